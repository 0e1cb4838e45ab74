"""Add low-rank adapters to the linears of layers, where there are any.

    q = linear(h, W("l.q_proj.weight"))  ->     q = linear(h, W("l.q_proj.weight"))
                                                q = lora(q, h, lora_stack("l.q_proj.lora_A", …),
                                                         lora_stack("l.q_proj.lora_B", …), adapters, rank=16, sizes=[…])

A linear of several modules side by side, as fuse_qkv makes them, has a slice for each. The factors of a weight that is
divided among ranks are divided as it is: b by the rank's outputs, a by its inputs. Products of parts of the inputs are
partial, and the sum over ranks behind the linear is theirs, too. The adapter of each token becomes an input of body and
head; drafts run without. Leaves alone the head's own linear, experts, and a weight that is not made of rows of modules'
weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from torch.fx import Node

from atom.graph import (
    BODY,
    DRAFT_IN,
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
from atom.graph.recipes import LoraStack, cat, leaves, narrow
from atom.passes.context import PassContext


class _Factors(NamedTuple):
    """The factors of a run of a linear's outputs that are of one module."""

    a: Recipe  # [L r, I]
    b: Recipe  # [O, L r]


def add_lora(graph: Graph, context: PassContext) -> Graph:
    if not context.max_loras:
        return graph
    layers, num_columns = tuple(f"{cache.name}." for cache in graph.caches()), context.max_loras * context.max_lora_rank
    for name in (BODY, HEAD, POOL):
        if (program := graph.programs.get(name)) is None:
            continue
        for linear in program.nodes:
            is_of_layers = linear.target is ops.linear and all(
                leaf.name.startswith(layers) for leaf in leaves(linear.args[1])
            )
            if is_of_layers and (factors := _factors_of(linear.args[1], num_columns)):
                _add(graph, program, linear, factors, context.max_lora_rank)
    _pass_on(graph)
    return graph


def _add(graph: Graph, program: Program, linear: Node, factors: list[_Factors], rank: int) -> None:
    adapters = program.input(ADAPTERS, Type("i64", program.inputs[0].meta["type"].shape[:1]))
    (a, b), readers = map(cat, zip(*factors, strict=True)), list(linear.users)
    args, sizes = (linear, linear.args[0], a, b, adapters), [int(each.b.type.shape[0]) for each in factors]
    made = graph.insert(linear.next, ops.lora, *args, rank=rank, sizes=sizes, name=linear.name)
    for reader in readers:
        reader.replace_input_with(linear, made)
    made.name, linear.name = linear.name, made.name
    graph.num_rewrites += 1


def _pass_on(graph: Graph) -> None:
    """Have the body return the adapters, behind what its heads take, where these need them."""
    heads = [graph.programs[name] for name in (HEAD, POOL) if name in graph.programs]
    taken = [program for program in heads if any(node.name == ADAPTERS for node in program.inputs)]
    if not taken:
        return
    body = graph.programs[BODY]
    adapters = body.input(ADAPTERS, Type("i64", body.inputs[0].meta["type"].shape[:1]))
    for program in heads:  # all take the same
        program.input(ADAPTERS, Type("i64", program.inputs[0].meta["type"].shape[:1]))
    num_states = len(graph.programs[DRAFT_IN].inputs) if DRAFT_IN in graph.programs else 0
    results = list(body.results)
    results.insert(len(results) - num_states, adapters)
    body.fx.output_node().args = (tuple(results),)


def _factors_of(weight: Recipe, num_columns: int) -> list[_Factors]:
    """The factors beside a weight, by run of outputs; none where it is made of anything but rows of modules' weights.

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
