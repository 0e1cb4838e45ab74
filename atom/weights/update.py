"""Update loaded weights in place, from tensors that arrive.

    live = LiveWeights(graph.recipes(), tensors, "cuda")
    update = Update(live, naming, open_checkpoint)
    update.expect(names)                    # of all that will come; RequestError if it could not be finished
    update.add([("model.norm.weight", tensor), …])
    update.finish()                         # RequestError: a tensor has not arrived that another one is packed with

A loaded tensor is cut into units, each made of few stored tensors: a part of a fused plain tensor is a view of it, an
expert in a kernel's layout is one, and what is packed as a whole is a unit by itself. A unit is written as soon as all
that it reads has arrived, by the functions that load it, so that its bits are those of a fresh load, and no unit is
written that reads none of the new tensors. What a unit reads besides them comes from the checkpoint's files, unless an
earlier update has replaced it.

Addresses stay, and CUDA graphs with them. In memory are a part of the update, what waits for other tensors of its unit,
and the largest unit that is packed or laid out anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.errors import RequestError
from atom.graph import LaidOut, PackedWeight, Recipe, Shuffle, W
from atom.graph.parts import parts_of, stored_tensors
from atom.graph.recipe_contents import layout_units, packed_while_loading
from atom.kernels.host_memory import HostTensor
from atom.weights.arrived import ArrivedTensors, Naming
from atom.weights.evaluate import Loaded, overwrite, split_recipe
from atom.weights.localize import localize
from atom.weights.make import fill_part, lay_out, pack
from atom.weights.sources import ArrivedSource

Write = Callable[[ArrivedSource], object]
Named = Iterable[tuple[str, Tensor]]


class Unit(NamedTuple):
    """What is written as one."""

    reads: frozenset[str]  # stored tensors
    write: Write


class LiveWeights:
    """The loaded weights of a rank, cut into units."""

    def __init__(
        self,
        recipes: Iterable[Recipe],
        tensors: Mapping[Recipe, Loaded],
        device: str = "cpu",
        coordinates: Mapping[str, int] | None = None,
    ) -> None:
        """
        tensors: of the recipes, in the memory that steps read
        coordinates: of the rank; None: there is one rank
        """
        own = {recipe: recipe if coordinates is None else localize(recipe, coordinates) for recipe in recipes}
        loaded = {local: tensors[recipe] for recipe, local in own.items()}  # equal recipes are one tensor
        self.units = [unit for local, each in loaded.items() for unit in cut_units(local, each, device)]
        self.readers: dict[str, list[Unit]] = {}  # by stored tensor
        for unit in self.units:
            for name in unit.reads:
                self.readers.setdefault(name, []).append(unit)


def cut_units(recipe: Recipe, loaded: Loaded, device: str) -> Iterator[Unit]:
    """The units of a recipe's tensor that are made of stored tensors."""
    if isinstance(loaded, HostTensor):
        yield from _plain_units(recipe.part, loaded.on_host)  # type: ignore[union-attr]
    elif isinstance(recipe, Shuffle):
        units, every = layout_units(recipe), loaded if isinstance(loaded, list) else [loaded]
        is_whole = units[0] is recipe.part
        for unit, each in zip(units, every, strict=True):
            yield Unit(_names(unit), partial(_lay_out_again, unit, recipe.layout, each, device, is_whole=is_whole))
    elif isinstance(loaded, PackedWeight):
        if any(packed_while_loading(recipe)):
            yield Unit(_names(recipe), partial(_pack_again, recipe, loaded, device))
        else:
            for name, part in parts_of(recipe).items():
                yield from _plain_units(part, loaded.parts[name])
    else:
        assert isinstance(loaded, Tensor), "only layouts make anything else"
        yield from _plain_units(recipe, loaded)


def _plain_units(recipe: Recipe, tensor: Tensor) -> Iterator[Unit]:
    for part, target in split_recipe(recipe, tensor):
        if names := _names(part):  # constants and adapters stay
            write = partial(_copy_whole, part, target) if isinstance(part, W) else partial(fill_part, part, target)
            yield Unit(names, write)


def _copy_whole(leaf: W, target: Tensor, source: ArrivedSource) -> None:
    """`fill_part` of a stored tensor as it is, sooner: a GPU copies most of them in less time than it takes."""
    arrived = source.find_arrived(leaf)
    if arrived is None or arrived.shape != target.shape:
        fill_part(leaf, target, source)
    else:
        target.copy_(arrived)


def _names(recipe: Recipe) -> frozenset[str]:
    return frozenset(leaf.name for leaf in stored_tensors(recipe))


def _pack_again(recipe: Recipe, loaded: PackedWeight, device: str, source: ArrivedSource) -> None:
    overwrite(loaded, pack(recipe, source, device))


def _lay_out_again(
    unit: Recipe,
    layout: str,
    loaded: Tensor | LaidOut | PackedWeight,
    device: str,
    source: ArrivedSource,
    *,
    is_whole: bool,
) -> None:
    made = lay_out(unit, layout, source, device, is_whole=is_whole)
    if isinstance(loaded, LaidOut) and isinstance(made, LaidOut) and loaded.tensor.is_cpu:
        with torch.inference_mode():
            loaded.tensor.set_(made.tensor)  # type: ignore[call-overload]  # it may be a mapped file, which is not written; no address is kept
    else:
        overwrite(loaded, made)


class Update:
    """One update of a rank's weights, of one or several parts."""

    def __init__(
        self,
        live: LiveWeights,
        naming: Naming,
        open_stored: Callable[[], Checkpoint] | None = None,
        replaced: Iterable[str] = (),
        alike: Iterable[tuple[str, str]] = (),
    ) -> None:
        """
        naming: of tensors that arrive
        open_stored: opens the files that have what does not arrive; None: all arrives
        replaced: stored tensors whose files are out of date, since an earlier update has brought them
        alike: pairs of names that have to arrive with the same content, the second of which nothing reads
        """
        self._live, self._open_stored, self._replaced = live, open_stored, set(replaced)
        self._arrived = ArrivedTensors(naming)
        self._source = ArrivedSource(self._arrived)
        self._waits: dict[int, int] = {}  # tensors that a unit waits for, by its id
        self._uses: Counter[str] = Counter()  # units that have not read a tensor yet
        self._pairs = {name: pair for pair in alike for name in pair}
        self._seen: set[str] = set()
        self.num_written = 0  # units

    def expect(self, names: Iterable[str]) -> None:
        """Check that an update of just these tensors can be finished. RequestError names one that is needed too."""
        given = set(names)
        self._check_alike(given)
        self._pairs = {name: pair for name, pair in self._pairs.items() if given.issuperset(pair)}
        if given.issuperset(self._live.readers):
            return
        for unit in {id(unit): unit for name in given for unit in self._live.readers.get(name, ())}.values():
            self._check_rest(unit, given)

    @torch.inference_mode()
    def add(self, tensors: Named, *, keeps: bool = True) -> None:
        """Take tensors, by the names of a checkpoint, and write all units that have theirs.

        keeps: copy those that are still waited for, since their memory may be written over afterwards
        """
        tensors = list(tensors)
        self._arrived.naming.announce(name for name, _ in tensors)
        compared = [(name, tensor) for name, tensor in tensors if name in self._pairs]  # before anything is written
        added = [part for name, tensor in compared for part in self._add(name, tensor)]
        self._check_pairs(added)
        self._write_ready(added)
        for name, tensor in tensors:
            if name not in self._pairs:
                parts = self._add(name, tensor)
                self._write_ready(parts)
                added += parts
        for name in added:
            if not self._uses[name] and self._arrived.find(name) is not None:
                self._source.drop([name])
        if keeps:
            self._arrived.keep(name for name in added if self._arrived.find(name) is not None)

    def _write_ready(self, added: Iterable[str]) -> None:
        """Write the units that have waited for these tensors only."""
        for name in added:
            for unit in self._live.readers.get(name, ()):
                self._waits[id(unit)] -= 1
                if not self._waits[id(unit)]:
                    self._write(unit)

    @torch.inference_mode()
    def finish(self) -> None:
        """Write the units of which only some tensors have arrived; the files have the others."""
        touched = {id(unit): unit for name in self._seen for unit in self._live.readers.get(name, ())}
        waiting = [unit for key, unit in touched.items() if self._waits[key]]
        self._check_alike(self._seen)
        for unit in waiting:
            self._check_rest(unit, self._seen)
        if waiting and self._open_stored is not None:
            self._arrived.fall_back(self._open_stored())
        for unit in waiting:
            self._write(unit)

    def close(self) -> None:
        """Let all tensors go."""
        self._arrived.close()

    def _add(self, name: str, tensor: Tensor) -> list[str]:
        added = self._arrived.add(name, tensor)
        for part in added:
            if part in self._seen:
                raise RequestError(f"tensor {part} has arrived twice in one update")
            self._seen.add(part)
            self._uses[part] += part in self._pairs
            for unit in self._live.readers.get(part, ()):
                self._uses[part] += 1
                self._waits.setdefault(id(unit), len(unit.reads))
        return added

    def _check_pairs(self, added: Sequence[str]) -> None:
        for pair in {self._pairs[name] for name in added if name in self._pairs}:
            one, other = map(self._arrived.find, pair)
            if one is None or other is None:
                continue
            if one.shape != other.shape or not torch.equal(one, other.to(one.dtype)):
                raise RequestError(f"tensor {pair[1]} is not {pair[0]}, which the model reads in its place")
            self._uses.subtract(pair)

    def _check_alike(self, given: set[str]) -> None:
        for read, other in set(self._pairs.values()):
            if other in given and read not in given:
                raise RequestError(f"the model reads {read} in place of {other}: give it in the same update")

    def _check_rest(self, unit: Unit, given: set[str]) -> None:
        for name in sorted(unit.reads - given):
            if self._open_stored is None or name in self._replaced:
                some = min(unit.reads & given)
                raise RequestError(f"tensor {some} is packed together with {name}: give it in the same update")

    def _write(self, unit: Unit) -> None:
        self.num_written += 1
        unit.write(self._source)
        self._waits[id(unit)] = 0
        for name in unit.reads & self._seen:
            self._uses[name] -= 1
