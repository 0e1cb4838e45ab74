from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from passes.cases import context_of, text_of

from atom.errors import PassError
from atom.graph import Graph, Shuffle, ops, parse, show
from atom.kernels import Target
from atom.passes import PassReport, lower, pipeline
from atom.passes.lower_attention import lower_attention
from atom.passes.quantize import quantize
from atom.passes.select_kernels import select_kernels
from atom.pieces import find_pieces

BEFORE = """\
def body(q: fp32[T, 2, 4], k: fp32[T, 1, 4], v: fp32[T, 1, 4], cos: fp32[T, 2], sin: fp32[T, 2]):
    q_1 = rms_norm(q, W("q_norm", fp32[4]), eps=1e-06)
    k_1 = rms_norm(k, W("k_norm", fp32[4]), eps=1e-06)
    q_2 = rope(q_1, cos, sin)
    k_2 = rope(k_1, cos, sin)
    a = attention(q_2, k_2, v, KV("0", fp32[2, 1, 4], window=3), scale=0.5, window=3)
    return a"""


AFTER = """\
def body(q: fp32[T, 2, 4], k: fp32[T, 1, 4], v: fp32[T, 1, 4], cos: fp32[T, 2], sin: fp32[T, 2], batch: Batch):
    q_2 = norm_rope_write(q, k, v, cos, sin, W("q_norm", fp32[4]), W("k_norm", fp32[4]), KV("0", fp32[2, 1, 4], window=3), batch, eps=1e-06)
    a = paged_attention(q_2, KV("0", fp32[2, 1, 4], window=3), batch, scale=0.5, window=3)
    return a"""


def test_norm_rope_and_write_become_one_op():
    assert text_of(lower_attention(parse(BEFORE))).strip() == AFTER


def test_scales_of_the_cache_go_to_the_write_and_the_attention():
    scales = 'W("k_scale", fp32[1]), W("v_scale", fp32[1])'
    scaled = BEFORE.replace("fp32[2, 1, 4], window=3), scale", f"fp8_e4m3[2, 1, 4], window=3), None, {scales}, scale")
    written = AFTER.replace("fp32[2, 1, 4]", "fp8_e4m3[2, 1, 4]").replace("batch, eps", f"batch, {scales}, eps")
    expected = written.replace("batch, scale", f"batch, None, {scales}, scale")
    assert text_of(lower_attention(parse(scaled))).strip() == expected


def test_an_attention_of_the_keys_of_an_earlier_one_writes_nothing():
    shared = BEFORE.replace("    return a", """\
    r_1 = rope(q, cos, sin)
    b = attention(r_1, k_2, v, KV("0", fp32[2, 1, 4], window=3), scale=0.5, window=2)
    return a, b""")  # fmt: skip
    expected = AFTER.replace("    return a", """\
    r_1 = rope(q, cos, sin)
    b = paged_attention(r_1, KV("0", fp32[2, 1, 4], window=3), batch, scale=0.5, window=2)
    return a, b""")  # fmt: skip
    assert text_of(lower_attention(parse(shared))).strip() == expected


def test_two_sets_of_keys_for_one_cache_are_refused():
    twice = BEFORE.replace("    return a", """\
    b = attention(q, k, v, KV("0", fp32[2, 1, 4], window=3), scale=0.5, window=3)
    return a, b""")  # fmt: skip
    with pytest.raises(PassError, match="b: its cache 0 is written by a, of other keys and values"):
        lower_attention(parse(twice))


def test_runs_are_pooled_of_a_step_and_of_what_the_cache_keeps():
    text = """\
def body(q: fp32[T, 2, 4], weights: fp32[T, 2], kv: fp32[T, 8], gate: fp32[T, 8]):
    k = compress(kv, gate, W("bias", fp32[4, 8]), KV("0", fp32[2, 8], window=8, part="runs"), overlaps=True)
    chosen = index_topk(q, k, weights, KV("0", fp32[4], every=4, part="index"), top_k=2, every=4)
    return chosen"""
    lowered = """\
def body(q: fp32[T, 2, 4], weights: fp32[T, 2], kv: fp32[T, 8], gate: fp32[T, 8], batch: Batch):
    k = paged_compress(kv, gate, W("bias", fp32[4, 8]), KV("0", fp32[2, 8], part="runs", window=8), batch, overlaps=True)
    index_q = write_index(q, k, KV("0", fp32[4], part="index", every=4), batch, every=4)
    chosen = paged_index_topk(index_q, weights, KV("0", fp32[4], part="index", every=4), batch, top_k=2, every=4)
    return chosen"""
    assert text_of(lower_attention(parse(text))).strip() == lowered


def test_attention_to_tokens_and_runs_writes_both():
    text = """\
def body(q: fp32[T, 2, 4], kv: fp32[T, 4], pooled: fp32[T, 4], chosen: i32[T, 1, 2]):
    a = mqa_attention(q, kv, KV("0", fp32[4], window=3), W("sinks", fp32[2]), scale=0.5, window=3)
    b = mqa_attention(a, kv, KV("1", fp32[4], window=3), None, None, pooled, KV("1", fp32[4], every=4), chosen, scale=0.5, window=3, every=4)
    return b"""
    lowered = """\
def body(q: fp32[T, 2, 4], kv: fp32[T, 4], pooled: fp32[T, 4], chosen: i32[T, 1, 2], batch: Batch):
    q_1 = write_mqa(q, kv, KV("0", fp32[4], window=3), batch)
    a = paged_mqa_attention(q_1, KV("0", fp32[4], window=3), batch, W("sinks", fp32[2]), scale=0.5, window=3)
    q_2 = write_mqa(a, kv, KV("1", fp32[4], window=3), batch)
    q_3 = write_mqa(q_2, pooled, KV("1", fp32[4], every=4), batch, every=4)
    b = paged_mqa_attention(q_3, KV("1", fp32[4], window=3), batch, None, None, KV("1", fp32[4], every=4), chosen, scale=0.5, window=3, every=4)
    return b"""
    assert text_of(lower_attention(parse(text))).strip() == lowered


def test_blocks_are_chosen_among_the_keys_that_a_layer_writes():
    text = """\
def body(index_q: fp32[T, 2, 4], index_k: fp32[T, 4], q: fp32[T, 4, 4], k: fp32[T, 2, 4], v: fp32[T, 2, 4]):
    selected = index_blocks(index_q, index_k, KV("0", fp32[4], part="index"), block=8, top_k=3)
    a = attention(q, k, v, KV("0", fp32[2, 2, 4]), None, None, None, None, None, selected, scale=0.5, block=8)
    return a"""
    expected = """\
def body(index_q: fp32[T, 2, 4], index_k: fp32[T, 4], q: fp32[T, 4, 4], k: fp32[T, 2, 4], v: fp32[T, 2, 4], batch: Batch):
    index_q_1 = write_index(index_q, index_k, KV("0", fp32[4], part="index"), batch)
    selected = paged_index_blocks(index_q_1, KV("0", fp32[4], part="index"), batch, block=8, top_k=3)
    q_1 = norm_rope_write(q, k, v, None, None, None, None, KV("0", fp32[2, 2, 4]), batch, None, None)
    a = paged_attention(q_1, KV("0", fp32[2, 2, 4]), batch, None, None, None, None, None, selected, scale=0.5, block=8)
    return a"""
    assert text_of(lower_attention(parse(text))).strip() == expected


def test_a_rope_that_only_q_has_stays():
    lowered = text_of(lower_attention(parse(BEFORE.replace("k_2 = rope(k_1, cos, sin)", "k_2 = add(k_1, k_1)"))))
    assert "q_2 = rope(q_1, cos, sin)" in lowered
    assert "norm_rope_write(q_2, k_2, v, None, None, None, None," in lowered


def test_ropes_of_different_cos_and_sin_stay():
    other = BEFORE.replace("sin: fp32[T, 2])", "sin: fp32[T, 2], cos_k: fp32[T, 2], sin_k: fp32[T, 2])")
    for k_rope in ("rope(k_1, cos_k, sin_k)", "rope(k_1, cos, sin_k)", "rope(k_1, cos_k, sin)"):
        lowered = text_of(lower_attention(parse(other.replace("rope(k_1, cos, sin)", k_rope))))
        assert "q_2 = rope(q_1, cos, sin)" in lowered and f"k_2 = {k_rope}" in lowered
        assert "norm_rope_write(q_2, k_2, v, None, None, None, None," in lowered


def test_norms_of_different_eps_stay():
    lowered = text_of(
        lower_attention(parse(BEFORE.replace('W("k_norm", fp32[4]), eps=1e-06', 'W("k_norm", fp32[4]), eps=1e-05')))
    )
    assert "norm_rope_write(q_1, k_1, v, cos, sin, None, None," in lowered


LATENT = """\
def body(q: fp32[T, 2, 4], q_rope: fp32[T, 2, 2], latent: fp32[T, 6], k_rope: fp32[T, 1, 2], cos: fp32[T, 1], sin: fp32[T, 1]):
    latent_1 = rms_norm(latent, W("kv_a_norm", fp32[6]), eps=1e-06)
    q_rope_1 = rope(q_rope, cos, sin, interleaved=True)
    k_rope_1 = rope(k_rope, cos, sin, interleaved=True)
    a = mla_attention(q, q_rope_1, latent_1, k_rope_1, W("kv_b", fp32[14, 6]), KV("0", fp32[8]), scale=0.5)
    return a"""

LATENT_AFTER = """\
def body(q: fp32[T, 2, 4], q_rope: fp32[T, 2, 2], latent: fp32[T, 6], k_rope: fp32[T, 1, 2], cos: fp32[T, 1], sin: fp32[T, 1], batch: Batch):
    q_rope_1 = norm_rope_write_latent(q_rope, latent, k_rope, cos, sin, W("kv_a_norm", fp32[6]), KV("0", fp32[8]), batch, interleaved=True, eps=1e-06)
    a = paged_mla_attention(q, q_rope_1, W("kv_b", fp32[14, 6]), KV("0", fp32[8]), batch, scale=0.5)
    return a"""


def test_latent_attention_writes_one_entry_for_all_heads():
    assert text_of(lower_attention(parse(LATENT))).strip() == LATENT_AFTER


def test_latents_of_an_earlier_layer_are_written_once():
    text = LATENT.replace("    return a", """\
    b = mla_attention(q, q_rope, latent_1, k_rope_1, W("kv_b_1", fp32[14, 6]), KV("0", fp32[8]), scale=0.5)
    return a, b""")  # fmt: skip
    expected = LATENT_AFTER.replace("    return a", """\
    b = paged_mla_attention(q, q_rope, W("kv_b_1", fp32[14, 6]), KV("0", fp32[8]), batch, scale=0.5)
    return a, b""")  # fmt: skip
    assert text_of(lower_attention(parse(text))).strip() == expected
    with pytest.raises(PassError, match="b: its cache 0 is written by a, of other keys and values"):
        lower_attention(parse(text.replace('latent_1, k_rope_1, W("kv_b_1', 'latent, k_rope_1, W("kv_b_1')))


CHOSEN = """\
def body(i: fp32[T, 3, 4], k: fp32[T, 4], w: fp32[T, 3], q: fp32[T, 2, 4], r: fp32[T, 2, 2], latent: fp32[T, 6], l: fp32[T, 1, 2]):
    s = index_topk(i, k, w, KV("0", fp32[4], part="index"), top_k=2)
    a = mla_attention(q, r, latent, l, W("kv_b", fp32[14, 6]), KV("0", fp32[8]), None, s, scale=0.5)
    b = mla_attention(q, r, latent, l, W("kv_b", fp32[14, 6]), KV("1", fp32[8]), None, s, scale=0.5)
    return a, b"""

CHOSEN_AFTER = """\
def body(i: fp32[T, 3, 4], k: fp32[T, 4], w: fp32[T, 3], q: fp32[T, 2, 4], r: fp32[T, 2, 2], latent: fp32[T, 6], l: fp32[T, 1, 2], batch: Batch):
    index_q = write_index(i, k, KV("0", fp32[4], part="index"), batch)
    s = paged_index_topk(index_q, w, KV("0", fp32[4], part="index"), batch, top_k=2)
    q_rope = norm_rope_write_latent(r, latent, l, None, None, None, KV("0", fp32[8]), batch)
    a = paged_mla_attention(q, q_rope, W("kv_b", fp32[14, 6]), KV("0", fp32[8]), batch, None, s, scale=0.5)
    q_rope_1 = norm_rope_write_latent(r, latent, l, None, None, None, KV("1", fp32[8]), batch)
    b = paged_mla_attention(q, q_rope_1, W("kv_b", fp32[14, 6]), KV("1", fp32[8]), batch, None, s, scale=0.5)
    return a, b"""


def test_an_indexer_writes_its_keys_and_a_later_layer_reads_what_it_chose():
    assert text_of(lower_attention(parse(CHOSEN))).strip() == CHOSEN_AFTER


def test_a_rope_of_which_only_one_is_interleaved_stays():
    lowered = text_of(
        lower_attention(
            parse(
                LATENT.replace(
                    "k_rope_1 = rope(k_rope, cos, sin, interleaved=True)", "k_rope_1 = rope(k_rope, cos, sin)"
                )
            )
        )
    )
    assert "q_rope_1 = rope(q_rope, cos, sin, interleaved=True)" in lowered
    assert "norm_rope_write_latent(q_rope_1, latent, k_rope_1, None, None," in lowered


def test_sinks_and_interleaved_pairs_go_along():
    text = BEFORE.replace("cos, sin)\n", "cos, sin, interleaved=True)\n").replace(
        "window=3), scale", 'window=3), W("sinks", fp32[2]), softcap=2.0, scale'
    )
    lowered = text_of(lower_attention(parse(text)))
    assert "batch, interleaved=True, eps=1e-06)" in lowered
    assert 'batch, W("sinks", fp32[2]), softcap=2.0, scale=0.5, window=3)' in lowered


def test_a_graph_without_attention_is_left_as_it_is():
    text = "def f(x: fp32[T, 8]):\n    y = add(x, x)\n    return y\n"
    graph = lower_attention(parse(text))
    assert text_of(graph).strip() == text.strip()
    assert graph.num_rewrites == 0


def test_the_reference_takes_every_call_at_level_0():
    graph = select_kernels(parse(AFTER), context_of(Target("cpu"), "reference"))
    assert {node.meta["kernel"] for node in graph.program("body").nodes} == {"reference"}
    assert show(parse(show(graph))) == show(graph)


def test_a_refusal_is_written_with_its_reason():
    graph = select_kernels(parse(AFTER), context_of(Target("nowhere"), "torch", "reference"))
    (call,) = graph.find(ops.paged_attention)
    assert call.meta["kernel"] == "reference"
    assert [note for note in call.meta["notes"] if note.startswith("torch: ")]
    assert f"; {call.meta['notes'][0]}" in show(graph)


@pytest.mark.parametrize("op", ["linear(x, {})", "grouped_linear(x, {}, ends)"])
def test_a_cpu_takes_packed_weights_in_a_layout_of_their_own(op: str):
    shape = "[2, 64, 64]" if "grouped" in op else "[64, 64]"
    call = op.format(f'W("w", bf16{shape}, fmt="q4_1")')
    graph = parse(f"def f(x: bf16[T, 64], ends: i64[2]):\n    y = {call}\n    return y\n")
    target = Target("cpu", frozenset({"onednn_bf16"}))
    (node,) = select_kernels(graph, context_of(target, "torch", "cpp", "reference")).program("f").nodes
    assert node.meta["kernel"] == "cpp"
    assert [arg.layout for arg in node.args if isinstance(arg, Shuffle)] == ["panels"]


@pytest.mark.parametrize(("fmt", "kernel"), [("q8_0", "cpp"), ("gptq_int4_ordered[1, 32]", "reference")])
def test_a_tied_embedding_is_kept_packed_where_both_calls_take_it(fmt: str, kernel: str):
    weight = f'W("e", bf16[128, 64], fmt="{fmt}")'
    graph = parse(
        f"def f(tokens: i64[T]):\n    x = embedding(tokens, {weight})\n    y = linear(x, {weight})\n    return y\n"
    )
    context = context_of(Target("cpu", frozenset({"onednn_bf16"})), "torch", "cpp", "reference")
    nodes = select_kernels(quantize(graph, context), context).program("f").nodes
    assert {node.meta["kernel"] for node in nodes} == {kernel}
    assert len({node.args[1] for node in nodes}) == 1, "no weight is kept twice"


TIED = """def f(tokens: i64[T]):
    x = embedding(tokens, W("e", bf16[128, 64]))
    y = linear(x, W("{head}", bf16[128, 64]))
    return y
"""


@pytest.mark.parametrize(
    ("features", "head", "kernels", "layouts"),
    [
        ({"onednn_bf16", "blocks_bf16"}, "e", ["cpp", "cpp"], ["blocks", "blocks"]),
        ({"onednn_bf16", "blocks_bf16"}, "h", ["inductor", "cpp"], ["blocks"]),
        ({"onednn_bf16"}, "e", ["inductor", "reference"], []),
        ({"onednn_bf16"}, "h", ["inductor", "torch"], ["onednn"]),
    ],
)
def test_a_tied_embedding_is_in_its_heads_layout_where_both_calls_take_it(
    features: set[str], head: str, kernels: list[str], layouts: list[str]
):
    context = context_of(Target("cpu", frozenset(features)), "inductor", "cpp", "torch", "reference")
    nodes = select_kernels(parse(TIED.format(head=head)), context).program("f").nodes
    assert [node.meta["kernel"] for node in nodes] == kernels
    assert [arg.layout for node in nodes for arg in node.args if isinstance(arg, Shuffle)] == layouts


def test_an_embedding_that_nothing_else_reads_is_as_stored():
    context = context_of(Target("cpu", frozenset({"blocks_bf16"})), "cpp", "reference")
    (call, _) = select_kernels(parse(TIED.format(head="h")), context).program("f").nodes
    assert (call.meta["kernel"], call.meta["notes"]) == ("reference", ["cpp: no matmul reads its weight"])


@pytest.mark.parametrize(
    ("call", "backends"),
    [
        ('linear(x, W("w", fp32[4, 8], fmt="int8z"))', ("torch", "triton")),
        ('gated_linear(x, W("w", fp32[4, 8], fmt="int8z"), kind="silu")', ("triton",)),
        ('norm_linear(x, W("n", fp32[8]), W("w", fp32[4, 8], fmt="int8z"), eps=1e-06)', ("triton",)),
        ('grouped_linear(x, W("w", fp32[2, 4, 8], fmt="int8z"), ends)', ("torch", "triton")),
        ('embedding(ends, W("w", fp32[4, 8], fmt="int8z"))', ("inductor", "generated")),
    ],
)
def test_no_kernel_takes_a_format_of_unknown_parts(call: str, backends: tuple[str, ...]):
    graph = parse(f"def f(x: fp32[T, 8], ends: i64[2]):\n    y = {call}\n    return y\n")
    (node,) = select_kernels(graph, context_of(Target("cpu"), *backends, "reference")).program("f").nodes
    assert node.meta["kernel"] == "reference"
    assert node.meta["notes"] == [f"{backend}: its weight is stored as int8z" for backend in backends]


def test_the_runner_reports_each_pass_in_order():
    reports: list[PassReport] = []
    lower(parse(BEFORE), 2, Target("cpu"), reports.append)
    assert [report.name for report in reports] == [rewrite.__name__ for rewrite, _, _ in pipeline.PIPELINE]
    assert [report.num_changes for report in reports if report.name == "lower_attention"] == [1]


def test_level_0_only_lowers():
    reports: list[PassReport] = []
    lower(parse(BEFORE), 0, Target("cpu"), reports.append)
    assert [report.name for report in reports] == [
        "split_stages",
        "shard",
        "add_lora",
        "lower_moe",
        "lower_attention",
        "quantize",
        "offload_tables",
        "select_kernels",
    ]


DRAFT = """\
def body(tokens: i64[T]):
    x = embedding(tokens, W("embed", fp32[9, 8]))
    q = split_heads(x, heads=2)
    a = attention(q, q, q, KV("0", fp32[2, 2, 4]), scale=0.5)
    o = merge_heads(a)
    y = add(x, o)
    return y

def head(hidden: fp32[R, 8]):
    logits = linear(hidden, W("embed", fp32[9, 8]))
    return logits

def draft(tokens: i64[T], hidden: fp32[T, 8]):
    x = embedding(tokens, W("embed", fp32[9, 8]))
    h = rms_norm(x, W("norm", fp32[8]), eps=1e-06)
    y = add(h, hidden)
    q = split_heads(y, heads=2)
    a = attention(q, q, q, KV("draft", fp32[2, 2, 4], window=3), scale=0.5, window=3)
    o = merge_heads(a)
    z = linear(o, W("o", fp32[8, 8]))
    return z
"""


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_program_besides_body_and_head_is_lowered_as_they_are(level: int):
    graph = lower(parse(DRAFT), level, Target("cpu"))
    two = lower(parse(DRAFT.partition("def draft")[0]), level, Target("cpu"))
    assert show(graph).startswith(show(two)), "which it leaves as they were"
    assert text_of(parse(show(graph))) == text_of(graph)
    draft = graph.programs["draft"]
    assert [str(node.meta["type"]) for node in draft.inputs] == ["i64[T]", "fp32[T, 8]", "Batch"]
    chosen = {call.target.name: call.meta["kernel"] for call in draft.nodes}
    assert chosen["norm_rope_write"] == chosen["paged_attention"] == ("cpp" if level else "reference")
    pieces = [find_pieces(program) for program in graph.programs.values()]
    assert [len(found) for found in pieces] == ([1, 1, 1] if level == 2 else [0, 0, 0])
    assert not any("Batch" in piece.text for found in pieces for piece in found)


def test_a_pass_that_breaks_the_graph_is_named_with_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def break_it(graph: Graph) -> Graph:
        (attention,) = graph.find(ops.attention)
        attention.meta["type"] = None
        return graph

    monkeypatch.setattr(pipeline, "PIPELINE", (pipeline.PIPELINE[0], (break_it, 0, ops.SEMANTIC)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        PassError,
        match=rf"^break_it \(after split_stages\): body: a is .*; its text: {tmp_path}/atom-break_it-.*\.py$",
    ):
        lower(parse(BEFORE), 1, Target("cpu"))
    with pytest.raises(PassError, match="break_it"):  # which is the last one
        lower(parse(BEFORE), 1, Target("cpu"), verifies_each=False)


def test_the_scale_of_latents_goes_to_their_write_and_their_attention():
    """An entry in fp8 is 6 bytes, 2 of padding, and a rotated key of 2 numbers in fp32."""
    plain = 'KV("0", fp32[8])'
    packed, scale = 'KV("0", fp8_e4m3[16])', 'measured("0.k_scale")'
    lowered = text_of(lower_attention(parse(LATENT.replace(plain, f"{packed}, {scale}"))))
    assert lowered.strip() == LATENT_AFTER.replace(f"{plain}, batch", f"{packed}, batch, {scale}")
