"""Load weights from tensors that arrive one by one, as another engine reads them.

    for recipe, loaded in load_incremental(graph.recipes(), tensors, stacked, "cuda:0"):
        ...

A recipe is made as soon as the last tensor that it reads is there. What no other recipe waits for is let go, so that
neither a whole checkpoint nor a weight twice has to be in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from atom.graph import Recipe
from atom.graph.parts import stored_tensors
from atom.weights.arrived import ArrivedTensors, Naming
from atom.weights.checks import check_stored, check_surplus
from atom.weights.evaluate import Loaded
from atom.weights.localize import localize
from atom.weights.make import make_all
from atom.weights.sources import ArrivedSource


def load_incremental(
    recipes: Iterable[Recipe],
    tensors: Iterable[tuple[str, Tensor]],
    stacked: Mapping[str, Sequence[str]],
    device: str,
    coordinates: Mapping[str, int] | None = None,
    ignore: Iterable[str] = (),
) -> Iterator[tuple[Recipe, Loaded]]:
    """Each recipe with what is loaded of it to the device, in the order in which they can be made.

    stacked: see `unstack`.
    coordinates: of the rank whose parts are loaded; None: there is one rank.
    ignore: patterns of tensors that nothing reads.

    CheckpointError if one is missing, surplus, or of another shape.
    """
    own: dict[Recipe, list[Recipe]] = {}  # what this rank has, and the recipes that it is of
    names: set[str] = set()  # that some rank reads
    for recipe in recipes:
        own.setdefault(recipe if coordinates is None else localize(recipe, coordinates), []).append(recipe)
        names |= {leaf.name for leaf in stored_tensors(recipe)}
    waits = {recipe: {leaf.name for leaf in stored_tensors(recipe)} for recipe in own}
    readers: dict[str, list[Recipe]] = {}
    for recipe, read in waits.items():
        for name in read:
            readers.setdefault(name, []).append(recipe)
    left = {recipe: len(read) for recipe, read in waits.items()}
    uses = Counter({name: len(reading) for name, reading in readers.items()})
    arrived, seen = ArrivedTensors(Naming(stacked)), set[str]()
    source = ArrivedSource(arrived)

    def make(ready: Sequence[Recipe]) -> Iterator[tuple[Recipe, Loaded]]:
        check_stored(ready, arrived.tensors)
        for recipe, made in make_all(ready, source, device).items():
            uses.subtract(waits[recipe])
            source.drop(name for name in waits[recipe] if not uses[name])
            del left[recipe]
            yield from ((each, made) for each in own[recipe])

    yield from make([recipe for recipe, read in waits.items() if not read])
    for name, tensor in tensors:
        added = arrived.add(name, tensor)
        seen |= set(added)
        source.drop(each for each in added if not uses[each])
        ready = []
        for recipe in (each for part in added for each in readers.get(part, ())):
            left[recipe] -= 1
            ready += [] if left[recipe] else [recipe]
        yield from make(ready)
        arrived.keep(each for each in added if uses[each])  # whoever reads may use its memory again
    check_stored(left, arrived.tensors)
    check_surplus(names, seen, ignore)
