"""Add low-rank adapters to the linears of layers, if the engine has any.

    q = linear(h, W("l.q_proj.weight"))  ->     q = linear(h, W("l.q_proj.weight"))
                                                q = lora(q, h, lora_stack("l.q_proj.lora_A", …),
                                                         lora_stack("l.q_proj.lora_B", …), adapters, rank=16, sizes=[…])

A linear of several modules side by side, as fuse_qkv makes them, has a slice for each. The factors of a weight that is
divided among ranks are divided as it is: b by the rank's outputs, a by its inputs. Linears of parts of the inputs are
partial, and the sum over ranks after the linear is theirs, too. The adapter of each token becomes an input of body and
head; drafts run without. Experts have adapters if `lora_experts` says so, see `add_expert_lora`. Skips the
head's own linear, and a weight that is not made of rows of modules' weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from torch.fx import Node

from atom.graph import (
    BODY,
    HEAD,
    POOL,
    Cat,
    Dequantize,
    Graph,
    Program,
    Quantize,
    Recipe,
    Regroup,
    Share,
    Slice,
    Type,
    W,
    ops,
)
from atom.graph.graph import ADAPTERS
from atom.graph.recipe_ranges import cat, narrow
from atom.graph.recipes import LoraStack
from atom.passes.add_expert_lora import add_expert_lora
from atom.passes.context import PassContext
from atom.passes.match import layer_of


class _Factors(NamedTuple):
    """The factors of a run of a linear's outputs that are of one module."""

    a: Recipe  # [L r, I]
    b: Recipe  # [O, L r]


def add_lora(graph: Graph, context: PassContext) -> Graph:
    if not context.max_loras:
        return graph
    layers, num_columns = graph.layers(), context.max_loras * context.max_lora_rank
    for name in (BODY, HEAD, POOL):
        if (program := graph.programs.get(name)) is None:
            continue
        for call in program.nodes:
            is_experts = call.target is ops.experts and context.lora_experts
            if call.target is not ops.linear and not is_experts:
                continue
            weight = call.args[3 if is_experts else 1]
            if (layer := layer_of(weight, layers)) is None:
                continue
            if is_experts:
                add_expert_lora(graph, call, layer, _adapters_of(program), context)
            elif factors := _factors_of(weight, num_columns):
                _add(graph, program, call, factors, context.max_lora_rank)
    _pass_on(graph)
    return graph


def _adapters_of(program: Program) -> Node:
    """The input that has each token's adapter."""
    return program.input(ADAPTERS, Type("i64", program.inputs[0].meta["type"].shape[:1]))


def _add(graph: Graph, program: Program, linear: Node, factors: list[_Factors], rank: int) -> None:
    adapters = _adapters_of(program)
    (a, b), readers = map(cat, zip(*factors, strict=True)), list(linear.users)
    args, sizes = (linear, linear.args[0], a, b, adapters), [int(each.b.type.shape[0]) for each in factors]
    made = graph.insert(linear.next, ops.lora, *args, rank=rank, sizes=sizes, name=linear.name)
    for reader in readers:
        reader.replace_input_with(linear, made)
    made.name, linear.name = linear.name, made.name
    graph.num_rewrites += 1


def _pass_on(graph: Graph) -> None:
    """Have the body return the adapters, after what its heads take, if these need them."""
    heads = [graph.programs[name] for name in (HEAD, POOL) if name in graph.programs]
    taken = [program for program in heads if any(node.name == ADAPTERS for node in program.inputs)]
    if not taken:
        return
    body = graph.programs[BODY]
    adapters = _adapters_of(body)
    for program in heads:  # all take the same
        _adapters_of(program)
    results = list(body.results)
    results.insert(len(heads[0].inputs) - 1, adapters)
    body.fx.output_node().args = (tuple(results),)


def _factors_of(weight: Recipe, num_columns: int) -> list[_Factors]:
    """The factors of a weight's adapters, by run of outputs; none unless it is made only of rows of modules' weights.

    num_columns: L r
    """
    if isinstance(weight, W) and weight.name.endswith(".weight"):
        module, (outputs, inputs) = weight.name.removesuffix("weight"), weight.type.shape
        shapes = {"lora_A": (num_columns, inputs), "lora_B": (outputs, num_columns)}
        return [_Factors(*(LoraStack(module + name, Type(weight.type.dtype, shapes[name])) for name in shapes))]
    if isinstance(weight, Quantize | Dequantize | Regroup):
        return _factors_of(weight.part, num_columns)
    if isinstance(weight, Cat) and weight.dim == 0:
        parts = [_factors_of(part, num_columns) for part in weight.parts]
        return _joined([each for part in parts for each in part]) if all(parts) else []
    if isinstance(weight, Slice) and (weight.dim, weight.step) == (0, 1):
        return _cut(_factors_of(weight.part, num_columns), weight.start, weight.stop)
    if isinstance(weight, Share):
        whole = _factors_of(weight.part, num_columns)
        if weight.dim == 1:
            return [each._replace(a=replace(weight, part=each.a)) for each in whole]
        return [each._replace(b=replace(weight, part=each.b)) for each in whole] if len(whole) == 1 else []
    return []


def _joined(factors: list[_Factors]) -> list[_Factors]:
    """Factors with neighbours of one module joined."""
    runs = groupby(factors, key=lambda each: each.a)
    return [_Factors(a, cat(tuple(each.b for each in run))) for a, run in runs]


def _cut(factors: list[_Factors], start: int, stop: int) -> list[_Factors]:
    """The factors of a range of the outputs."""
    found, begin = [], 0
    for each in factors:
        size = int(each.b.type.shape[0])
        first, last = max(start - begin, 0), min(stop - begin, size)
        if first < last:
            found.append(each._replace(b=narrow(each.b, first, last)))
        begin += size
    return found
