"""Match linears that several passes fuse.

if have_same_form([gate, up]):
    fused = graph.insert(gate, ops.linear, *cat_linears([gate, up]))
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch.fx import Node

from atom.graph import Recipe, ops
from atom.graph.graph import type_of
from atom.graph.recipe_ranges import cat
from atom.graph.recipes import leaves


def have_same_form(linears: Sequence[Node]) -> bool:
    """Whether these are different linears of one input, alike in bias, dtype, stored format and attributes."""
    if len(set(linears)) < len(linears) or any(linear.target is not ops.linear for linear in linears):
        return False
    return len(set(map(form_of, linears))) == 1


def form_of(linear: Node) -> Hashable:
    """What linears have in common that can be one: their input, and whether there is a bias, dtypes, stored formats
    and attributes."""
    types = tuple((type.dtype, type.fmt) for type in map(type_of, linear.args[1:]))
    return linear.args[0], types, *linear.kwargs.items()


def cat_linears(linears: Sequence[Node]) -> tuple[Any, ...]:
    """The arguments of one linear whose result is the results of all these, side by side."""
    x = linears[0].args[0]
    recipes = zip(*(linear.args[1:] for linear in linears), strict=True)
    return (x, *(cat(tuple(parts)) for parts in recipes))


def layer_of(weight: Recipe, layers: Sequence[str]) -> str | None:
    """The layer that all of a weight is of."""
    of = {next((layer for layer in layers if leaf.name.startswith(f"{layer}.")), None) for leaf in leaves(weight)}
    return of.pop() if len(of) == 1 else None
