"""Cache TMA tensor descriptors by address, dtype, sizes and strides.

descriptors = TensorDescriptors((64, 64), layout)               # the block of one copy, and its layout in shared memory
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
