"""Search for the formats of fewest bytes within a KL divergence of outputs.

    choice = FormatSearch(groups, ["int4[1, 128]", "int4[1, 32]", "int8[1, *]", "plain"], load, meter).run(max_kl=0.01)

Formats are a ladder: by their bytes, the last one plain. The base is the one of least divergence; if the whole model in
it is beyond the budget, plain. Each group is measured in each smaller format, all others in the base. Groups then step
to smaller formats in the order of what a step costs a byte saved, as many steps as stay within the budget: by
bisection, in which the whole model is measured each time. So the order assumes that costs add up, and the budget does
not. A group's steps are those of the lower convex hull of its costs by bytes: formats above it are never worth theirs
(Lagrangian relaxation of the multiple-choice knapsack problem, Sinha and Zoltners 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from atom.assemble.format_costs import Group, KLMeter
from atom.checkpoint import Progress
from atom.graph import Dequantize, Quantize, Recipe
from atom.graph.formats import FormatError, shrink_group

PLAIN = "plain"
Tensors = dict[Recipe, Tensor]
Costs = dict[str, dict[int, float]]  # by format, and group that it packs: nats more than in the base


class Choice(NamedTuple):
    """Formats by group, and what was measured of them."""

    formats: list[str]  # by group
    kl: float  # of the whole model, in nats a position
    kls: dict[str, float]  # of the whole model in each format that was measured
    costs: Costs
    base: str  # the format of groups that take no step


class FormatSearch:
    """Measures groups of weights in formats."""

    def __init__(
        self,
        groups: Sequence[Group],
        ladder: Sequence[str],
        load: Callable[[str, Mapping[Recipe, Recipe]], Tensors],
        meter: KLMeter,
        others: Tensors,
        progress: Progress,
    ) -> None:
        """load: the tensors of groups' weights in a format, by what they are in the text, of their recipes in it
        others: the model's other tensors.
        """
        self._groups, self._ladder, self._load, self._meter = groups, ladder, load, meter
        self._progress, self._tensors = progress, dict(others)
        self._held: list[str | None] = [None] * len(groups)  # by group, the format of its tensors

    def run(self, max_kl: float, kept: Callable[[str], Costs] = lambda _: {}) -> Choice:
        """Search within a budget, in nats a position.

        kept: costs with a base, that were measured before; empty: none were
        """
        kls: dict[str, float] = {}
        for fmt in self._ladder[:-1]:
            kls[fmt] = self._measure([fmt] * len(self._groups))
            if kls[self._ladder[0]] <= max_kl:
                break
        base = min(kls, key=kls.__getitem__)
        if kls[base] > max_kl:
            base, kls[PLAIN] = PLAIN, 0.0
        formats = [format_in(base, group, self._ladder) for group in self._groups]
        if base == self._ladder[0]:
            return Choice(formats, kls[base], kls, {}, base)
        costs = kept(base) or self._measure_costs(base, kls[base])
        steps = self._order_steps(costs, formats)
        within, beyond, kl = 0, len(steps), kls[base]
        while beyond - within > 1:
            num = (within + beyond) // 2
            measured = self._measure(with_steps(formats, steps[:num]))
            if measured <= max_kl:
                within, kl = num, measured
            else:
                beyond = num
        return Choice(with_steps(formats, steps[:within]), kl, kls, costs, base)

    def _measure_costs(self, base: str, base_kl: float) -> Costs:
        """What each group costs in each smaller format that packs it, the others in the base."""
        self._set([base] * len(self._groups))
        costs: Costs = {fmt: {} for fmt in self._ladder[: self._ladder.index(base)]}
        with self._progress.task(f"measuring {', '.join(costs)}", len(self._groups), in_bytes=False) as task:
            for index, group in enumerate(self._groups):
                for fmt in (each for each in costs if format_in(each, group, self._ladder) == each):
                    self._meter.advance(group, self._tensors)
                    changed = self._load(fmt, recipes_in(fmt, group))
                    costs[fmt][index] = max(self._meter.measure({**self._tensors, **changed}) - base_kl, 0.0)
                task.advance(1)
        self._meter.rewind()
        return costs

    def _order_steps(self, costs: Costs, formats: Sequence[str]) -> list[tuple[int, str]]:
        """Groups and the format to which each steps, from these formats on, by nats a byte saved."""
        steps: list[tuple[float, int, str]] = []
        for index, group in enumerate(self._groups):
            points = {fmt: (bytes_in(fmt, group), of[index]) for fmt, of in costs.items() if index in of}
            size, cost, rate = bytes_in(formats[index], group), 0.0, 0.0
            while smaller := {fmt: at for fmt, at in points.items() if at[0] < size}:
                rates = {fmt: ((more - cost) / (size - less), less) for fmt, (less, more) in smaller.items()}
                fmt = min(rates, key=rates.__getitem__)
                rate = max(rate, rates[fmt][0])  # as it is but for rounding
                steps.append((rate, index, fmt))
                size, cost = smaller[fmt]
        return [(index, fmt) for _, index, fmt in sorted(steps, key=lambda step: step[:2])]

    def _measure(self, formats: Sequence[str]) -> float:
        self._set(formats)
        return self._meter.measure(self._tensors)

    def _set(self, formats: Sequence[str]) -> None:
        """Load the tensors of groups whose formats differ from what is loaded."""
        own = [format_in(fmt, group, self._ladder) for fmt, group in zip(formats, self._groups, strict=True)]
        for fmt in dict.fromkeys(own):
            changed = [index for index, each in enumerate(own) if each == fmt != self._held[index]]
            recipes: dict[Recipe, Recipe] = {}
            for index in changed:
                recipes |= recipes_in(fmt, self._groups[index])
                self._held[index] = fmt
            self._tensors |= self._load(fmt, recipes) if recipes else {}


def with_steps(formats: Sequence[str], steps: Sequence[tuple[int, str]]) -> list[str]:
    """Formats by group after some steps."""
    taken = dict(steps)
    return [taken.get(index, fmt) for index, fmt in enumerate(formats)]


def format_in(fmt: str, group: Group, ladder: Sequence[str]) -> str:
    """The first format of a ladder, from this one on, that packs all weights of a group."""
    return next(each for each in ladder[ladder.index(fmt) :] if each == PLAIN or all(_packs(each, group)))


def _packs(fmt: str, group: Group) -> Iterable[bool]:
    for weight in group.weights:
        try:
            shrink_group(fmt, weight.part.type)
            yield True
        except FormatError:
            yield False


def recipes_in(fmt: str, group: Group) -> dict[Recipe, Recipe]:
    """The recipes of a group's weights, rounded to a format that packs them; of plain ones as they are."""
    if fmt == PLAIN:
        return {weight: weight.part for weight in group.weights}
    return {weight: Dequantize(Quantize(weight.part, shrink_group(fmt, weight.part.type))) for weight in group.weights}


def bytes_in(fmt: str, group: Group) -> int:
    """The bytes of a group's weights in a format that packs them; plain ones in 16 bits."""
    types = [weight.part.type for weight in group.weights]
    if fmt == PLAIN:
        return sum(2 * type.num_elements for type in types)
    return sum(replace(type, fmt=shrink_group(fmt, type)).num_bytes for type in types)
