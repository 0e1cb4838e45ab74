"""Cache packed weights as a safetensors file.

    file = PackedFile([part for parts in every for part in parts.values()], cache, key, about)
    checkpoint = file.open()                                 # None: it is not kept, or damaged
    file.begin()                                             # OSError if there is no room
    file.write({"0.values": values, "0.scales": scales})     # several threads may, in any order
    file.publish()                                           # or file.discard()

A config.json is put next to it, so that the folder is opened as a checkpoint.

Each part has a checksum, made of it in memory and compared at each start, since a bit that differs would be a wrong
token that nothing else notices. It is XXH3, at the speed of memory, when the manifest's SHA-256 would take minutes; the
pages that it reads are those that the first step needs. Damage is one line, and the weights are made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from atom.cache import Cache
from atom.cache.files import WEIGHTS
from atom.checkpoint import Checkpoint, open_checkpoint
from atom.dtypes import DTYPES
from atom.errors import CheckpointError
from atom.graph import W

FILE = "model.safetensors"
NUM_CHECKERS = 4  # threads that compare checksums
ALIGNMENT = 64  # bytes, of the first tensor; panels come first, and most have a multiple of that


class PackedFile:
    def __init__(self, parts: Sequence[W], cache: Cache, key: str, about: Mapping[str, Any]) -> None:
        """parts: all that the file has.
        about: of the entry.
        """
        self._cache, self._key, self._about = cache, key, about
        self._header, self._places, self._num_bytes = _lay_out(parts)
        self._sizes = {part.name: part.type.num_bytes for part in parts}
        self._checksums: dict[str, str] = {}  # by name, of the parts that are written
        self._folder: Path | None = None  # where it is written
        self._file = -1

    def open(self) -> Checkpoint | None:
        """Open what an earlier start has kept, and check it; None without it, or if it is damaged."""
        found, entry = self._cache.find(WEIGHTS, self._key, unread={FILE}), self._cache.describe(WEIGHTS, self._key)
        if found is None or entry is None:
            return None
        try:
            with open(found / FILE, "rb") as file:
                is_ours = file.read(len(self._header)) == self._header
            kept = open_checkpoint(str(found)) if is_ours else None
        except (CheckpointError, OSError):
            kept = None
        expected = entry.about.get("checksums")
        if kept is None or not isinstance(expected, dict):
            self._cache.distrust(WEIGHTS, self._key, f"the header of {FILE} is damaged")
            return None
        with ThreadPoolExecutor(NUM_CHECKERS, "checksums of weights") as threads:
            checksums = threads.map(xxh3_128_hexdigest, map(kept.read, self._places))
            damaged = [
                name for name, actual in zip(self._places, checksums, strict=True) if expected.get(name) != actual
            ]
        if damaged:
            self._cache.distrust(WEIGHTS, self._key, f"the checksum of {damaged[0]} in {FILE} is wrong")
            kept.close()
            return None
        return kept

    def begin(self) -> bool:
        """Start the file, with places for all parts; False if the cache takes no entries, which its warnings say.

        OSError if the disk has less than twice as much free
        """
        self._folder = self._cache.begin(WEIGHTS)
        if self._folder is None:
            return False
        if shutil.disk_usage(self._folder).free < 2 * self._num_bytes:
            raise OSError(f"their {self._num_bytes} bytes are more than half of what is free on its disk")
        (self._folder / "config.json").write_text("{}")
        self._file = os.open(self._folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, self._header, 0)
        os.ftruncate(self._file, len(self._header) + self._num_bytes)
        return True

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write parts to their places, by their names."""
        for name, tensor in tensors.items():
            content = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data
            assert len(content) == self._sizes[name], f"{name} is written as {len(content)} bytes"
            self._checksums[name] = xxh3_128_hexdigest(content)
            start = self._places[name]
            while content:
                count = os.pwrite(self._file, content, start)
                content, start = content[count:], start + count

    def publish(self) -> None:
        """Give the file, of which all is written, to the cache; OSError if that fails."""
        assert self._folder is not None, "it is begun"
        os.close(self._file)
        self._file = -1
        self._cache.finish(WEIGHTS, self._key, self._folder, {**self._about, "checksums": self._checksums})

    def discard(self) -> None:
        """Remove what is written and not published."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _lay_out(parts: Sequence[W]) -> tuple[bytes, dict[str, int], int]:
    """The file's header, the byte that each part begins at, and the bytes of all."""
    entries: dict[str, Any] = {}
    end = 0
    for part in parts:
        begin, end = end, end + part.type.num_bytes
        dtype, shape = DTYPES[part.type.dtype].safetensors, part.type.shape
        entries[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}, end
