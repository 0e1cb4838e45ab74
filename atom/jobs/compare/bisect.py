"""Find the smallest change with which two sides agree.

bisect("passes", comparison)["lines"]       # ["without fuse_norm_linear they agree"]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch.fx import Node

from atom.compiler import compile_graph, level_of, mesh_of
from atom.compiler.saved_graph import show_saved
from atom.config import Config, PassesConfig
from atom.errors import AtomError
from atom.graph import Graph, parse, show
from atom.jobs.compare.lines import Line
from atom.jobs.compare.outcome import Answered, Comparison, Outcome
from atom.kernels import find_target
from atom.passes import PassReport
from atom.passes.context import PassContext
from atom.passes.pipeline import PIPELINE
from atom.passes.select_kernels import select_kernels
from atom.plugins import PASSES, split_function

Kernel = tuple[str, str]  # op, backend
T = TypeVar("T")


class Change(NamedTuple):
    """What is changed of a side."""

    names: list[str]
    text: str  # as a sentence has it before "they agree"


def bisect(kind: str, comparison: Comparison, outcome: Outcome, answered: Answered) -> dict[str, Any]:
    """Find the smallest change of a kind that makes the sides agree: its names, and a line that says so.

    kind: passes, kernels or layers
    outcome, answered: of the side as it is
    """
    if outcome.agrees:
        return {"kind": kind, "changes": [], "line": "the sides agree as they are"}
    if kind == "layers":
        return {"kind": kind, **by_layers(comparison, outcome, answered)}
    change = by_passes(comparison, outcome) if kind == "passes" else by_kernels(comparison, outcome)
    if change is None:
        return {"kind": kind, "changes": None, "line": f"no other choice of {kind} makes the sides agree"}
    return {"kind": kind, "changes": change.names, "line": f"{change.text} they agree"}


def by_passes(comparison: Comparison, outcome: Outcome) -> Change | None:
    """Leave passes out, ours and the user's."""
    config = comparison.tested.config
    may = [spec.name for spec in fields(config.passes) if getattr(config.passes, spec.name) is True]
    may += map(name_of_extra, config.passes.extra)
    changing = {name for line in outcome.lines.values() for name in line.passes}
    names = in_order(suspects(outcome, lambda line: line.passes), [name for name in may if name in changing])

    def agrees(some: Sequence[str]) -> bool:
        return is_mended(comparison, replace(config, passes=without(config.passes, some)))

    found = smallest(names, agrees)
    return None if found is None else Change(list(found), f"without {' and '.join(found)}")


def without(passes: PassesConfig, names: Sequence[str]) -> PassesConfig:
    """The configuration with some passes left out."""
    left_out: dict[str, Any] = {spec.name: False for spec in fields(passes) if spec.name in names}
    return replace(passes, **left_out, extra=[each for each in passes.extra if name_of_extra(each) not in names])


def name_of_extra(spec: str) -> str:
    """The name of a user's pass: of module:function@PASS its function's."""
    return split_function(spec.partition("@")[0], PASSES)[1]


def by_kernels(comparison: Comparison, outcome: Outcome) -> Change | None:
    """Select others than these kernels."""
    config = comparison.tested.config
    before = text_before_kernels(config)
    if before is None:
        return None
    used = {(line.op, line.kernel): None for line in outcome.lines.values() if line.kernel != "reference"}
    kernels = in_order(suspects(outcome, lambda line: [(line.op, line.kernel)]), used)

    def agrees(some: Sequence[Kernel]) -> bool:
        with tempfile.TemporaryDirectory(prefix="atom-compare-") as folder:
            path = Path(folder, "graph.py")
            path.write_text(show_saved(select_kernels.__name__, show(select_others(parse(before), config, some))))
            return is_mended(comparison, replace(config, job=replace(config.job, graph=str(path))))

    found = smallest(kernels, agrees)
    if found is None:
        return None
    chosen = {node.target.name: node.meta["kernel"] for node in nodes_of(select_others(parse(before), config, found))}
    texts = [f"{chosen[op]}.{op} in place of {backend}" for op, backend in found]
    return Change([f"{backend}.{op}" for op, backend in found], f"with {' and '.join(texts)}")


def by_layers(comparison: Comparison, outcome: Outcome, answered: Answered) -> dict[str, Any]:
    """Take the values of whole layers from the reference: of those with a value beyond the bound, and of no other."""
    places = {finding.line.layer for finding in outcome.judged.findings}
    values = {value for value, line in outcome.lines.items() if line.layer in places}
    with comparison.open(comparison.tested) as opened:
        mended = comparison.answer(opened, replaced=values)
    layers = sorted(place for place in places if place is not None)
    names = [f"layer {layer}" for layer in layers] + ["the calls around the layers"] * (None in places)
    before, after = answered.outputs.error, mended.outputs.error
    line = f"with the reference's values in {' and '.join(names)} they agree; the logits are off by {after:.2g} then"
    return {"changes": names, "line": f"{line}, and by {before:.2g} as they are", "logits": after}


def is_mended(comparison: Comparison, config: Config) -> bool:
    """Whether a changed side agrees; one that cannot run does not."""
    try:
        with comparison.open(replace(comparison.tested, config=config)) as opened:
            return comparison.measure(opened).agrees
    except AtomError:
        return False


def smallest(changes: Sequence[T], agrees: Callable[[Sequence[T]], bool]) -> Sequence[T] | None:
    """A smallest set of changes with which it agrees: one, or else what is left once none can be spared."""
    for each in changes:
        if agrees([each]):
            return [each]
    if len(changes) < 2 or not agrees(changes):
        return None
    left = list(changes)
    for each in changes:
        fewer = [other for other in left if other != each]
        if len(fewer) > 1 and agrees(fewer):
            left = fewer
    return left


def suspects(outcome: Outcome, names_of: Callable[[Line], Iterable[T]]) -> list[T]:
    """What has to do with the calls that the first value beyond the bound depends on."""
    return list(dict.fromkeys(name for line in outcome.judged.findings[0].since for name in names_of(line)))


def in_order(first: Iterable[T], names: Iterable[T]) -> list[T]:
    """Names, those of `first` ahead."""
    known = list(names)
    return [
        *(each for each in dict.fromkeys(first) if each in known),
        *(each for each in known if each not in [*first]),
    ]


def text_before_kernels(config: Config) -> str | None:
    """The text that kernels are selected for; None if the saved text that is run has them."""
    texts = [""]
    names = [rewrite.__name__ for rewrite, _, _ in PIPELINE]
    before = names[: names.index(select_kernels.__name__)]

    def keep(report: PassReport) -> None:
        if report.name in before:
            texts[0] = show(report.graph)

    compile_graph(config, keep)
    return texts[0] or None


def select_others(graph: Graph, config: Config, avoided: Iterable[Kernel]) -> Graph:
    """The graph with the first kernel that accepts each call, but for these."""
    context = PassContext.of(find_target(config.device), level_of(config), mesh_of(config))
    known = set(avoided)
    backends = [
        replace(each, kernels=tuple(kernel for kernel in each.kernels if (kernel.op.name, kernel.backend) not in known))
        for each in context.backends
    ]
    return select_kernels(graph, replace(context, backends=tuple(backends)))


def nodes_of(graph: Graph) -> list[Node]:
    return [node for program in graph.programs.values() for node in program.nodes]
