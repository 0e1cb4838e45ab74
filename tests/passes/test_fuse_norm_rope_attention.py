"""Attention takes in the norm, rotation and cache write before it, where a kernel computes them as one."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, random_weight, text_of

from atom.graph import KV, TORCH_DTYPES, Batch, Graph, interpret, ops, parse
from atom.kernels import Target
from atom.passes.fuse_norm_rope_attention import fuse_norm_rope_attention
from atom.passes.pipeline import lower

GPU, BACKENDS = Target("cuda", frozenset({"nvidia", "sm_90"})), ("triton", "reference")

INPUTS = "q: fp32[T, 4, 4], k: fp32[T, 2, 4], v: fp32[T, 2, 4], cos: fp32[T, 2], sin: fp32[T, 2], batch: Batch"
PAIR = f"""\
def f({INPUTS}):
    q_1 = norm_rope_write(q, k, v, cos, sin, W("q_norm", fp32[4]), W("k_norm", fp32[4]), KV("0", fp32[2, 2, 4], window=3), batch, eps=1e-06, interleaved=True)
    a = paged_attention(q_1, KV("0", fp32[2, 2, 4], window=3), batch, W("sinks", fp32[4]), scale=0.5, window=3, softcap=2.0)
    b = merge_heads(a)
    return b"""
FUSED = f"""\
def f({INPUTS}):
    a = norm_rope_attention(q, k, v, cos, sin, W("q_norm", fp32[4]), W("k_norm", fp32[4]), KV("0", fp32[2, 2, 4], window=3), batch, W("sinks", fp32[4]), eps=1e-06, interleaved=True, scale=0.5, window=3, softcap=2.0)
    b = merge_heads(a)
    return b"""
PLAIN = f"""\
def f({INPUTS}):
    q_1 = norm_rope_write(q, k, v, None, None, None, None, KV("0", fp32[2, 2, 4]), batch)
    a = paged_attention(q_1, KV("0", fp32[2, 2, 4]), batch, scale=0.5)
    return a"""
PLAIN_FUSED = f"""\
def f({INPUTS}):
    a = norm_rope_attention(q, k, v, None, None, None, None, KV("0", fp32[2, 2, 4]), batch, scale=0.5)
    return a"""
SCALES = 'W("k_scale", fp32[1]), W("v_scale", fp32[1])'
SCALED = f"""\
def f({INPUTS}):
    q_1 = norm_rope_write(q, k, v, None, None, None, None, KV("0", fp8_e4m3[2, 2, 4]), batch, {SCALES})
    a = paged_attention(q_1, KV("0", fp8_e4m3[2, 2, 4]), batch, None, {SCALES}, scale=0.5)
    return a"""
SCALED_FUSED = f"""\
def f({INPUTS}):
    a = norm_rope_attention(q, k, v, None, None, None, None, KV("0", fp8_e4m3[2, 2, 4]), batch, None, {SCALES}, scale=0.5)
    return a"""
CASES = pytest.mark.parametrize(
    ("before", "after"),
    [(PAIR, FUSED), (PLAIN, PLAIN_FUSED), (SCALED, SCALED_FUSED)],
    ids=["all of it", "plain", "fp8"],
)


def fused(text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> Graph:
    return fuse_norm_rope_attention(parse(text), context_of(target, *backends))


def assert_stays(text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> None:
    graph = fused(text, target, backends)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


def run(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for a decode after 4 tokens and a prompt of 3, and the cache after it."""
    random = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(4, heads, 4, generator=random) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    angles = torch.rand(4, 2, generator=random)
    table, slots = torch.tensor([[1, 2], [3, 0]]).int(), torch.tensor([8, 12, 13, 14])
    graph = parse(text)
    (kind,) = {cache.kind for cache in graph.states()}
    batch = Batch({kind: table}, {kind: slots}, torch.tensor([0, 1, 4]).int(), torch.tensor([5, 3]).int(), 1)
    inputs |= {"cos": angles.cos(), "sin": angles.sin(), "batch": batch}
    cache = torch.randn(4, 4, 2, 2, 4, generator=random).to(TORCH_DTYPES[graph.states()[0].type.dtype])
    return interpret(graph, "f", inputs, random_weight, lambda _: cache), cache.float()


@CASES
def test_the_text_before_becomes_the_text_after(before: str, after: str):
    graph = fused(before)
    assert text_of(graph).strip() == after
    assert graph.num_rewrites == 1
    assert_stays(after)


@CASES
def test_the_numbers_stay(before: str, after: str):
    for out, expected in zip(run(text_of(fused(before))), run(before), strict=True):
        torch.testing.assert_close(out, expected)


def test_where_no_kernel_takes_the_two_as_one_they_stay():
    assert_stays(PAIR, Target("cpu"), ("inductor", "torch", "reference"))
    assert_stays(PAIR, GPU, ("reference",))
    assert_stays(PAIR, Target("cpu"), BACKENDS)  # the kernel is there and refuses
    assert_stays(PAIR.replace(", 4]", ", 516]"))  # heads are too wide for it


@pytest.mark.parametrize(
    "text",
    [
        PAIR.replace("b = merge_heads(a)", "a_1 = add(a, q_1)\n    b = merge_heads(a_1)"),
        PAIR.replace("return b", "return b, q_1"),
    ],
)
def test_where_another_reads_the_q_too_they_stay(text: str):
    assert_stays(text)


def test_where_queries_chose_what_they_attend_to_they_stay():
    chosen = PLAIN.replace("batch: Batch", "selected: i32[T, 2, 3], batch: Batch")
    assert_stays(
        chosen.replace("batch, scale=0.5", "batch, None, None, None, None, None, selected, scale=0.5, block=16")
    )


def test_where_another_call_lies_between_the_two_they_stay():
    other = 'c = paged_attention(q, KV("0", fp32[2, 2, 4]), batch, scale=0.5)'
    assert_stays(PLAIN.replace("    a = ", f"    {other}\n    a = ").replace("return a", "return a, c"))


def test_an_attention_over_what_another_layer_wrote_stays():
    assert_stays(PLAIN.replace('paged_attention(q_1, KV("0"', 'paged_attention(q_1, KV("1"'))
    assert_stays(PLAIN.replace("paged_attention(q_1", "paged_attention(q"))


def test_an_attention_with_another_scale_than_the_one_written_stays():
    assert_stays(SCALED.replace(f"None, {SCALES}, scale", f"None, {SCALES.replace('k_scale', 'other')}, scale"))


def test_an_attention_of_another_batch_than_the_one_written_stays():
    other = PLAIN.replace("batch: Batch", "batch: Batch, other: Batch")
    assert_stays(other.replace("batch, scale", "other, scale"))


def test_a_semantic_attention_becomes_the_one_op_on_a_gpu_and_two_on_a_cpu():
    text = """\
def body(qkv: bf16[T, 32], cos: fp32[T, 2], sin: fp32[T, 2]):
    q, k, v = split(qkv, sizes=[16, 8, 8])
    q_1 = split_heads(q, heads=4)
    k_1 = split_heads(k, heads=2)
    v_1 = split_heads(v, heads=2)
    q_2 = rope(q_1, cos, sin)
    k_2 = rope(k_1, cos, sin)
    a = attention(q_2, k_2, v_1, KV("0", bf16[2, 2, 4]), scale=0.5)
    return a"""
    two = [ops.norm_rope_write, ops.paged_attention]
    for target, level, expected in [
        (GPU, 0, two), (GPU, 1, [ops.norm_rope_attention]), (GPU, 2, [ops.norm_rope_attention]), (Target("cpu"), 1, two),
    ]:  # fmt: skip
        graph = lower(parse(text), level, target)
        assert [call.target for op in (*two, ops.norm_rope_attention) for call in graph.find(op)] == expected
        assert graph.states() == [KV("0", *(cache.type for cache in parse(text).states()))]
