"""Types of the text: tensors (dtype, shape, stored format) and batches.

Type("bf16", ("T", 576))                     # bf16[T, 576]: T tokens of 576 numbers
Type("bf16", (576, 576)).num_bytes           # 663552
Type("bf16", (576, 576), "mxfp4").num_bytes  # 176256, of a weight that is stored packed: bf16[576, 576, "mxfp4"]
BATCH                                        # Batch: what a step's sequences are
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from atom.dtypes import DTYPES, GRAPH_DTYPES
from atom.graph import formats

Dim = int | str

BITS = {dtype: DTYPES[dtype].bits for dtype in GRAPH_DTYPES}


@dataclass(frozen=True)
class Type:
    dtype: str  # a key of BITS
    shape: tuple[Dim, ...]
    fmt: str | None = None  # of a weight: its stored format, see `formats`, if it is not a plain tensor

    def __str__(self) -> str:
        shown = [*map(str, self.shape), *([json.dumps(self.fmt)] if self.fmt else [])]
        return f"{self.dtype}[{', '.join(shown)}]" if shown else self.dtype

    @property
    def num_elements(self) -> int:
        """The number of elements, if every dim is a number."""
        return math.prod(int(dim) for dim in self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes as stored, if every dim is a number."""
        if self.fmt is not None:
            return formats.num_bytes(self)
        return self.num_elements * BITS[self.dtype] // 8

    @property
    def plain(self) -> Type:
        """The same, not packed."""
        return replace(self, fmt=None)

    @property
    def row(self) -> Type:
        """The type without its first dim: bf16[T, 576] -> bf16[576]."""
        return Type(self.dtype, self.shape[1:])

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a tensor's rows of one token: of bf16[4*T, 64], 4 rows, 512."""
        count, _, _ = str(self.shape[0]).rpartition("*")
        return int(count or 1) * self.row.num_bytes

    def with_size(self, dim: int, size: int) -> Type:
        """The same with another size of one dim."""
        shape = list(self.shape)
        shape[dim] = size
        return replace(self, shape=tuple(shape))

    def with_last(self, *dims: Dim) -> Type:
        """The same with the last dim replaced by `dims`."""
        return Type(self.dtype, (*self.shape[:-1], *dims))


@dataclass(frozen=True)
class BatchType:
    """The type of a step's `Batch`, which is one value and no tensor."""

    def __str__(self) -> str:
        return "Batch"


BATCH = BatchType()


def need(condition: bool, reason: str) -> None:
    """Raise ValueError unless the condition of a type or a recipe holds."""
    if not condition:
        raise ValueError(reason)
