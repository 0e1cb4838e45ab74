"""Fuse linears of a layer that read the same tensor (horizontal fusion).

    qkv = linear(h, W("qkv"))           ->      qkv_z = linear(h, cat([W("qkv"), W("z")]))
    z = linear(h, W("z"))                       qkv, z = split(qkv_z, sizes=[…])

It comes after adapters, of which a kernel takes those of q, k and v, and after `quantize`, which says what is packed.

Joins linears of one layer that are alike in bias, format and number of readers, and either all or none of which have
rows in multiples of 8, since kernels copy them in units of 16 bytes. Leaves one that only a gated activation reads,
which `fuse_linear_gate` takes, packed weights that cannot be joined, and those of which only the parts have a kernel.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from atom.graph import Graph, Recipe, Type, ops
from atom.graph.formats import FormatError
from atom.graph.graph import node_leaves, type_of
from atom.graph.parts import has_parts, parts_of
from atom.graph.recipe_contents import packed_while_loading
from atom.passes.context import PassContext
from atom.passes.match import cat_linears, form_of, layer_of

ALIGNED = 8  # rows of 2 bytes that are a unit of a copy


def fuse_sibling_linears(graph: Graph, context: PassContext) -> Graph:
    layers, siblings = graph.layers(), defaultdict[Any, list[Node]](list)
    num_readers = Counter(leaf for node in _calls(graph) for leaf in node_leaves(node))
    for linear in graph.find(ops.linear):
        weights = linear.args[1:]
        if not all(isinstance(weight, Recipe) for weight in weights) or _feeds_gates(linear):
            continue
        is_aligned = int(weights[0].type.shape[0]) % ALIGNED == 0
        readers = tuple(map(num_readers.__getitem__, weights))
        siblings[form_of(linear), layer_of(weights[0], layers), is_aligned, readers].append(linear)
    for linears in siblings.values():
        if len(linears) > 1 and _can_be_joined(linears, context):
            _fuse(graph, linears)
    return graph


def _calls(graph: Graph) -> list[Node]:
    return [node for program in graph.programs.values() for node in program.nodes]


def _feeds_gates(linear: Node) -> bool:
    return all(user.target is ops.gated_activate for user in linear.users)


def _can_be_joined(linears: Sequence[Node], context: PassContext) -> bool:
    x, weight, *biases = cat_linears(linears)
    try:
        if has_parts(weight) and not any(packed_while_loading(weight)):
            parts_of(weight)
    except FormatError:  # a part ends within a block, or each has an order of its own
        return False
    return _is_taken([x, weight, *biases], linears[0], context) or not any(
        _is_taken(linear.args, linear, context) for linear in linears
    )


def _is_taken(args: Sequence[Any], linear: Node, context: PassContext) -> bool:
    types: list[Type] = [type_of(arg) for arg in args]
    return context.takes(ops.linear, *types, **linear.kwargs)


def _fuse(graph: Graph, linears: Sequence[Node]) -> None:
    first, names = linears[0], [linear.name for linear in linears]
    sizes = [linear.meta["type"].shape[-1] for linear in linears]
    whole = "_".join(re.sub(r"_\d+$", "", name) for name in names)
    fused = graph.insert(first, ops.linear, *cat_linears(linears), name=whole, **first.kwargs)
    parts = graph.insert(first, ops.split, fused, sizes=sizes, name=tuple(names))
    graph.replace(dict(zip(linears, parts, strict=True)))
