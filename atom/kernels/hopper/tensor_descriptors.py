"""Cache TMA tensor descriptors by address, dtype, sizes and strides.

descriptors = TensorDescriptors((64, 64), layout)               # the block of one copy, and its layout in shared memory
x = align_rows(x)                                               # copied where the TMA would not take it
kernel[grid](descriptors.find(x, tuple(x.shape), x.stride()))   # the same object for the same memory
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

KEPT = 1024  # descriptors of one block shape: a model of 100 layers has some hundred weights and caches, steps the rest


class _Memory(NamedTuple):
    """Stands for a tensor in a descriptor, which must not keep the tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def align_rows(x: Tensor) -> Tensor:
    """x [T, ...] of 2 bytes an element, copied unless its rows begin at multiples of 16 bytes, as the TMA requires."""
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


class TensorDescriptors:
    """Descriptors of tensors that are copied in blocks of one shape."""

    def __init__(self, block_shape: tuple[int, ...], layout: Any) -> None:
        @lru_cache(KEPT)
        def make(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            return TensorDescriptor(_Memory(address, dtype), list(sizes), list(strides), list(block_shape), layout)

        self._make = make

    def find(self, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Find or make the descriptor of x with these sizes and strides."""
        return self._make(x.data_ptr(), x.dtype, sizes, strides)
