"""Cache weights that were packed or laid out while loading, for the next start.

    with PackedStore(recipes, checkpoint, cache) as store:     # store.checkpoint has what is kept and the rest
        parts = store.find(recipe)                             # recipes of what is kept; None: it has to be made,
        store.write(recipe, weight.parts)                      # and is written then
        weight = store.map(recipe)                             # on a CPU, one in a kernel's layout: it is mapped

Leaving the block publishes the file in a thread, if every weight was written and nothing was raised.

The key has the sizes and times of the checkpoint's files, the recipes, the sources of what makes tensors, and what it
rounds them by. The file (`packed_file.py`) is opened as a checkpoint. What is mapped is used in place: processes share
its memory, and a file that is removed stays until the last of them ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from atom.cache import Cache, digest, key_of
from atom.checkpoint import Checkpoint, JoinedCheckpoint
from atom.graph import LaidOut, Quantize, Recipe, Shuffle, Type, W
from atom.graph.recipe_contents import layout_units, packed_while_loading
from atom.kernels import layout_type
from atom.process.messages import say
from atom.weights.evaluate import view
from atom.weights.packed_file import PackedFile
from atom.weights.quantize import part_types


class PackedStore:
    def __init__(
        self,
        recipes: Sequence[Recipe],
        checkpoint: Checkpoint,
        cache: Cache,
        device: str = "cpu",
        sources: str = "",
        calibration: str | None = None,
        is_elsewhere: Callable[[Recipe], bool] = lambda _: False,
    ) -> None:
        """sources: a digest of what makes tensors of files

        calibration: the key of what numbers are rounded by; None: to the nearest
        is_elsewhere: whether another file has a weight that is packed while it loads
        """
        laid_out = _laid_out(recipes) if device == "cpu" else {}
        others = (recipe for recipe in recipes if not laid_out.keys() & {*_units_of(recipe)})
        made = {part for recipe in others for part in packed_while_loading(recipe)}
        quantized = sorted((part for part in made if not is_elsewhere(part)), key=repr)
        packed: list[Shuffle | Quantize] = [*laid_out, *quantized]
        types = [*({"": type} for type in laid_out.values()), *(part_types(recipe.type) for recipe in quantized)]
        self._parts = {
            recipe: {name: W(f"{number}.{name}", type) for name, type in parts.items()}
            for number, (recipe, parts) in enumerate(zip(packed, types, strict=True))
        }
        formats = dict.fromkeys(str(recipe.type.fmt) for recipe in packed)
        ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files() if packed else ())),
            "reading": digest(checkpoint.reading),
            "formats": ", ".join(formats),
            "recipes": digest(repr(packed)),
            "sources": sources,
            "calibration": calibration or "none",
        }
        about = {"name": f"{', '.join(formats)} of {checkpoint.location}", "ingredients": ingredients}
        places = [part for parts in self._parts.values() for part in parts.values()]
        self._file = PackedFile(places, cache, key_of(ingredients), about)
        kept = self._file.open() if packed else None
        self.is_kept = kept is not None
        self.checkpoint = checkpoint if kept is None else JoinedCheckpoint(checkpoint, kept)
        self._is_written, self._has_failed = False, False
        self._missing: set[Recipe] = set(packed)  # what is not written yet
        if packed and kept is None:
            try:
                self._is_written = self._file.begin()
            except OSError as error:
                self._give_up(error)

    def __enter__(self) -> PackedStore:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self._is_written and not self._has_failed and not self._missing:
            threading.Thread(target=self._publish, name="keep packed weights").start()
        else:
            self._file.discard()

    def find(self, recipe: Recipe) -> dict[str, W] | None:
        return self._parts.get(recipe) if self.is_kept and isinstance(recipe, Quantize) else None

    def has_laid_out(self, recipe: Recipe) -> bool:
        """Whether the file has a weight in its kernel's layout."""
        every = _units_of(recipe)
        return self.is_kept and bool(every) and self._parts.keys() >= {*every}

    def map(self, recipe: Shuffle) -> LaidOut | None:
        """A weight in a kernel's layout, in the mapped file; None if it has to be made."""
        if not self.is_kept or recipe not in self._parts:
            return None
        return LaidOut(recipe.type, view(self._parts[recipe][""], self.checkpoint))

    def write(self, recipe: Recipe, parts: Mapping[str, Tensor]) -> None:
        """Write a weight's parts to their places; several threads may."""
        if not self._is_written or self._has_failed or recipe not in self._parts:
            return
        try:
            self._file.write({part.name: parts[name] for name, part in self._parts[recipe].items()})
        except OSError as error:
            self._give_up(error)
        self._missing.discard(recipe)

    def _publish(self) -> None:
        try:
            self._file.publish()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._has_failed:
            say(f"packed weights are not kept for the next start: {error}")
        self._has_failed = True


def _units_of(recipe: Recipe) -> list[Shuffle]:
    """What is put into a kernel's layout as one, of a packed weight that is; [] of others."""
    if not isinstance(recipe, Shuffle) or recipe.type.fmt is None:
        return []
    return [Shuffle(part, recipe.layout) for part in layout_units(recipe)]


def _laid_out(recipes: Sequence[Recipe]) -> dict[Shuffle, Type]:
    """The weights in a layout that a file can hold, with the types of their tensors, in a fixed order."""
    every = {weight for recipe in recipes for weight in _units_of(recipe)}
    found = ((weight, layout_type(weight.type, weight.layout)) for weight in sorted(every, key=repr))
    return {weight: type for weight, type in found if type is not None}


def describe_file(path: Path) -> str:
    """A file's name, size and time, which change with its content."""
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
