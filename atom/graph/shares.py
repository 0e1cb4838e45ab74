"""Compute the active fraction of each weight: what one token is multiplied with.

For experts it is top_k of all, for an embedding 0.

fractions = active_fractions(graph.programs.values())    # of lowered programs: {recipe: Fraction(1, 16)}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction

from torch.fx import Node

from atom.graph import ops
from atom.graph.graph import Program, call_of, node_leaves, type_of
from atom.graph.recipes import Offset, Recipe

ENDS = {ops.grouped_linear: 2, ops.grouped_lora: 4}  # the argument that says where the rows of each expert end


def active_fractions(programs: Iterable[Program]) -> dict[Recipe, Fraction]:
    """The active fraction of each weight; the largest one if several calls read it."""
    fractions: dict[Recipe, Fraction] = defaultdict(Fraction)
    for program in programs:
        for node in program.nodes:
            for leaf in node_leaves(node):
                if isinstance(leaf, Recipe):
                    fractions[leaf] = max(fractions[leaf], active_fraction(node))
    return fractions


def num_parts(experts: Node) -> int:
    """The number of ranks that divide the experts of this call."""
    return _num_ranks(experts.args[7] if len(experts.args) > 7 else None)


def num_parts_of_group(group: Node) -> int:
    """The number of ranks that divide the experts by which a `group` call sorts."""
    return _num_ranks(group.args[2] if len(group.args) > 2 else None)


def _num_ranks(first: Recipe | None) -> int:
    """The number of ranks with experts, by the number of a rank's first one."""
    return int(first.ranks) if isinstance(first, Offset) else 1


def group_of(node: Node) -> Node:
    """The `group` call that made the rows of a call that multiplies them by expert."""
    group = call_of(node.args[ENDS[node.target]])
    if group.target is ops.ends_of_experts:
        group = call_of(group.args[0])
    assert group.target is ops.group, "nothing else knows where the rows of an expert end"
    return group


def active_fraction(node: Node) -> Fraction:
    """The active fraction of a call's weight."""
    if node.target is ops.embedding:
        return Fraction(0)
    if node.target is ops.experts:
        return Fraction(node.args[2].meta["type"].shape[1], type_of(node.args[3]).shape[0] * num_parts(node))
    if node.target not in ENDS:
        return Fraction(1)
    group, ends = group_of(node), node.args[ENDS[node.target]]
    top_k, experts = group.args[1].meta["type"].shape[1], int(type_of(ends).shape[0])
    return Fraction(top_k, experts * num_parts_of_group(group))
