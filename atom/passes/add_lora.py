"""Add low-rank adapters to the linears of layers, where there are any.

    q = linear(h, W("l.q_proj.weight"))  ->     q = linear(h, W("l.q_proj.weight"))
                                                q = lora(q, h, lora_stack("l.q_proj.lora_A", …),
                                                         lora_stack("l.q_proj.lora_B", …), adapters, rank=16, sizes=[…])

A linear of several modules side by side, as fuse_qkv makes them, has a slice for each. The adapter of each token
becomes an input of body and head; drafts run without. Leaves alone the head's own linear, experts, and a weight that is
no run of rows of modules' weights.
"""

from __future__ import annotations

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
    Slice,
    Type,
    W,
    ops,
)
from atom.graph.graph import ADAPTERS, type_of
from atom.graph.recipes import LoraStack, cat, narrow
from atom.passes.context import PassContext

FACTORS = ".lora_A", ".lora_B"


class _Rows(NamedTuple):
    """A run of rows of a module's weight."""

    module: str
    start: int
    stop: int
    of: int  # rows


def add_lora(graph: Graph, context: PassContext) -> Graph:
    if not context.max_loras:
        return graph
    layers = tuple(f"{cache.name}." for cache in graph.caches())
    for name in (BODY, HEAD, POOL):
        if (program := graph.programs.get(name)) is None:
            continue
        for linear in program.nodes:
            rows = _rows_of(linear.args[1]) if linear.target is ops.linear else []
            if rows and all(each.module.startswith(layers) for each in rows):
                _add(graph, program, linear, rows, context)
    _pass_on(graph)
    return graph


def _add(graph: Graph, program: Program, linear: Node, rows: list[_Rows], context: PassContext) -> None:
    x, dtype = linear.args[0], type_of(linear.args[0]).dtype
    rank, columns = context.max_lora_rank, context.max_loras * context.max_lora_rank
    adapters = program.input(ADAPTERS, Type("i64", program.inputs[0].meta["type"].shape[:1]))
    slices: list[tuple[str, int]] = []  # module and outputs
    a: list[Recipe] = []
    b: list[Recipe] = []
    for each in rows:
        factor = LoraStack(each.module + FACTORS[1], Type(dtype, (each.of, columns)))
        b.append(narrow(factor, each.start, each.stop))
        size = each.stop - each.start
        if slices and slices[-1][0] == each.module:
            slices[-1] = each.module, slices[-1][1] + size
        else:
            slices.append((each.module, size))
            a.append(LoraStack(each.module + FACTORS[0], Type(dtype, (columns, type_of(x).shape[-1]))))
    readers, sizes = list(linear.users), [size for _, size in slices]
    factors = cat(tuple(a)), cat(tuple(b))
    made = graph.insert(linear.next, ops.lora, linear, x, *factors, adapters, rank=rank, sizes=sizes, name=linear.name)
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


def _rows_of(weight: Recipe) -> list[_Rows]:
    """The runs of modules' rows that make up a weight; none where it is made of anything else."""
    if isinstance(weight, W) and weight.name.endswith(".weight"):
        size = int(weight.type.shape[0])
        return [_Rows(weight.name.removesuffix(".weight"), 0, size, size)]
    if isinstance(weight, Quantize | Dequantize):
        return _rows_of(weight.part)
    if isinstance(weight, Cat) and weight.dim == 0:
        parts = [_rows_of(part) for part in weight.parts]
        return [each for part in parts for each in part] if all(parts) else []
    if isinstance(weight, Slice) and (weight.dim, weight.step) == (0, 1):
        return _cut(_rows_of(weight.part), weight.start, weight.stop)
    return []


def _cut(rows: list[_Rows], start: int, stop: int) -> list[_Rows]:
    """The runs from one output to another."""
    found, begin = [], 0
    for each in rows:
        size = each.stop - each.start
        first, last = max(start - begin, 0), min(stop - begin, size)
        if first < last:
            found.append(each._replace(start=each.start + first, stop=each.start + last))
        begin += size
    return found
