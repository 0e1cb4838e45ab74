"""How a kernel's result is held against that of the op's own body, and what it called on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atom.graph import PackedWeight

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_equal(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()


def assert_as_near(out: Tensor, by_reference: Tensor, truth: Tensor, factor: float = 1.1) -> None:
    """No further from the truth in float32 than this times the reference, which in float32 is the truth, and 1e-5."""
    assert (out.dtype, out.shape) == (by_reference.dtype, by_reference.shape)
    error, allowed = ((x.double() - truth).norm() / truth.double().norm() for x in (out, by_reference))
    assert error <= factor * allowed + 1e-5, f"{error:.3g} where the reference is {allowed:.3g} off"


def poisoned(weight: PackedWeight, is_unread: Tensor) -> PackedWeight:
    """The same experts with all bits set in those that are not to be read, bool[E]: NaN in each float and exponent."""
    parts = {name: part.clone() for name, part in weight.parts.items()}
    for part in parts.values():
        part.view(torch.uint8)[is_unread.to(part.device)] = 0xFF
    return replace(weight, parts=parts)


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[[], object]) -> list[str]:
    """The names of the aten ops that ran."""
    with _Calls() as calls:
        run()
    return calls.names
