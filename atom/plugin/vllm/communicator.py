"""Collectives of atom's programs by vLLM's groups of ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from atom.errors import UnsupportedError
from atom.kernels.backend import Held


class GroupCommunicator:
    """The ranks of vLLM's tensor parallel group, along `tensor`."""

    def num_ranks(self, axis: str) -> int:
        size: int = get_tensor_model_parallel_world_size()
        return size

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        total: Tensor = tensor_model_parallel_all_reduce(x)
        return total

    def all_gather(self, x: Tensor, *, axis: str, size: int) -> Tensor:
        gathered: Tensor = tensor_model_parallel_all_gather(x.contiguous(), dim=-1)
        return gathered[..., :size].contiguous()

    def gather_tokens(self, x: Tensor, weights: Tensor, ids: Tensor, *, axis: str, ranks: int) -> tuple[Tensor, ...]:
        raise _unsupported("gather_tokens")

    def reduce_scatter(self, x: Tensor, *, axis: str, ranks: int) -> Tensor:
        raise _unsupported("reduce_scatter")

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int
    ) -> tuple[Tensor, ...]:
        raise _unsupported("dispatch")

    def collect(self, x: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int) -> Tensor:
        raise _unsupported("collect")

    def send(self, x: Tensor, *, axis: str, to: int) -> Tensor:
        raise _unsupported("send")

    def receive(self, like: Tensor, *, axis: str, source: int, columns: int | None, dtype: str) -> Tensor:
        raise _unsupported("receive")

    def take_held(self) -> list[Held]:
        """Nothing: only stages of a pipeline send, and these are refused."""
        return []

    def watch(self, check: Callable[[], object]) -> None:
        """vLLM watches over its workers."""

    def abort(self) -> None:
        """vLLM ends its workers."""


class NoCommunicator(GroupCommunicator):
    """Returns tensors of the right shapes while kernels are compiled and nothing is computed."""

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor, *, axis: str, size: int) -> Tensor:
        return x.new_zeros(*x.shape[:-1], size)


def _unsupported(op: str) -> UnsupportedError:
    return UnsupportedError(f"{op}: inside vLLM ranks divide only layers and experts (--tensor-parallel-size)")
