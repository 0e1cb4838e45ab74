"""Add low-rank adapters to the linears of experts; `add_lora` calls it.

    y = experts(h, weights, ids, gate_up, down, kind="silu")
        ->
    pairs = pair_adapters(ids, adapters, loras=8)
    grouped, order, ends = group(h, pairs, experts=72)
    expert_ends = ends_of_experts(ends, loras=8)
    gate_up = grouped_linear(grouped, gate_up, expert_ends)
    gate_up = grouped_lora(gate_up, grouped, lora_stack("l.experts.gate_up.lora_A", …), …, ends)
    m = gated_activate(gate_up, kind="silu")
    down = grouped_linear(m, down, expert_ends)
    down = grouped_lora(down, m, …, ends)
    y = combine(down, weights, order)

Tokens are grouped by expert and adapter, so that a group's factors are one matrix each. Ranks divide factors as they do
the experts and their widths, and the sum over ranks after the experts is of both. No kernel computes all of it in one
call, and activations stay in the dtype of h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.fx import Node

from atom.graph import Dequantize, Graph, Mesh, Offset, Quantize, Recipe, Regroup, Share, Slice, Type, ops
from atom.graph.graph import call_of, type_of
from atom.graph.recipe_contents import slices
from atom.graph.recipe_ranges import cat, narrow
from atom.graph.recipes import LoraStack
from atom.passes.context import PassContext


def add_expert_lora(graph: Graph, experts: Node, layer: str, adapters: Node, context: PassContext) -> None:
    """adapters: i64[T] of the tokens of this rank"""
    h, weights, ids, gate_up, down, *rest = experts.args
    gate_up_bias, down_bias, *first = (*rest, None, None)[: max(len(rest), 2)]
    loras, num_local = context.max_loras, int(gate_up.type.shape[0])
    first = [replace(each, size=each.size * (loras + 1)) if isinstance(each, Offset) else each for each in first]
    paired = _pair(graph, experts, ids, adapters, loras, first)
    grouped, order, ends = graph.insert(
        experts, ops.group, h, paired, *first, experts=num_local * (loras + 1), name=("grouped", "order", "ends")
    )
    expert_ends = graph.insert(experts, ops.ends_of_experts, ends, loras=loras, name="expert_ends")

    def multiply(x: Node, weight: Recipe, bias: Recipe | None, factors: tuple[Recipe, Recipe], name: str) -> Node:
        y = graph.insert(experts, ops.grouped_linear, x, weight, expert_ends, bias, name=name)
        return graph.insert(experts, ops.grouped_lora, y, x, *factors, ends, name=name)

    num_experts, width = int(_whole(gate_up).type.shape[0]), int(_whole(down).type.shape[2])
    room = _Room(layer, num_experts, loras + 1, context.max_lora_rank, width, type_of(h), context.mesh)
    factors = room.of_gate_up(interleaved=any(each.step == 2 for each in slices(gate_up)))
    both = multiply(grouped, gate_up, gate_up_bias, factors, "gate_up")
    kwargs = {name: value for name, value in experts.kwargs.items() if name != "act"}
    m = graph.insert(experts, ops.gated_activate, both, name="m", **kwargs)
    rows = multiply(m, down, down_bias, room.of_down(), "down")
    graph.replace({experts: graph.insert(experts, ops.combine, rows, weights, order, name=experts.name)})
    graph.num_rewrites += 1


def _pair(graph: Graph, experts: Node, ids: Node, adapters: Node, loras: int, first: Sequence[Recipe | None]) -> Node:
    """The number of the expert and the adapter of each pair; those of other data groups come with their tokens.

    first: the first pair of the rank, if it does not have all
    """
    gathered = call_of(ids)
    if gathered.target not in (ops.gather_tokens, ops.dispatch):
        return graph.insert(experts, ops.pair_adapters, ids, adapters, loras=loras, name="pairs")
    x, weights, own, *rest = gathered.args
    pairs = graph.insert(gathered, ops.pair_adapters, own, adapters, loras=loras, name="pairs")
    gathered.args = x, weights, pairs, *rest
    for call in (gathered, *experts.users):
        if call.target in (ops.dispatch, ops.collect):  # of pairs, as a rank has them
            call.args = *call.args[:-1], *first
            call.kwargs = {**call.kwargs, "experts": call.kwargs["experts"] * (loras + 1)}
    return ids


def _whole(recipe: Recipe) -> Recipe:
    """The weight that all ranks divide."""
    while isinstance(recipe, Share | Quantize | Dequantize | Regroup):
        recipe = recipe.part
    return recipe


class _Room(NamedTuple):
    """Makes the factors of all experts of a layer, as a rank has them."""

    layer: str
    num_experts: int
    slots: int  # of an expert: one for each adapter, and the first without
    rank: int
    width: int  # of an expert
    x: Type  # what experts read
    mesh: Mesh

    def of_gate_up(self, *, interleaved: bool) -> tuple[Recipe, Recipe]:
        """interleaved: whether gate and up rows alternate in the checkpoint's outputs, and so in an adapter's"""
        a, b = self._stacks("gate_up", int(self.x.shape[-1]), 2 * self.width)
        if interleaved:
            b = cat(tuple(Slice(b, first, 2 * self.width, dim=2, step=2) for first in (0, 1)), 2)
        halves = [narrow(b, first, first + self.width, 2) for first in (0, self.width)]
        return self._of_rank(a), self._of_rank(cat(tuple(self._share(half, "width", 2) for half in halves), 2))

    def of_down(self) -> tuple[Recipe, Recipe]:
        a, b = self._stacks("down", self.width, int(self.x.shape[-1]))
        return self._of_rank(self._share(a, "width", 3)), self._of_rank(b)

    def _stacks(self, name: str, inputs: int, outputs: int) -> tuple[Recipe, Recipe]:
        shapes = {"A": (self.rank, inputs), "B": (outputs, self.rank)}
        a, b = (
            LoraStack(
                f"{self.layer}.experts.{name}.lora_{factor}", Type(self.x.dtype, (self.num_experts, self.slots, *shape))
            )
            for factor, shape in shapes.items()
        )
        return a, b

    def _of_rank(self, recipe: Recipe) -> Recipe:
        return self._share(recipe, "experts", 0)

    def _share(self, recipe: Recipe, axis: str, dim: int) -> Recipe:
        ranks = self.mesh.size(axis)
        return recipe if ranks == 1 else Share(recipe, axis, ranks, dim)
