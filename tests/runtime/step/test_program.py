from __future__ import annotations

from typing import Any

import pytest
import torch

from atom.graph import BODY, parse
from atom.graph.ops import Op
from atom.kernels import find_kernel
from atom.runtime.step import program as step_program
from atom.runtime.step.program import Bindings, Executable

TEXT = """
def body(x: fp32[T, 4]):
    a = linear(x, W("a", fp32[8, 4]))     # fp32[T, 8]
    wide = activate(a, kind="silu")       # fp32[T, 8]
    b = linear(wide, W("b", fp32[4, 8]))  # fp32[T, 4]
    low = activate(b, kind="silu")        # fp32[T, 4]
    c = linear(low, W("c", fp32[8, 4]))   # fp32[T, 8]
    more = activate(c, kind="silu")       # fp32[T, 8]
    d = linear(more, W("d", fp32[4, 8]))  # fp32[T, 4]
    return d
"""


def test_thinned_calls_of_other_shapes_are_made_and_alike_ones_are_not():
    graph = parse(TEXT)
    program = graph.programs[BODY]
    bindings = Bindings({recipe: torch.ones(*recipe.type.shape) for recipe in graph.recipes()})
    x = torch.ones(3, 4)
    whole = Executable(program, bindings)
    assert len(whole._steps) == 7
    thinned = Executable(program, bindings, thins=whole)
    (result,) = thinned({"x": x})
    assert result.shape == (3, 4)
    assert len(thinned._steps) == 5, "the last two are those of other calls"


def test_thinned_programs_have_the_kernels_of_the_whole_which_keep_memory(monkeypatch: pytest.MonkeyPatch):
    loaded = []

    def load(op: Op, backend: str) -> Any:
        loaded.append(op.name)
        return find_kernel(op, backend)

    monkeypatch.setattr(step_program, "find_kernel", load)
    graph = parse(TEXT)
    bindings = Bindings({recipe: torch.ones(*recipe.type.shape) for recipe in graph.recipes()})
    whole = Executable(graph.programs[BODY], bindings)
    Executable(graph.programs[BODY], bindings, thins=whole)
    assert loaded == ["linear", "activate"]
