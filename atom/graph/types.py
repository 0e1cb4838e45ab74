"""Tensor types: a dtype and a shape of numbers and symbols.

Type("bf16", ("T", 576))            # bf16[T, 576]: T tokens of 576 numbers
Type("bf16", (576, 576)).num_bytes  # 663552
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Dim = int | str

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "i64": 64, "i32": 32, "u8": 8, "bool": 8}


@dataclass(frozen=True)
class Type:
    dtype: str  # a key of BITS
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else self.dtype

    @property
    def num_elements(self) -> int:
        """The number of elements, where every dim is a number."""
        return math.prod(int(dim) for dim in self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes, where every dim is a number."""
        return self.num_elements * BITS[self.dtype] // 8

    @property
    def row(self) -> Type:
        """The type without its first dim: bf16[T, 576] -> bf16[576]."""
        return Type(self.dtype, self.shape[1:])

    def with_last(self, *dims: Dim) -> Type:
        """The same with the last dim replaced by `dims`."""
        return Type(self.dtype, (*self.shape[:-1], *dims))
