"""Sums in a fixed order, of columns and of ranks, for batch-invariant backends.

    total = sum_columns(weights)             # [T, k] -> [T], from the first to the last
    out = combine(y, weights, order)         # [k T, H] -> [T, H]
    kernel = all_reduce_kernel("fixed_cpp", "cpu")

torch adds two tensors number by number, each rounded once, so that such sums have the same bits for any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from atom.errors import UnsupportedError
from atom.graph import ops
from atom.kernels.backend import Communicator, Kernel, LoadContext, on_device


def sum_columns(x: Tensor) -> Tensor:
    """[T, k] -> [T]"""
    total = x[:, 0]
    for column in x.unbind(1)[1:]:
        total = total + column
    return total


def combine(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """x [k T, H], weights fp32[T, k], order i64[k T] -> [T, H], by a token's choices in their order"""
    by_token = torch.empty_like(x).index_copy_(0, order, x).view(*weights.shape, -1)
    total = x.new_zeros(len(weights), x.shape[1], dtype=torch.float32)
    for choice in range(weights.shape[1]):
        total = total + by_token[:, choice].float() * weights[:, choice, None]
    return total.to(x.dtype)


def all_reduce(communicator: Communicator, x: Tensor, *, axis: str) -> Tensor:
    """x [...] of each rank -> their sum [...], of what the ranks gather"""
    columns = x.shape[-1]
    gathered = communicator.all_gather(x, axis=axis, size=communicator.num_ranks(axis) * columns)
    total, *others = torch.split(gathered, columns, -1)
    for part in others:
        total = total + part
    return total.contiguous()


def all_reduce_kernel(backend: str, device: str) -> Kernel:
    """The sum over ranks in their order: a library's own order depends on the number of bytes."""

    def load(context: LoadContext) -> Callable[..., Tensor]:
        if context.communicator is None:
            raise UnsupportedError("all_reduce is for several ranks, and this is one: set parallel")
        return partial(all_reduce, context.communicator)

    return Kernel(ops.all_reduce, backend, on_device(device), load, batch_invariant=True)
