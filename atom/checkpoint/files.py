"""Open a file of a checkpoint: a regular file of bounded size.

    read_file(folder / "config.json", MAX_DESCRIPTION)      # bytes
    map_file(folder / "model.safetensors")                  # memoryview of the mapped file

A pipe or a device in place of a file would block, or be read without end.
"""

from __future__ import annotations

import mmap
import os
import stat
from io import FileIO
from pathlib import Path

from atom.errors import CheckpointError

MAX_DESCRIPTION = 16 << 20  # bytes of config.json and the like, which have kilobytes
MAX_INDEX = 64 << 20  # of the list of all tensors: 100k of them make some 10 MB
MAX_TOKENIZER = 256 << 20  # of tokenizer.json: vocabularies of 256k tokens make some 35 MB
LFS_POINTER = b"version https://git-lfs"  # what a clone without Git LFS has in place of a large file


def open_file(path: Path) -> FileIO:
    """Open a regular file for reading. CheckpointError if it is not one or cannot be read."""
    try:
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # a pipe must not block
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is not a regular file; put the checkpoint's own file there")
    return file


def read_file(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes."""
    with open_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if max(size, len(data)) > limit:
        raise CheckpointError(f"{path} has more than the {limit >> 20} MiB that such a file may have")
    return data


def map_file(path: Path) -> memoryview:
    """Map a file: bytes are read when they are touched, and stay valid as long as the view lives."""
    with open_file(path) as file:
        try:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:  # mmap refuses an empty file
            return memoryview(b"")
    if bytes(data[: len(LFS_POINTER)]) == LFS_POINTER:
        raise CheckpointError(f"{path} is a pointer of Git LFS in place of the file; run git lfs pull in its folder")
    return data
