"""The communicator of ranks whose GPUs share memory.

    communicator = PeerCommunicator(rendezvous, large)
    total = communicator.all_reduce(x, axis="tensor")

The path is chosen by size and number of ranks: one shot, two shots, tiles, or the communicator `large`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from atom.errors import EngineDeadError, UnsupportedError
from atom.graph import ops
from atom.kernels.backend import Communicator, Held, Rendezvous
from atom.kernels.peers import collectives, tiles
from atom.kernels.peers.collectives import DTYPES, MAX_PROGRAMS, MAX_RANKS, WORDS_BYTES, Arena
from atom.kernels.peers.memory import IpcMemory
from atom.kernels.peers.tiles import TILES_BYTES
from atom.kernels.triton.gpu import find_gpu

# Max bytes of the one-shot path by rank count: measured for 2; for more, where other implementations switch.
ONE_SHOT_BYTES = {2: 1 << 20, 3: 512 << 10, 4: 256 << 10}
ONE_SHOT_OF_MANY = 128 << 10  # with more ranks
TWO_SHOT_BYTES = 2 << 20  # max for two shots in words; doubled without a tiled path
# Max bytes of the tiled path by rank count. Above it NCCL wins; with 2 ranks the limit is 32-bit indexing. Off on AMD,
# where a barrier does not wait for the stores of all threads.
TILED_BYTES = {2: 4 << 30, 3: 16 << 20, 4: 16 << 20} if torch.version.hip is None else {}
GATHERED_BYTES = 8 << 20  # max of all ranks together for pushed gathers


class Ready(msgspec.Struct, frozen=True):
    """The message that ranks exchange before they open each other's memory."""

    units: int = 0  # multiprocessors
    handles: dict[str, bytes] = {}  # of its memory, by axis
    reason: str = ""  # why it has no memory to share


class PeerCommunicator:
    def __init__(
        self, rendezvous: Rendezvous, large: Communicator, make_memory: Callable[[int], Any] = IpcMemory
    ) -> None:
        """large: fallback for tensors over the push limits
        make_memory: allocator of memory that other ranks can open; takes a byte count

        UnsupportedError, on all ranks, if one cannot open another's memory.
        """
        if rendezvous.folder is None:
            raise UnsupportedError("ranks on several hosts share no memory")
        mesh, rank = rendezvous.mesh, rendezvous.rank
        if mesh.ranks_per_stage > MAX_RANKS:
            raise UnsupportedError(f"up to {MAX_RANKS} ranks push into each other's memory, not {mesh.ranks_per_stage}")
        peers = {axis: mesh.peers(rank, axis) for axis in ops.MEETING_AXES if mesh.size(axis) > 1}
        self.large, self._is_dead = large, threading.Event()
        self._memories: dict[str, Any] = {}
        ready = self._meet(rendezvous, lambda: self._allocate(peers, make_memory))
        programs = min(MAX_PROGRAMS, *(each.units for each in ready))
        self._stop = Stop(next(iter(self._memories.values())).device)
        self.arenas: dict[str, Arena] = {}

        def open_all() -> Ready:
            for axis, ranks in peers.items():
                self.arenas[axis] = self._open(axis, ranks, rank, ready, programs)
            return Ready()

        self._meet(rendezvous, open_all)

    def _meet(self, rendezvous: Rendezvous, prepare: Callable[[], Ready]) -> list[Ready]:
        """Exchange what all ranks have prepared. UnsupportedError, on all of them, if one could not."""
        try:
            own = prepare()
        except UnsupportedError as error:
            own = Ready(reason=str(error))
        shown = rendezvous.exchange(msgspec.msgpack.encode(own))
        every = [msgspec.msgpack.decode(each, type=Ready) for each in shown]
        for each in every:
            if each.reason:
                raise UnsupportedError(each.reason)
        return every

    def _allocate(self, peers: dict[str, tuple[int, ...]], make_memory: Callable[[int], Any]) -> Ready:
        for axis in peers:
            self._memories[axis] = make_memory(WORDS_BYTES + TILES_BYTES)
        handles = {axis: memory.handle for axis, memory in self._memories.items()}
        device = next(iter(self._memories.values())).device
        return Ready(find_gpu(device).units, handles)

    def _open(self, axis: str, ranks: tuple[int, ...], rank: int, ready: list[Ready], programs: int) -> Arena:
        memory = self._memories[axis]
        addresses = [memory.address if each == rank else memory.open(ready[each].handles[axis]) for each in ranks]
        table = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        epochs = torch.ones(programs, dtype=torch.int32, device=memory.device)
        return Arena(table, epochs, torch.zeros_like(epochs), self._stop.flag, ranks.index(rank))

    def num_ranks(self, axis: str) -> int:
        return self.arenas[axis].ranks

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        x = x.contiguous()
        if (arena := self._arena_for(axis, x)) is None or x.dtype not in DTYPES:
            return self.large.all_reduce(x, axis=axis)
        if x.nbytes <= min(ONE_SHOT_BYTES.get(arena.ranks, ONE_SHOT_OF_MANY), arena.room):
            return collectives.all_reduce(x, arena)
        tiled = TILED_BYTES.get(arena.ranks, 0)
        if x.nbytes <= min(TWO_SHOT_BYTES if tiled else 2 * TWO_SHOT_BYTES, arena.room * arena.ranks // 2):
            return collectives.all_reduce_in_parts(x, arena)
        if x.nbytes <= tiled:
            return tiles.all_reduce(x, arena)
        return self.large.all_reduce(x, axis=axis)

    def all_gather(self, x: Tensor, *, axis: str, size: int) -> Tensor:
        x = x.contiguous()
        arena, has_words = self._arena_for(axis, x), all(each * x.itemsize % 4 == 0 for each in (x.shape[-1], size))
        if arena is None or not has_words or not self._is_gathered(x.nbytes, arena):
            return self.large.all_gather(x, axis=axis, size=size)
        return collectives.all_gather(x, size, arena)

    def gather_tokens(self, x: Tensor, weights: Tensor, ids: Tensor, *, axis: str, ranks: int) -> tuple[Tensor, ...]:
        tensors = [each.contiguous() for each in (x, weights, ids)]
        if (arena := self._arena_of_tokens(axis, tensors)) is None:
            return self.large.gather_tokens(x, weights, ids, axis=axis, ranks=ranks)
        return tuple(collectives.gather_tokens(tensors, arena))

    def reduce_scatter(self, x: Tensor, *, axis: str, ranks: int) -> Tensor:
        x = x.contiguous()
        if (arena := self._arena_of_parts(axis, x, ranks)) is None:
            return self.large.reduce_scatter(x, axis=axis, ranks=ranks)
        return collectives.reduce_scatter(x, arena)

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int
    ) -> tuple[Tensor, ...]:
        tensors = [each.contiguous() for each in (x, weights, ids)]
        if (arena := self._arena_of_tokens(axis, tensors)) is None:
            return self.large.dispatch(x, weights, ids, first, axis=axis, ranks=ranks, experts=experts)
        return tuple(collectives.gather_tokens(tensors, arena))

    def collect(self, x: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int) -> Tensor:
        x = x.contiguous()
        if (arena := self._arena_of_parts(axis, x, ranks)) is None:
            return self.large.collect(x, ids, first, axis=axis, ranks=ranks, experts=experts)
        return collectives.reduce_scatter(x, arena)

    def send(self, x: Tensor, *, axis: str, to: int) -> Tensor:
        return self.large.send(x, axis=axis, to=to)

    def receive(self, like: Tensor, *, axis: str, source: int, columns: int | None, dtype: str) -> Tensor:
        return self.large.receive(like, axis=axis, source=source, columns=columns, dtype=dtype)

    def take_held(self) -> list[Held]:
        return self.large.take_held()

    def watch(self, check: Callable[[], object]) -> None:
        self.large.watch(check)

    def abort(self) -> None:
        """End the kernels that wait for a rank that has ended. None can be called from then on."""
        self._is_dead.set()
        self._stop.set()
        self.large.abort()

    def _arena_for(self, axis: str, *xs: Tensor) -> Arena | None:
        """The arena along an axis; None if a tensor does not consist of whole words."""
        if self._is_dead.is_set():
            raise EngineDeadError("the ranks have ended")
        return self.arenas[axis] if all(x.nbytes and x.nbytes % 4 == x.data_ptr() % 4 == 0 for x in xs) else None

    def _arena_of_tokens(self, axis: str, tensors: Sequence[Tensor]) -> Arena | None:
        """The arena to gather these tensors in; None if they are too large to push."""
        arena, size = self._arena_for(axis, *tensors), sum(each.nbytes for each in tensors)
        return None if arena is None or not self._is_gathered(size, arena) else arena

    def _arena_of_parts(self, axis: str, x: Tensor, ranks: int) -> Arena | None:
        """The arena to reduce-scatter in; None if the parts cannot be pushed."""
        arena, part = self._arena_for(axis, x), x.nbytes // ranks
        if arena is None or x.dtype not in DTYPES or part % 4 or not self._is_gathered(part, arena):
            return None
        return arena

    def _is_gathered(self, part: int, arena: Arena) -> bool:
        """Whether to push `part` bytes of each rank to all others."""
        return part <= min(GATHERED_BYTES // arena.ranks, arena.room)


class Stop:
    """A flag on which kernels stop waiting, set from another stream than theirs."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._values = torch.arange(2, dtype=torch.int32, pin_memory=is_gpu)
        self._stream = torch.cuda.Stream() if is_gpu else None  # type: ignore[no-untyped-call]
        self._copy(0)  # CUDA's set-up for the first copy could wait for the kernels

    def set(self) -> None:
        self._copy(1)

    def _copy(self, value: int) -> None:
        with torch.cuda.stream(self._stream):
            self.flag.copy_(self._values[value : value + 1], non_blocking=True)
