"""Adapters of the linears of layers, and fused with them where a kernel takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from passes.cases import context_of, random_weight, run, text_of

from atom.graph import Graph, Mesh, Recipe, interpret, parse
from atom.kernels import Target
from atom.passes.add_lora import add_lora
from atom.passes.context import PassContext
from atom.passes.fuse_lora import fuse_lora

GPU, BACKENDS = Target("cuda", frozenset({"amd", "gfx942"})), ("triton", "reference")

WRITTEN = """\
def body(tokens: i64[T], positions: i64[T]):
    x = embedding(tokens, W("embed.weight", fp32[50, 8]))
    qkv = linear(x, cat([W("l.q.weight", fp32[8, 8]), W("l.k.weight", fp32[8, 8]), W("l.v.weight", fp32[8, 8])]))
    q, k, v = split(qkv, sizes=[8, 8, 8])
    q_1 = split_heads(q, heads=2)
    k_1 = split_heads(k, heads=2)
    v_1 = split_heads(v, heads=2)
    a = attention(q_1, k_1, v_1, KV("l", fp32[2, 2, 4]), scale=0.5)
    return a
def head(a: fp32[R, 2, 4]):
    a_1 = merge_heads(a)
    o = linear(a_1, slice(W("l.o.weight", fp32[16, 8]), 4, 12))
    logits = linear(o, W("lm_head.weight", fp32[50, 8]))
    return logits
"""

ADDED = """\
def body(tokens: i64[T], positions: i64[T], adapters: i64[T]):
    x = embedding(tokens, W("embed.weight", fp32[50, 8]))
    qkv_1 = linear(x, cat([W("l.q.weight", fp32[8, 8]), W("l.k.weight", fp32[8, 8]), W("l.v.weight", fp32[8, 8])]))
    qkv = lora(qkv_1, x, cat([lora_stack("l.q.lora_A", fp32[6, 8]), lora_stack("l.k.lora_A", fp32[6, 8]), lora_stack("l.v.lora_A", fp32[6, 8])]), cat([lora_stack("l.q.lora_B", fp32[8, 6]), lora_stack("l.k.lora_B", fp32[8, 6]), lora_stack("l.v.lora_B", fp32[8, 6])]), adapters, rank=2, sizes=[8, 8, 8])
    q, k, v = split(qkv, sizes=[8, 8, 8])
    q_1 = split_heads(q, heads=2)
    k_1 = split_heads(k, heads=2)
    v_1 = split_heads(v, heads=2)
    a = attention(q_1, k_1, v_1, KV("l", fp32[2, 2, 4]), scale=0.5)
    return a, adapters

def head(a: fp32[R, 2, 4], adapters: i64[R]):
    a_1 = merge_heads(a)
    o_1 = linear(a_1, slice(W("l.o.weight", fp32[16, 8]), 4, 12))
    o = lora(o_1, a_1, lora_stack("l.o.lora_A", fp32[6, 8]), slice(lora_stack("l.o.lora_B", fp32[16, 6]), 4, 12), adapters, rank=2, sizes=[8])
    logits = linear(o, W("lm_head.weight", fp32[50, 8]))
    return logits"""

SEPARATE = """\
def f(x: fp32[T, 8], adapters: i64[T]):
    y_1 = linear(x, W("l.y.weight", fp32[12, 8]), W("l.y.bias", fp32[12]))
    y = lora(y_1, x, lora_stack("l.y.lora_A", fp32[6, 8]), lora_stack("l.y.lora_B", fp32[12, 6]), adapters, rank=2, sizes=[12])
    m = gated_activate(y, kind="silu")
    return m"""

FUSED = """\
def f(x: fp32[T, 8], adapters: i64[T]):
    y_2 = linear(x, cat([W("l.y.weight", fp32[12, 8]), lora_stack("l.y.lora_A", fp32[6, 8])]), cat([W("l.y.bias", fp32[12]), full(0, fp32[6])]))
    m = expand_lora(y_2, lora_stack("l.y.lora_B", fp32[12, 6]), adapters, rank=2, sizes=[12], kind="silu")
    return m"""


DIVIDED = """\
def body(tokens: i64[T], positions: i64[T]):
    x = embedding(tokens, W("embed.weight", fp32[50, 8]))
    qkv = linear(x, cat([share(W("l.q.weight", fp32[16, 8]), "tensor", 4), share(slice(W("l.kv.weight", fp32[16, 8]), 0, 8), "tensor", 4, copies=2), share(slice(W("l.kv.weight", fp32[16, 8]), 8, 16), "tensor", 4, copies=2)]))
    q, k, v = split(qkv, sizes=[4, 4, 4])
    q_1 = split_heads(q, heads=1)
    k_1 = split_heads(k, heads=1)
    v_1 = split_heads(v, heads=1)
    a = attention(q_1, k_1, v_1, KV("l", fp32[2, 1, 4]), scale=0.5)
    a_1 = merge_heads(a)
    o = linear(a_1, share(W("l.o.weight", fp32[8, 16]), "tensor", 4, dim=1), once(W("l.o.bias", fp32[8]), "tensor"))
    o_1 = all_reduce(o, axis="tensor")
    return o_1
"""

ADDED_TO_DIVIDED = {
    "qkv": """lora(qkv_1, x, cat([lora_stack("l.q.lora_A", fp32[6, 8]), lora_stack("l.kv.lora_A", fp32[6, 8])]), cat([share(lora_stack("l.q.lora_B", fp32[16, 6]), "tensor", 4), cat([share(slice(lora_stack("l.kv.lora_B", fp32[16, 6]), 0, 8), "tensor", 4, copies=2), share(slice(lora_stack("l.kv.lora_B", fp32[16, 6]), 8, 16), "tensor", 4, copies=2)])]), adapters, rank=2, sizes=[4, 8])""",
    "o": """lora(o_2, a_1, share(lora_stack("l.o.lora_A", fp32[6, 16]), "tensor", 4, dim=1), lora_stack("l.o.lora_B", fp32[8, 6]), adapters, rank=2, sizes=[8])""",
    "o_1": """all_reduce(o, axis="tensor")""",
}


def lines_of(graph: Graph) -> dict[str, str]:
    """The calls of a text by their results."""
    return dict(line.strip().split(" = ", 1) for line in text_of(graph).splitlines() if " = " in line)


def with_room(context: PassContext) -> PassContext:
    return replace(context, max_loras=3, max_lora_rank=2)


def test_linears_of_layers_get_adapters_and_the_head_does_not():
    graph = add_lora(parse(WRITTEN), context=with_room(context_of(GPU, *BACKENDS)))
    assert text_of(graph) == ADDED
    assert text_of(parse(ADDED)) == ADDED


def test_factors_are_divided_as_their_linears_and_summed_with_them():
    graph = add_lora(parse(DIVIDED), context=with_room(context_of(GPU, *BACKENDS)))
    written = lines_of(graph)
    assert {name: written[name] for name in ADDED_TO_DIVIDED} == ADDED_TO_DIVIDED
    assert text_of(graph).count("all_reduce") == 1


MIXTURE = """\
def body(tokens: i64[T], positions: i64[T]):
    h = embedding(tokens, W("embed.weight", fp32[50, 8]))
    q = linear(h, W("l.q.weight", fp32[8, 8]))
    q_1 = split_heads(q, heads=2)
    a = attention(q_1, q_1, q_1, KV("l", fp32[2, 2, 4]), scale=0.5)
    weights, ids = router(h, W("l.mlp.gate.weight", fp32[6, 8]), None, None, top_k=2)
    rows, row_weights, row_ids = gather_tokens(h, weights, ids, axis="data", ranks=2)
    y = experts(rows, row_weights, row_ids, share(cat([share(slice(W("l.mlp.experts.gate_up", fp32[6, 10, 8]), 0, 5, dim=1), "width", 2, dim=1), share(slice(W("l.mlp.experts.gate_up", fp32[6, 10, 8]), 5, 10, dim=1), "width", 2, dim=1)], dim=1), "experts", 4), share(share(W("l.mlp.experts.down", fp32[6, 8, 5]), "width", 2, dim=2), "experts", 4), None, None, offset("experts", 4, 2), kind="silu")
    y_1 = reduce_scatter(y, axis="data", ranks=2)
    return y_1, a
"""

OF_EXPERTS = {
    "pairs": "pair_adapters(ids, adapters, loras=3)",
    "rows, row_weights, row_ids": 'gather_tokens(h, weights, pairs, axis="data", ranks=2)',
    "grouped, order, ends": 'group(rows, row_ids, offset("experts", 4, 8), experts=8)',
    "expert_ends": "ends_of_experts(ends, loras=3)",
    "gate_up_1": 'grouped_lora(gate_up, grouped, share(lora_stack("l.experts.gate_up.lora_A", fp32[6, 4, 2, 8]), "experts", 4), share(cat([share(slice(lora_stack("l.experts.gate_up.lora_B", fp32[6, 4, 10, 2]), 0, 5, dim=2), "width", 2, dim=2), share(slice(lora_stack("l.experts.gate_up.lora_B", fp32[6, 4, 10, 2]), 5, 10, dim=2), "width", 2, dim=2)], dim=2), "experts", 4), ends)',
    "m": 'gated_activate(gate_up_1, kind="silu")',
    "down_1": 'grouped_lora(down, m, share(share(lora_stack("l.experts.down.lora_A", fp32[6, 4, 2, 5]), "width", 2, dim=3), "experts", 4), share(lora_stack("l.experts.down.lora_B", fp32[6, 4, 8, 2]), "experts", 4), ends)',
    "y": "combine(down_1, row_weights, order)",
    "y_1": 'reduce_scatter(y, axis="data", ranks=2)',
}


def test_experts_are_grouped_with_their_adapters():
    mesh = Mesh(tensor=4, data=2, experts=4)
    context = replace(with_room(context_of(GPU, *BACKENDS)), mesh=mesh, lora_experts=True)
    written = lines_of(add_lora(parse(MIXTURE), context=context))
    assert {name: written.get(name) for name in OF_EXPERTS} == OF_EXPERTS


def test_experts_that_get_only_their_tokens_get_those_of_their_adapters():
    first, meeting = 'offset("experts", 4, 2)', 'axis="data", ranks=2'
    sent = MIXTURE.replace(
        f"gather_tokens(h, weights, ids, {meeting})", f"dispatch(h, weights, ids, {first}, {meeting}, experts=2)"
    )
    sent = sent.replace(f"reduce_scatter(y, {meeting})", f"collect(y, row_ids, {first}, {meeting}, experts=2)")
    context = replace(with_room(context_of(GPU, *BACKENDS)), mesh=Mesh(tensor=4, data=2, experts=4), lora_experts=True)
    written = lines_of(add_lora(parse(sent), context=context))
    first, meeting = 'offset("experts", 4, 8)', 'axis="data", ranks=2, experts=8'
    assert written["rows, row_weights, row_ids"] == f"dispatch(h, weights, pairs, {first}, {meeting})"
    assert written["y_1"] == f"collect(y, row_ids, {first}, {meeting})"
    assert {name: written.get(name) for name in ("grouped, order, ends", "y")} == {
        name: OF_EXPERTS[name] for name in ("grouped, order, ends", "y")
    }


def test_without_room_for_them_experts_stay():
    written = lines_of(add_lora(parse(MIXTURE), context=with_room(context_of(GPU, *BACKENDS))))
    assert written["y"].startswith("experts(")


def test_without_room_nothing_changes():
    written = parse(WRITTEN)
    assert text_of(add_lora(written, context=context_of(GPU, *BACKENDS))) == text_of(parse(WRITTEN))


def test_the_first_product_goes_into_the_linear_and_gates_into_the_second():
    assert text_of(fuse_lora(parse(SEPARATE), context=context_of(GPU, *BACKENDS))) == FUSED
    inputs = {"x": torch.randn(5, 8), "adapters": torch.tensor([2, -1, 0, 1, 2])}
    torch.testing.assert_close(run(FUSED, **inputs), run(SEPARATE, **inputs))


def test_a_token_has_the_sum_of_its_own_adapter():
    x, adapters = torch.randn(3, 8), torch.tensor([1, -1, 0])
    weight, bias, a, b = (
        random_weight(recipe) for node in parse(SEPARATE).programs["f"].nodes[:2] for recipe in node.args if isinstance(recipe, Recipe)
    )  # fmt: skip
    wanted = x @ weight.T + bias
    for token, number in ((0, 1), (2, 0)):
        wanted[token] += b[:, 2 * number : 2 * number + 2] @ a[2 * number : 2 * number + 2] @ x[token]
    text = "\n".join(line for line in SEPARATE.splitlines() if "gated" not in line).replace("return m", "return y")
    torch.testing.assert_close(interpret(parse(text), "f", {"x": x, "adapters": adapters}, random_weight), wanted)


@pytest.mark.parametrize("old, new", [
    ('W("l.y.weight", fp32[12, 8])', 'W("l.y.weight", fp32[12, 8], fmt="fp8[1, *]")'),  # a packed weight
    ("return m", "return m, y_1"),  # another reader of the linear
])  # fmt: skip
def test_what_cannot_be_joined_stays_separate(old: str, new: str):
    text = SEPARATE.replace(old, new)
    assert text_of(fuse_lora(parse(text), context=context_of(GPU, *BACKENDS))) == text


def test_a_kernel_has_to_take_it():
    assert text_of(fuse_lora(parse(SEPARATE), context=context_of(Target("cpu"), "reference"))) == SEPARATE
