"""Match linears that several passes fuse.

if have_same_form([gate, up]):
    fused = graph.insert(gate, ops.linear, *cat_linears([gate, up]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from atom.graph import ops
from atom.graph.graph import type_of
from atom.graph.recipe_ranges import cat


def have_same_form(linears: Sequence[Node]) -> bool:
    """Whether these are different linears of one input, alike in bias, dtype, stored format and attributes."""
    if len(set(linears)) < len(linears) or any(linear.target is not ops.linear for linear in linears):
        return False
    forms = {
        (
            linear.args[0],
            len(linear.args),
            tuple((type.dtype, type.fmt) for type in map(type_of, linear.args[1:])),
            *linear.kwargs.items(),
        )
        for linear in linears
    }
    return len(forms) == 1


def cat_linears(linears: Sequence[Node]) -> tuple[Any, ...]:
    """The arguments of one linear whose result is the results of all these, side by side."""
    x = linears[0].args[0]
    recipes = zip(*(linear.args[1:] for linear in linears), strict=True)
    return (x, *(cat(tuple(parts)) for parts in recipes))
