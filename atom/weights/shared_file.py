"""Write tensors to a file in memory that other processes of this host map.

with write_shared(info, tensors) as shared:     # an `UpdateInfo` with the file's path and the tensors' places
    …                                           # the file is removed afterwards
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from atom.errors import RequestError
from atom.weights.transfers import SharedMemory, UpdateInfo

FOLDER = Path("/dev/shm")
ALIGNMENT = 64  # bytes, of each tensor


def describe_tensors(tensors: Sequence[tuple[str, Tensor]]) -> UpdateInfo:
    """What an update says of these tensors, but not where they are. RequestError for one that atom cannot load"""
    if wrong := next((each for each in tensors if not torch.is_tensor(each[1])), None):
        raise RequestError(f"{wrong[0]} is {type(wrong[1]).__name__}, not a tensor")
    if empty := next((name for name, each in tensors if each.is_meta or each.layout is not torch.strided), None):
        raise RequestError(f"tensor {empty} has no numbers here, or is sparse: gather it, or make it dense")
    names = [name for name, _ in tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    shapes = [[*tensor.shape] for _, tensor in tensors]
    return UpdateInfo.read({"names": names, "dtype_names": dtypes, "shapes": shapes})


@contextmanager
def write_shared(info: UpdateInfo, tensors: Sequence[tuple[str, Tensor]] | None) -> Iterator[UpdateInfo]:
    """The info with a file that has these tensors, until the context ends; the same info if tensors is None."""
    if tensors is None:
        yield info
        return
    sizes = [tensor.nbytes for _, tensor in tensors]
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    folder = FOLDER if os.access(FOLDER, os.W_OK) else None
    with tempfile.NamedTemporaryFile(prefix="atom-weights-", dir=folder) as file:  # readable by this user only
        os.posix_fallocate(file.fileno(), 0, max(end, 1))  # it fails now, and not when a page is touched
        mapped = torch.from_file(file.name, shared=True, size=max(end, 1), dtype=torch.uint8)
        for (_, tensor), offset, size in zip(tensors, offsets, sizes, strict=True):
            mapped[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        yield msgspec.structs.replace(info, shared_memory=SharedMemory(file.name, offsets))
