"""The backend `gloo`: collectives of ranks on a CPU, over torch's process group.

    communicator = GlooCommunicator(rank=1, num_ranks=4, folder)     # of all ranks, at about the same time
    total = communicator.all_reduce(x)

Nothing listens but on this host's loopback address; the ranks find each other by a file in a private folder.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from atom.errors import UnsupportedError
from atom.graph import ops
from atom.graph.ops import Op
from atom.kernels.backend import Backend, Kernel, LoadContext, on_device

LOOPBACK = "127.0.0.1"
CONNECT = timedelta(seconds=30)  # for all ranks to be there, which have loaded their weights
TIMEOUT = timedelta(minutes=5)  # of a collective; a rank that is gone ends it at once


class GlooCommunicator:
    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        """folder: a private one, the same of all ranks"""
        gloo: Any = torch.distributed.ProcessGroupGloo  # whose stubs say little; one that no global state knows
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = CONNECT
        store = torch.distributed.FileStore(str(folder / "store"), num_ranks)  # type: ignore[attr-defined]
        self.num_ranks = num_ranks
        self._group = gloo(store, rank, num_ranks, options)
        self._group._set_default_timeout(TIMEOUT)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor, *, size: int) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self._group.allgather([parts], [x]).wait()
        return torch.cat(parts, -1)[..., :size].contiguous()


def _kernel(op: Op) -> Kernel:
    def load(context: LoadContext) -> Callable[..., Any]:
        if context.communicator is None:
            raise UnsupportedError(f"{op.name} is for several ranks, and this is one: set parallel.tensor")
        return getattr(context.communicator, op.name)  # type: ignore[no-any-return]

    return Kernel(op, "gloo", on_device("cpu"), load)


BACKEND = Backend(
    "gloo",
    tuple(_kernel(op) for op in ops.OPS.values() if op.is_collective),
    find_versions=lambda: {"torch": torch.__version__},
    connect=GlooCommunicator,
)
