from __future__ import annotations

import torch

from atom.graph import BODY, parse
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
    assert len(Executable(program, bindings)._steps) == 7
    thinned = Executable(program, bindings, is_thinned=True)
    (result,) = thinned({"x": x})
    assert result.shape == (3, 4)
    assert len(thinned._steps) == 5, "the last two are those of other calls"
