"""Keep weights that were packed or laid out while loading for the next start.

    with PackedStore(recipes, checkpoint, cache) as store:     # store.checkpoint has what is kept beside the rest
        parts = store.find(recipe)                             # recipes of what is kept; None: it has to be made,
        store.write(recipe, weight.parts)                      # and is written then
        weight = store.map(recipe)                             # on a CPU, one in a kernel's layout: it is mapped

Leaving the block publishes the file in a thread, if every weight was written and nothing was raised.

The key has the sizes and times of the checkpoint's files, the recipes, the sources of what makes tensors, and what it
weights errors by. The file is one of safetensors, beside a config.json that says nothing, so that it is opened as a
checkpoint. What is mapped is used in place: processes share its memory, and a file that is removed stays until the last
of them ends.

Each part has a checksum, made of it in memory and compared at each start, since a bit that differs would be a wrong
token that nothing else notices. It is XXH3, at the speed of memory where the manifest's SHA-256 would take minutes; the
pages that it reads are those that the first step needs. Damage is one line, and the weights are made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from atom.cache import Cache, digest, key_of
from atom.cache.files import WEIGHTS
from atom.checkpoint import Checkpoint, JoinedCheckpoint, open_checkpoint
from atom.dtypes import DTYPES
from atom.errors import CheckpointError
from atom.graph import LaidOut, Quantize, Recipe, Shuffle, Type, W
from atom.graph.recipe_contents import packed_while_loading, shuffled_alone
from atom.kernels import layout_type
from atom.weights.evaluate import view
from atom.weights.quantize import part_types, takes_importance

FILE = "model.safetensors"
NUM_CHECKERS = 4  # threads that compare checksums
ALIGNMENT = 64  # bytes, of the first tensor; panels come first, and most have a multiple of that


class PackedStore:
    def __init__(
        self,
        recipes: Sequence[Recipe],
        checkpoint: Checkpoint,
        cache: Cache,
        device: str = "cpu",
        sources: str = "",
        calibration: str | None = None,
    ) -> None:
        """sources: a digest of what makes tensors of files

        calibration: the key of the moments by which numbers are rounded where that changes them; None: without
        """
        laid_out = _laid_out(recipes) if device == "cpu" else {}
        others = (recipe for recipe in recipes if not laid_out.keys() & {*_alone(recipe)})
        quantized = sorted({part for recipe in others for part in packed_while_loading(recipe)}, key=repr)
        packed: list[Shuffle | Quantize] = [*laid_out, *quantized]
        types = [*({"": type} for type in laid_out.values()), *(part_types(recipe.type) for recipe in quantized)]
        self._parts = {
            recipe: {name: W(f"{number}.{name}", type) for name, type in parts.items()}
            for number, (recipe, parts) in enumerate(zip(packed, types, strict=True))
        }
        self._cache = cache
        formats = dict.fromkeys(str(recipe.type.fmt) for recipe in packed)
        ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files() if packed else ())),
            "reading": digest(checkpoint.reading),
            "formats": ", ".join(formats),
            "recipes": digest(repr(packed)),
            "sources": sources,
            "calibration": calibration if calibration and any(map(takes_importance, formats)) else "none",
        }
        self._about = {"name": f"{', '.join(formats)} of {checkpoint.location}", "ingredients": ingredients}
        self._key = key_of(ingredients)
        self._header, self._places, self._num_bytes = self._lay_out()
        self._checksums: dict[str, str] = {}  # by name, of the parts that are written
        kept = self._open() if packed else None
        self.is_kept = kept is not None
        self.checkpoint = checkpoint if kept is None else JoinedCheckpoint(checkpoint, kept)
        self._folder = cache.begin(WEIGHTS) if packed and kept is None else None  # None: nothing is written
        self._file, self._has_failed = -1, False
        self._missing: set[Recipe] = set(packed)  # what is not written yet
        if self._folder is not None:
            self._begin(self._folder)

    def __enter__(self) -> PackedStore:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._folder is None:
            return
        if error is None and not self._has_failed and not self._missing:
            threading.Thread(target=self._publish, args=(self._folder,), name="keep packed weights").start()
            return
        if self._file >= 0:
            os.close(self._file)
        shutil.rmtree(self._folder, ignore_errors=True)

    def find(self, recipe: Recipe) -> dict[str, W] | None:
        return self._parts.get(recipe) if self.is_kept and isinstance(recipe, Quantize) else None

    def map(self, recipe: Shuffle) -> LaidOut | None:
        """A weight in a kernel's layout, in the mapped file; None where it has to be made."""
        if not self.is_kept or recipe not in self._parts:
            return None
        return LaidOut(recipe.type, view(self._parts[recipe][""], self.checkpoint))

    def write(self, recipe: Recipe, parts: Mapping[str, Tensor]) -> None:
        """Write a weight's parts to their places; several threads may."""
        if self._folder is None or self._has_failed or recipe not in self._parts:
            return
        try:
            for name, part in self._parts[recipe].items():
                content = parts[name].contiguous().flatten().view(torch.uint8).cpu().numpy().data
                assert len(content) == part.type.num_bytes, f"{part} is written as {len(content)} bytes"
                self._checksums[part.name] = xxh3_128_hexdigest(content)
                start = self._places[part.name]
                while content:
                    count = os.pwrite(self._file, content, start)
                    content, start = content[count:], start + count
        except OSError as error:
            self._give_up(error)
        self._missing.discard(recipe)

    def _open(self) -> Checkpoint | None:
        """What an earlier start has kept, compared with its checksums; None without it, or where it is damaged."""
        found, entry = self._cache.find(WEIGHTS, self._key, unread={FILE}), self._cache.describe(WEIGHTS, self._key)
        if found is None or entry is None:
            return None
        try:
            with open(found / FILE, "rb") as file:
                is_ours = file.read(len(self._header)) == self._header
            kept = open_checkpoint(str(found)) if is_ours else None
        except (CheckpointError, OSError):
            kept = None
        stated = entry.about.get("checksums")
        if kept is None or not isinstance(stated, dict):
            self._cache.distrust(WEIGHTS, self._key, f"the header of {FILE} is damaged")
            return None
        with ThreadPoolExecutor(NUM_CHECKERS, "checksums of weights") as threads:
            checksums = threads.map(xxh3_128_hexdigest, map(kept.read, self._places))
            damaged = [name for name, actual in zip(self._places, checksums, strict=True) if stated.get(name) != actual]
        if damaged:
            self._cache.distrust(WEIGHTS, self._key, f"the checksum of {damaged[0]} in {FILE} is wrong")
            kept.close()
            return None
        return kept

    def _lay_out(self) -> tuple[bytes, dict[str, int], int]:
        """The file's header, the byte that each part begins at, and the bytes of all."""
        entries: dict[str, Any] = {}
        end = 0
        for part in (part for parts in self._parts.values() for part in parts.values()):
            begin, end = end, end + part.type.num_bytes
            dtype, shape = DTYPES[part.type.dtype].safetensors, part.type.shape
            entries[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        header = struct.pack("<Q", len(text)) + text
        return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}, end

    def _begin(self, folder: Path) -> None:
        """Start the file, with places for all parts."""
        try:
            if shutil.disk_usage(folder).free < 2 * self._num_bytes:
                raise OSError(f"their {self._num_bytes} bytes are more than half of what is free on its disk")
            (folder / "config.json").write_text("{}")
            self._file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, self._header, 0)
            os.ftruncate(self._file, len(self._header) + self._num_bytes)
        except OSError as error:
            self._give_up(error)

    def _publish(self, folder: Path) -> None:
        os.close(self._file)
        try:
            self._cache.finish(WEIGHTS, self._key, folder, self._about | {"checksums": self._checksums})
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._has_failed:
            print(f"atom-run: packed weights are not kept for the next start: {error}", file=sys.stderr)
        self._has_failed = True


def _alone(recipe: Recipe) -> list[Shuffle]:
    """What is put into a kernel's layout as one, of a packed weight that is; [] of others."""
    if not isinstance(recipe, Shuffle) or recipe.type.fmt is None:
        return []
    return [Shuffle(part, recipe.layout) for part in shuffled_alone(recipe)]


def _laid_out(recipes: Sequence[Recipe]) -> dict[Shuffle, Type]:
    """The weights in a layout that a file can hold, with the types of their tensors, in a fixed order."""
    every = {alone for recipe in recipes for alone in _alone(recipe)}
    found = ((alone, layout_type(alone.type, alone.layout)) for alone in sorted(every, key=repr))
    return {alone: type for alone, type in found if type is not None}


def describe_file(path: Path) -> str:
    """A file's name, size and time, which change with its content."""
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
