"""Kernels under TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch
import triton.language as tl

from atom.kernels.triton.compile.jit import jit


@jit
def _double(x):
    return x * 2


@jit
def _double_all(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, _double(_double(_double(tl.load(x + at)))))


@jit
def _spread(x, y, SIZE: tl.constexpr):
    each = tl.load(x + tl.arange(0, SIZE))
    tl.store(y + tl.program_id(0), tl.max(each) - tl.min(each) + tl.sum(each) * tl.program_id(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize(
    ("kernel", "programs", "expected", "num_patches"),
    [(_double_all, 1, [0, 8, 16, 24], 1), (_spread, 3, [3, 9, 15, 0], 2)],  # of Triton's functions, one module's
)
def test_a_launch_patches_the_language_once_for_all_functions_that_it_calls(kernel, programs, expected, num_patches):
    from triton.runtime import interpreter

    calls: Counter[object] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        calls[frame.f_code] += event == "call"

    x, y, call = torch.arange(4.0), torch.zeros(4), interpreter.InterpretedFunction.__call__
    sys.setprofile(count)
    try:
        kernel[(programs,)](x, y, SIZE=4)
    finally:
        sys.setprofile(None)
    assert y.tolist() == expected
    assert calls[interpreter._patch_lang.__code__] == num_patches
    assert interpreter.InterpretedFunction.__call__ is call
    assert tl.load.__module__ == "triton.language.core", "the launch has put it back"
