"""The stages of a pipeline, interpreted side by side in one process, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import assert_same_logits

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph, semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import UnsupportedError
from atom.graph import Graph, Mesh, interpret_ranks, ops, parse, show, verify
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.shard import shard
from atom.passes.split_stages import layers_of_stages, split_stages

BEFORE = """\
def body(tokens: i64[T], positions: i64[T]):
    cos, sin = rotary(positions, rope_freqs(4, 10000.0))
    x = embedding(tokens, W("embed", fp32[7, 4]))
    q = split_heads(x, heads=1)
    q_1 = rope(q, cos, sin)
    a = attention(q_1, q_1, q_1, KV("0", fp32[2, 1, 4]), scale=0.5)
    a_1 = merge_heads(a)
    m = activate(a_1, kind="relu")
    x_1 = add(x, m)
    h = rms_norm(x_1, W("norm", fp32[4]), eps=1e-06)
    q_2 = split_heads(h, heads=1)
    q_3 = rope(q_2, cos, sin)
    a_2 = attention(q_3, q_3, q_3, KV("1", fp32[2, 1, 4]), scale=0.5)
    a_3 = merge_heads(a_2)
    x_2 = add(x_1, a_3)
    return x_2

def head(hidden: fp32[R, 4]):
    logits = linear(hidden, W("embed", fp32[7, 4]))
    return logits"""

SHARED = BEFORE.replace("    return x_2", """\
    q_4 = split_heads(x_2, heads=1)
    a_4 = attention(q_4, q_3, q_3, KV("1", fp32[2, 1, 4]), scale=0.5)
    a_5 = merge_heads(a_4)
    x_3 = add(x_2, a_5)
    return x_3""")  # fmt: skip

FIRST = """\
def body(tokens: i64[T], positions: i64[T]):
    cos, sin = rotary(positions, rope_freqs(4, 10000.0))
    x = embedding(tokens, W("embed", fp32[7, 4]))
    q = split_heads(x, heads=1)
    q_1 = rope(q, cos, sin)
    a = attention(q_1, q_1, q_1, KV("0", fp32[2, 1, 4]), scale=0.5)
    a_1 = merge_heads(a)
    m = activate(a_1, kind="relu")
    x_1 = add(x, m)
    x_2 = send(x_1, axis="pipeline", to=1)
    return x_2

def head(hidden: fp32[R, 4]):
    logits = receive(hidden, axis="pipeline", source=1, columns=7, dtype="fp32")
    return logits"""

LAST = """\
def body(tokens: i64[T], positions: i64[T]):
    x_1 = receive(tokens, axis="pipeline", source=0, columns=4, dtype="fp32")
    cos, sin = rotary(positions, rope_freqs(4, 10000.0))
    h = rms_norm(x_1, W("norm", fp32[4]), eps=1e-06)
    q_2 = split_heads(h, heads=1)
    q_3 = rope(q_2, cos, sin)
    a_2 = attention(q_3, q_3, q_3, KV("1", fp32[2, 1, 4]), scale=0.5)
    a_3 = merge_heads(a_2)
    x_2 = add(x_1, a_3)
    return x_2

def head(hidden: fp32[R, 4]):
    logits = linear(hidden, W("embed", fp32[7, 4]))
    logits_1 = send(logits, axis="pipeline", to=0)
    return logits_1"""


def test_a_layer_that_reads_the_kv_of_another_is_on_its_stage():
    first, _ = (plain(split_stages(parse(SHARED), context(stage, 2))).strip() for stage in range(2))
    assert first == FIRST, "the third attention is no layer of its own"
    apart = SHARED.replace("    return x_3", """\
    q_5 = split_heads(x_3, heads=1)
    a_6 = attention(q_5, q_5, q_5, KV("2", fp32[2, 1, 4]), scale=0.5)
    a_7 = attention(q_5, q_3, q_3, KV("1", fp32[2, 1, 4]), scale=0.5)
    a_8 = add(a_6, a_7)
    a_9 = merge_heads(a_8)
    return a_9""")  # fmt: skip
    with pytest.raises(UnsupportedError, match="a_7 reads the KV of 1, a layer of another stage; set fewer stages"):
        split_stages(parse(apart), context(0, 2))


DRAFT = """
def draft(tokens: i64[T], positions: i64[T]):
    x = embedding(tokens, W("embed", fp32[7, 4]))
    return x

def draft_head(hidden: fp32[R, 4], keys: i64[R], temperatures: fp32[R], depths: fp32[R]):
    logits = linear(hidden, W("embed", fp32[7, 4]))
    tokens = gumbel_argmax(logits, keys, temperatures, depths)
    return tokens"""

FIRST_DRAFT = """
def draft(tokens: i64[T]):
    return tokens

def draft_head(hidden: i64[R], keys: i64[R], temperatures: fp32[R], depths: fp32[R]):
    tokens = receive(hidden, axis="pipeline", source=1, columns=None, dtype="i64")
    return tokens"""


def plain(graph: Graph) -> str:
    """The text without comments."""
    return "\n".join(line.partition("    # ")[0] for line in show(graph).splitlines())


def context(stage: int, num_stages: int) -> PassContext:
    return PassContext.of(Target("cpu"), 0, Mesh(pipeline=num_stages), stage=stage)


def test_a_stage_has_its_layers_and_the_values_at_its_ends():
    assert [plain(split_stages(parse(BEFORE), context(stage, 2))).strip() for stage in range(2)] == [FIRST, LAST]
    assert show(split_stages(parse(BEFORE), context(0, 1))) == show(parse(BEFORE))


def test_a_layer_of_two_states_is_one_layer():
    last = LAST.replace("add(x_1, a_3)", "add(x_1, b_1)").replace(
        "    a_3 = merge_heads(a_2)\n",
        '    b = attention(a_2, q_3, q_3, KV("1", fp32[2, 1, 4], window=3), scale=0.5, window=3)\n'
        "    b_1 = merge_heads(b)\n",
    )
    middle = slice(last.index("    h = rms_norm"), last.index("\n\ndef head"))
    text = BEFORE[: BEFORE.index("    h = rms_norm")] + last[middle] + BEFORE[BEFORE.index("\n\ndef head") :]
    assert parse(text).layers() == ["0", "1"]
    assert [plain(split_stages(parse(text), context(stage, 2))).strip() for stage in range(2)] == [FIRST, last]


def test_the_last_stage_drafts_and_sends_the_tokens():
    first, last = (plain(split_stages(parse(f"{BEFORE}\n{DRAFT}"), context(stage, 2))).strip() for stage in range(2))
    assert first == f"{FIRST}\n{FIRST_DRAFT}"
    sends = '    tokens_1 = send(tokens, axis="pipeline", to=0)\n    return tokens_1'
    assert last == f"{LAST}\n{DRAFT.removesuffix('    return tokens')}{sends}"


def test_the_ranks_of_the_last_stage_divide_its_head():
    mesh = Mesh(tensor=2, pipeline=2)
    context = PassContext.of(Target("cpu"), 0, mesh, stage=1)
    head = plain(
        shard(
            split_stages(
                parse(
                    BEFORE.replace("heads=1", "heads=2").replace("[2, 1, 4]", "[2, 2, 2]").replace("freqs(4", "freqs(2")
                ),
                context,
            ),
            context,
        )
    ).partition("def head")[2]
    assert head.splitlines()[1:] == [
        '    logits_2 = linear(hidden, share(W("embed", fp32[7, 4]), "tensor", 2))',
        '    logits = all_gather(logits_2, axis="tensor", size=7)',
        '    logits_1 = send(logits, axis="pipeline", to=0)',
        "    return logits_1",
    ]


def test_a_layer_that_reads_two_values_of_an_earlier_one_is_refused():
    crossing = BEFORE.replace("x_2 = add(x_1, a_3)", "b = merge_heads(a)\n    x_2 = add(b, a_3)")
    with pytest.raises(UnsupportedError, match=r"no rows of one type; set parallel\.pipeline=1"):
        split_stages(parse(crossing), context(0, 2))


def test_stages_multiply_in_no_shape_that_the_whole_model_does_not(checkpoints: Callable[[str], Path]):
    """So that what `tune=true` measures without stages, even of a few layers, is all that stages look up."""
    pytest.importorskip("triton")
    from atom.kernels.triton.experts.grouped_tune import matmuls_of as matmuls_of_experts
    from atom.kernels.triton.linear.tune import matmuls_of

    def shapes(*fields: str, stage: int = 0) -> set[Any]:
        config = load([f"checkpoint={checkpoints('qwen3_moe')}", "device=cpu", "dtype=bf16", "level=1", *fields])
        graph = compile_graph(config, target=Target("cuda", frozenset({"nvidia", "sm_90"})), stage=stage)
        return {each._replace(num_calls=0) for each in (*matmuls_of(graph), *matmuls_of_experts(graph))}

    known = shapes("parallel=tp2", "model.layers=1")
    of_stages = [shapes("parallel=tp2_pp2", stage=stage) for stage in range(2)]
    assert all(each and each <= known for each in of_stages)


def test_layers_that_remain_go_before_the_last_stage():
    # as vllm.distributed.utils.get_pp_indices
    counts = {(4, 2): [2, 2], (5, 2): [3, 2], (7, 3): [2, 3, 2], (8, 3): [3, 3, 2], (3, 3): [1, 1, 1]}
    assert {sizes: layers_of_stages(*sizes) for sizes in counts} == counts


def test_several_rows_pass_side_by_side():
    again = """\
    h_1 = rms_norm(x_2, W("norm", fp32[4]), eps=1e-06)
    q_4 = split_heads(h_1, heads=1)
    a_4 = attention(q_4, q_4, q_4, KV("2", fp32[2, 1, 4]), scale=0.5)
    a_5 = merge_heads(a_4)
    b = add(x_1, x_2)
    x_3 = add(b, a_5)
    return x_3"""
    three = BEFORE.replace("    return x_2", again)
    first, last = (plain(split_stages(parse(three), context(stage, 2))) for stage in range(2))
    assert 'rows = join(x_1, x_2)\n    rows_1 = send(rows, axis="pipeline", to=1)\n    return rows_1' in first
    received = 'rows = receive(tokens, axis="pipeline", source=0, columns=8, dtype="fp32")\n'
    assert received + "    x_1, x_2 = split(rows, sizes=[4, 4])" in last


@torch.inference_mode()
def logits_of_stages(checkpoint: Path, tokens: list[int], mesh: Mesh) -> list[torch.Tensor]:
    """The logits of each rank."""
    config = load([f"checkpoint={checkpoint}", "dtype=fp32"])
    graphs = []
    for stage in range(mesh.pipeline):
        context = PassContext.of(Target("cpu"), 0, mesh, stage=stage)
        graphs.append(shard(split_stages(semantic_graph(config), context), context))
        verify(graphs[-1], ops.SEMANTIC)
        assert show(parse(show(graphs[-1]))) == show(graphs[-1])
    assert {name for graph in graphs for name in graph.stored()} == semantic_graph(config).stored().keys()
    assert sum(len(graph.states()) for graph in graphs) == len(semantic_graph(config).states())
    opened, read = open_for(config, SilentProgress()), []
    for rank in range(mesh.num_ranks):
        recipes = graphs[mesh.stage(rank)].recipes()
        read.append(weights.load(recipes, opened, SilentProgress(), coordinates=mesh.coordinates(rank)).__getitem__)
    inputs = {"tokens": torch.tensor(tokens), "positions": torch.arange(len(tokens))}
    hidden = interpret_ranks(graphs, "body", [inputs] * mesh.num_ranks, read, mesh)
    return interpret_ranks(graphs, "head", [{"hidden": each} for each in hidden], read, mesh)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, Mesh(pipeline=2)) for name in tiny.MODEL_FILES),
        ("llama_tied", Mesh(pipeline=3)),
        ("llama_tied", Mesh(tensor=2, pipeline=2)),
        ("deepseek_v3", Mesh(tensor=2, experts=2, pipeline=3)),
        ("qwen3_moe", Mesh(tensor=2, experts=4, data=2, pipeline=2)),
    ],
    ids=str,
)
def test_stages_give_the_logits_of_transformers(
    name: str, mesh: Mesh, checkpoints: Callable[[str], Path], references: Any
):
    tokens = tiny.prompt(33)
    made = logits_of_stages(checkpoints(name), tokens, mesh)
    assert_same_logits(made[0], tiny.logits(references(name), tokens))
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_a_stage_begins_at_a_layer_that_chooses_for_itself(tmp_path: Path):
    types = ["full", "full", "shared", "shared", "shared", "full"]
    tiny.save_changed("glm_moe_dsa", tmp_path, num_hidden_layers=6, indexer_types=types)
    config = load([f"checkpoint={tmp_path}", "device=cpu"])

    def first_layers(num_stages: int) -> list[int]:
        graphs = [split_stages(semantic_graph(config), context(stage, num_stages)) for stage in range(num_stages)]
        return [int(graph.states()[0].name.split(".")[2]) for graph in graphs]

    assert {num: first_layers(num) for num in (2, 3)} == {2: [0, 1], 3: [0, 1, 5]}, "not 3, nor 2 and 4"
    message = (
        "layers read what earlier ones chose, which does not go to another stage; set fewer stages with parallel.p"
    )
    with pytest.raises(UnsupportedError, match=message):
        first_layers(4)


def test_layers_without_state_go_with_the_layer_before_them(tmp_path: Path):
    tiny.save_changed("nemotron_h", tmp_path)
    config = load([f"checkpoint={tmp_path}", "device=cpu"])
    types = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    assert config.model.layer_types == types
    stages = [set(split_stages(semantic_graph(config), context(stage, 3)).stored()) for stage in range(3)]
    of_layers = [{name.split(".")[2] for name in stage if ".layers." in name} for stage in stages]
    assert of_layers == [{"0", "1"}, {"2", "3"}, {"4"}]
    assert set().union(*stages) == set(semantic_graph(config).stored())
