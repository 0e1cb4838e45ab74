"""Keep weights that were packed while loading for the next start.

    with PackedStore(recipes, checkpoint, cache) as store:     # store.checkpoint has what is kept beside the rest
        parts = store.find(recipe)                             # recipes of what is kept; None: it has to be made,
        store.write(recipe, weight)                            # and is written then

Leaving the block publishes the file in a thread, if every weight was written and nothing was raised.

The key has the sizes and times of the checkpoint's files, the recipes, the quantizer's version, and what it weights
errors by. The file is one of
safetensors, beside a config.json that says nothing, so that it is opened as a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atom.cache import Cache, digest, key_of
from atom.cache.files import WEIGHTS
from atom.checkpoint import Checkpoint, JoinedCheckpoint, open_checkpoint
from atom.dtypes import DTYPES
from atom.graph import PackedWeight, Quantize, Recipe, W
from atom.graph.recipes import packed_while_loading
from atom.weights.quantize import VERSION, part_types, takes_importance

FILE = "model.safetensors"


class PackedStore:
    def __init__(
        self, recipes: Sequence[Recipe], checkpoint: Checkpoint, cache: Cache, calibration: str | None = None
    ) -> None:
        """calibration: the key of the moments by which numbers are rounded where that changes them; None: without"""
        packed = sorted({part for recipe in recipes for part in packed_while_loading(recipe)}, key=repr)
        self._parts = {recipe: _parts(recipe, f"{number}.") for number, recipe in enumerate(packed)}
        self._cache = cache
        formats = dict.fromkeys(recipe.fmt for recipe in packed)
        ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files() if packed else ())),
            "formats": ", ".join(formats),
            "recipes": digest(repr(packed)),
            "quantizer": str(VERSION),
            "calibration": calibration if calibration and any(map(takes_importance, formats)) else "none",
        }
        self._about = {"name": f"{', '.join(formats)} of {checkpoint.location}", "ingredients": ingredients}
        self._key = key_of(ingredients)
        found = cache.find(WEIGHTS, self._key) if packed else None
        self.is_kept = found is not None
        self.checkpoint = checkpoint if found is None else JoinedCheckpoint(checkpoint, open_checkpoint(str(found)))
        self._folder = cache.begin(WEIGHTS) if packed and found is None else None  # None: nothing is written
        self._file, self._has_failed = -1, False
        self._missing = set(packed)  # what is not written yet
        self._places: dict[str, int] = {}  # by name: the byte that a part begins at
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

    def write(self, recipe: Recipe, weight: PackedWeight) -> None:
        """Write a weight's parts to their places; several threads may."""
        if self._folder is None or self._has_failed or not isinstance(recipe, Quantize) or recipe not in self._parts:
            return
        try:
            for name, part in self._parts[recipe].items():
                content = weight.parts[name].contiguous().flatten().view(torch.uint8).cpu().numpy().data
                assert len(content) == part.type.num_bytes, f"{part} is written as {len(content)} bytes"
                start = self._places[part.name]
                while content:
                    count = os.pwrite(self._file, content, start)
                    content, start = content[count:], start + count
        except OSError as error:
            self._give_up(error)
        self._missing.discard(recipe)

    def _begin(self, folder: Path) -> None:
        """Start the file, with places for all parts."""
        header: dict[str, Any] = {}
        end = 0
        for part in (part for parts in self._parts.values() for part in parts.values()):
            begin, end = end, end + part.type.num_bytes
            dtype, shape = DTYPES[part.type.dtype].safetensors, part.type.shape
            header[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        first = 8 + len(text)
        self._places = {name: first + entry["data_offsets"][0] for name, entry in header.items()}
        try:
            if shutil.disk_usage(folder).free < 2 * end:
                raise OSError(f"their {end} bytes are more than half of what is free on its disk")
            (folder / "config.json").write_text("{}")
            self._file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, struct.pack("<Q", len(text)) + text, 0)
            os.ftruncate(self._file, first + end)
        except OSError as error:
            self._give_up(error)

    def _publish(self, folder: Path) -> None:
        os.close(self._file)
        try:
            self._cache.finish(WEIGHTS, self._key, folder, self._about)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._has_failed:
            print(f"atom-run: packed weights are not kept for the next start: {error}", file=sys.stderr)
        self._has_failed = True


def _parts(recipe: Quantize, name: str) -> dict[str, W]:
    """The parts of a weight as tensors of the file."""
    return {each: W(name + each, type) for each, type in part_types(recipe.type).items()}


def describe_file(path: Path) -> str:
    """A file's name, size and time, which change with its content."""
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
