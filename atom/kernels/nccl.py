"""The backend `nccl`: collectives of ranks on GPUs, by the NCCL of torch.

    communicator = connect(rendezvous)              # on all ranks, at about the same time
    total = communicator.all_reduce(x, axis="tensor")

If GPUs can open each other's memory, small tensors are pushed into it instead (`peers`).

NCCL, or RCCL on AMD's GPUs, which has the same functions, is called through ctypes on the current stream, so that a
CUDA graph captures a collective like any kernel, and only the driver of the ranks watches it. Each group of ranks along
an axis has its own communicator, and so has each direction in which two stages send: a stage sends on a stream of its
own without waiting, since the other one may be sending too. A graph holds no send, since it would end only with it:
what a graph computes is sent after each replay.

NVLink's multicast is never used. Data between hosts is neither encrypted nor authenticated.
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
from atom.kernels.backend import Backend, Communicator, Held, Rendezvous, collective_kernels
from atom.kernels.dispatch import Exchange, Plan, collect_rows, dispatch_rows, parts_of, plan_rows
from atom.process.messages import say

LIBRARIES = ("libnccl.so.2", "librccl.so.1")  # which torch has loaded
# for all ranks: a multicast object that outlives its process can take the links of a whole machine down
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# for ranks on one host: otherwise each collective in a CUDA graph takes 12 us more, to be ordered after those of other
# graphs; here one stream runs all steps, which orders them
ONE_STREAM = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
DTYPES = {torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
BYTES, SUM = DTYPES[torch.uint8], 0
GRACE = 0.05  # seconds between the news that ranks have ended and the abort of their communicators
COUNTED_BYTES = 1 << 20  # of all ranks' rows, above which the host waits for their counts by rank: about 50 us
WARM_UP = (1, 1 << 20)  # float32 elements: small and large tensors may use different connections

is_walking: ContextVar[bool] = ContextVar("is_walking", default=False)  # in this thread: nothing is launched


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Library:
    """The functions of NCCL. UnsupportedError if torch comes without it."""

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
        self.broadcast = self._find("ncclBroadcast", pointer, pointer, size, number, *ends)
        self.send = self._find("ncclSend", pointer, size, number, *ends)
        self.receive = self._find("ncclRecv", pointer, size, number, *ends)
        self.abort = self._find("ncclCommAbort", pointer)
        self._get_unique_id = self._find("ncclGetUniqueId", ctypes.POINTER(UniqueId))
        self._init_rank = self._find("ncclCommInitRank", ctypes.POINTER(pointer), number, UniqueId, number)

    def make_id(self) -> bytes:
        """The id that one rank shares with the others, to connect."""
        made = UniqueId()
        self._get_unique_id(ctypes.byref(made))
        return bytes(made)

    def connect(self, id: bytes, place: int, size: int) -> int:
        """Wait for all `size` ranks with this id; the communicator. place: of this rank among them"""
        communicator = ctypes.c_void_p()
        self._init_rank(ctypes.byref(communicator), size, UniqueId.from_buffer_copy(id), place)
        assert communicator.value is not None, "NCCL has made one"
        return communicator.value

    def _find(self, name: str, *types: Any) -> Callable[..., None]:
        """A function by its name, which raises EngineDeadError if it fails."""
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
    """The ranks along an axis, with their NCCL communicator."""

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
        """The id of each group, by its name; its first rank makes it."""
        made = {_name(axis, ranks): self._nccl.make_id() for axis, ranks in groups if ranks[0] == rendezvous.rank}
        shared = rendezvous.exchange(msgspec.msgpack.encode(made))
        return {name: id for each in shared for name, id in msgspec.msgpack.decode(each, type=dict[str, bytes]).items()}

    def _connect(self, ids: dict[str, bytes], axis: str, ranks: tuple[int, ...], mesh: Mesh, rank: int) -> _Group:
        place, parts = ranks.index(rank), parts_of(mesh, ranks)
        return _Group(self._nccl.connect(ids[_name(axis, ranks)], place, len(ranks)), place, parts)

    def num_ranks(self, axis: str) -> int:
        return self._groups[axis].size

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
            send = partial(self._send_on_own_stream, rank=self._stages[to])
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
        """Concatenate each tensor's rows of all ranks."""
        group, tensors = self._groups[axis], [each.contiguous() for each in xs]
        gathered = [each.new_empty(group.size * len(each), *each.shape[1:]) for each in tensors]
        if self._launches(tensors[0]):
            stream = _stream()
            self._nccl.group_start()  # one launch for all
            for each, out in zip(tensors, gathered, strict=True):
                self._nccl.all_gather(each.data_ptr(), out.data_ptr(), each.nbytes, BYTES, group.handle, stream)
            self._nccl.group_end()
        return gathered

    def _counts(self, x: Tensor, times: int) -> bool:
        """Whether to count the rows for each rank, for which the host waits: not in a graph, whose sizes are fixed, nor
        for few bytes (those of x, `times` over). All ranks decide the same."""
        is_large = x.nbytes * times > COUNTED_BYTES
        return is_large and self._launches(x) and not torch.cuda.is_current_stream_capturing()

    def _plan(self, ids: Tensor, first: Tensor, axis: str, experts: int) -> tuple[Plan, Exchange]:
        group = self._groups[axis]
        return plan_rows(ids, first, experts, group.parts, group.place), partial(self._exchange, group)

    def _exchange(self, group: _Group, rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        """All-to-all: rows [sum(sent), …], in the order of the ranks -> [sum(taken), …]. sent, taken: rows by rank"""
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
        """Nothing to do: the host waits in no collective."""

    def abort(self) -> None:
        """End the kernels of collectives, which may wait for a rank that has ended. None can be called from then on."""
        abort(self._nccl, self._handles, self._is_dead)

    def _launches(self, x: Tensor) -> bool:
        """Whether a collective of this tensor is launched."""
        if self._is_dead.is_set():
            raise EngineDeadError("the ranks have ended")
        return x.numel() > 0 and not is_walking.get()

    def _send_on_own_stream(self, x: Tensor, rank: int) -> None:
        """Send a copy, on the stream of this rank."""
        copied, stream = x.clone(memory_format=torch.contiguous_format), self._streams[rank]
        stream.wait_stream(torch.cuda.current_stream())
        copied.record_stream(stream)
        self._send(copied, self._senders[rank], stream)

    def _send(self, x: Tensor, way: _Group, stream: Any) -> None:
        self._nccl.send(x.data_ptr(), x.nbytes, BYTES, 1, way.handle, stream.cuda_stream)

    def _receive(self, x: Tensor, way: _Group) -> None:
        self._nccl.receive(x.data_ptr(), x.nbytes, BYTES, 0, way.handle, _stream())

    def _warm_up(self, ways: Mapping[tuple[int, int], _Group], *, sends_rows: bool) -> None:
        """Have NCCL make its connections now, before CUDA graphs are captured and free memory is measured.

        sends_rows: ranks may send each other rows along `data`
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
    """(source, destination) of all sends: hidden states to the next stage, logits from the last one to all."""
    *others, last = stages
    return [*itertools.pairwise(stages), *((last, each) for each in others)]


def _name(axis: str, ranks: tuple[int, ...]) -> str:
    return f"{axis} {' '.join(map(str, ranks))}"


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def abort(nccl: Library, handles: Sequence[int], is_dead: threading.Event) -> None:
    """Abort communicators, in threads: NCCL waits there for graphs that hold their kernels."""
    if is_dead.is_set():
        return
    is_dead.set()

    def end() -> None:
        time.sleep(GRACE)  # calls that have passed the check are done
        for handle in handles:
            threading.Thread(target=nccl.abort, args=(handle,), name="abort", daemon=True).start()

    threading.Thread(target=end, name="abort", daemon=True).start()


def connect(rendezvous: Rendezvous) -> Communicator:
    """Connect to the other ranks, which call this at about the same time. Small tensors are pushed if possible."""
    whole, meets = NcclCommunicator(rendezvous), any(rendezvous.mesh.size(axis) > 1 for axis in ops.MEETING_AXES)
    if rendezvous.collectives == "nccl" or not meets:
        return whole
    if rendezvous.collectives == "auto" and torch.version.hip is not None:
        if rendezvous.rank == 0:
            say("ranks use only RCCL; parallel.collectives=peers pushes small tensors, not run on AMD yet")
        return whole
    try:
        return peers.connect(rendezvous, whole)
    except UnsupportedError as error:
        if rendezvous.collectives == "peers":
            raise
        if rendezvous.rank == 0:
            say(f"ranks use only NCCL: {error}")
        return whole


@contextmanager
def compile_launches(_pool: Executor) -> Iterator[None]:
    """Within this context, this thread launches no collective. There is nothing to compile."""
    token = is_walking.set(True)
    try:
        yield
    finally:
        is_walking.reset(token)


BACKEND = Backend(
    "nccl",
    collective_kernels("nccl", "cuda"),
    compile_launches=compile_launches,
    connect=connect,
)
