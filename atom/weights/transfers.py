"""Receive named tensors from another process by shared memory, CUDA IPC or NCCL.

    info = UpdateInfo.read({"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[4096]], …})
    info.stored()                                # {name: StoredTensor}: known before anything is transferred
    with open_transfer(info, "cuda", group) as transfer:
        for tensors in transfer.parts():         # [(name, tensor), …], valid until the next part
            …

The fields are those of vLLM's weight transfer engines, so that trainers written for them can send here
(vllm/distributed/weight_transfer; 0.33 is the version that was read). `shared_memory` is ours.
"""

from __future__ import annotations

import base64
import binascii
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from atom.checkpoint import StoredTensor
from atom.errors import RequestError
from atom.kernels.broadcast import BroadcastGroup
from atom.process.pickles import read_pickle, write_pickle
from atom.weights.arrived import DTYPE_NAMES

Part = Sequence[tuple[str, Tensor]]
BUFFER_BYTES = 1 << 30  # of packed tensors, unless the trainer says otherwise, as in vLLM
MAX_VERSION = 1024  # characters of a name of weights
NUM_REBUILD_ARGS = 15  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
DEVICE_ARG = 6  # among them
IPC_NAMES = {  # what a pickle of IPC handles may name, besides dtypes
    ("torch", "Size"): torch.Size,
    ("torch._tensor", "Tensor"): torch.Tensor,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): rebuild_cuda_tensor,
}


@dataclass
class Kept:
    """Memory of a trainer that stays open between transfers."""

    handles: list[Any] = field(default_factory=list)  # of the last transfer
    tensors: list[Tensor] = field(default_factory=list)  # that they have opened
    opened: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)  # by their arguments


class SharedMemory(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors in a file that both processes can map, one in /dev/shm say."""

    path: str
    offsets: list[int]  # byte of each tensor


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a trainer says of the tensors that it sends: vLLM's `update_info`."""

    names: list[str]
    dtype_names: list[str]  # torch's, as bfloat16
    shapes: list[list[int]]
    ipc_handles: Any = None  # [{GPU's uuid: rebuild_cuda_tensor's arguments}], or one of a buffer with all tensors
    ipc_handles_pickled: str | None = None  # the same as base64
    tensor_sizes: list[int] | None = None  # bytes of each tensor in the one buffer
    shared_memory: SharedMemory | None = None
    packed: bool | None = None  # by NCCL: many tensors in a broadcast; None: as `init_info` said
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    version: str | None = None
    keep_cache: bool = False

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> UpdateInfo:
        """Check what was sent. RequestError says what is wrong."""
        handles = info.get("ipc_handles")
        try:
            made = msgspec.convert({**info, "ipc_handles": None}, cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"update_info: {error}") from None
        made.ipc_handles = handles
        if made.version is not None and len(made.version) > MAX_VERSION:
            raise RequestError(f"update_info: version has {len(made.version)} characters, at most {MAX_VERSION}")
        counts = {len(made.names), len(made.dtype_names), len(made.shapes)}
        if made.shared_memory is not None:
            counts.add(len(made.shared_memory.offsets))
        if made.tensor_sizes is not None:
            counts.add(len(made.tensor_sizes))
        if len(counts) > 1:
            raise RequestError(
                "update_info: names, dtype_names, shapes and what else is of each tensor differ in length"
            )
        if made.ipc_handles_pickled is not None:
            if handles is not None:
                raise RequestError("update_info: give ipc_handles or ipc_handles_pickled, not both")
            made.ipc_handles, made.ipc_handles_pickled = unpickle_handles(made.ipc_handles_pickled), None
        if len(set(made.names)) < len(made.names):
            twice = next(name for name in made.names if made.names.count(name) > 1)
            raise RequestError(f"update_info: tensor {twice} is there twice")
        for name, dtype, shape in zip(made.names, made.dtype_names, made.shapes, strict=True):
            if not isinstance(getattr(torch, dtype, None), torch.dtype) or getattr(torch, dtype) not in DTYPE_NAMES:
                raise RequestError(f"update_info: tensor {name} is {dtype}, which atom cannot load yet")
            if any(dim < 0 for dim in shape):
                raise RequestError(f"update_info: tensor {name} is {shape}, which is no shape")
        return made

    def encode(self) -> bytes:
        """For another rank of this engine, which reads it by `decode`."""
        body = msgspec.structs.replace(self, ipc_handles=None)
        if self.ipc_handles is not None:
            body.ipc_handles_pickled = base64.b64encode(write_pickle(self.ipc_handles)).decode()
        return msgspec.msgpack.encode(body)

    @classmethod
    def decode(cls, body: bytes) -> UpdateInfo:
        return cls.read(msgspec.msgpack.decode(body))

    def dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, dtype) for dtype in self.dtype_names]

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors as a checkpoint's header describes them."""
        described = zip(self.dtypes(), self.shapes, strict=True)
        tensors = [StoredTensor(DTYPE_NAMES[dtype], tuple(shape)) for dtype, shape in described]
        return dict(zip(self.names, tensors, strict=True))

    def sizes(self) -> list[int]:
        """The bytes of each tensor."""
        return [
            torch.Size(shape).numel() * dtype.itemsize for dtype, shape in zip(self.dtypes(), self.shapes, strict=True)
        ]


class InitInfo(msgspec.Struct, forbid_unknown_fields=True):
    """How a trainer will send: vLLM's `init_info`. Without an address or an id, NCCL is not used."""

    backend: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int = 1  # of this engine's first rank; the trainer is rank 0
    world_size: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = 2
    keep_open: bool = False  # by IPC: the trainer's memory stays mapped until the next update, which may be in it too
    timeout: float = 300.0  # seconds without progress after which the trainer counts as dead

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> InitInfo:
        """Check what was sent. RequestError says what is wrong."""
        try:
            made = msgspec.convert(dict(info), cls)
        except msgspec.ValidationError as error:
            raise RequestError(f"init_info: {error}") from None
        has_address = made.master_address is not None and made.master_port is not None
        if made.backend not in (None, "nccl", "ipc", "shared_memory"):
            raise RequestError(
                f"init_info: backend={made.backend} is not supported (supported: nccl, ipc, shared_memory)"
            )
        if made.uses_nccl and has_address == (made.nccl_unique_id_b64 is not None):
            raise RequestError("init_info: NCCL needs master_address and master_port, or nccl_unique_id_b64")
        if made.uses_nccl and (made.world_size is None or not 0 < made.rank_offset < made.world_size):
            raise RequestError("init_info: NCCL needs world_size, and a rank_offset from 1 that is less")
        if not made.timeout > 0:
            raise RequestError(f"init_info: timeout={made.timeout} is no time to wait")
        return made

    @property
    def uses_nccl(self) -> bool:
        given = (self.master_address, self.master_port, self.nccl_unique_id_b64)
        return self.backend == "nccl" or any(each is not None for each in given)

    def unique_id(self) -> bytes | None:
        try:
            return None if self.nccl_unique_id_b64 is None else base64.b64decode(self.nccl_unique_id_b64, validate=True)
        except binascii.Error as error:
            raise RequestError(f"init_info: nccl_unique_id_b64: {error}") from None


class Transfer(ABC):
    """Tensors that arrive in parts."""

    is_kept = False  # whether the tensors stay valid until the transfer is closed

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """The parts in order; tensors of a part are valid until the next one is asked for."""

    def close(self) -> None:  # noqa: B027
        """Release what the tensors are in."""

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalTransfer(Transfer):
    """Tensors of this process."""

    is_kept = True

    def __init__(self, tensors: Part) -> None:
        self._tensors = tensors

    def parts(self) -> Iterator[Part]:
        yield self._tensors


class SharedMemoryTransfer(Transfer):
    """Tensors in a mapped file."""

    is_kept = True

    def __init__(self, info: UpdateInfo) -> None:
        assert info.shared_memory is not None, "open_transfer has looked"
        path, offsets = info.shared_memory.path, info.shared_memory.offsets
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise RequestError(f"update_info: shared_memory: {path} cannot be mapped: {error}") from None
        data = memoryview(mapped)
        self._tensors = []
        each = zip(info.names, info.dtypes(), info.shapes, offsets, info.sizes(), strict=True)
        for name, dtype, shape, offset, size in each:
            if not 0 <= offset <= len(data) - size or offset % dtype.itemsize:
                raise RequestError(f"update_info: shared_memory: tensor {name} is not within {path}, or not aligned")
            content = (
                torch.frombuffer(data[offset : offset + size], dtype=dtype) if size else torch.empty(0, dtype=dtype)
            )
            self._tensors.append((name, content.view(shape)))

    def parts(self) -> Iterator[Part]:
        yield self._tensors

    def close(self) -> None:
        self._tensors = []


class IPCTransfer(Transfer):
    """Tensors of a process that uses the same GPU, read in its memory."""

    is_kept = True

    def __init__(self, info: UpdateInfo, device: torch.device, kept: Kept | None = None) -> None:
        """kept: memory of the last transfer that stays open, then of this one; None: this one closes its own"""
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handles = info.ipc_handles
        if isinstance(handles, Mapping):
            if info.tensor_sizes != info.sizes():
                raise RequestError("update_info: tensor_sizes are not the bytes of the tensors in one buffer")
            (buffer,) = _rebuild([handles], ["the buffer"], uuid, device, kept)
            if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < sum(info.sizes()):
                raise RequestError("update_info: the buffer of ipc_handles is too small, or not of bytes")
            parts = torch.split(buffer[: sum(info.sizes())], info.sizes())
            tensors = [_typed(part, dtype) for part, dtype in zip(parts, info.dtypes(), strict=True)]
        elif isinstance(handles, list) and len(handles) == len(info.names):
            tensors = _rebuild(handles, info.names, uuid, device, kept)
        else:
            raise RequestError("update_info: ipc_handles are neither one for each tensor nor one of a buffer")
        self._tensors = []
        for name, tensor, dtype, shape in zip(info.names, tensors, info.dtypes(), info.shapes, strict=True):
            if tensor.dtype != dtype or tensor.numel() != torch.Size(shape).numel():
                raise RequestError(f"update_info: the handle of tensor {name} is of another dtype or size")
            self._tensors.append((name, tensor.view(shape)))

    def parts(self) -> Iterator[Part]:
        yield self._tensors

    def close(self) -> None:
        torch.cuda.synchronize()  # the trainer may write over its memory from now on
        self._tensors = []


class NCCLTransfer(Transfer):
    """Tensors that the trainer broadcasts, one by one or many in a buffer, while the buffer before is used."""

    def __init__(self, info: UpdateInfo, group: BroadcastGroup, init: InitInfo) -> None:
        self._info, self._group, self._init = info, group, init

    def parts(self) -> Iterator[Part]:
        info, init = self._info, self._init
        is_packed = init.packed if info.packed is None else info.packed
        limit = info.packed_buffer_size_bytes or init.packed_buffer_size_bytes
        names, dtypes, shapes, sizes = info.names, info.dtypes(), info.shapes, info.sizes()
        buffers = cut_buffers(sizes, limit if is_packed else 0)
        arriving = (self._group.receive(sum(sizes[at] for at in places)) for places in buffers)
        following = next(arriving, None)
        for places in buffers:
            current, following = following, next(arriving, None)  # it arrives while the current one is used
            assert current is not None, "there is one for each"
            parts = torch.split(current.wait(), [sizes[at] for at in places])
            yield [
                (names[at], _typed(part, dtypes[at]).view(shapes[at])) for at, part in zip(places, parts, strict=True)
            ]
        self._group.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()


def cut_buffers(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which tensors are in which buffer: a buffer is full with the tensor by which it has more bytes than the limit."""
    groups: list[list[int]] = []
    total = limit + 1
    for place, size in enumerate(sizes):
        if total > limit:
            groups.append([])
            total = 0
        groups[-1].append(place)
        total += size
    return groups


def open_transfer(info: UpdateInfo, device: str, group: BroadcastGroup | None, init: InitInfo, kept: Kept) -> Transfer:
    """The transfer that an update describes; nothing has been read yet. RequestError if it cannot be opened.

    group: of the trainer and all ranks, for NCCL; None: it was not set up
    kept: memory that stays open between transfers, if `init` says so
    """
    if info.shared_memory is not None:
        return SharedMemoryTransfer(info)
    if info.ipc_handles is not None:
        if device == "cpu":
            raise RequestError("update_info: ipc_handles are of a GPU, and this engine is on a CPU: send shared_memory")
        return IPCTransfer(info, torch.device("cuda", torch.cuda.current_device()), kept if init.keep_open else None)
    if group is None:
        raise RequestError("update_info: call init_weight_transfer_engine first, or send ipc_handles or shared_memory")
    return NCCLTransfer(info, group, init)


@lru_cache(maxsize=1)  # a trainer whose parameters stay where they are sends the same text each time
def unpickle_handles(text: str) -> Any:
    """IPC handles of base64 and pickle. RequestError if they are anything else."""
    try:
        return read_pickle(base64.b64decode(text, validate=True), _find_in_handle)
    except ValueError as error:
        raise RequestError(f"update_info: ipc_handles_pickled cannot be read: {error}") from None


def _find_in_handle(module: str, name: str) -> Any:
    """One of the few names that torch puts into a handle."""
    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    return IPC_NAMES.get((module, name))


def _rebuild(
    handles: Sequence[Any], names: Sequence[str], uuid: str, device: torch.device, kept: Kept | None
) -> list[Tensor]:
    """Open handles. kept: those that are open stay so if they come again, and are closed if they do not"""
    if kept is not None and kept.handles == handles:
        return kept.tensors
    opened: dict[tuple[Any, ...], Tensor] = {}
    tensors = []
    for name, of_gpus in zip(names, handles, strict=True):
        if not isinstance(of_gpus, Mapping) or uuid not in of_gpus:
            has = ", ".join(map(str, of_gpus)) if isinstance(of_gpus, Mapping) else of_gpus
            raise RequestError(f"update_info: the IPC handle of {name} is not of this GPU, {uuid}: {has}")
        args = of_gpus[uuid]
        if isinstance(args, tuple | list) and len(args) == 2:  # with the function, as older versions send it
            args = args[1]
        if not isinstance(args, tuple | list) or len(args) != NUM_REBUILD_ARGS:
            raise RequestError(f"update_info: the IPC handle of {name} is not that of torch {torch.__version__}")
        own = (*args[:DEVICE_ARG], device.index, *args[DEVICE_ARG + 1 :])
        try:
            tensor = None if kept is None else kept.opened.get(own)
            opened[own] = rebuild_cuda_tensor(*own).detach() if tensor is None else tensor  # type: ignore[no-untyped-call]
        except Exception as error:  # of the driver, or of wrong arguments
            raise RequestError(f"update_info: the IPC handle of {name} cannot be opened: {error}") from None
        tensors.append(opened[own])
    if kept is not None:
        kept.handles, kept.tensors, kept.opened = [dict(each) for each in handles], tensors, opened
    return tensors


def _typed(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements; a copy if they are not aligned."""
    aligned = content.storage_offset() % dtype.itemsize == 0
    return (content if aligned else content.clone()).view(dtype)
