"""Steering vectors and hidden states: safetensors files with tensors by the names of layers.

    files = SteeringFiles({"calm": "calm.safetensors"}, (576,))     # a vector [H] for each layer that it is added to
    files.read("steer:calm:model.layers.12")
    write_states(Path("0.safetensors"), {"model.layers.12": states})

The files of vectors are joined to the model's checkpoint, so that a vector is a weight as others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atom.checkpoint.base import Checkpoint, FileRange
from atom.checkpoint.folder import read_header

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def name_of_vector(name: str, layer: str) -> str:
    """The name of a vector's tensor. name: as requests name it; layer: that it is added to"""
    return f"steer:{name}:{layer}"


class SteeringFiles(Checkpoint):
    """The vectors of files, by the names that requests use. CheckpointError if one cannot be read.

    layer_shape: what a layer gives of a token; vectors [S, H] of all streams are read as [S H], as these lie
    """

    def __init__(self, files: Mapping[str, str], layer_shape: tuple[int, ...]) -> None:
        self.location = ", ".join(files.values())
        self.config, self.generation_config = {}, {}
        self._stored = {
            name_of_vector(name, layer): entry
            for name, path in files.items()
            for layer, entry in read_header(Path(path).expanduser()).items()
        }
        flat = (math.prod(layer_shape),)
        self.tensors = {
            name: replace(entry[0], shape=flat) if entry[0].shape == layer_shape else entry[0]
            for name, entry in self._stored.items()
        }

    def read(self, name: str) -> memoryview:
        return self._stored[name][1]

    def locate(self, name: str) -> FileRange:
        _, data, path, start = self._stored[name]
        return FileRange(path, start, len(data))

    def files(self) -> tuple[()]:
        """None: weights are packed and calibrated without vectors, so other vectors leave what is kept of that."""
        return ()

    def tokenizer(self, *, trust_remote_code: bool = False) -> None:
        return None

    def close(self) -> None:
        self._stored = {}  # a file stays mapped until its last view is gone


def write_states(path: Path, states: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write arrays to a safetensors file. Format: https://huggingface.co/docs/safetensors."""
    header, end = dict[str, object](), 0
    for name, values in states.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # as data begins at a multiple of 8 bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = (values.tobytes() for values in states.values())
    path.write_bytes(b"".join((len(encoded).to_bytes(8, "little"), encoded, *parts)))
