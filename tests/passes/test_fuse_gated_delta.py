"""The gated delta rule takes in its convolution, gates and norm, where a kernel computes them as one."""

from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, random_weight, text_of

from atom.graph import Batch, Graph, interpret, parse
from atom.kernels import Target
from atom.passes.fuse_gated_delta import fuse_gated_delta

GPU, BACKENDS = Target("cuda", frozenset({"nvidia", "sm_90"})), ("triton", "reference")
STATES = 'STATE("0", fp32[2, 24]), STATE("0", fp32[4, 4, 2])'
BLOCK = """\
def f(qkv: fp32[T, 24], z: fp32[T, 8], a: fp32[T, 4], b: fp32[T, 4], batch: Batch):
    c = batched_causal_conv(qkv, STATE("0", fp32[2, 24]), batch, W("conv", fp32[24, 3]), kind="silu")
    q, k, v = split(c, sizes=[8, 8, 8])
    q_1 = split_heads(q, heads=2)
    k_1 = split_heads(k, heads=2)
    v_1 = split_heads(v, heads=4)
    z_1 = split_heads(z, heads=4)
    beta = activate(b, kind="sigmoid")
    decay = ssm_decay(a, W("A_log", fp32[4]), W("dt_bias", fp32[4]))
    o = batched_gated_delta(q_1, k_1, v_1, decay, beta, STATE("0", fp32[4, 4, 2]), batch, scale=0.5, normalize=True)
    o_1 = rms_norm(o, W("norm", fp32[2]), eps=1e-06)
    z_2 = activate(z_1, kind="silu")
    o_2 = mul(o_1, z_2)
    o_3 = merge_heads(o_2)
    return o_3"""
FUSED = f"""\
def f(qkv: fp32[T, 24], z: fp32[T, 8], a: fp32[T, 4], b: fp32[T, 4], batch: Batch):
    o_3 = gated_delta_net(qkv, z, a, b, {STATES}, batch, W("conv", fp32[24, 3]), W("A_log", fp32[4]), W("dt_bias", fp32[4]), W("norm", fp32[2]), key_heads=2, scale=0.5, normalize=True, eps=1e-06)
    return o_3"""
SCALED = BLOCK.replace("    decay =", "    beta_1 = scale(beta, by=2.0)\n    decay =").replace(
    "decay, beta,", "decay, beta_1,"
)
SCALED_FUSED = FUSED.replace("eps=1e-06)", "eps=1e-06, beta_scale=2.0)")
BY_DIM = (
    BLOCK.replace("a: fp32[T, 4]", "a: fp32[T, 16]")
    .replace('W("dt_bias", fp32[4]))', 'W("dt_bias", fp32[16]))\n    decay_1 = split_heads(decay, heads=4)')
    .replace("decay, beta,", "decay_1, beta,")
)
SIGMOID = BLOCK.replace('activate(z_1, kind="silu")', 'activate(z_1, kind="sigmoid")')
SIGMOID_FUSED = FUSED.replace("eps=1e-06)", 'eps=1e-06, kind="sigmoid")')
BY_DIM_FUSED = FUSED.replace("a: fp32[T, 4]", "a: fp32[T, 16]").replace('dt_bias", fp32[4]', 'dt_bias", fp32[16]')
FLOOR = BLOCK.replace('W("dt_bias", fp32[4]))', 'W("dt_bias", fp32[4]), floor=-5.0)')
FLOOR_FUSED = FUSED.replace("eps=1e-06)", "floor=-5.0, eps=1e-06)")
CASES = pytest.mark.parametrize(
    ("before", "after"),
    [(BLOCK, FUSED), (SCALED, SCALED_FUSED), (BY_DIM, BY_DIM_FUSED), (SIGMOID, SIGMOID_FUSED), (FLOOR, FLOOR_FUSED)],
    ids=["a decay by head", "beta up to 2", "a decay by dim", "a sigmoid gate", "a floor of decays"],
)


def fused(text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> Graph:
    return fuse_gated_delta(parse(text), context_of(target, *backends))


def assert_stays(text: str, target: Target = GPU, backends: tuple[str, ...] = BACKENDS) -> None:
    graph = fused(text, target, backends)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


def run(text: str) -> list[torch.Tensor]:
    """The result for a decode after 4 tokens and a prompt of 3, and the states after it."""
    random, graph = torch.Generator().manual_seed(0), parse(text)
    (program,) = graph.programs.values()
    inputs: dict[str, object] = {
        node.name: torch.randn(4, int(node.meta["type"].shape[1]), generator=random)
        for node in program.inputs
        if node.name != "batch"
    }
    starts, slots = torch.tensor([0, 1, 4]).int(), torch.tensor([1, 0]).int()
    batch = Batch({}, {}, starts, torch.tensor([5, 3]).int(), 1, slots=slots)
    states = {state: torch.randn(3, 1, *map(int, state.type.shape), generator=random) for state in graph.states()}
    return [interpret(graph, "f", inputs | {"batch": batch}, random_weight, states.__getitem__), *states.values()]


@CASES
def test_the_text_before_becomes_the_text_after(before: str, after: str):
    graph = fused(before)
    assert text_of(graph).strip() == after
    assert graph.num_rewrites == 1
    assert_stays(after)


@CASES
def test_the_numbers_and_states_stay(before: str, after: str):
    for one, other in zip(run(after), run(before), strict=True):
        torch.testing.assert_close(one, other)


def test_where_no_kernel_takes_all_of_it_the_parts_stay():
    assert_stays(BLOCK, Target("cpu"), ("torch", "reference"))
    assert_stays(BLOCK, GPU, ("reference",))
    wide = BLOCK.replace("[T, 24]", "[T, 528]").replace("[2, 24]", "[2, 528]").replace("[24, 3]", "[528, 3]")
    wide = wide.replace("sizes=[8, 8, 8]", "sizes=[260, 260, 8]").replace("q, heads=2", "q, heads=1")
    wide = wide.replace("k, heads=2", "k, heads=1").replace("[4, 4, 2]", "[4, 260, 2]")
    assert_stays(wide)  # keys have more dims than it takes


@pytest.mark.parametrize(
    "text",
    [
        BLOCK.replace("return o_3", "return o_3, q_1"),
        BLOCK.replace("return o_3", "return o_3, o"),
        BLOCK.replace("return o_3", "return o_3, decay"),
        BLOCK.replace("return o_3", "return o_3, z_2"),
        BLOCK.replace("return o_3", "return o_3, beta"),
        BLOCK[: BLOCK.index("    o_1 =")] + "    return o",
    ],
)
def test_where_another_reads_a_part_they_stay(text: str):
    assert_stays(text)


def test_a_convolution_that_is_another_stays():
    assert_stays(BLOCK.replace(', kind="silu")\n    q, k', ")\n    q, k"))
    assert_stays(BLOCK.replace("fp32[24, 3]), kind", 'fp32[24, 3]), W("bias", fp32[24]), kind'))
    other = BLOCK.replace("batch: Batch", "batch: Batch, other: Batch")
    assert_stays(other.replace('STATE("0", fp32[2, 24]), batch', 'STATE("0", fp32[2, 24]), other'))
    swapped = BLOCK.replace("split_heads(q,", "split_heads(x,").replace("split_heads(k,", "split_heads(q,")
    assert_stays(swapped.replace("split_heads(x,", "split_heads(k,"))


def test_gates_of_another_kind_stay():
    without = BLOCK.replace('    z_2 = activate(z_1, kind="silu")\n', "")
    assert_stays(without.replace("mul(o_1, z_2)", 'mul(o_1, W("factors", fp32[2]))'))
    assert_stays(BLOCK.replace("z: fp32[T, 8]", "z: fp32[T, 4]"))  # one of a head
    assert_stays(BLOCK.replace('activate(b, kind="sigmoid")', 'activate(b, kind="silu")'))
