"""Parse a GGUF file: metadata, tensors, quantized numbers as fp32.

    metadata, tensors = read_gguf(Path("tiny.gguf"))
    metadata["general.architecture"], tensors["token_embd.weight"].shape
    dequantize(tensors["token_embd.weight"])         # fp32, flat

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read by hand, since gguf.GGUFReader
takes 2 s for a vocabulary of 50k; most types are dequantized by the `gguf` package.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from atom.checkpoint.files import map_file
from atom.checkpoint.gguf_types import SIZES, Type
from atom.dtypes import BY_SAFETENSORS
from atom.errors import CheckpointError, UnsupportedError

Array = np.ndarray[Any, Any]

SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type of a value: its format character in `struct`
STRING, ARRAY = 8, 9
MAX_DIMS = 4
TYPES = {int(kind): kind for kind in Type}
PLAIN = {kind: BY_SAFETENSORS[kind.name] for kind in Type if kind.name in BY_SAFETENSORS}  # not quantized
Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("pairs", "u1", 16)])  # numbers i and i + 16 share a byte
Q8_0 = np.dtype([("scale", "<f2"), ("numbers", "i1", 32)])


class GGUFTensor(NamedTuple):
    type: Type
    shape: tuple[int, ...]
    data: memoryview  # a view of its blocks in the mapped file
    scale: Array | None = None  # fp32[1], or one for each expert: what its numbers are multiplied by

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are stored as they are."""
        return self.type in PLAIN and self.scale is None


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read metadata, and tensors by the file's names. Counts, lengths and offsets are checked against the file's size.

    A value is a number, a bool, a string, a list of strings or an array. Raises CheckpointError for a damaged file,
    UnsupportedError for what is not read here.
    """
    data = map_file(path)
    if not data:
        raise CheckpointError(f"{path} is empty; download it again")
    header = Header(data)
    try:
        magic, version, num_tensors, num_values = header.unpack("4sIQQ")
        if magic != b"GGUF":
            raise CheckpointError(f"{path} is no GGUF file")
        if version not in (2, 3):
            raise UnsupportedError(f"{path} is GGUF version {version} or big-endian; little-endian 2 and 3 are read")
        metadata = {header.string(): header.value() for _ in range(num_values)}
        infos = [header.tensor() for _ in range(num_tensors)]
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}; download it again") from None

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, dims, number, offset in infos:
        if number not in TYPES:
            raise UnsupportedError(f"{path}: tensor {name} has the unknown type {number}")
        block, size = SIZES[TYPES[number]]
        if name in tensors or not dims or min(dims) < 1 or dims[0] % block:
            raise CheckpointError(f"{path}: tensor {name} is there twice or has impossible dimensions {dims}")
        begin = start + offset
        end = begin + math.prod(dims) // block * size
        if end > len(data):
            raise CheckpointError(f"{path} is cut short: {name} ends at byte {end} of {len(data)}; download it again")
        tensors[name] = GGUFTensor(TYPES[number], dims[::-1], data[begin:end])
    return metadata, tensors


class Header:
    """Parses values from the front of a file. ValueError past its end and for what GGUF does not have."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def unpack(self, format: str) -> tuple[Any, ...]:
        return struct.unpack_from("<" + format, self._data, self._advance(struct.calcsize("<" + format)))

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self) -> Any:
        (kind,) = self.unpack("I")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(*self.unpack("IQ"))
        (value,) = self.unpack(self._letter(kind))
        return float(str(np.float32(value))) if SCALARS[kind] == "f" else value  # 1e-05, not 9.999999747378752e-06

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions (innermost first), type and offset of a tensor."""
        name = self.string()
        (num_dims,) = self.unpack("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        *dims, kind, offset = self.unpack(f"{num_dims}QIQ")
        return name, tuple(dims), kind, offset

    def _array(self, kind: int, count: int) -> list[str] | Array:
        if kind == STRING:
            return self._strings(count)
        item = np.dtype("<" + self._letter(kind))
        begin = self._advance(count * item.itemsize)
        return np.frombuffer(bytes(self._data[begin : self.position]), item)

    def _strings(self, count: int) -> list[str]:
        data, position, end, strings = self._data, self.position, len(self._data), []
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):  # in one loop, since a vocabulary has 100k of them
            begin = position + 8
            position = begin + read_length(data, position)[0] if begin <= end else begin
            if position > end:
                raise ValueError(f"a string ends at byte {position} of {end}")
            strings.append(str(data[begin:position], "utf-8"))
        self.position = position
        return strings

    def _letter(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"a value of the unknown type {kind} before byte {self.position}")
        return SCALARS[kind]

    def _advance(self, size: int) -> int:
        begin = self.position
        self.position += size
        if self.position > len(self._data):
            raise ValueError(f"a value ends at byte {self.position} of {len(self._data)}")
        return begin


def dequantize(tensor: GGUFTensor) -> Array:
    """A tensor's numbers as a flat array: fp32 for quantized types, else items of their size, bits as stored.

    Q4_1 and Q8_0 equal gguf.quants.dequantize bit by bit in less than half its time. NotImplementedError for a type
    that it cannot dequantize.
    """
    size = SIZES[tensor.type][1]
    array: Array
    if tensor.scale is not None:
        return (floats(tensor._replace(scale=None)).reshape(len(tensor.scale), -1) * tensor.scale[:, None]).reshape(-1)
    if tensor.type in PLAIN:
        array = np.frombuffer(tensor.data, f"u{size}")
    elif tensor.type is Type.Q4_1:
        blocks = np.frombuffer(tensor.data, Q4_1)
        array = np.empty((len(blocks), 32), np.float32)
        array[:, :16] = blocks["pairs"] & 15
        array[:, 16:] = blocks["pairs"] >> 4
        array *= blocks["scale"].astype(np.float32)[:, None]
        array += blocks["minimum"].astype(np.float32)[:, None]
    elif tensor.type is Type.Q8_0:
        blocks = np.frombuffer(tensor.data, Q8_0)
        array = blocks["numbers"] * blocks["scale"].astype(np.float32)[:, None]
    else:
        array = dequantize_blocks(np.frombuffer(tensor.data, np.uint8).reshape(-1, size), tensor.type)
    return array.reshape(-1)


def floats(tensor: GGUFTensor) -> Array:
    """A tensor's numbers as fp32, in its shape."""
    if not tensor.is_plain:
        return dequantize(tensor).reshape(tensor.shape)
    blocks = np.frombuffer(tensor.data, np.uint8).reshape(-1, SIZES[tensor.type][1])
    return dequantize_blocks(blocks, tensor.type).reshape(tensor.shape)


def dequantize_blocks(blocks: Array, kind: Type) -> Array:
    """The numbers of blocks, by the `gguf` package. NotImplementedError for a type that it cannot dequantize."""
    import gguf

    if kind not in gguf.GGML_QUANT_SIZES:  # of an older version
        raise NotImplementedError
    numbers: Array = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    return numbers
