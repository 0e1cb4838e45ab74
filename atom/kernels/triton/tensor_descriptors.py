"""Cache TMA tensor descriptors by address.

One is made once for a weight, a cache, and what steps of one size have in one place.

boxes = Boxes((64, 64), layout)                            # the block of one copy, and its layout in shared memory
kernel[grid](boxes.find(x, tuple(x.shape), x.stride()))    # the same object for the same memory
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom.kernels.triton.launch_cache import Described

KEPT = 1024  # descriptors of one block shape: some hundred for the weights and caches of 100 layers, the rest for steps


class _Memory(NamedTuple):
    """Stands for a tensor in a descriptor, which must not keep the tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class _Box(TensorDescriptor, Described):  # type: ignore[misc]
    pass


class Boxes:
    """The descriptors of tensors that are copied in blocks of one shape."""

    def __init__(self, shape: tuple[int, ...], layout: Any) -> None:
        kinds: dict[torch.dtype, object] = {}

        @lru_cache(KEPT)
        def make(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            box = _Box(_Memory(address, dtype), list(sizes), list(strides), list(shape), layout)
            box.kind, box.made = kinds.setdefault(dtype, object()), {}
            return box

        self._make = make

    def find(self, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Find or make the descriptor of x with these sizes and strides."""
        return self._make(x.data_ptr(), x.dtype, sizes, strides)
