"""Ops with recurrent state in C++, against the reference bodies of their ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gil import releases_gil
from graph.ops.recurrences import in_steps, make_case, states_of, with_drafts
from kernels.checks import assert_as_near
from torch import Tensor

from atom.graph import BATCH, Batch, LatestState, Type, ops
from atom.kernels import LoadContext, find_kernel
from atom.kernels.backend import Target
from atom.kernels.cpp.build import RECURRENT, load_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["causal_conv", "gated_delta", "lightning", "ssd", "selective_scan"]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("causal_conv", {}),
    ("causal_conv", {"channels": 200, "taps": 3, "kind": None, "has_bias": False}),
    ("causal_conv", {"channels": 64, "taps": 8}),
    ("causal_conv", {"channels": 1, "taps": 2}),
    ("gated_delta", {}),
    ("gated_delta", {"by_dim": True, "heads": 3}),
    ("gated_delta", {"key_heads": 1, "heads": 1, "key_dim": 128, "value_dim": 128, "normalize": False}),
    ("gated_delta", {"key_heads": 2, "heads": 4, "key_dim": 33, "value_dim": 100}),
    ("gated_delta", {"key_heads": 2, "heads": 2, "key_dim": 16, "value_dim": 1, "by_dim": True}),
    ("lightning", {}),
    ("lightning", {"heads": 2, "dim": 33}),
    ("ssd", {}),
    ("ssd", {"heads": 2, "groups": 1, "dim": 64, "size": 128}),
    ("ssd", {"heads": 5, "groups": 5, "dim": 1, "size": 1}),
    ("selective_scan", {}),
    ("selective_scan", {"channels": 130, "size": 7}),
    ("selective_scan", {"channels": 64, "size": 33}),
]


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    assert load_library(RECURRENT)


def load(name: str) -> Callable[..., Tensor]:
    op = ops.OPS[f"batched_{name}"]
    run: Callable[..., Tensor] = find_kernel(op, "cpp").load(LoadContext())
    assert run is not op.body
    return run


@pytest.mark.parametrize(("name", "options"), CALLS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 150])
def test_sequences_in_any_chunks_equal_the_reference(name: str, options: dict[str, Any], chunk: int):
    lengths = [150, 1, 65, 9] if chunk > 1 else [5, 1, 3]
    cases = [make_case(name, length, seed=n, **options) for n, length in enumerate(lengths)]
    for case, out in zip(cases, in_steps(load(name), cases, chunk), strict=True):
        torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CALLS, ids=str)
def test_it_is_as_near_to_the_truth_as_the_reference(name: str, options: dict[str, Any], dtype: torch.dtype):
    case = make_case(name, 70, dtype, **options)
    (out,) = in_steps(load(name), [case], 33)
    assert_as_near(out, case.run(), case.wide().run())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES[1:])
def test_states_of_16_bits_are_rounded_once_a_step(name: str, dtype: str):
    case = make_case(name, 70).kept_in(dtype)
    (out,), (reference,) = (in_steps(run, [case], 9) for run in (load(name), ops.OPS[f"batched_{name}"]))
    exact = case.run()
    assert_as_near(out, reference, exact)
    errors = (out - exact).abs().amax(dim=tuple(range(1, out.dim())))
    assert errors[:9].max() < 1e-5 < errors[9:].max(), "of the first step nothing was kept before"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kept", "first", "in_rows"), [(2, 1, False), (4, 70, False), (4, 2, True)])
def test_drafts_that_are_rejected_leave_no_trace(name: str, kept: int, first: int, in_rows: bool):
    case = make_case(name, 90)
    out = with_drafts(load(name), case, kept, first, in_rows=in_rows)
    torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_it_leaves_the_states_of_the_reference(name: str):
    case = make_case(name, 70)
    left = []
    for run in (load(name), ops.OPS[f"batched_{name}"]):
        slots = torch.randn(3, 4, *case.zeros.shape, generator=torch.Generator().manual_seed(1))
        starts, lengths = torch.tensor([0, 1, 3, 70]).int(), torch.tensor([40, 2, 67]).int()
        run(*case.values, slots, Batch({}, {}, starts, lengths, 1, slots=torch.tensor([2, 0, 1]).int()), *case.weights,
            **case.attributes)  # fmt: skip
        left.append(slots)
    torch.testing.assert_close(*left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_no_sequence_changes_no_state_and_gives_zeros(name: str):
    case = make_case(name, 3)
    slots = states_of(torch.ones_like(case.zeros), 2)
    for values in (case.values, tuple(each[:0] for each in case.values)):
        nothing = torch.zeros(0).int()
        out = load(name)(*values, slots, Batch({}, {}, torch.zeros(1).int(), nothing, 0, slots=nothing), *case.weights,
                         **case.attributes)  # fmt: skip
        assert len(out) == len(values[0]) and not out.any() and bool((slots == 1).all())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_may_lie_apart(name: str):
    case = make_case(name, 20)
    slots = states_of(case.zeros, 1)
    batch = Batch({}, {}, torch.tensor([0, 20]).int(), torch.tensor([20]).int(), 0, slots=torch.zeros(1).int())
    out = load(name)(*case.apart().values, slots, batch, *case.weights, **case.attributes)
    torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=1e-5)


def test_large_numbers_give_what_the_reference_gives():
    case = make_case("causal_conv", 20)
    case = case._replace(values=tuple(each * 1e4 for each in case.values))
    (out,) = in_steps(load("causal_conv"), [case], 7)
    torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=1e-4)
    case = make_case("gated_delta", 20, by_dim=True, heads=3)
    decay = case.values[3] * 1e3  # which forgets all
    case = case._replace(values=(*case.values[:3], decay, case.values[4]))
    (out,) = in_steps(load("gated_delta"), [case], 7)
    torch.testing.assert_close(out, case.run(), rtol=1e-4, atol=1e-5)


def test_a_scan_releases_the_gil():
    case = make_case("gated_delta", 500, key_heads=8, heads=16, key_dim=64, value_dim=64)
    run = load("gated_delta")
    slots = states_of(case.zeros, 1)
    batch = Batch({}, {}, torch.tensor([0, 500]).int(), torch.tensor([500]).int(), 0, slots=torch.zeros(1).int())
    assert releases_gil(lambda: run(*case.values, slots, batch, **case.attributes))


def test_what_it_has_no_code_for_is_left_to_the_reference():
    x, weight, state = Type("bf16", ("T", 8)), Type("bf16", (8, 4)), LatestState("0", Type("bf16", (3, 8)))
    conv = find_kernel(ops.OPS["batched_causal_conv"], "cpp")
    assert conv.accepts(Target("cpu"), x, state, BATCH, weight, kind="silu") is None
    assert conv.accepts(Target("cpu"), x, state, BATCH, weight, kind="gelu") == "has no activation 'gelu'"
    assert conv.accepts(Target("cpu"), x, state, BATCH, Type("bf16", (8, 9))) == "has no 9 taps"
    assert conv.accepts(Target("cuda"), x, state, BATCH, weight) == "runs on cpu, not on cuda"


def test_without_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.kernels.cpp.recurrent.load_library", lambda _: False)
    op = ops.OPS["batched_ssd"]
    assert find_kernel(op, "cpp").load(LoadContext()) is op.body
