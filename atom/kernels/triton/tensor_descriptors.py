"""Cache TMA tensor descriptors by address.

One is made once for a weight, a cache, and what steps of one size have in one place.

boxes = Boxes((64, 64), layout)                            # what one copy brings, and how it lies in shared memory
kernel[grid](boxes.find(x, tuple(x.shape), x.stride()))    # the same object for the same memory
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom.kernels.triton.launch_cache import Described

KEPT = 1024  # descriptors of a kind of boxes: a model of 100 layers has some hundred weights and caches, steps the rest


class _Memory(NamedTuple):
    """What a descriptor has for a tensor, which it must not keep alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class _Box(TensorDescriptor, Described):  # type: ignore[misc]
    pass


class Boxes:
    """Descriptors of tensors of which a copy brings the same."""

    def __init__(self, shape: tuple[int, ...], layout: Any) -> None:
        kinds: dict[torch.dtype, object] = {}

        @lru_cache(KEPT)
        def make(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            box = _Box(_Memory(address, dtype), list(sizes), list(strides), list(shape), layout)
            box.kind, box.made = kinds.setdefault(dtype, object()), {}
            return box

        self._make = make

    def find(self, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """The descriptor of x, seen with these sizes and strides."""
        return self._make(x.data_ptr(), x.dtype, sizes, strides)
