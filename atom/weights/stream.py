"""Stream weights from files to a device, through pinned buffers.

Several readers read the files, not their maps, and reuse the buffers.

    source = StreamedSource(checkpoint, device, task.advance)
    tensors = source.map(make, recipes)             # `make` calls source.fill(part, target)

A reader reads the bytes of a transfer into a pinned buffer and hands it to the caller. The caller copies it to the
device: straight to its target if the file has just the bytes that are wanted, else to a temporary, where it is cut,
transposed and converted. The buffer goes back to the readers with the next transfer, and is reused once it is copied.
The readers only read, since the interpreter runs one thread at a time; but packed tensors (GGUF's blocks, MXFP4) are
dequantized by the readers on the CPU, one part at a time for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.checkpoint.files import open_file
from atom.errors import CheckpointError
from atom.graph import Apply, LearnedFreqs, Recipe, Shift
from atom.graph.recipes import leaves
from atom.weights.evaluate import Loaded, copy, view
from atom.weights.sources import WeightSource, is_computed

MAX_READERS = 8  # threads
READER_BUFFERS = 2  # for each reader: one is read into while the other is copied
BUFFER = 4 << 20  # bytes, a multiple of 8; together the buffers stay in a CPU's cache


class Transfer(NamedTuple):
    """One read from a file and its copy to the device: of a part of a recipe, or of a portion of one."""

    part: Recipe
    target: Tensor  # the view that it fills; u8[num_bytes] if the file's bytes are used as they are
    file: FileIO | None = None  # None: the tensor must be dequantized
    start: int = 0  # byte of the file
    num_bytes: int = 0
    mapped: Tensor | None = None  # a view of its elements in the file, not read; None: the bytes are used as they are


class Buffer(NamedTuple):
    """A staging buffer for transfers, pinned for a GPU."""

    content: Tensor  # u8[BUFFER]
    memory: memoryview  # the same
    copied: torch.cuda.Event | None  # over when it may be read into again

    def wait(self) -> None:
        """Wait until it may be reused."""
        if self.copied and not self.copied.query():  # type: ignore[no-untyped-call]  # a query costs less than a wait
            self.copied.synchronize()


class StreamedSource(WeightSource):
    """A source of weights: fills targets from files, of which threads read the next parts meanwhile."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, advance: Callable[[int], None]) -> None:
        """advance: gets the number of bytes done"""
        self._checkpoint, self._advance = checkpoint, advance
        self._num_readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
        self._stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
        self._buffers = _make_buffers(self._num_readers * READER_BUFFERS, device)
        self._files, self._opened = ExitStack(), dict[Path, FileIO]()
        self._todo: SimpleQueue[tuple[Transfer, Buffer] | None] = SimpleQueue()  # None: ends a reader
        self._done: SimpleQueue[tuple[Transfer | None, Buffer] | BaseException] = SimpleQueue()  # what ended a reader

    @torch.inference_mode()
    def map(self, make: Callable[[Recipe], Loaded], recipes: Iterable[Recipe]) -> list[Loaded]:
        """Other parts are read meanwhile, so that `make` may take its time. CheckpointError for a file that cannot be
        read or ends too early."""
        for buffer in self._buffers:
            self._done.put((None, buffer))
        with self._files, ThreadPoolExecutor(self._num_readers) as pool:
            try:
                for _ in range(self._num_readers):
                    pool.submit(self._read)
                made = [make(recipe) for recipe in recipes]
                self.flush()
            finally:
                try:
                    with suppress(Empty):
                        while True:
                            self._todo.get_nowait()  # transfers under way are finished, no more are taken
                finally:
                    for _ in range(self._num_readers):
                        self._todo.put(None)
        if self._stream:
            self._stream.synchronize()
            torch.cuda.empty_cache()  # the temporaries of conversions
        return made

    def fill(self, part: Recipe, target: Tensor) -> None:
        """Have it read; waits if no buffer is free."""
        for transfer in self._cut_transfers(part, target):
            self._todo.put((transfer, self._take_buffer()))

    def flush(self) -> None:
        for buffer in [self._take_buffer() for _ in self._buffers]:
            self._done.put((None, buffer))

    def _take_buffer(self) -> Buffer:
        """Take a buffer from the readers; what it holds is copied to the device first."""
        returned = self._done.get()
        if isinstance(returned, BaseException):
            raise returned
        transfer, buffer = returned
        if transfer:
            _copy_to_device(transfer, buffer, self._stream)
            self._advance(transfer.target.nbytes)
        return buffer

    @torch.inference_mode()
    def _read(self) -> None:
        """Be one of the readers."""
        try:
            for transfer, buffer in iter(self._todo.get, None):
                if transfer.file is None:
                    with torch.cuda.stream(self._stream):
                        copy(transfer.part, transfer.target, lambda plain: view(plain, self._checkpoint))
                else:
                    buffer.wait()
                    read_exactly(transfer.file, transfer.start, buffer.memory[: transfer.num_bytes])
                self._done.put((transfer, buffer))
        except BaseException as error:  # the caller raises it
            self._done.put(error)

    def _cut_transfers(self, part: Recipe, target: Tensor) -> Iterator[Transfer]:
        """Cut a part into transfers that fit a buffer; files are left open."""
        leaf = next(leaves(part))
        file_range = None if is_computed(part) else self._checkpoint.locate(leaf.name)
        if file_range is None:
            yield Transfer(part, target)
            return
        if file_range.path not in self._opened:
            self._opened[file_range.path] = self._files.enter_context(open_file(file_range.path))
        plain = part
        while isinstance(plain, Shift | Apply | LearnedFreqs):
            plain = plain.part
        mapped, file = view(plain, self._checkpoint), self._opened[file_range.path]
        if plain is part and _are_same_bytes(mapped, target):
            start = file_range.start + int(mapped.storage_offset()) * mapped.itemsize
            for portion in torch.split(target.view(-1).view(torch.uint8), BUFFER):
                yield Transfer(part, portion, file, start, portion.nbytes)
                start += portion.nbytes
        else:
            for stored, portion in _split(mapped, target):
                start = file_range.start + int(stored.storage_offset()) * stored.itemsize
                yield Transfer(part, portion, file, start, _extent(stored) * stored.itemsize, stored)


def _make_buffers(count: int, device: torch.device) -> list[Buffer]:
    is_pinned = device.type != "cpu"
    return [
        Buffer(
            content,
            memoryview(content.numpy()),
            torch.cuda.Event(blocking=True) if is_pinned else None,  # type: ignore[no-untyped-call]
        )
        for content in torch.empty(count, BUFFER, dtype=torch.uint8, pin_memory=is_pinned)
    ]


def _copy_to_device(transfer: Transfer, buffer: Buffer, stream: torch.cuda.Stream | None) -> None:
    """Start the copy of a transfer from the buffer to its target."""
    if transfer.file is None:
        return
    content, mapped = buffer.content[: transfer.num_bytes], transfer.mapped
    if mapped is None:
        transfer.target.copy_(content, non_blocking=True)
    else:
        stored = content.view(mapped.dtype).to(transfer.target.device, non_blocking=True)
        copy(transfer.part, transfer.target, lambda _: stored.as_strided(mapped.shape, mapped.stride()))
    if buffer.copied:
        buffer.copied.record(stream)


def read_exactly(file: FileIO, start: int, target: memoryview) -> None:
    """Fill the target with the bytes from `start` on; other threads may read the same file."""
    while target:
        try:
            count = os.preadv(file.fileno(), [target], start)
        except OSError as error:
            raise CheckpointError(f"cannot read {file.name}: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{file.name} is cut short: it ends at byte {start}; download it again")
        target, start = target[count:], start + count


def _are_same_bytes(mapped: Tensor, target: Tensor) -> bool:
    return mapped.dtype == target.dtype and mapped.is_contiguous() and target.is_contiguous()


def _split(mapped: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both along the dim of the largest stride until the range from first to last byte fits a buffer."""
    if not mapped.numel():
        return
    limit, extent = BUFFER // mapped.itemsize, _extent(mapped)
    if extent <= limit:
        yield mapped, target
        return
    dim = max((dim for dim in range(mapped.dim()) if mapped.shape[dim] > 1), key=mapped.stride)
    size, step = mapped.shape[dim], mapped.stride(dim)
    row = extent - (size - 1) * step
    count = max((limit - row) // step + 1, 1)
    for start in range(0, size, count):
        length = min(count, size - start)
        yield from _split(mapped.narrow(dim, start, length), target.narrow(dim, start, length))


def _extent(tensor: Tensor) -> int:
    """The number of elements from a view's first to its last in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
