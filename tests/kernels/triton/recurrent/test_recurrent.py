"""Triton kernels of ops with recurrent state, against the reference bodies of their ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from graph.ops.recurrences import Case, in_steps, make_case, states_of, with_drafts
from kernels.checks import BF16, assert_as_near
from torch import Tensor
from torch.utils._pytree import tree_map_only

from atom.graph import BATCH, Batch, LatestState, Type, ops
from atom.kernels import LoadContext, find_kernel
from atom.kernels.backend import Target
from atom.kernels.triton.recurrent import chunks

CHUNKED = ["gated_delta", "lightning", "ssd"]  # of which prompts go in chunks
INF = float("inf")
NAMES = ["causal_conv", "gated_delta", "lightning", "selective_scan", "ssd"]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("causal_conv", {}),
    ("causal_conv", {"channels": 130, "taps": 3, "kind": None, "has_bias": False}),
    ("causal_conv", {"channels": 8, "taps": 2, "kind": "gelu"}),
    ("gated_delta", {"key_heads": 2, "heads": 4}),
    ("gated_delta", {"key_heads": 2, "heads": 2, "key_dim": 8, "value_dim": 33, "by_dim": True, "normalize": False}),
    ("lightning", {}),
    ("lightning", {"heads": 2, "dim": 33}),
    ("selective_scan", {}),
    ("selective_scan", {"channels": 8, "size": 7}),
    ("ssd", {"heads": 4, "groups": 2}),
    ("ssd", {"heads": 2, "groups": 1, "dim": 33, "size": 16}),
]


def run_on(device: str, name: str) -> Callable[..., Tensor]:
    """A kernel whose arguments, of which it writes the states, are on a CPU."""
    run = find_kernel(ops.OPS[f"batched_{name}"], "triton").load(LoadContext())

    def run_there(*args: Any, **attributes: Any) -> Tensor:
        there = tree_map_only(Tensor, lambda each: each.to(device), args)
        out: Tensor = run(*there, **attributes).cpu()
        for here, moved in zip(args, there, strict=True):
            if isinstance(here, Tensor):
                here.copy_(moved)
        return out

    return run_there


@pytest.mark.parametrize(("name", "options"), CALLS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_sequences_in_any_chunks_equal_the_reference(
    triton_device: str, name: str, options: dict[str, Any], chunk: int
):
    longest = 19 if name == "causal_conv" else 7  # more than a tile
    lengths = [longest, 1, 6] if chunk > 1 else [4, 1, 3]
    cases = [make_case(name, length, seed=n, **options) for n, length in enumerate(lengths)]
    for case, out in zip(cases, in_steps(run_on(triton_device, name), cases, chunk), strict=True):
        torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_near_to_the_truth_as_the_reference(triton_device: str, name: str, dtype: torch.dtype):
    if triton_device == "cpu" and name in CHUNKED and dtype is BF16:
        pytest.skip("the interpreter multiplies no matrices in bf16")
    case = make_case(name, 9, dtype)
    (out,) = in_steps(run_on(triton_device, name), [case], 5)
    # products of chunks are rounded between
    assert_as_near(out, case.run(), case.wide().run(), factor=2.5 if name in CHUNKED else 1.1)


@pytest.fixture
def _in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies no matrices in bf16."""
    monkeypatch.setattr(chunks, "DTYPES", (torch.float16, torch.bfloat16))


@pytest.mark.usefixtures("_in_fp16")
@pytest.mark.parametrize("lengths", [[64, 1], [63, 65, 130], [200]], ids=str)
@pytest.mark.parametrize("chunk", [64, 129])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gated_delta", {"key_heads": 1, "heads": 2, "key_dim": 33, "value_dim": 20}),
        ("gated_delta", {"key_heads": 1, "heads": 2, "key_dim": 64, "value_dim": 33}),
        ("gated_delta", {"key_heads": 1, "heads": 2, "key_dim": 40, "value_dim": 33, "by_dim": True}),
        ("lightning", {"heads": 2}),
        ("ssd", {"heads": 2, "groups": 1, "dim": 33, "size": 16}),
    ],
    ids=str,
)
def test_prompts_of_several_chunks_are_nearly_as_near_to_the_truth(
    triton_device: str, name: str, sizes: dict[str, Any], lengths: list[int], chunk: int
):
    cases = [make_case(name, n, torch.float16, seed=n, **sizes) for n in lengths]
    for case, out in zip(cases, in_steps(run_on(triton_device, name), cases, chunk), strict=True):
        truth = case.wide().run()
        assert (out.float() - truth).norm() < 8e-4 * truth.norm()  # three times what rounding the output costs


@pytest.mark.usefixtures("_in_fp16")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gated_delta", {}),
        ("gated_delta", {"key_dim": 24, "value_dim": 20, "by_dim": True}),
        ("lightning", {}),
        ("ssd", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kept", [1, 3])
def test_prompts_next_to_decodes_leave_the_states_of_the_reference(
    triton_device: str, name: str, sizes: dict[str, Any], kept: int
):
    assert_same_states(triton_device, make_case(name, 74, torch.float16, **sizes), kept, error=8e-4)


@pytest.mark.usefixtures("_in_fp16")
@pytest.mark.parametrize("name", [*CHUNKED, "selective_scan"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_states_may_have_16_bits(triton_device: str, name: str, dtype: str):
    if triton_device == "cpu" and dtype == "bf16":
        pytest.skip("the interpreter cuts numbers off in place of rounding them to bf16")
    case = make_case(name, 74, torch.float16, **{"gated_delta": {"value_dim": 40}, "ssd": {"dim": 40}}.get(name, {}))
    assert_same_states(triton_device, case.kept_in(dtype), 1, error=1.6e-3)  # some are rounded the other way


def assert_same_states(device: str, case: Case, kept: int, error: float) -> None:
    """Prompts next to decodes give what they give by the reference, and leave its states."""
    left = []
    for run in (run_on(device, case.op.name), ops.OPS[f"batched_{case.op.name}"]):
        slots = torch.randn(4, kept, *case.zeros.shape, generator=torch.Generator().manual_seed(1)).to(case.zeros.dtype)
        starts, lengths = torch.tensor([0, 1, 2, 4, 74]).int(), torch.tensor([40, 2, 7, 80]).int()
        batch = Batch({}, {}, starts, lengths, 2, slots=torch.tensor([2, 0, 1, 3]).int())
        out = run(*case.values, slots, batch, *case.weights, **case.attributes)
        left.append((out.float(), slots.float()))
    for ours, theirs in zip(*left, strict=True):
        assert (ours - theirs).norm() < error * theirs.norm()


@pytest.mark.usefixtures("_in_fp16")
@pytest.mark.parametrize("decays", [(0.0,), (-1e-3,), (-5.0,), (-50.0,), (0.0, -0.01, -0.3, -5.0, -50.0, -1e5, -INF)])
def test_decays_by_dim_of_any_size_leave_precision(triton_device: str, decays: tuple[float, ...]):
    """Neither differences of sums that are large nor factors that have no bound."""
    case = make_case("gated_delta", 130, torch.float16, key_heads=1, heads=2, key_dim=40, value_dim=33, by_dim=True)
    q, k, v, decay, beta = case.values
    chosen = torch.randint(len(decays), decay.shape, generator=torch.Generator().manual_seed(0))
    case = case._replace(values=(q, k, v, torch.tensor(decays)[chosen], beta))
    (out,) = in_steps(run_on(triton_device, "gated_delta"), [case], 130)
    truth = case.wide().run()
    assert (out.float() - truth).norm() < 8e-4 * truth.norm()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_heads_of_128_with_decays_by_dim_are_near_to_the_truth(triton_device: str, dtype: torch.dtype):
    if triton_device == "cpu" and dtype is BF16:
        pytest.skip("the interpreter multiplies no matrices in bf16")
    sizes = {"key_heads": 2, "heads": 2, "key_dim": 128, "value_dim": 128, "by_dim": True}
    case = make_case("gated_delta", 130, dtype, **sizes)
    (out,) = in_steps(run_on(triton_device, "gated_delta"), [case], 130)
    truth = case.wide().run()
    error = 8e-4 if dtype is torch.float16 else 6.4e-3
    assert (out.float() - truth).norm() < error * truth.norm()


@pytest.mark.parametrize("by_dim", [False, True])
def test_keys_that_are_nearly_alike_do_not_cost_precision(triton_device: str, by_dim: bool):
    """The triangular system of a chunk is then as far from the identity as it can be."""
    sizes = {"key_heads": 1, "heads": 2, "key_dim": 32, "value_dim": 32}
    case = make_case("gated_delta", 128, torch.float16, **sizes, by_dim=by_dim)
    q, k, v, decay, beta = case.values
    values = q, (1 + 0.1 * k.float()).half(), v, torch.full_like(decay, -1e-3), torch.full_like(beta, 0.95)
    case = case._replace(values=values)
    (out,) = in_steps(run_on(triton_device, "gated_delta"), [case], 128)
    truth = case.wide().run()
    assert (out.float() - truth).norm() < 4e-3 * truth.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kept", "first"), [(2, 1), (4, 9)])
def test_drafts_that_are_rejected_leave_no_trace(triton_device: str, name: str, kept: int, first: int):
    case = make_case(name, 20)
    out = with_drafts(run_on(triton_device, name), case, kept, first)
    torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_it_leaves_the_states_of_the_reference(triton_device: str, name: str):
    case = make_case(name, 9)
    left = []
    for run in (run_on(triton_device, name), ops.OPS[f"batched_{name}"]):
        slots = torch.randn(4, 3, *case.zeros.shape, generator=torch.Generator().manual_seed(1))
        starts, lengths = torch.tensor([0, 1, 3, 9, 9]).int(), torch.tensor([40, 2, 7, 1]).int()
        batch = Batch({}, {}, starts, lengths, 1, slots=torch.tensor([2, 0, 1, 3]).int())
        run(*case.values, slots, batch, *case.weights, **case.attributes)
        left.append(slots)
    torch.testing.assert_close(*left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_may_lie_apart(triton_device: str, name: str):
    case = make_case(name, 5)
    slots, nothing = states_of(case.zeros, 1), torch.zeros(1).int()
    batch = Batch({}, {}, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 0, slots=nothing)
    out = run_on(triton_device, name)(*case.apart().values, slots, batch, *case.weights, **case.attributes)
    torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=1e-5)


def test_prompts_of_sizes_that_chunks_do_not_take_go_token_by_token():
    prompt = Batch({}, {}, torch.tensor([0, 1]), torch.tensor([1]), 0, slots=torch.tensor([0]))

    def suits(dtype: torch.dtype, dim: int, width: int, **options: bool) -> bool:
        return chunks.suits(torch.empty(1, 1, width, dtype=dtype), dim, prompt, **options)

    assert suits(torch.bfloat16, 1, 1) and suits(torch.bfloat16, 128, 128)
    assert suits(torch.float16, 64, 64, is_unit=True) and not suits(torch.float16, 64, 64)
    assert not any(suits(torch.bfloat16, *sizes) for sizes in ((129, 64), (64, 129)))
    assert not suits(torch.float32, 64, 64, is_unit=True)
    assert suits(torch.bfloat16, 96, 64, is_unit=True, by_dim=True)
    assert not suits(torch.bfloat16, 100, 64, is_unit=True, by_dim=True) and not suits(
        torch.bfloat16, 96, 64, by_dim=True
    )


def test_large_states_and_convolutions_are_left_to_the_reference():
    target, state = Target("cuda"), LatestState("0", Type("fp32", (2, 8, 8)))
    small, large = Type("bf16", ("T", 2, 256)), Type("bf16", ("T", 2, 257))
    delta, ssd = (find_kernel(ops.OPS[f"batched_{name}"], "triton") for name in ("gated_delta", "ssd"))
    assert delta.accepts(target, small, small, small, small, small, state, BATCH, scale=1.0) is None
    reason = "keys have 257 dims, more than 256"
    assert delta.accepts(target, large, large, large, large, large, state, BATCH, scale=1.0) == reason
    assert ssd.accepts(target, small, small, small, small, state, BATCH, small, small) is None
    reason = "a channel's state has 257 numbers, more than 256"
    assert ssd.accepts(target, small, small, large, large, state, BATCH, small, small) == reason
    conv, x = find_kernel(ops.OPS["batched_causal_conv"], "triton"), Type("bf16", ("T", 8))
    for taps, refused in ((33, None), (34, "has 34 taps, more than 33")):
        assert conv.accepts(target, x, LatestState("0", Type("bf16", (taps - 1, 8))), BATCH, x) == refused
