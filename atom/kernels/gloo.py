"""The backend `gloo`: collectives of ranks on a CPU.

    communicator = GlooCommunicator(rendezvous)     # of all ranks, at about the same time
    total = communicator.all_reduce(x, axis="tensor")

On one host, small tensors go through memory that the ranks share, where each waits for the others. Larger ones, those
of ranks on several hosts and those between stages take torch's gloo: each rank listens at its host's own address, which
the others get over the connections to the driver. Gloo's data is neither encrypted nor authenticated.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed
from torch import Tensor

from atom.graph import TORCH_DTYPES, ops
from atom.kernels.backend import Backend, Held, Rendezvous, collective_kernels
from atom.kernels.dispatch import collect_rows, dispatch_rows, parts_of, plan_rows

CONNECT = timedelta(seconds=30)  # for all ranks to connect, once they have loaded their weights
LOOK = timedelta(seconds=0.2)  # between two checks that all ranks are alive
FOREVER = timedelta(days=365)  # for a collective: a stopped rank is waited for, and a dead one ends it at once
SHARED_BYTES = 1 << 20  # max size of a tensor that goes through shared memory
COUNTED_BYTES = 1 << 16  # of all ranks' rows, above which those for each rank are counted: 0.5 ms at 1 Gbit/s
LINE = 64  # bytes of a cache line
ORDERED = ("x86_64", "AMD64")  # processors with total store order
SPINS = 20  # polls of a counter before yielding the core and checking the other ranks


class GlooCommunicator:
    def __init__(self, rendezvous: Rendezvous) -> None:
        mesh = rendezvous.mesh
        axes = (*ops.MEETING_AXES, ops.STAGES)
        self._along = {axis: _Peers(rendezvous, axis) for axis in axes if mesh.size(axis) > 1}

    def num_ranks(self, axis: str) -> int:
        return self._along[axis].size

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        return self._along[axis].all_reduce(x)

    def all_gather(self, x: Tensor, *, axis: str, size: int) -> Tensor:
        parts = self._along[axis].all_gather(x)
        return ops.all_gather(parts, axis=axis, size=size)[0].contiguous()  # type: ignore[no-any-return]

    def gather_tokens(self, x: Tensor, weights: Tensor, ids: Tensor, *, axis: str, ranks: int) -> tuple[Tensor, ...]:
        return tuple(self._gather([x, weights, ids], axis))

    def _gather(self, xs: Sequence[Tensor], axis: str) -> list[Tensor]:
        """Concatenate each tensor's rows of all ranks."""
        tensors = [each.contiguous() for each in xs]
        widths = [each.shape[1] * each.itemsize for each in tensors]
        rows = torch.cat([each.view(torch.uint8) for each in tensors], 1)  # so that ranks meet once
        gathered = torch.split(torch.cat(self._along[axis].all_gather(rows)), widths, 1)
        return [part.contiguous().view(each.dtype) for part, each in zip(gathered, tensors, strict=True)]

    def reduce_scatter(self, x: Tensor, *, axis: str, ranks: int) -> Tensor:
        return self._along[axis].reduce_scatter(x)

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int
    ) -> tuple[Tensor, ...]:
        if x.nbytes * ranks <= COUNTED_BYTES:
            return self.gather_tokens(x, weights, ids, axis=axis, ranks=ranks)
        peers = self._along[axis]
        all_weights, all_ids = self._gather([weights, ids], axis)
        plan = plan_rows(all_ids, first, experts, peers.parts, peers.place)
        return dispatch_rows(x, plan, peers.exchange), all_weights, all_ids

    def collect(self, x: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int) -> Tensor:
        if x.nbytes <= COUNTED_BYTES:
            return self.reduce_scatter(x, axis=axis, ranks=ranks)
        peers = self._along[axis]
        return collect_rows(x, plan_rows(ids, first, experts, peers.parts, peers.place), peers.exchange)

    def send(self, x: Tensor, *, axis: str, to: int) -> Tensor:
        self._along[axis].send(x, to)
        return x

    def receive(self, like: Tensor, *, axis: str, source: int, columns: int | None, dtype: str) -> Tensor:
        x = torch.empty(len(like), *ops.row_shape(columns), dtype=TORCH_DTYPES[dtype])
        self._along[axis].receive(x, source)
        return x

    def take_held(self) -> list[Held]:
        return []  # a CPU has no graphs

    def watch(self, check: Callable[[], object]) -> None:
        """Have waiting collectives call this; it raises if a rank has ended."""
        for peers in self._along.values():
            peers.watch(check)

    def abort(self) -> None:
        """Nothing to do: only the host waits, and `watch` wakes it."""


class _Peers:
    """The ranks along one axis, for its collectives."""

    def __init__(self, rendezvous: Rendezvous, axis: str) -> None:
        gloo: Any = torch.distributed.ProcessGroupGloo  # of which the stubs say little; created without global state
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=rendezvous.host)]
        options._timeout = CONNECT
        rank, folder = rendezvous.rank, rendezvous.folder
        peers = rendezvous.mesh.peers(rank, axis)
        name, self.place, self.size = f"{axis}-{peers[0]}", peers.index(rank), len(peers)
        self.parts = parts_of(rendezvous.mesh, peers)
        self._store = ExchangeStore(rendezvous.exchange, name)  # gloo holds only its C++ part
        self._check: Callable[[], object] = lambda: None
        self._group = gloo(self._store, self.place, self.size, options)
        self._group._set_default_timeout(FOREVER)
        self._shared = None
        if axis == ops.STAGES:  # they wait long, and should not spin
            self._senders, self._receiver = [Waiter() for _ in peers], Waiter()
            self._sent: deque[Future[None]] = deque()  # what may not have been taken yet
        elif folder:
            self._shared = SharedMemory(self.place, self.size, folder / name, self._barrier)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._shared and self._shared.takes(x):
            return add(self._shared.exchange(x))
        total = x.clone(memory_format=torch.contiguous_format)
        self._wait(self._group.allreduce([total]))
        return total

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of each rank, valid until the next call."""
        x = x.contiguous()
        if self._shared and self._shared.takes(x):
            return self._shared.exchange(x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [x]))
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum of this rank's rows."""
        rows = len(x) // self.size
        own = slice(self.place * rows, (self.place + 1) * rows)
        if self._shared and self._shared.takes(x):
            return add([each[own] for each in self._shared.exchange(x)])
        return add(torch.split(self.exchange(x.contiguous(), [rows] * self.size, [rows] * self.size), rows))

    def exchange(self, rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        """All-to-all: rows [sum(sent), …], in the order of the ranks -> [sum(taken), …]. sent, taken: rows by rank"""
        got = rows.new_empty(sum(taken), *rows.shape[1:])
        self._wait(self._group.alltoall_base(got.view(torch.uint8), rows.view(torch.uint8), taken, sent))
        return got

    def send(self, x: Tensor, to: int) -> None:
        """Send a copy of a tensor to the rank at this place, without waiting."""
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        copied = x.clone(memory_format=torch.contiguous_format)
        self._sent.append(self._senders[to].start(self._group.send([copied], to, 0), copied))

    def receive(self, x: Tensor, source: int) -> None:
        """Fill a tensor with what the rank at this place sends."""
        done = self._receiver.start(self._group.recv([x], source, 0), x)
        while True:  # a time-out of gloo itself would end all its connections
            try:
                return done.result(LOOK.total_seconds())
            except TimeoutError:
                self._check_or_leave()

    def watch(self, check: Callable[[], object]) -> None:
        """Have waiting collectives call this; it raises if a rank has ended."""
        self._check = check
        if self._shared:
            self._shared.check = check

    def _wait(self, work: Any) -> None:
        """Wait for a collective; a host that is gone ends no connection of gloo, so check in between."""
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                self._check_or_leave()
                if work.is_completed():
                    raise

    def _check_or_leave(self) -> None:
        try:
            self._check()
        except BaseException:
            # destroying the group would wait for its pending work, which never ends: leak it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            raise

    def _barrier(self) -> None:
        self._group.barrier().wait()


class Waiter:
    """A thread that waits for transfers in order, and keeps their tensors alive meanwhile."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        threading.Thread(target=_wait_for_works, args=(self._works,), name="transfers", daemon=True).start()
        weakref.finalize(self, self._works.put, None)

    def start(self, work: Any, x: Tensor) -> Future[None]:
        """Queue a transfer of this tensor; the future is done when the transfer is."""
        done: Future[None] = Future()
        self._works.put((work, x, done))
        return done


Transfer = tuple[Any, Tensor, Future[None]]


def _wait_for_works(works: queue.SimpleQueue[Transfer | None]) -> None:
    while (each := works.get()) is not None:
        work, _, done = each
        try:
            work.wait()
            done.set_result(None)
        except RuntimeError as error:
            done.set_exception(error)
        del each, work, done, _


class ExchangeStore(torch.distributed.Store):  # type: ignore[misc, name-defined]
    """The store by which gloo's ranks find each other; every rank sets a key at the same time."""

    def __init__(self, exchange: Callable[[bytes], list[bytes]], name: str) -> None:
        """name: of this rank's group, as a prefix of its keys"""
        super().__init__()
        self._exchange, self._name, self._values = exchange, name, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        pairs = self._exchange(msgspec.msgpack.encode((f"{self._name}/{key}", bytes(value))))
        self._values.update(msgspec.msgpack.decode(pair, type=tuple[str, bytes]) for pair in pairs)

    def get(self, key: str) -> bytes:
        return self._values[f"{self._name}/{key}"]

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """Return at once: `set` has waited."""


def add(xs: Sequence[Tensor]) -> Tensor:
    """The sum, in the order of the ranks."""
    return ops.all_reduce(xs, axis="tensor")[0]  # type: ignore[no-any-return]


class SharedMemory:
    """Two buffers per rank, used in turn, and a counter of the tensors that it has written.

    A rank that writes its tensor n has read tensor n - 1 of all others, each of which had read tensor n - 2 of all
    before writing that, so two buffers are enough.
    """

    def __init__(self, rank: int, num_ranks: int, file: Path, barrier: Callable[[], None]) -> None:
        """barrier: waits for all ranks, which then have the file open"""
        self.check: Callable[[], object] = lambda: None
        self._rank, self._number = rank, 0
        self._is_ordered = platform.machine() in ORDERED
        head = num_ranks * LINE
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(descriptor, 0, head + num_ranks * 2 * SHARED_BYTES)  # fail now rather than on a write
        memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        barrier()
        self._counters = np.frombuffer(memory, np.int64, head // 8)[:: LINE // 8]
        self._places = torch.frombuffer(memory, dtype=torch.uint8, offset=head).view(num_ranks, 2, SHARED_BYTES)

    def takes(self, x: Tensor) -> bool:
        return self._is_ordered and 0 < x.nbytes <= SHARED_BYTES

    def exchange(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, valid until the next call."""
        self._number += 1
        turn, number, counters = self._number % 2, self._number, self._counters
        shown = [place[turn, : x.nbytes].view(x.dtype).view(x.shape) for place in self._places]
        shown[self._rank].copy_(x)
        counters[self._rank] = number
        spins = 0
        while counters.min() < number:
            spins += 1
            if spins % SPINS == 0:
                os.sched_yield()
                self.check()
        return shown


BACKEND = Backend(
    "gloo",
    collective_kernels("gloo", "cpu"),
    find_versions=lambda: {"torch": torch.__version__},
    connect=GlooCommunicator,
)
