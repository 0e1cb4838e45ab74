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
from passes.cases import random_weight

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
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
def logits_of_ranks(overrides: list[str], tokens: list[int], mesh: Mesh) -> list[torch.Tensor]:
    """The logits of each rank, by the text that all of them have."""
    config = load(overrides)
    texts = [sharded(semantic_graph(config), mesh)]
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


MIXTURES = list(filter(tiny.is_mixture, tiny.VARIANTS))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "experts"), [*((name, 2) for name in MIXTURES), ("gpt_oss", 4), ("dots1", 4)])
def test_a_mesh_that_divides_experts_gives_the_logits_of_transformers(
    name: str, experts: int, checkpoints: Callable[[str], Path], references: Any
):
    heads = tiny.config(name).num_attention_heads
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
