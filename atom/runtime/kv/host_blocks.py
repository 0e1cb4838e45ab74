"""Copy KV blocks to host memory and back while steps run.

    host = HostBlocks(model, {"full": 4096})           # on each rank, for its own part of the KV
    host.costs = measure(model, host, 2048)            # whether loading is faster than computing
    host.copy(BlockCopies(saves={"full": [(7, 1)]}))   # block 7 to the host's block 1
    host.join()                                        # the next step waits for these copies

A block of the host is one row of bytes: what all layers of a kind keep in a block, concatenated. With a GPU, rows are
pinned, and a separate stream gathers blocks in a staging buffer on the GPU and copies consecutive rows at once. A CPU
copies the same way, and waits.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from atom.errors import CapacityError, naming_a_lack_of_memory
from atom.kernels.host_memory import pin, unpin
from atom.runtime.kv.cache import SAVED_BYTES
from atom.runtime.kv.files import Block, KVFiles
from atom.runtime.step.input import BatchShape
from atom.runtime.step.model import Model
from atom.runtime.step.program import score
from atom.runtime.step.request_state import zeros
from atom.runtime.types import BlockCopies, StateKind, SwapCosts

NUM_TIMED = 3  # runs, of which the fastest counts

Pairs = Sequence[tuple[int, int]]


def plan_host_blocks(kinds: Sequence[StateKind], memory_bytes: int) -> dict[str, int]:
    """The number of blocks that fit in host memory, including block 0; CapacityError if none.

    They hold equally many tokens of all kinds, but copies of recurrent state share the memory with the others.
    """
    stride = max((kind.stride for kind in kinds), default=1)  # blocks of tokens for one of the kind with the fewest
    num_blocks = {kind.name: stride // kind.stride for kind in kinds}
    sizes = {
        in_slot: sum(num_blocks[kind.name] * kind.block_bytes for kind in kinds if kind.rule.in_slot == in_slot)
        for in_slot in (False, True)
    }
    num_shares = sum(size > 0 for size in sizes.values())
    needed = 2 * num_shares * max(sizes.values())
    if memory_bytes < needed:
        raise CapacityError(f"serve.swap_space={memory_bytes} is less than two blocks of KV: raise it to {needed}")
    return {kind.name: memory_bytes // num_shares // sizes[kind.rule.in_slot] * num_blocks[kind.name] for kind in kinds}


class HostBlocks:
    def __init__(self, model: Model, num_blocks: Mapping[str, int]) -> None:
        """
        num_blocks: by state kind, including block 0; a pipeline stage holds those of its layers

        Raises CapacityError if they cannot be allocated or pinned.
        """
        self.num_blocks = num_blocks
        self.costs: SwapCosts | None = None
        self.files: KVFiles | None = None  # where blocks go that are evicted from host memory
        self._model = model
        states = model.graph.states()
        widths = {
            kind: [state.block(model.block_size).num_bytes for state in states if state.kind == kind]
            for kind in dict.fromkeys(state.kind for state in states)
        }
        divisor = math.gcd(*(width for each in widths.values() for width in each))
        self._unit = torch.int64 if divisor % torch.int64.itemsize == 0 else torch.uint8
        self._sizes = {kind: sum(each) // self._unit.itemsize for kind, each in widths.items()}  # of a row
        self.num_bytes = {kind: size * self._unit.itemsize for kind, size in self._sizes.items()}  # of a block
        self._stream = None if model.is_cpu else torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None  # end of the newest copies, which no step waits for yet
        self._due: torch.cuda.Event | None = None  # end of the copies that the next step waits for
        num_bytes = sum(num_blocks[kind] * size for kind, size in self.num_bytes.items())
        with naming_a_lack_of_memory(f"serve.swap_space: the system has no {num_bytes} bytes for it; lower it"):
            self._rows = {
                kind: zeros((num_blocks[kind], size), self._unit, torch.device("cpu"))
                for kind, size in self._sizes.items()
            }
            num_staged = max(SAVED_BYTES // self._unit.itemsize, *self._sizes.values())
            self._staging = torch.empty(num_staged, dtype=self._unit, device=model.device)
        if self._stream is not None:
            for rows in self._rows.values():
                pin(rows, "lower serve.swap_space")
                weakref.finalize(self, unpin, rows.data_ptr()).atexit = False

    def copy(self, copies: BlockCopies) -> None:
        """Start copies after the preceding steps: writes, fills, saves, then loads."""
        self._last = None
        if self._stream is None:
            self._copy_to_host(copies)
            self._copy_all(copies.loads, self._load)
            return
        steps = torch.cuda.current_stream()
        self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            self._copy_to_host(copies)
            if copies.awaits_saves:
                steps.wait_stream(self._stream)
            self._copy_all(copies.loads, self._load)
            if copies.awaits_loads:
                steps.wait_stream(self._stream)
            else:
                self._last = self._stream.record_event()

    def join(self) -> None:
        """Make the next step wait for the copies that run during the last one."""
        if self._due is not None:
            torch.cuda.current_stream().wait_event(self._due)
        self._due, self._last = self._last, None

    def keep(self, kept: Iterable[tuple[str, int, int, bytes]], seconds: float) -> None:
        """Write blocks to files until the time is over.

        kept: kind, block or 0, block of the host or 0, and key of the file; the most important first
        seconds: time limit
        """
        assert self.files is not None, "only a cache with files keeps blocks"
        if not self._model.is_cpu:
            torch.cuda.synchronize()
        end = time.perf_counter() + seconds
        for age, (kind, block, row, key) in enumerate(kept):
            if self.files.is_stopped or time.perf_counter() > end:
                break
            if not self.files.has(key, kind):
                content = self._rows[kind][row] if row else self._read(kind, block)
                self.files.write([Block(key, kind, content.view(torch.uint8), age=age)])
                self.files.flush(end - time.perf_counter())

    @torch.inference_mode()
    def _read(self, kind: str, block: int) -> Tensor:
        return torch.cat([cache[block] for cache in self._caches(kind)]).cpu()

    @torch.inference_mode()
    def _copy_to_host(self, copies: BlockCopies) -> None:
        for kind, written in copies.writes.items():
            self._write(kind, written)
        for kind, filled in copies.fills.items():
            for row, content in filled:
                self._fill(kind, row, content)
        self._copy_all(copies.saves, self._save)

    @torch.inference_mode()
    def _copy_all(self, pairs: Mapping[str, Pairs], copy: Callable[[str, Pairs], None]) -> None:
        for kind, each in pairs.items():
            if kind in self._sizes:  # the other kinds are those of other stages
                copy(kind, each)

    def _write(self, kind: str, written: Sequence[tuple[int, bytes]]) -> None:
        """Write rows to files before something else is copied to them."""
        assert self.files is not None, "only a cache with files plans writes"
        blocks, ready = [], None
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready = event.synchronize
        for row, key in written:
            held = self._rows[kind][row]
            content = torch.empty_like(held, pin_memory=self._stream is not None)
            if self._stream is None:
                content.copy_(held)
            else:  # by the device, since the stream has yet to write the row
                staged = self._staging[: len(held)]
                staged.copy_(held, non_blocking=True)
                content.copy_(staged, non_blocking=True)
            blocks.append(Block(key, kind, content.view(torch.uint8), ready))
        if self._stream is not None:
            event.record()
        self.files.write(blocks)

    def _fill(self, kind: str, row: int, content: Tensor) -> None:
        """Copy what was read from a file to a row of the host, by the device, whose stream may still read the row."""
        held = self._rows[kind][row]
        if self._stream is None:
            held.copy_(content.view(self._unit))
        else:
            staged = self._staging[: len(held)]
            staged.copy_(content.view(self._unit), non_blocking=True)
            held.copy_(staged, non_blocking=True)

    def _save(self, kind: str, pairs: Pairs) -> None:
        copier = self._model.block_copier([*self._caches(kind)])
        for part, blocks, staged in self._parts(kind, pairs):
            copier.gather(blocks, staged)
            for place, row, count in runs(part):
                self._rows[kind][row : row + count].copy_(staged[place : place + count], non_blocking=True)

    def _load(self, kind: str, pairs: Pairs) -> None:
        copier = self._model.block_copier([*self._caches(kind)])
        for part, blocks, staged in self._parts(kind, pairs):
            for place, row, count in runs(part):
                staged[place : place + count].copy_(self._rows[kind][row : row + count], non_blocking=True)
            copier.scatter(staged, blocks)

    def _parts(self, kind: str, pairs: Pairs) -> Iterator[tuple[Pairs, Tensor, Tensor]]:
        """As many pairs at a time as can be staged, ordered by host row, with their blocks i64[N] and staging rows.

        Consecutive rows are one copy; those of a sequence have mostly been saved together, though not in its order.
        """
        pairs = sorted(pairs, key=itemgetter(1))
        blocks = self._model.send(np.array([block for block, _ in pairs]), torch.int64)
        size = self._sizes[kind]
        max_rows = len(self._staging) // size
        for start in range(0, len(pairs), max_rows):
            part = pairs[start : start + max_rows]
            yield part, blocks[start : start + max_rows], self._staging[: len(part) * size].view(len(part), size)

    def _caches(self, kind: str) -> Iterator[Tensor]:
        """The caches of a kind, a row for each block."""
        for state, tensor in self._model.caches.items():
            if state.kind == kind:
                yield tensor.view(torch.uint8).view(len(tensor), -1).view(self._unit)


def runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive rows on the host: index of the first pair, its row, and the number of rows."""
    start = 0
    for place in range(1, len(pairs) + 1):
        if place == len(pairs) or pairs[place][1] != pairs[place - 1][1] + 1:
            yield start, pairs[start][1], place - start
            start = place


def measure(model: Model, host: HostBlocks, num_tokens: int) -> SwapCosts:
    """Time loads of one block and of many, and a prompt of num_tokens. All of them write only to block 0."""
    strides = {state.kind: state.stride(model.block_size) for state in model.graph.states()}
    num_held = {kind: num * strides.get(kind, 1) for kind, num in host.num_blocks.items()}  # blocks of tokens
    max_blocks = min(num_tokens // model.block_size, *num_held.values())

    def load(count: int) -> None:
        pairs = {kind: [(0, row) for row in range(-(-count // strides.get(kind, 1)))] for kind in num_held}
        host.copy(BlockCopies(loads=pairs, awaits_loads=True))

    def compute() -> None:
        computed = model.mix(shape, model.send(packed))
        if computed.unscored:  # of a stage that waits for the logits of the last one
            score(model.head, computed.unscored)

    host.copy(BlockCopies(saves={kind: [(0, 0)] for kind in host.num_blocks}))  # compiles what saves
    num_blocks, shape = max(max_blocks - 1, 2), BatchShape(num_tokens, 1, 1)
    packed = shape.pad(model.padding)
    one, many = _time(model, lambda: load(1)), _time(model, lambda: load(num_blocks))
    prompt = _time(model, compute)
    of_block = max(many - one, 0.0) / (num_blocks - 1)
    return SwapCosts(max(one - of_block, 0.0), of_block / model.block_size, prompt / num_tokens)


@torch.inference_mode()
def _time(model: Model, run: Callable[[], object]) -> float:
    """The time of the fastest run in seconds."""
    times = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        run()
        if not model.is_cpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
