"""Write a safetensors file of packed weights part by part.

file = PackedFile(folder, [part for parts in every for part in parts.values()])
file.write({"0.values": values, "0.scales": scales})     # several threads may
file.close()

A config.json is put beside it, so that the folder is opened as a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atom.dtypes import DTYPES
from atom.graph import W

FILE = "model.safetensors"
ALIGNMENT = 64  # bytes, of the first tensor; panels come first, and most have a multiple of that


class PackedFile:
    def __init__(self, folder: Path, parts: Iterable[W]) -> None:
        """Start the file, with places for all parts. OSError where its disk has less than twice as much free."""
        header: dict[str, Any] = {}
        sizes, end = dict[str, int](), 0
        for part in parts:
            sizes[part.name] = part.type.num_bytes
            begin, end = end, end + sizes[part.name]
            dtype, shape = DTYPES[part.type.dtype].safetensors, part.type.shape
            header[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        first = 8 + len(text)
        self._places = {name: (first + entry["data_offsets"][0], sizes[name]) for name, entry in header.items()}
        if shutil.disk_usage(folder).free < 2 * end:
            raise OSError(f"their {end} bytes are more than half of what is free on its disk")
        (folder / "config.json").write_text("{}")
        self._file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, struct.pack("<Q", len(text)) + text, 0)
        os.ftruncate(self._file, first + end)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write parts, by their names."""
        for name, tensor in tensors.items():
            content = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data
            start, size = self._places[name]
            assert len(content) == size, f"{name} is written as {len(content)} bytes, not {size}"
            while content:
                count = os.pwrite(self._file, content, start)
                content, start = content[count:], start + count

    def close(self) -> None:
        os.close(self._file)
