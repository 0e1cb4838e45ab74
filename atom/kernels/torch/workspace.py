"""Memory that a kernel keeps from step to step, and what it reads into it: keys and values of a paged cache in float32.

    workspace = Workspace()
    reader = Reader(workspace, cache, slots)    # once a step
    reader.read(cache)                          # each layer: two calls of torch
    scores = q @ reader.keys.mT

Float32, since torch's batched products of bf16 round each score, and its conversion costs less than they gain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Memory by name, for one user of a name at a time. It grows by doubling, so that a step hardly ever allocates."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous tensor."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name, dtype] = torch.empty(1 << (size - 1).bit_length(), dtype=dtype)
        return buffer[:size].view(shape)


class Reader:
    """I times C slots of a cache: `keys` and `values` fp32[I K, C, D], once `read` has run."""

    def __init__(self, workspace: Workspace, cache: Tensor, slots: Tensor) -> None:
        """cache [blocks, block size, 2, K, D], slots i64[I, C]: block number * block size + place in the block"""
        (num, size), (kv_heads, dim) = slots.shape, cache.shape[3:]
        self._slots = slots.flatten().int()
        self._stored = workspace.take("stored", num * size, 2, kv_heads, dim, dtype=cache.dtype)
        self._by_head = self._stored.view(num, size, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
        self._wide = workspace.take("wide", *self._by_head.shape)
        self.keys, self.values = self._wide.view(2, num * kv_heads, size, dim).unbind()

    def read(self, cache: Tensor) -> None:
        torch.index_select(cache.view(-1, *cache.shape[2:]), 0, self._slots, out=self._stored)
        self._wide.copy_(self._by_head)
