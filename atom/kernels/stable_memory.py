"""GPU memory that is released and allocated again at the same addresses.

    memory = StableMemory(1 << 36)             # reserves addresses, allocates nothing
    weight = memory.tensor((4096, 4096), torch.bfloat16)
    memory.release()                           # the addresses are unmapped: no kernel may read them
    memory.take()                              # as much as before, undefined

CUDA graphs and tensor descriptors hold addresses, and torch's allocator would return others. Addresses and memory come
from CUDA's driver:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from atom.errors import UnsupportedError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
ALIGNMENT = 512  # bytes, of a tensor, as in torch
CHUNK = 64 << 20  # min bytes of an allocation of the driver, to make few of them
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, PROT_READWRITE


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class StableMemory:
    """Consecutive tensors in memory of the current device. UnsupportedError if the driver cannot map memory."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all tensors together"""
        if torch.version.hip is not None:
            raise UnsupportedError("serve.enable_sleep_mode is for NVIDIA's GPUs and CPUs; leave it out")
        torch.cuda.synchronize()  # creates the context of this thread
        self._driver = open_driver()
        self._device = find_device()
        self._place = Location(DEVICE, self._device.index or 0)
        self._prop = AllocationProp(type=PINNED, location=self._place)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), 0)
        self._unit = granularity.value
        self._max_bytes = self._round(max_bytes)
        address, size, none = ctypes.c_uint64(), ctypes.c_size_t(self._max_bytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, none, _u64(0), _u64(0))
        self._first = address.value
        self.num_bytes = 0  # of all tensors
        self._sizes: list[int] = []  # of the driver's allocations, in order
        self._handles: list[int] = []  # of those that are mapped
        reserved = self._driver, self._first, self._max_bytes, self._sizes, self._handles
        weakref.finalize(self, _free, *reserved).atexit = False

    @property
    def is_there(self) -> bool:
        return len(self._handles) == len(self._sizes)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor, undefined."""
        assert self.is_there, "a tensor has memory"
        start = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        if (missing := end - sum(self._sizes)) > 0:
            self._sizes.append(max(self._round(missing), CHUNK))
            try:
                self._map(len(self._handles))
            except BaseException:
                self._sizes.pop()
                raise
        self.num_bytes = end
        return self._view(start, end - start).view(dtype).view(*shape)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = self.tensor(shape, dtype)
        made.view(torch.uint8).zero_()
        return made

    def content(self) -> Tensor:
        """All bytes of all tensors, u8."""
        return self._view(0, self.num_bytes)

    def release(self) -> None:
        """Free the memory; keep the addresses."""
        torch.cuda.synchronize()
        _unmap(self._driver, self._first, self._sizes, self._handles)

    def take(self) -> None:
        """Allocate as much as was released. OutOfMemoryError if the GPU has less; it then stays released."""
        try:
            for number in range(len(self._handles), len(self._sizes)):
                self._map(number)
        except BaseException:
            self.release()
            raise

    def clear(self) -> None:
        """Free everything, and forget all tensors."""
        self.release()
        self._sizes.clear()
        self.num_bytes = 0

    def _map(self, number: int) -> None:
        """Map one more allocation, after those that are mapped."""
        address, size, handle = self._first + sum(self._sizes[:number]), self._sizes[number], ctypes.c_uint64()
        assert address + size <= self._first + self._max_bytes, "more than was reserved"
        num_bytes, none = ctypes.c_size_t(size), ctypes.c_size_t(0)
        self._call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._prop), _u64(0))
        with ExitStack() as undo:
            undo.callback(self._driver.cuMemRelease, handle)
            self._call("cuMemMap", _u64(address), num_bytes, none, handle, _u64(0))
            undo.callback(self._driver.cuMemUnmap, _u64(address), num_bytes)
            access = AccessDesc(self._place, READ_WRITE)
            self._call("cuMemSetAccess", _u64(address), num_bytes, ctypes.byref(access), ctypes.c_size_t(1))
            undo.pop_all()
        self._handles.append(handle.value)

    def _view(self, start: int, num_bytes: int) -> Tensor:
        storage = torch._C._construct_storage_from_data_pointer(self._first + start, self._device, num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))

    def _round(self, num_bytes: int) -> int:
        return -(-num_bytes // self._unit) * self._unit

    def _call(self, name: str, *args: Any) -> None:
        result = getattr(self._driver, name)(*args)
        if result == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the GPU is out of memory")
        if result != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {result}"
            raise UnsupportedError(f"serve.enable_sleep_mode: {name}: {reason}; leave it out")


def find_device() -> torch.device:
    """The current device, with its index: a storage on `cuda` does not match a tensor on `cuda:0`."""
    return torch.device("cuda", torch.cuda.current_device())


def open_driver() -> Any:
    return ctypes.CDLL(LIBRARY)


def _u64(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


def _unmap(driver: Any, first: int, sizes: list[int], handles: list[int]) -> None:
    while handles:
        handle = handles.pop()
        driver.cuMemUnmap(_u64(first + sum(sizes[: len(handles)])), ctypes.c_size_t(sizes[len(handles)]))
        driver.cuMemRelease(_u64(handle))


def _free(driver: Any, first: int, max_bytes: int, sizes: list[int], handles: list[int]) -> None:
    _unmap(driver, first, sizes, handles)
    driver.cuMemAddressFree(_u64(first), ctypes.c_size_t(max_bytes))
