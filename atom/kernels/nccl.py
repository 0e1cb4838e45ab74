"""The backend `nccl`: collectives of ranks on GPUs, by the library that torch brings.

    communicator = connect(rendezvous)              # on all ranks, at about the same time
    total = communicator.all_reduce(x, axis="tensor")

Small tensors are pushed into the peers' memory instead where GPUs can open each other's (`peers`).

NCCL, or RCCL on AMD's GPUs, which has the same functions, is called through ctypes on the current stream, so that a
CUDA graph takes a collective as any kernel, and nothing watches it but the driver of the ranks. Each group of ranks
along an axis has a communicator of its own, and so has each direction in which two stages send: a stage that sends
waits for nothing, on a stream of its own, since the other one may be sending too. A graph holds no such send, for it
would end with it: what it computes is sent behind each replay.

NVLink's multicast is never used. What ranks on several hosts send is neither encrypted nor authenticated.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from atom.errors import EngineDeadError, UnsupportedError
from atom.graph import TORCH_DTYPES, Mesh, ops
from atom.kernels import peers
from atom.kernels.backend import Backend, Communicator, Held, Rendezvous, collective_kernel
from atom.kernels.dispatch import Exchange, Plan, collect_rows, dispatch_rows, parts_of, plan_rows
from atom.process.messages import say

LIBRARIES = ("libnccl.so.2", "librccl.so.1")  # which torch has loaded
# of all ranks: a multicast object that one of them leaves behind can take the links of a whole machine down
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# of ranks on one host: else each collective in a CUDA graph takes 12 us more, to come behind those of other graphs, as
# it does here on the one stream that takes all steps
ONE_STREAM = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
DTYPES = {torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
BYTES, SUM = DTYPES[torch.uint8], 0
GRACE = 0.05  # seconds between the word that ranks are gone and the end of their communicators
COUNTED_BYTES = 1 << 20  # of all ranks' rows, from which the host waits to learn how many go where: some 50 us
WARM_UP = (1, 1 << 20)  # elements of float32: small and large tensors may take connections of their own

is_walking: ContextVar[bool] = ContextVar("is_walking", default=False)  # of this thread: nothing is launched


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Library:
    """The functions of NCCL. UnsupportedError where torch has brought none."""

    def __init__(self, *, is_one_host: bool) -> None:
        self._nccl = _open_library()
        for name, value in (NO_MULTICAST | (ONE_STREAM if is_one_host else {})).items():
            os.putenv(name, value)  # for C's getenv; it is read when the first communicator is made
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        ends = [number, pointer, pointer]  # dtype or rank, communicator, stream
        self.group_start = self._find("ncclGroupStart")
        self.group_end = self._find("ncclGroupEnd")
        self.all_reduce = self._find("ncclAllReduce", pointer, pointer, size, number, *ends)
        self.all_gather = self._find("ncclAllGather", pointer, pointer, size, *ends)
        self.reduce_scatter = self._find("ncclReduceScatter", pointer, pointer, size, number, *ends)
        self.send = self._find("ncclSend", pointer, size, number, *ends)
        self.receive = self._find("ncclRecv", pointer, size, number, *ends)
        self.abort = self._find("ncclCommAbort", pointer)
        self._get_unique_id = self._find("ncclGetUniqueId", ctypes.POINTER(UniqueId))
        self._init_rank = self._find("ncclCommInitRank", ctypes.POINTER(pointer), number, UniqueId, number)

    def make_id(self) -> bytes:
        """What one rank gives the others, to connect."""
        made = UniqueId()
        self._get_unique_id(ctypes.byref(made))
        return bytes(made)

    def connect(self, id: bytes, place: int, size: int) -> int:
        """Wait for so many ranks with this id; the communicator. place: of this one among them"""
        communicator = ctypes.c_void_p()
        self._init_rank(ctypes.byref(communicator), size, UniqueId.from_buffer_copy(id), place)
        assert communicator.value is not None, "NCCL has made one"
        return communicator.value

    def _find(self, name: str, *types: Any) -> Callable[..., None]:
        """A function by its name, which raises EngineDeadError where it fails."""
        function = getattr(self._nccl, name)
        function.argtypes = types

        def call(*args: Any) -> None:
            if (result := function(*args)) != 0:
                raise EngineDeadError(
                    f"{name}: {self._nccl.ncclGetErrorString(result).decode()}; NCCL_DEBUG=INFO says more"
                )

        return call


def _open_library() -> Any:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedError(
        f"ranks on GPUs need one of {', '.join(LIBRARIES)}, which torch brings; install torch for GPUs"
    )


class _Group(NamedTuple):
    """The ranks along an axis, as NCCL knows them."""

    handle: int
    place: int  # of this rank
    parts: tuple[int, ...]  # of the experts, that each has

    @property
    def size(self) -> int:
        return len(self.parts)


class NcclCommunicator:
    def __init__(self, rendezvous: Rendezvous) -> None:
        mesh, rank = rendezvous.mesh, rendezvous.rank
        self._nccl, self._is_dead = Library(is_one_host=rendezvous.folder is not None), threading.Event()
        self._stages = mesh.peers(rank, ops.STAGES)
        meeting = {axis: mesh.peers(rank, axis) for axis in ops.MEETING_AXES if mesh.size(axis) > 1}
        ways = [way for way in directions(self._stages) if rank in way]
        ids = self._share_ids(rendezvous, [*meeting.items(), *((ops.STAGES, way) for way in ways)])
        self._groups = {axis: self._connect(ids, axis, peers, mesh, rank) for axis, peers in meeting.items()}
        connected = {way: self._connect(ids, ops.STAGES, way, mesh, rank) for way in ways}  # in one order on all ranks
        self._senders = {to: group for (source, to), group in connected.items() if source == rank}
        self._receivers = {source: group for (source, to), group in connected.items() if to == rank}
        self._held: list[Held] = []
        self._streams: dict[int, Any] = {to: torch.cuda.Stream() for to in self._senders}  # type: ignore[no-untyped-call]
        self._handles = [group.handle for group in (*self._groups.values(), *connected.values())]
        weakref.finalize(self, abort, self._nccl, self._handles, self._is_dead).atexit = False
        self._warm_up(connected, sends_rows=rendezvous.folder is None)

    def _share_ids(self, rendezvous: Rendezvous, groups: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, bytes]:
        """The id of each group, by its name, which its first rank makes."""
        made = {_name(axis, ranks): self._nccl.make_id() for axis, ranks in groups if ranks[0] == rendezvous.rank}
        shared = rendezvous.exchange(msgspec.msgpack.encode(made))
        return {name: id for each in shared for name, id in msgspec.msgpack.decode(each, type=dict[str, bytes]).items()}

    def _connect(self, ids: dict[str, bytes], axis: str, ranks: tuple[int, ...], mesh: Mesh, rank: int) -> _Group:
        place, parts = ranks.index(rank), parts_of(mesh, ranks)
        return _Group(self._nccl.connect(ids[_name(axis, ranks)], place, len(ranks)), place, parts)

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        group, x = self._groups[axis], x.contiguous()
        total = torch.empty_like(x)
        if self._launches(x):
            own, out = x.data_ptr(), total.data_ptr()
            self._nccl.all_reduce(own, out, x.numel(), DTYPES[x.dtype], SUM, group.handle, _stream())
        return total

    def all_gather(self, x: Tensor, *, axis: str, size: int) -> Tensor:
        group, x = self._groups[axis], x.contiguous()
        parts = x.new_empty(group.size, *x.shape)
        if self._launches(x):
            self._nccl.all_gather(x.data_ptr(), parts.data_ptr(), x.nbytes, BYTES, group.handle, _stream())
        return parts.movedim(0, -2).flatten(-2)[..., :size].contiguous()

    def gather_tokens(self, x: Tensor, weights: Tensor, ids: Tensor, *, axis: str, ranks: int) -> tuple[Tensor, ...]:
        return tuple(self._gather([x, weights, ids], axis))

    def reduce_scatter(self, x: Tensor, *, axis: str, ranks: int) -> Tensor:
        group, x = self._groups[axis], x.contiguous()
        total = x.new_empty(len(x) // ranks, *x.shape[1:])
        if self._launches(x):
            own, out = x.data_ptr(), total.data_ptr()
            self._nccl.reduce_scatter(own, out, total.numel(), DTYPES[x.dtype], SUM, group.handle, _stream())
        return total

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int
    ) -> tuple[Tensor, ...]:
        if not self._counts(x, ranks):
            return self.gather_tokens(x, weights, ids, axis=axis, ranks=ranks)
        all_weights, all_ids = self._gather([weights, ids], axis)
        plan, exchange = self._plan(all_ids, first, axis, experts)
        return dispatch_rows(x, plan, exchange), all_weights, all_ids

    def collect(self, x: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int) -> Tensor:
        if not self._counts(x, 1):
            return self.reduce_scatter(x, axis=axis, ranks=ranks)
        return collect_rows(x, *self._plan(ids, first, axis, experts))

    def send(self, x: Tensor, *, axis: str, to: int) -> Tensor:
        if self._launches(x):
            send = partial(self._send_beside, rank=self._stages[to])
            if torch.cuda.is_current_stream_capturing():
                self._held.append(Held(x, send))
            else:
                send(x)
        return x

    def receive(self, like: Tensor, *, axis: str, source: int, columns: int | None, dtype: str) -> Tensor:
        x = torch.empty(len(like), *ops.row_shape(columns), dtype=TORCH_DTYPES[dtype], device=like.device)
        if self._launches(x):
            self._receive(x, self._receivers[self._stages[source]])
        return x

    def _gather(self, xs: Sequence[Tensor], axis: str) -> list[Tensor]:
        """The rows of each tensor of all ranks, one below the other."""
        group, tensors = self._groups[axis], [each.contiguous() for each in xs]
        gathered = [each.new_empty(group.size * len(each), *each.shape[1:]) for each in tensors]
        if self._launches(tensors[0]):
            stream = _stream()
            self._nccl.group_start()  # so that ranks meet once
            for each, out in zip(tensors, gathered, strict=True):
                self._nccl.all_gather(each.data_ptr(), out.data_ptr(), each.nbytes, BYTES, group.handle, stream)
            self._nccl.group_end()
        return gathered

    def _counts(self, x: Tensor, times: int) -> bool:
        """Whether rows are counted, and the host waits for that: not in a graph, whose sizes are fixed, nor of few
        bytes, so many times those of x. All ranks answer the same."""
        is_large = x.nbytes * times > COUNTED_BYTES
        return is_large and self._launches(x) and not torch.cuda.is_current_stream_capturing()

    def _plan(self, ids: Tensor, first: Tensor, axis: str, experts: int) -> tuple[Plan, Exchange]:
        group = self._groups[axis]
        return plan_rows(ids, first, experts, group.parts, group.place), partial(self._exchange, group)

    def _exchange(self, group: _Group, rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        """Send so many rows to each rank, one part below the other; those that come likewise."""
        got, stream = rows.new_empty(sum(taken), *rows.shape[1:]), _stream()
        self._nccl.group_start()
        for rank, (given, part) in enumerate(zip(torch.split(rows, sent), torch.split(got, taken), strict=True)):
            if len(given):
                self._nccl.send(given.data_ptr(), given.nbytes, BYTES, rank, group.handle, stream)
            if len(part):
                self._nccl.receive(part.data_ptr(), part.nbytes, BYTES, rank, group.handle, stream)
        self._nccl.group_end()
        return got

    def take_held(self) -> list[Held]:
        held, self._held = self._held, []
        return held

    def watch(self, check: Callable[[], object]) -> None:
        """The host waits in no collective."""

    def abort(self) -> None:
        """End the kernels of collectives, which may wait for a rank that is gone. None can be called from now on."""
        abort(self._nccl, self._handles, self._is_dead)

    def _launches(self, x: Tensor) -> bool:
        """Whether a collective of this tensor is launched."""
        if self._is_dead.is_set():
            raise EngineDeadError("the ranks have ended")
        return x.numel() > 0 and not is_walking.get()

    def _send_beside(self, x: Tensor, rank: int) -> None:
        """Send a copy on the stream for this rank."""
        copied, stream = x.clone(memory_format=torch.contiguous_format), self._streams[rank]
        stream.wait_stream(torch.cuda.current_stream())
        copied.record_stream(stream)
        self._send(copied, self._senders[rank], stream)

    def _send(self, x: Tensor, way: _Group, stream: Any) -> None:
        self._nccl.send(x.data_ptr(), x.nbytes, BYTES, 1, way.handle, stream.cuda_stream)

    def _receive(self, x: Tensor, way: _Group) -> None:
        self._nccl.receive(x.data_ptr(), x.nbytes, BYTES, 0, way.handle, _stream())

    def _warm_up(self, ways: Mapping[tuple[int, int], _Group], *, sends_rows: bool) -> None:
        """Have NCCL make its connections now: a CUDA graph should find them, and the memory that they take is known.

        sends_rows: each rank may send rows to each other one along `data`
        """
        for axis, group in self._groups.items():
            for size in WARM_UP:
                x = torch.zeros(group.size, -(-size // group.size), device="cuda")
                self.all_reduce(x, axis=axis)
                self.all_gather(x, axis=axis, size=x.shape[1] * group.size)
                self.reduce_scatter(x, axis=axis, ranks=group.size)
                if sends_rows and len(set(group.parts)) > 1 and axis == "data":
                    self._exchange(group, x, [1] * group.size, [1] * group.size)
        x = torch.zeros(1, device="cuda")
        for (_, to), way in ways.items():
            if to in self._senders:
                self._send(x, way, torch.cuda.current_stream())
            else:
                self._receive(x, way)
            torch.cuda.synchronize()
        torch.cuda.synchronize()


def directions(stages: Sequence[int]) -> list[tuple[int, int]]:
    """Which ranks send to which: hidden states to the next stage, logits from the last one to all."""
    *others, last = stages
    return [*itertools.pairwise(stages), *((last, each) for each in others)]


def _name(axis: str, ranks: tuple[int, ...]) -> str:
    return f"{axis} {' '.join(map(str, ranks))}"


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def abort(nccl: Library, handles: Sequence[int], is_dead: threading.Event) -> None:
    """End communicators in a thread of its own: NCCL waits there for graphs that have their kernels."""
    if is_dead.is_set():
        return
    is_dead.set()

    def end() -> None:
        time.sleep(GRACE)  # whoever has asked before now is through
        for handle in handles:
            threading.Thread(target=nccl.abort, args=(handle,), name="abort", daemon=True).start()

    threading.Thread(target=end, name="abort", daemon=True).start()


def connect(rendezvous: Rendezvous) -> Communicator:
    """Connect to the other ranks, which do so at about the same time. What is small is pushed, where it can be."""
    whole, meets = NcclCommunicator(rendezvous), any(rendezvous.mesh.size(axis) > 1 for axis in ops.MEETING_AXES)
    if rendezvous.collectives == "nccl" or not meets:
        return whole
    if rendezvous.collectives == "auto" and torch.version.hip is not None:
        if rendezvous.rank == 0:
            say("ranks meet through RCCL alone; parallel.collectives=peers pushes small tensors, not run on AMD yet")
        return whole
    try:
        return peers.connect(rendezvous, whole)
    except UnsupportedError as error:
        if rendezvous.collectives == "peers":
            raise
        if rendezvous.rank == 0:
            say(f"ranks meet through NCCL alone: {error}")
        return whole


@contextmanager
def compile_launches(_pool: Executor) -> Iterator[None]:
    """Within this context, this thread launches no collective; there is nothing to compile."""
    token = is_walking.set(True)
    try:
        yield
    finally:
        is_walking.reset(token)


BACKEND = Backend(
    "nccl",
    tuple(collective_kernel(op, "nccl", "cuda") for op in ops.OPS.values() if op.is_collective),
    compile_launches=compile_launches,
    connect=connect,
)
