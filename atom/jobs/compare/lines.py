"""The lines of a text by the values that they compute."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from atom.graph import BODY, HEAD, Graph, Recipe, State, show
from atom.graph.graph import call_of, node_leaves, results_of
from atom.graph.recipe_contents import packed_to
from atom.graph.recipes import leaves
from atom.jobs.compare.trace import Value
from atom.passes import PassReport

LAYER = re.compile(r"\blayers\.(\d+)\b")
KERNEL = re.compile(r"(?<== )\w+\.(?=\w+\()")


@dataclass
class Line:
    """A call in the text."""

    number: int  # from 1, as job.stage=… prints it
    text: str  # without its comment
    layer: int | None  # None: before the first one or after the last
    op: str
    kernel: str  # the backend of its kernel
    formats: frozenset[str]  # that numbers are rounded to: of weights packed while they load, of KV, of activations
    stored: frozenset[str]  # the formats of its weights in the checkpoint
    act: str | None  # the format of its activations
    passes: list[str] = field(default_factory=list)  # that made or changed it


def read_lines(graph: Graph) -> dict[Value, Line]:
    """The lines of the body and of the head by each value that they compute."""
    texts = dict(number_lines(show(graph)))
    found: dict[Value, Line] = {}
    layer: int | None = None  # calls of the last one may have moved to the head
    for program in (BODY, HEAD):
        for node in graph.programs[program].nodes:
            names = [
                leaf.name
                for each in node_leaves(node)
                for leaf in ([each] if isinstance(each, State) else leaves(each))
            ]
            if names:
                match = next(filter(None, map(LAYER.search, names)), None)
                layer = int(match[1]) if match else None
            kernel = node.meta.get("kernel", "reference")
            for result in results_of(node):
                number, text = texts[program, result.name]
                found[program, result.name] = Line(
                    number, text, layer, node.target.name, kernel, formats_of(node), stored_formats(node),
                    node.kwargs.get("act"),
                )  # fmt: skip
    return found


def number_lines(text: str) -> Iterator[tuple[Value, tuple[int, str]]]:
    """Each value of a text with the number of its line and the line."""
    program = ""
    for number, line in enumerate(text.splitlines(), 2):  # the first line of a saved text names its stage
        if line.startswith("def "):
            program = line[4:].partition("(")[0]
        elif " = " in line:
            call = line.partition("    #")[0].strip() if "    #" in line else line.strip()
            for name in call.partition(" = ")[0].split(", "):
                yield (program, name), (number, call)


def formats_of(node: Node) -> frozenset[str]:
    """The formats that a call's weights are packed to while they load, of the KV, and that of its activations."""
    made = {fmt for arg in node.args if isinstance(arg, Recipe) for fmt in packed_to(arg)}
    made |= {arg.type.dtype for arg in node.args if isinstance(arg, State) and arg.type.dtype.startswith("fp8")}
    return frozenset(made | {act} if (act := node.kwargs.get("act")) else made)


def stored_formats(node: Node) -> frozenset[str]:
    """The formats in which a call's weights are stored."""
    weights = (leaf for arg in node.args if isinstance(arg, Recipe) for leaf in leaves(arg))
    return frozenset(weight.type.fmt for weight in weights if weight.type.fmt)


class History:
    """Notes which passes make or change the call of each value."""

    def __init__(self, graph: Graph) -> None:
        self.passes: dict[Value, list[str]] = {}
        self._calls = calls_of(graph)

    def __call__(self, report: PassReport) -> None:
        calls = calls_of(report.graph)
        for value, call in calls.items():
            if self._calls.get(value) != call:
                self.passes.setdefault(value, []).append(report.name)
        self._calls = calls


def calls_of(graph: Graph) -> dict[Value, str]:
    """The call of each value, without its kernel."""
    return {value: KERNEL.sub("", text) for value, (_, text) in number_lines(show(graph))}


def between(graph: Graph, value: Value, known: Container[Value]) -> list[Value]:
    """The values that a value depends on back to those that are known, in the order of the text, itself last.

    A call that reads KV depends on those that write it, whatever they compute besides.
    """
    program, name = value
    waiting = [next((program, node) for node in graph.programs[program].fx.nodes if node.name == name)]
    found = {value}
    while waiting:
        program, node = waiting.pop()
        call = call_of(node)
        unknown = [read for read in reads_of(graph, program, call) if (read[0], read[1].name) not in known]
        for read in (*unknown, *((program, writer) for writer in writers_of(graph, program, call))):
            if (read[0], read[1].name) not in found:
                found.add((read[0], read[1].name))
                waiting.append(read)
    ordered = ((program, node.name) for program in (BODY, HEAD) for node in graph.programs[program].fx.nodes)
    return [each for each in ordered if each in found and each != value] + [value]


def reads_of(graph: Graph, program: str, call: Node) -> Iterator[tuple[str, Node]]:
    """The results that a call reads: of its program or, by an input of the head, of the body."""
    body, head = graph.programs[BODY], graph.programs[HEAD]
    for read in call.all_input_nodes:
        if read.op != "placeholder":
            yield program, read
        elif program == HEAD:
            yield BODY, body.results[head.inputs.index(read)]


def writers_of(graph: Graph, program: str, call: Node) -> Iterator[Node]:
    """A result of each earlier call with the same KV."""
    caches = {arg for arg in call.args if isinstance(arg, State)}
    for other in graph.programs[program].nodes:
        if other is call:
            return
        if not caches.isdisjoint(arg for arg in other.args if isinstance(arg, State)):
            yield results_of(other)[0]
