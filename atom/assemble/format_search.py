"""Search for the formats of fewest bytes within a KL divergence of outputs.

    choice = FormatSearch(groups, ["int4[1, 128]", "int8[1, *]", "plain"], load, meter).run(max_kl=0.01)

Formats are a ladder: by their bytes, the last one plain. The whole model goes down it as far as it stays within the
budget: there is the base, and formats further down than the next are never loaded. Each group is measured in that next
one, all others in the base. Groups then take it in the order of what that costs a byte saved, as many as stay within
the budget: by bisection, in which the whole model is measured each time. So the order assumes that costs add up, and
the budget does not.
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


class Choice(NamedTuple):
    """Formats by group, and what was measured of them."""

    formats: list[str]  # by group
    kl: float  # of the whole model, in nats a position
    kls: dict[str, float]  # of the whole model in each format that was measured
    costs: dict[int, float]  # by group that has both formats: nats that the smaller one adds
    smaller: str  # of the formats that groups have
    base: str


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

    def run(self, max_kl: float, kept: Callable[[str], dict[int, float]] = lambda _: {}) -> Choice:
        """Search within a budget, in nats a position.

        kept: costs in a format, in place of the next in the ladder, that were measured before; empty: none were
        """
        kls, base = {PLAIN: 0.0}, PLAIN
        for smaller in reversed(self._ladder[:-1]):
            kls[smaller] = self._measure([smaller] * len(self._groups))
            if kls[smaller] > max_kl:
                break
            base = smaller
        formats = [format_in(base, group, self._ladder) for group in self._groups]
        if base == self._ladder[0]:
            return Choice(formats, kls[base], kls, {}, base, base)
        costs = kept(smaller) or self._measure_costs(smaller, base, kls[base])
        order = sorted(costs, key=lambda index: (costs[index] / self._saved(index, smaller, base), index))
        within, beyond, kl = 0, len(order), kls[base]
        while beyond - within > 1:
            num = (within + beyond) // 2
            measured = self._measure([smaller if index in order[:num] else fmt for index, fmt in enumerate(formats)])
            if measured <= max_kl:
                within, kl = num, measured
            else:
                beyond = num
        chosen = [smaller if index in order[:within] else fmt for index, fmt in enumerate(formats)]
        return Choice(chosen, kl, kls, costs, smaller, base)

    def _measure_costs(self, smaller: str, base: str, base_kl: float) -> dict[int, float]:
        """What each group that has both formats costs in the smaller one, the others in the base."""
        self._set([base] * len(self._groups))
        costs: dict[int, float] = {}
        with self._progress.task(f"measuring {smaller}", len(self._groups), in_bytes=False) as task:
            for index, group in enumerate(self._groups):
                if format_in(smaller, group, self._ladder) == smaller:
                    self._meter.advance(group, self._tensors)
                    changed = self._load(smaller, recipes_in(smaller, group))
                    costs[index] = max(self._meter.measure({**self._tensors, **changed}) - base_kl, 0.0)
                task.advance(1)
        self._meter.rewind()
        return costs

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

    def _saved(self, index: int, smaller: str, base: str) -> int:
        group = self._groups[index]
        return max(bytes_in(base, group) - bytes_in(smaller, group), 1)


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
