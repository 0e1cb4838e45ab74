"""Workspace memory kept from step to step, and float32 reads of a cache.

    workspace = Workspace()
    reader = Reader(workspace, cache, value_dim, slots)    # once a step
    reader.read(cache)                                     # each layer: two calls of torch
    scores = q @ reader.keys.mT

Float32, since torch's batched bf16 matmuls round each score, and converting costs less than they save.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom.graph.ops.latent import find_keys

FP8 = torch.float8_e4m3fn


class Workspace:
    """Buffers by name, each for one user at a time. They grow to powers of 2, so that a step rarely allocates."""

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
    """I times C slots of a cache: `keys` fp32[I K, C, D] and `values` fp32[I K, C, U], once `read` has run.

    A slot holds planes of K heads: the first is of keys, and values are the first U dims of the last, which may be the
    same one. In fp8 the dims after them may be bytes of numbers in another dtype, `tail`, as for latents.
    """

    def __init__(self, workspace: Workspace, cache: Tensor, value_dim: int, slots: Tensor,
                 tail: torch.dtype | None = None) -> None:  # fmt: skip
        """cache [blocks, block size, planes, K, D], slots i64[I, C]: block number * block size + offset in the block"""
        (num, size), (planes, kv_heads, dim) = slots.shape, cache.shape[2:]
        tail = tail if cache.dtype is FP8 else None

        def by_head(numbers: Tensor) -> Tensor:
            return numbers.view(num, size, planes, kv_heads, -1).permute(2, 0, 3, 1, 4)

        self._slots = slots.flatten().int()
        self._stored = workspace.take("stored", num * size, planes, kv_heads, dim, dtype=cache.dtype)
        self._numbers, self._tail, self._halves = self._stored, None, None
        if tail is not None:
            first = find_keys(value_dim, tail.itemsize)
            self._numbers, self._tail = self._stored[..., :value_dim], by_head(self._stored[..., first:].view(tail))
        if cache.dtype is FP8:
            self._halves = workspace.take("halves", *self._numbers.shape, dtype=torch.int16)
        self._by_head = by_head(self._numbers if self._halves is None else self._halves.view(torch.float16))
        wide_dim = self._by_head.shape[-1] + (0 if self._tail is None else self._tail.shape[-1])
        self._wide = workspace.take("wide", *self._by_head.shape[:-1], wide_dim)
        wide = self._wide.view(planes, num * kv_heads, size, wide_dim)
        self.keys, self.values = wide[0], wide[-1, ..., :value_dim]

    def read(self, cache: Tensor) -> None:
        self.gather(cache)
        if self._halves is None:
            self._wide.copy_(self._by_head)
            return
        # the bits of e4m3 as those of an fp16, of 1/256 the value; torch's conversion takes ten times as long
        self._halves.copy_(self._numbers.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(0xBF80 - (1 << 16))
        self._wide[..., : self._by_head.shape[-1]].copy_(self._by_head).mul_(256)
        if self._tail is not None:
            self._wide[..., self._by_head.shape[-1] :].copy_(self._tail)

    def gather(self, cache: Tensor) -> Tensor:
        """The slots as stored, [I C, planes, K, D]."""
        return torch.index_select(cache.view(-1, *cache.shape[2:]), 0, self._slots, out=self._stored)
