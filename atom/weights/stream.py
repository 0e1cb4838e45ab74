"""Stream weights from files to a device, through pinned buffers.

Several readers read past the map of the files, and reuse the buffers.

    fill(find_places(recipe, tensor), checkpoint, torch.device("cuda"), task.advance)

A reader fills a pinned buffer with a piece and hands it to the caller. The caller copies it to the device, straight to
its place where the file has just the bytes that are wanted, else to a temporary where it is cut, transposed and
converted. The buffer goes back to the readers with the next piece, and is reused once it is copied. The readers only
read, since the interpreter runs one thread at a time; but packed tensors (GGUF's blocks, MXFP4) are dequantized by the
readers on the CPU, one part at a time for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import FileIO
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.checkpoint.files import open_file
from atom.errors import CheckpointError
from atom.graph import Recipe, Shift
from atom.graph.recipes import leaves
from atom.weights.evaluate import copy, view

MAX_READERS = 8  # threads
READER_BUFFERS = 2  # for each reader: one is read into while the other is copied
BUFFER = 4 << 20  # bytes, a multiple of 8; together the buffers stay in a CPU's cache


class Piece(NamedTuple):
    """A part of a recipe, or a portion of one, that is read at once."""

    part: Recipe
    place: Tensor  # what it fills; u8[num_bytes] where the file's bytes are used as they are
    file: FileIO | None = None  # None: the tensor must be dequantized
    start: int = 0  # byte of the file
    num_bytes: int = 0
    mapped: Tensor | None = None  # a view of its elements in the file, not read; None: the bytes are used as they are


class Buffer(NamedTuple):
    """A staging buffer for pieces, pinned for a GPU."""

    content: Tensor  # u8[BUFFER]
    memory: memoryview  # the same
    copied: torch.cuda.Event | None  # over when it may be read into again

    def wait(self) -> None:
        """Wait until it may be reused."""
        if self.copied and not self.copied.query():  # type: ignore[no-untyped-call]  # a query costs less than a wait
            self.copied.synchronize()


@torch.inference_mode()
def fill(
    parts: Iterable[tuple[Recipe, Tensor]],
    checkpoint: Checkpoint,
    device: torch.device,
    advance: Callable[[int], None],
) -> None:
    """Fill the places of parts, see `find_places`, from the files; `advance` gets the number of bytes done.

    The iterator of parts is advanced while other parts are read, so that making them may take its time.
    CheckpointError for a file that cannot be read or ends too early.
    """
    num_readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
    stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
    buffers = _make_buffers(num_readers * READER_BUFFERS, device)
    todo: SimpleQueue[tuple[Piece, Buffer] | None] = SimpleQueue()  # None: ends a reader
    done: SimpleQueue[tuple[Piece | None, Buffer] | None] = SimpleQueue()  # None: a reader has ended
    for buffer in buffers:
        done.put((None, buffer))

    @torch.inference_mode()
    def read() -> None:
        try:
            for piece, buffer in iter(todo.get, None):
                if piece.file is None:
                    with torch.cuda.stream(stream):
                        copy(piece.part, piece.place, lambda plain: view(plain, checkpoint))
                else:
                    buffer.wait()
                    read_exactly(piece.file, piece.start, buffer.memory[: piece.num_bytes])
                done.put((piece, buffer))
        finally:
            done.put(None)

    with ExitStack() as files, ThreadPoolExecutor(num_readers) as pool:
        try:
            readers = [pool.submit(read) for _ in range(num_readers)]
            for piece in chain(_find_pieces(parts, checkpoint, files), [None for _ in buffers]):
                returned = done.get()
                if returned is None:
                    break
                filled, buffer = returned
                if filled:
                    _move(filled, buffer, stream)
                    advance(filled.place.nbytes)
                if piece:
                    todo.put((piece, buffer))
        finally:
            try:
                with suppress(Empty):
                    while True:
                        todo.get_nowait()  # pieces under way are finished, no more are taken
            finally:
                for _ in range(num_readers):
                    todo.put(None)
        for reader in readers:
            reader.result()
    if stream:
        stream.synchronize()
        torch.cuda.empty_cache()  # the temporaries of conversions


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


def _move(piece: Piece, buffer: Buffer, stream: torch.cuda.Stream | None) -> None:
    """Start the copy of a piece from the buffer to its place."""
    if piece.file is None:
        return
    content, mapped = buffer.content[: piece.num_bytes], piece.mapped
    if mapped is None:
        piece.place.copy_(content, non_blocking=True)
    else:
        stored = content.view(mapped.dtype).to(piece.place.device, non_blocking=True)
        copy(piece.part, piece.place, lambda _: stored.as_strided(mapped.shape, mapped.stride()))
    if buffer.copied:
        buffer.copied.record(stream)


def read_exactly(file: FileIO, start: int, left: memoryview) -> None:
    """Fill `left` from a byte of a file on; other threads may read the same file."""
    while left:
        try:
            count = os.preadv(file.fileno(), [left], start)
        except OSError as error:
            raise CheckpointError(f"cannot read {file.name}: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{file.name} is cut short: it ends at byte {start}; download it again")
        left, start = left[count:], start + count


def _find_pieces(parts: Iterable[tuple[Recipe, Tensor]], checkpoint: Checkpoint, files: ExitStack) -> Iterator[Piece]:
    """Cut parts into pieces that fit a buffer; files are left open."""
    opened: dict[Path, FileIO] = {}
    for part, place in parts:
        leaf = next(leaves(part))
        where = None if leaf.type.fmt else checkpoint.locate(leaf.name)
        if where is None:
            yield Piece(part, place)
            continue
        if where.path not in opened:
            opened[where.path] = files.enter_context(open_file(where.path))
        plain = part
        while isinstance(plain, Shift):
            plain = plain.part
        mapped, file = view(plain, checkpoint), opened[where.path]
        if plain is part and _are_same_bytes(mapped, place):
            start = where.start + int(mapped.storage_offset()) * mapped.itemsize
            for target in torch.split(place.view(-1).view(torch.uint8), BUFFER):
                yield Piece(part, target, file, start, target.nbytes)
                start += target.nbytes
        else:
            for each, target in _split(mapped, place):
                start = where.start + int(each.storage_offset()) * each.itemsize
                yield Piece(part, target, file, start, _extent(each) * each.itemsize, each)


def _are_same_bytes(mapped: Tensor, place: Tensor) -> bool:
    return mapped.dtype == place.dtype and mapped.is_contiguous() and place.is_contiguous()


def _split(mapped: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both along the dim of the largest stride until the range from first to last byte fits a buffer."""
    if not mapped.numel():
        return
    limit, extent = BUFFER // mapped.itemsize, _extent(mapped)
    if extent <= limit:
        yield mapped, place
        return
    dim = max((dim for dim in range(mapped.dim()) if mapped.shape[dim] > 1), key=mapped.stride)
    size, step = mapped.shape[dim], mapped.stride(dim)
    row = extent - (size - 1) * step
    count = max((limit - row) // step + 1, 1)
    for start in range(0, size, count):
        length = min(count, size - start)
        yield from _split(mapped.narrow(dim, start, length), place.narrow(dim, start, length))


def _extent(tensor: Tensor) -> int:
    """The number of elements from a view's first to its last in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
