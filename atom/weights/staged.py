"""Weights from files to a device, past the map of the files: several readers, each with two buffers in turn.

    fill(find_places(recipe, tensor), checkpoint, torch.device("cuda"), task.advance)

A reader takes the next piece, reads its bytes into a pinned buffer, and has them copied to the device on a stream of
its own, where they are cut, transposed and converted; meanwhile it reads the next piece into its other buffer. What a
file does not hold as it stands (GGUF's blocks, MXFP4) is unpacked on the CPU, one part at a time for each reader.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atom.checkpoint import Checkpoint
from atom.errors import CheckpointError
from atom.graph import Recipe, Shift
from atom.graph.recipes import leaves
from atom.weights.parts import copy, view

MAX_READERS = 8  # threads
BUFFER = 16 << 20  # bytes; smaller ones cost more of the interpreter than of the disk


class Piece(NamedTuple):
    """A part of a recipe, or some of one, that one read brings."""

    part: Recipe
    place: Tensor  # what it fills
    mapped: Tensor | None = None  # its elements as they lie in the file, none of them read; None: it is to be unpacked
    file: FileIO | None = None
    start: int = 0  # byte of the file that the stored tensor starts at


def fill(
    parts: Iterable[tuple[Recipe, Tensor]],
    checkpoint: Checkpoint,
    device: torch.device,
    advance: Callable[[int], None],
) -> None:
    """Fill the places of parts, see `find_places`, with what is stored; `advance` is told the bytes that are.

    The parts are taken one after the other while others are read, so that making them may take its time.
    CheckpointError for a file that cannot be read or ends too early.
    """
    lock = threading.Lock()
    num_readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
    with ExitStack() as files, ThreadPoolExecutor(num_readers) as readers:
        pieces = _find_pieces(parts, checkpoint, files)

        def take() -> Piece | None:
            with lock:
                return next(pieces, None)

        def stop() -> None:
            with lock:
                pieces.close()  # what is under way ends, nothing more is taken

        @torch.inference_mode()
        def read() -> None:
            try:
                with Stage(device) as stage:
                    for piece in iter(take, None):
                        stage.load(piece, checkpoint)
                        advance(piece.place.nbytes)
            finally:
                stop()

        try:
            for reader in [readers.submit(read) for _ in range(num_readers)]:
                reader.result()
        finally:
            stop()
    if device.type != "cpu":
        torch.cuda.empty_cache()  # what the readers converted in would stay with their streams


class Stage:
    """The way of one reader to the device."""

    def __init__(self, device: torch.device) -> None:
        is_pinned = device.type != "cpu"
        buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        copied = [torch.cuda.Event(blocking=True) if is_pinned else None for _ in buffers]  # type: ignore[no-untyped-call]
        self._device = device
        self._turns = itertools.cycle(zip(buffers, copied, strict=True))
        self._stream = torch.cuda.Stream(device) if is_pinned else None  # type: ignore[no-untyped-call]
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # a place may be memory that had another use

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream:
            self._stream.synchronize()

    def load(self, piece: Piece, checkpoint: Checkpoint) -> None:
        with torch.cuda.stream(self._stream):
            if piece.mapped is None:
                copy(piece.part, piece.place, lambda plain: view(plain, checkpoint))
                return
            assert piece.file is not None, "what lies in a file is read from it"
            mapped, (buffer, copied) = piece.mapped, next(self._turns)
            if copied:
                copied.synchronize()
            buffer = buffer[: _extent(mapped) * mapped.itemsize]
            read_exactly(piece.file, piece.start + int(mapped.storage_offset()) * mapped.itemsize, buffer)
            stored = buffer.view(mapped.dtype).to(self._device, non_blocking=True)
            copy(piece.part, piece.place, lambda _: stored.as_strided(mapped.shape, mapped.stride()))
            if copied:
                copied.record(self._stream)


def read_exactly(file: FileIO, start: int, buffer: Tensor) -> None:
    """Fill a buffer u8[N] from a byte of a file on, while other threads run and read the same file."""
    left = memoryview(buffer.numpy())  # type: ignore[arg-type]
    while left:
        try:
            count = os.preadv(file.fileno(), [left], start)
        except OSError as error:
            raise CheckpointError(f"cannot read {file.name}: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{file.name} is cut short: it ends at byte {start}; download it again")
        left, start = left[count:], start + count


def _find_pieces(
    parts: Iterable[tuple[Recipe, Tensor]], checkpoint: Checkpoint, files: ExitStack
) -> Generator[Piece, None, None]:
    """What there is to read, in pieces that a buffer holds; files are left open."""
    opened: dict[Path, FileIO] = {}
    for part, place in parts:
        leaf = next(leaves(part))
        where = None if leaf.fmt else checkpoint.locate(leaf.name)
        if where is None:
            yield Piece(part, place)
            continue
        if where.path not in opened:
            opened[where.path] = files.enter_context(_open(where.path))
        plain = part
        while isinstance(plain, Shift):
            plain = plain.part
        for mapped, target in _split(view(plain, checkpoint), place):
            yield Piece(part, target, mapped, opened[where.path], where.start)


def _open(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _split(mapped: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both, cut along the dim of the longest steps until all from the first byte to the last fits a buffer."""
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
    """Elements from its first to its last, those between them included."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
