"""The text of several ranks, interpreted side by side in one process, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import assert_same_logits
from passes.cases import random_weight, text_of

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import UnsupportedError
from atom.graph import Graph, Mesh, interpret, interpret_ranks, ops, parse, show, verify
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.shard import shard
from atom.weights.localize import localize


def sharded(graph: Graph, mesh: Mesh, dispatches: bool = False) -> Graph:
    graph = shard(graph, replace(PassContext.of(Target("cpu"), 0, mesh), dispatches=dispatches))
    verify(graph, ops.SEMANTIC)
    assert show(parse(show(graph))) == show(graph)
    return graph


@torch.inference_mode()
def logits_of_ranks(
    overrides: list[str], tokens: list[int], mesh: Mesh, rewrite: Callable[[Graph], Graph] = lambda graph: graph
) -> list[torch.Tensor]:
    """The logits of each rank, by the text that all of them have, rewritten."""
    config = load(overrides)
    texts = [rewrite(sharded(semantic_graph(config), mesh))]
    if mesh.data > 1 and mesh.experts > 1:
        texts.append(sharded(semantic_graph(config), mesh, dispatches=True))
    graph = texts[0]
    checkpoint = open_for(config, SilentProgress())
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    coordinates = map(mesh.coordinates, range(mesh.num_ranks))
    tensors = [weights.load(graph.recipes(), checkpoint, SilentProgress(), coordinates=each) for each in coordinates]
    read = [each.__getitem__ for each in tensors]
    prompts = [tokens[group:] + tokens[:group] for group in range(mesh.data)]  # of each group another
    inputs = [
        {"tokens": torch.tensor(prompts[mesh.coordinates(rank)["data"]]), "positions": torch.arange(len(tokens))}
        for rank in range(mesh.num_ranks)
    ]
    hidden, *others = (interpret_ranks([text], "body", inputs, read, mesh) for text in texts)
    assert all(all(map(torch.equal, hidden, other)) for other in others), "rows that nobody needs change nothing"
    return interpret_ranks([graph], "head", [{"hidden": each} for each in hidden], read, mesh)


@pytest.mark.sampled(27)
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_the_text_of_several_ranks_gives_the_logits_of_transformers(
    name: str, checkpoints: Callable[[str], Path], references: Any
):
    tokens = tiny.prompt(70)
    made = logits_of_ranks([f"checkpoint={checkpoints(name)}", "dtype=fp32"], tokens, Mesh(tiny.num_ranks(name)))
    assert_same_logits(made[0], tiny.logits(references(name), tokens))
    assert all(torch.equal(made[0], other) for other in made[1:])


# variants whose heads this many ranks divide, and what differs from the variants
RECURRENT = [
    ("lfm2_biases", 2, {}),
    ("lfm2_moe", 3, {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ("qwen3_next", 2, {}),
    ("qwen3_5", 4, {"linear_num_value_heads": 4}),  # each key head on two ranks
    ("qwen3_5", 3, {"num_attention_heads": 3, "num_key_value_heads": 1, "linear_num_key_heads": 1}),
    ("olmo_hybrid", 2, {}),
    ("qwen4_exp", 2, {}),
    ("kimi_linear", 2, {"linear_num_heads": 4}),
    ("bailing_moe_v3", 2, {"num_attention_heads": 4}),
    ("bamba", 2, {}),
    ("granitemoehybrid_stacked", 2, {}),  # a norm over the heads of all ranks
    ("nemotron_h", 3, {"num_attention_heads": 3, "num_key_value_heads": 1}),
    ("nemotron_h_stacked", 2, {}),
    ("mamba2", 6, {}),  # each group on two ranks, and its norm
    ("falcon_h1", 2, {}),
    ("falcon_h1_normed", 4, {"mamba_n_heads": 8, "mamba_d_head": 12}),
    ("zamba2_biases", 2, {"use_shared_attention_adapter": True}),  # adapters of what is divided
]


def test_heads_that_a_convolution_mixes_are_whole_on_each_rank(tmp_path: Path):
    model = tiny.save_changed("zaya", tmp_path / "zaya")
    tokens, overrides = tiny.prompt(33), [f"checkpoint={tmp_path / 'zaya'}", "dtype=fp32"]
    made = logits_of_ranks(overrides, tokens, Mesh(2))
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))
    graph = sharded(semantic_graph(load(overrides)), Mesh(2))
    assert graph.states() == semantic_graph(load(overrides)).states()
    assert all("share(" in str(call.args[3]) or "Share" in str(call.args[3]) for call in graph.find(ops.experts))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "kv_heads", "groups"), [(2, 4, 2), (4, 2, 2), (4, 4, 2), (4, 2, 1)])
def test_index_heads_go_with_their_heads_of_keys(ranks: int, kv_heads: int, groups: int, tmp_path: Path):
    """groups: index heads, of which a rank has a part, or a whole one as others do"""
    model = tiny.save_changed("minimax_m3", tmp_path / "m3", num_key_value_heads=kv_heads, index_n_heads=groups)
    tokens, overrides = tiny.prompt(33), [f"checkpoint={tmp_path / 'm3'}", "dtype=fp32"]
    made = logits_of_ranks(overrides, tokens, Mesh(ranks))
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))
    graph = sharded(semantic_graph(load(overrides)), Mesh(ranks))
    chosen = [call.meta["type"].shape[1] for call in graph.find(ops.index_blocks)]
    assert chosen == [max(1, groups // ranks)] * 2
    assert {state.type.shape for state in graph.states() if state.part == "index"} == {(12,)}, "keys are of all heads"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "ranks", "changes"), RECURRENT, ids=str)
def test_recurrent_layers_are_divided_by_heads(name: str, ranks: int, changes: dict[str, Any], tmp_path: Path):
    model = tiny.save_changed(name, tmp_path / name, **changes)
    tokens, overrides = tiny.prompt(33), [f"checkpoint={tmp_path / name}", "dtype=fp32"]
    made = logits_of_ranks(overrides, tokens, Mesh(ranks))
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))
    assert all(torch.equal(made[0], other) for other in made[1:])
    config = load(overrides)
    whole, own = semantic_graph(config).states(), sharded(semantic_graph(config), Mesh(ranks)).states()
    matrices = [pair for pair in zip(whole, own, strict=True) if pair[0].rule.in_slot and len(pair[0].type.shape) == 3]
    assert all(part.type.num_bytes * ranks == each.type.num_bytes for each, part in matrices)
    assert len(matrices) > 0 or "lfm2" in name


def test_gates_that_are_stored_with_latent_queries_are_divided_by_heads(tmp_path: Path):
    model = tiny.save_changed("axk2", tmp_path / "axk2")
    tokens = tiny.prompt(40)
    made = logits_of_ranks([f"checkpoint={tmp_path / 'axk2'}", "dtype=fp32"], tokens, Mesh(2, experts=2))
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))
    assert torch.equal(made[0], made[1])


def test_scales_of_channels_and_norms_ahead_of_the_last_linears_are_divided(tmp_path: Path):
    model = tiny.save_changed("dory", tmp_path)
    tokens = tiny.prompt(33)
    made = logits_of_ranks([f"checkpoint={tmp_path}", "dtype=fp32"], tokens, Mesh(2))
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))
    assert torch.equal(*made)


DELTA = """\
def body(x: fp32[T, 8]):
    qkv = linear(x, W("qkv", fp32[18, 8]))
    beta = linear(x, W("beta", fp32[4, 8]))
    a = linear(x, W("a", fp32[4, 8]))
    conv = causal_conv(qkv, STATE("0", fp32[1, 18]), W("conv", fp32[18, 2]), kind="silu")
    q, k, v = split(conv, sizes=[3, 3, 12])
    q_1 = split_heads(q, heads=1)
    k_1 = split_heads(k, heads=1)
    v_1 = split_heads(v, heads=4)
    beta_1 = activate(beta, kind="sigmoid")
    decay = ssm_decay(a, W("a_log", fp32[4]), W("bias", fp32[4]))
    o = gated_delta(q_1, k_1, v_1, decay, beta_1, STATE("0", fp32[4, 3, 3]), scale=0.5, normalize=True)
    o_1 = rms_norm(o, W("norm", fp32[3]), eps=1e-06)
    o_2 = merge_heads(o_1)
    out = linear(o_2, W("out", fp32[8, 12]))
    return out
"""

DELTA_OF_A_RANK = """\
def body(x: fp32[T, 8]):
    qkv = linear(x, cat([share(slice(W("qkv", fp32[18, 8]), 0, 3), "tensor", 2, copies=2), share(slice(W("qkv", fp32[18, 8]), 3, 6), "tensor", 2, copies=2), share(slice(W("qkv", fp32[18, 8]), 6, 18), "tensor", 2)]))
    beta = linear(x, share(W("beta", fp32[4, 8]), "tensor", 2))
    a = linear(x, share(W("a", fp32[4, 8]), "tensor", 2))
    conv = causal_conv(qkv, STATE("0", fp32[1, 12]), cat([share(slice(W("conv", fp32[18, 2]), 0, 3), "tensor", 2, copies=2), share(slice(W("conv", fp32[18, 2]), 3, 6), "tensor", 2, copies=2), share(slice(W("conv", fp32[18, 2]), 6, 18), "tensor", 2)]), kind="silu")
    q, k, v = split(conv, sizes=[3, 3, 6])
    q_1 = split_heads(q, heads=1)
    k_1 = split_heads(k, heads=1)
    v_1 = split_heads(v, heads=2)
    beta_1 = activate(beta, kind="sigmoid")
    decay = ssm_decay(a, share(W("a_log", fp32[4]), "tensor", 2), share(W("bias", fp32[4]), "tensor", 2))
    o = gated_delta(q_1, k_1, v_1, decay, beta_1, STATE("0", fp32[2, 3, 3]), scale=0.5, normalize=True)
    o_1 = rms_norm(o, W("norm", fp32[3]), eps=1e-06)
    o_2 = merge_heads(o_1)
    out_partial = linear(o_2, share(W("out", fp32[8, 12]), "tensor", 2, dim=1))
    out = all_reduce(out_partial, axis="tensor")
    return out
"""

SSD = """\
def body(x: fp32[T, 8]):
    zxd = linear(x, W("in", fp32[40, 8]))
    z, xbc, dt = split(zxd, sizes=[12, 24, 4])
    conv = causal_conv(xbc, STATE("0", fp32[1, 24]), W("conv", fp32[24, 2]), W("conv_bias", fp32[24]))
    xs, b, c = split(conv, sizes=[12, 6, 6])
    x_1 = split_heads(xs, heads=4)
    b_1 = split_heads(b, heads=2)
    c_1 = split_heads(c, heads=2)
    dt_1 = time_step(dt, W("step", fp32[4]))
    y = ssd(x_1, dt_1, b_1, c_1, STATE("0", fp32[4, 3, 3]), W("a_log", fp32[4]), W("skip", fp32[4]))
    y_1 = merge_heads(y)
    z_1 = activate(z, kind="silu")
    y_2 = mul(y_1, z_1)
    y_3 = group_rms_norm(y_2, W("norm", fp32[12]), eps=1e-06, groups=2)
    out = linear(y_3, W("out", fp32[8, 12]), W("out_bias", fp32[8]))
    return out
"""

SCAN = """\
def body(x: fp32[T, 8]):
    xz = linear(x, W("in", fp32[24, 8]))
    x_1, z = split(xz, sizes=[12, 12])
    conv = causal_conv(x_1, STATE("0", fp32[1, 12]), W("conv", fp32[12, 2]))
    dt = linear(x, W("dt", fp32[12, 8]))
    dt_1 = time_step(dt, W("step", fp32[12]))
    b = linear(x, W("b", fp32[3, 8]))
    c = linear(x, W("c", fp32[3, 8]))
    y = selective_scan(conv, dt_1, b, c, STATE("0", fp32[12, 3]), W("a_log", fp32[12, 3]), W("skip", fp32[12]))
    z_1 = activate(z, kind="silu")
    y_1 = mul(y, z_1)
    out = linear(y_1, W("out", fp32[8, 12]))
    return out
"""

LIGHTNING = """\
def body(x: fp32[T, 8]):
    q = linear(x, W("q", fp32[12, 8]))
    k = linear(x, W("k", fp32[12, 8]))
    v = linear(x, W("v", fp32[8, 8]))
    q_1 = split_heads(q, heads=4)
    k_1 = split_heads(k, heads=4)
    v_1 = split_heads(v, heads=4)
    o = lightning(q_1, k_1, v_1, STATE("0", fp32[4, 3, 2]), W("slopes", fp32[4]))
    o_1 = merge_heads(o)
    out = linear(o_1, W("out", fp32[8, 8]))
    return out
"""

CLAMPED = """\
def body(x: fp32[T, 8]):
    gate = linear(x, W("gate", fp32[12, 8]))
    up = linear(x, W("up", fp32[12, 8]))
    gate_up = join(gate, up)
    m = gated_activate(gate_up, kind="silu", limit=0.5)
    out = linear(m, W("out", fp32[8, 12]))
    return out
"""


NORMED = """\
def body(x: fp32[T, 8]):
    h = linear(x, W("proj", fp32[8, 8]))
    h_1 = layer_norm(h, W("norm", fp32[8]), W("norm_bias", fp32[8]), eps=1e-05)
    h_2 = activate(h_1, kind="gelu")
    up = linear(h_2, W("up", fp32[12, 8]))
    m = activate(up, kind="silu")
    out = linear(m, W("out", fp32[8, 12]))
    return out
"""


def test_a_layer_norm_between_linears_has_all_of_its_row():
    text = text_of(sharded(parse(NORMED), Mesh(2)))
    assert 'h = linear(x, W("proj", fp32[8, 8]))' in text
    assert 'up = linear(h_2, share(W("up", fp32[12, 8]), "tensor", 2))' in text


def test_each_value_that_a_linear_computes_is_divided_by_itself():
    assert text_of(sharded(parse(DELTA), Mesh(2))) == DELTA_OF_A_RANK.rstrip()


@pytest.mark.parametrize(
    ("text", "ranks"),
    [(DELTA, 2), (DELTA, 4), (SSD, 2), (SSD, 4), (SCAN, 2), (SCAN, 5), (LIGHTNING, 2), (LIGHTNING, 4)],
    ids=["delta-2", "delta-4", "ssd-2", "ssd-4", "scan-2", "scan-5", "lightning-2", "lightning-4"],
)
def test_ranks_with_heads_of_their_own_give_what_one_gives(text: str, ranks: int):
    x, mesh = torch.randn(7, 8), Mesh(ranks)
    graph = sharded(parse(text), mesh)
    assert [state.type for state in graph.states()] != [state.type for state in parse(text).states()]
    read = [lambda recipe, rank=rank: random_weight(localize(recipe, mesh.coordinates(rank))) for rank in range(ranks)]
    expected = interpret(parse(text), "body", {"x": x}, random_weight)
    for made in interpret_ranks([graph], "body", [{"x": x}] * ranks, read, mesh):
        assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_parts_of_gate_and_up_give_what_one_gives(ranks: int):
    x, mesh = torch.randn(7, 8), Mesh(ranks)
    graph = sharded(parse(CLAMPED), mesh)
    assert 'out_partial = linear(m, share(W("out", fp32[8, 12]), "tensor"' in text_of(graph)
    read = [lambda recipe, rank=rank: random_weight(localize(recipe, mesh.coordinates(rank))) for rank in range(ranks)]
    expected = interpret(parse(CLAMPED), "body", {"x": x}, random_weight)
    for made in interpret_ranks([graph], "body", [{"x": x}] * ranks, read, mesh):
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(
    ("text", "ranks", "reason"),
    [
        (DELTA, 3, "qkv: 4 heads cannot be divided among 3 ranks"),
        (DELTA, 8, "o_2: 4 heads cannot be divided among 8 ranks"),
        (
            DELTA.replace('activate(beta, kind="sigmoid")', "softcap(beta, cap=2.0)"),
            2,
            "o: some of what it reads is divided among ranks, and some is not",
        ),
        (SSD, 3, "in: 4 heads cannot be divided among 3 ranks"),
        (LIGHTNING, 3, "q: 4 heads cannot be divided among 3 ranks"),
    ],
    ids=["delta-3", "delta-8", "delta-whole", "ssd-3", "lightning-3"],
)
def test_heads_that_ranks_do_not_divide_are_refused(text: str, ranks: int, reason: str):
    with pytest.raises(UnsupportedError, match=f"^{reason}$"):
        sharded(parse(text), Mesh(ranks))


def test_an_op_of_another_module_is_divided_as_it_says():
    @ops.recurrent(lambda x, state: x, heads={"x": 1, "state": 1})
    def unlike(x: Any, state: Any) -> Any:
        raise NotImplementedError

    text = """\
def body(x: fp32[T, 8]):
    gate = linear(x, W("gate", fp32[12, 8]))
    s = unlike(gate, STATE("0", fp32[2, 12]))
    m = activate(s, kind="silu")
    down = linear(m, W("down", fp32[8, 12]))
    return down
"""
    try:
        assert 'unlike(gate, STATE("0", fp32[2, 6]))' in text_of(sharded(parse(text), Mesh(2)))
    finally:
        del ops.OPS["unlike"], ops.OPS["batched_unlike"]


def test_an_op_that_says_nothing_of_heads_is_computed_whole():
    text = LIGHTNING.replace("lightning(q_1, k_1, v_1, ", "unlike(q_1, k_1, v_1, ")

    @ops.recurrent(ops.lightning.infer)
    def unlike(q: Any, k: Any, v: Any, state: Any, slopes: Any) -> Any:
        raise NotImplementedError

    try:
        assert text_of(sharded(parse(text), Mesh(2))) == text.rstrip()
    finally:
        del ops.OPS["unlike"], ops.OPS["batched_unlike"]


def test_rows_of_a_tensor_that_is_packed_while_it_loads_are_divided():
    up = 'quantize(slice(W("both", fp32[128, 64]), 64, 128), "int8[1, 32]")'
    text = f"""\
def body(x: fp32[T, 64]):
    up = linear(x, {up})
    m = activate(up, kind="relu")
    down = linear(m, W("down", fp32[8, 64]))
    return down
"""
    assert f'share({up}, "tensor", 2)' in text_of(sharded(parse(text), Mesh(2)))


MIXTURES = list(filter(tiny.is_mixture, tiny.VARIANTS))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "experts"), [*((name, 2) for name in MIXTURES), ("gpt_oss", 4), ("dots1", 4)])
def test_a_mesh_that_divides_experts_gives_the_logits_of_transformers(
    name: str, experts: int, checkpoints: Callable[[str], Path], references: Any
):
    heads = tiny.num_heads(name)
    mesh = Mesh(tensor=4, experts=experts) if heads % 4 == 0 else Mesh(tiny.num_ranks(name), tiny.num_ranks(name))
    tokens = tiny.prompt(33)
    made = logits_of_ranks([f"checkpoint={checkpoints(name)}", "dtype=fp32"], tokens, mesh)
    assert_same_logits(made[0], tiny.logits(references(name), tokens))
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, Mesh(data=2, experts=2)) for name in MIXTURES),
        ("qwen3_moe", Mesh(tensor=2, data=2, experts=4)),
        ("qwen3_moe", Mesh(tensor=2, data=3, experts=2)),
        ("deepseek_v3", Mesh(tensor=2, data=2, experts=1)),
        ("gpt_oss", Mesh(tensor=2, data=2, experts=2)),
    ],
    ids=str,
)
def test_groups_with_tokens_of_their_own_share_experts(
    name: str, mesh: Mesh, checkpoints: Callable[[str], Path], references: Any
):
    tokens = tiny.prompt(21)
    made = logits_of_ranks([f"checkpoint={checkpoints(name)}", "dtype=fp32"], tokens, mesh)
    for group in range(mesh.data):
        first, *others = made[group * mesh.tensor : (group + 1) * mesh.tensor]
        assert_same_logits(first, tiny.logits(references(name), tokens[group:] + tokens[:group]))
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(2, experts=2), Mesh(1, data=2, experts=2)], ids=str)
def test_experts_that_give_their_input_are_of_no_rank(mesh: Mesh, tmp_path: Path):
    model = tiny.save_changed("longcat_flash", tmp_path / "longcat_flash")
    tokens = tiny.prompt(40)
    made = logits_of_ranks([f"checkpoint={tmp_path / 'longcat_flash'}", "dtype=fp32"], tokens, mesh)
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))


def test_tokens_are_sent_to_the_ranks_that_have_experts_for_them():
    written = parse(MIXTURE)
    graph = sharded(written, Mesh(tensor=2, data=2, experts=4), dispatches=True)
    lines = dict(line.strip().split(" = ", 1) for line in show(graph).splitlines() if " = " in line)
    first = 'offset("experts", 4, 2)'
    meeting = 'axis="data", ranks=2, experts=2)'
    assert lines["rows, row_weights, row_ids"].startswith(f"dispatch(h, weights, ids, {first}, {meeting}")
    assert lines["y_partial"].startswith(f"collect(y_1, row_ids, {first}, {meeting}")
    whole = show(sharded(parse(MIXTURE), Mesh(tensor=2, data=2), dispatches=True))
    assert "gather_tokens" in whole and "dispatch" not in whole, "each rank has all experts, and a part of each"


BIASED = """\
def body(x: fp32[T, 8]):
    up = linear(x, W("up", fp32[12, 8]), W("up_bias", fp32[12]))
    m = activate(up, kind="relu")
    down = linear(m, W("down", fp32[8, 12]), W("down_bias", fp32[8]))
    weights, ids = router(down, W("gate", fp32[4, 8]), None, None, top_k=2)
    y = experts(down, weights, ids, W("gate_up", fp32[4, 12, 8]), W("downs", fp32[4, 8, 6]), W("gate_up_bias", fp32[4, 12]), W("downs_bias", fp32[4, 8]), kind="silu")
    return y
"""


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(2, experts=2), Mesh(3), Mesh(4, experts=2)], ids=str)
def test_biases_of_what_ranks_sum_are_added_once(mesh: Mesh):
    x, whole = torch.randn(5, 8), parse(BIASED)
    expected = interpret(whole, "body", {"x": x}, random_weight)
    read = [
        lambda recipe, rank=rank: random_weight(localize(recipe, mesh.coordinates(rank)))
        for rank in range(mesh.num_ranks)
    ]
    made = interpret_ranks([sharded(parse(BIASED), mesh)], "body", [{"x": x}] * mesh.num_ranks, read, mesh)
    for each in made:
        assert (each - expected).abs().max() <= 1e-5 * expected.abs().max()


GROUPED = """\
def body(x: fp32[T, 8]):
    q = linear(x, W("q", fp32[16, 8]))
    q_1 = rms_norm(q, W("q_norm", fp32[16]), eps=1e-06)
    k = linear(x, W("k", fp32[8, 8]))
    v = linear(x, W("v", fp32[8, 8]))
    q_2 = split_heads(q_1, heads=4)
    k_1 = split_heads(k, heads=2)
    v_1 = split_heads(v, heads=2)
    a = attention(q_2, k_1, v_1, KV("0", fp32[2, 2, 4]), scale=0.5)
    a_1 = merge_heads(a)
    o = linear(a_1, W("o", fp32[8, 16]))
    return o
"""


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), (4, 1)])
def test_heads_of_keys_and_values_are_on_several_ranks_where_these_are_more(ranks: int, kv_heads: int):
    x, mesh = torch.randn(5, 8), Mesh(ranks)
    graph = sharded(parse(GROUPED), mesh)
    (cache,) = graph.states()
    assert cache.type.shape == (2, kv_heads, 4)
    read = [lambda recipe, rank=rank: random_weight(localize(recipe, mesh.coordinates(rank))) for rank in range(ranks)]
    expected = interpret(parse(GROUPED), "body", {"x": x}, random_weight)
    for made in interpret_ranks([graph], "body", [{"x": x}] * ranks, read, mesh):
        assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()


MIXTURE = """\
def body(tokens: i64[T], positions: i64[T]):
    h = embedding(tokens, W("embed.weight", fp32[50, 8]))
    weights, ids = router(h, W("l.mlp.gate.weight", fp32[8, 8]), None, None, top_k=2)
    y = experts(h, weights, ids, W("l.mlp.experts.gate_up", fp32[8, 12, 8]), W("l.mlp.experts.down", fp32[8, 8, 6]), kind="silu")
    return y
"""
