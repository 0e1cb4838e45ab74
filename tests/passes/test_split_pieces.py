"""The marks in the text, the runs that are no piece, and equal numbers of what the pieces' own texts say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passes.cases import random_weight, run
from torch.fx import Node

from atom.graph import Graph, Recipe, interpret, parse, show
from atom.graph.graph import results_of
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.split_pieces import split_pieces
from atom.pieces import NAME, find_pieces

BEFORE = """\
def f(x: fp32[T, 8], x_1: fp32[T, 8], ids: i64[T, 2], weights: fp32[T, 2]):
    h, x_2 = inductor.add_rms_norm(x, x_1, W("norm", fp32[8]), eps=1e-06)
    y = reference.linear(h, W("up", fp32[8, 8]))
    grouped, order, ends = reference.group(y, ids, experts=4)
    down = reference.grouped_linear(grouped, W("down", fp32[4, 8, 8]), ends, None)
    o = reference.combine(down, weights, order)
    s = inductor.add(o, x_2)
    return s
"""

MARKED = """\
def f(x: fp32[T, 8], x_1: fp32[T, 8], ids: i64[T, 2], weights: fp32[T, 2]):
    h, x_2 = inductor.add_rms_norm(x, x_1, W("norm", fp32[8]), eps=1e-06)    # fp32[T, 8], fp32[T, 8]; piece 0
    y = reference.linear(h, W("up", fp32[8, 8]))    # fp32[T, 8]; piece 0
    grouped, order, ends = reference.group(y, ids, experts=4)    # fp32[2*T, 8], i64[2*T], i64[4]
    down = reference.grouped_linear(grouped, W("down", fp32[4, 8, 8]), ends, None)    # fp32[2*T, 8]
    o = reference.combine(down, weights, order)    # fp32[T, 8]
    s = inductor.add(o, x_2)    # fp32[T, 8]; piece 1
    return s
"""

PIECES = [
    """\
def piece(x0: fp32[A, 8], x1: fp32[A, 8], w0: fp32[8], w1: fp32[8, 8]):
    add_rms_norm, add_rms_norm_1 = inductor.add_rms_norm(x0, x1, w0, eps=1e-06)    # fp32[A, 8], fp32[A, 8]
    linear = reference.linear(add_rms_norm, w1)    # fp32[A, 8]
    return add_rms_norm_1, linear
""",
    """\
def piece(x0: fp32[A, 8], x1: fp32[A, 8]):
    add = inductor.add(x0, x1)    # fp32[A, 8]
    return add
""",
]

WITHOUT_WORK = [
    # nothing for Inductor: torch's matmul, and views
    """\
def f(x: fp32[T, 8]):
    y = reference.linear(x, W("up", fp32[8, 8]))
    h = inductor.split_heads(y, heads=2)
    z = inductor.merge_heads(h)
    return z
""",
    # no kernels are chosen yet
    """\
def f(x: fp32[T, 8]):
    y = add(x, x)
    return y
""",
    # not to be traced: what it gives depends on data
    """\
def f(x: fp32[T, 8], ids: i64[T, 2]):
    grouped, order, ends = reference.group(x, ids, experts=4)
    return grouped
""",
]


def split(graph: Graph) -> Graph:
    return split_pieces(graph, PassContext.of(Target("cpu"), level=2))


def test_calls_between_two_that_cannot_be_compiled_are_a_piece():
    graph = split(parse(BEFORE))
    assert show(graph) == MARKED
    assert graph.num_rewrites == 2


def test_a_piece_has_a_text_of_its_own():
    pieces = find_pieces(split(parse(BEFORE)).programs["f"])
    assert [piece.text for piece in pieces] == PIECES
    assert [[node.name for node in piece.inputs] for piece in pieces] == [["x", "x_1"], ["o", "x_2"]]
    assert [[node.name for node in piece.results] for piece in pieces] == [["x_2", "y"], ["s"]]


def test_runs_share_a_text_only_if_they_are_equal_but_for_names():
    norm = 'inductor.rms_norm(x, W("{}", fp32[8]), eps={})'
    runs = [
        ("inductor.add(x, x_1)", 0),
        ("inductor.add(x_1, x)", 0),
        ("inductor.add(x, x)", 1),
        ("inductor.add(z, z)", 2),  # 16 columns
        (norm.format("a", "1e-06"), 3),
        (norm.format("b", "1e-06"), 3),
        (norm.format("a", "1e-05"), 4),
        ("inductor.mul(x, x_1)", 5),
    ]
    lines = [
        f"    y{i} = {call}\n    g{i}, o{i}, e{i} = reference.group(x, ids, experts=4)"
        for i, (call, _) in enumerate(runs)
    ]
    head = "def f(x: fp32[T, 8], x_1: fp32[T, 8], z: fp32[T, 16], ids: i64[T, 2]):"
    given = ", ".join(f"y{i}" for i in range(len(runs)))
    program = split(parse("\n".join([head, *lines, f"    return {given}", ""]))).programs["f"]
    texts = [piece.text for piece in find_pieces(program)]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    assert [numbers[text] for text in texts] == [number for _, number in runs]
    assert "eps=1e-05" in texts[6] and "mul" in texts[7] and "16" in texts[3]


@pytest.mark.parametrize("text", WITHOUT_WORK)
def test_a_run_without_work_for_inductor_is_no_piece(text: str):
    graph = split(parse(text))
    assert "piece" not in show(graph) and graph.num_rewrites == 0


def test_pieces_are_counted_over_all_programs():
    body, head = (BEFORE.replace("def f", f"def {name}") for name in ("body", "head"))
    marked = [line for line in show(split(parse(f"{body}\n{head}"))).splitlines() if "; piece" in line]
    assert [line[-1] for line in marked] == ["0", "0", "1", "2", "2", "3"]


def test_the_numbers_stay():
    """Each piece is run as what its own text says."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(9, 8, generator=generator),
        "x_1": torch.randn(9, 8, generator=generator),
        "ids": torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)]),
        "weights": torch.rand(9, 2, generator=generator),
    }
    program = split(parse(BEFORE)).programs["f"]
    values: dict[Any, Any] = {node: inputs[node.name] for node in program.inputs}
    pieces = {piece.calls[0]: piece for piece in find_pieces(program)}
    for node in program.nodes:
        if piece := pieces.get(node):
            given = {f"x{index}": values[each] for index, each in enumerate(piece.inputs)}
            given |= {f"w{index}": random_weight(each) for index, each in enumerate(piece.weights)}
            made, places = interpret(parse(piece.text), NAME, given, random_weight), piece.results
        elif "piece" in node.meta:
            continue
        else:
            args = [
                values[arg] if isinstance(arg, Node) else random_weight(arg) if isinstance(arg, Recipe) else arg
                for arg in node.args
            ]
            made, places = node.target(*args, **node.kwargs), results_of(node)
        values |= zip(places, made if isinstance(made, tuple) else (made,), strict=True)
    (result,) = program.results
    torch.testing.assert_close(values[result], run(BEFORE, **inputs))
