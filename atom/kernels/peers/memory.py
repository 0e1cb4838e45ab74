"""GPU memory that the ranks of a host share, by CUDA or HIP IPC.

    memory = IpcMemory(1 << 25)                     # of zeros, on the current device
    address = memory.open(handle)                   # of what another rank has, by its memory.handle

Handles and addresses come from the driver, since torch's allocator may return memory that cannot be shared. Each
process may see only its own GPU. On AMD's GPUs, only uncached memory shows peers what a running kernel writes
(https://rocm.docs.amd.com/projects/HIP: hipExtMallocWithFlags).
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atom.errors import UnsupportedError

CUDA_LIBRARY, HIP_LIBRARY = "libcuda.so.1", "libamdhip64.so"
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS and hipIpcMemLazyEnablePeerAccess, the only flag
UNCACHED = 3  # hipDeviceMallocUncached
HIP_GPUS = ("gfx942", "gfx950")  # on older ones a running kernel does not see what peers write


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Functions(NamedTuple):
    """The names of a driver's functions, in the order of their use, and the flags of `allocate`."""

    allocate: str
    flags: tuple[int, ...]
    clear: str
    export: str
    open: str
    close: str
    free: str


CUDA = Functions(
    "cuMemAlloc_v2",
    (),
    "cuMemsetD8_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemFree_v2",
)
HIP = Functions(
    "hipExtMallocWithFlags",
    (UNCACHED,),
    "hipMemset",
    "hipIpcGetMemHandle",
    "hipIpcOpenMemHandle",
    "hipIpcCloseMemHandle",
    "hipFree",
)


class IpcMemory:
    """Memory of this rank that others may open. UnsupportedError if the driver cannot share any."""

    device = torch.device("cuda")

    def __init__(self, size: int) -> None:
        """size: in bytes"""
        self._names = find_functions()
        torch.cuda.synchronize()  # creates the context of this thread
        address, handle, pointer = ctypes.c_uint64(), Handle(), ctypes.c_uint64
        self._driver = ctypes.CDLL(CUDA_LIBRARY if self._names is CUDA else find_hip())
        flags = map(ctypes.c_uint, self._names.flags)
        self._call(self._names.allocate, ctypes.byref(address), ctypes.c_size_t(size), *flags)
        self.address = address.value
        self._opened: list[int] = []
        release_all = (self._driver, self._names, self.address, self._opened)
        weakref.finalize(self, release, *release_all).atexit = False
        self._call(self._names.clear, pointer(self.address), ctypes.c_int(0), ctypes.c_size_t(size))
        self._call(self._names.export, ctypes.byref(handle), pointer(self.address))
        self.handle = bytes(handle)
        torch.cuda.synchronize()

    def open(self, handle: bytes) -> int:
        """The address, in this process, of another rank's memory."""
        address, opened = ctypes.c_uint64(), Handle.from_buffer_copy(handle)
        self._call(self._names.open, ctypes.byref(address), opened, ctypes.c_uint(PEER_ACCESS))
        self._opened.append(address.value)
        return address.value

    def _call(self, name: str, *args: Any) -> None:
        if (result := getattr(self._driver, name)(*args)) != 0:
            reason = explain(self._driver, self._names, result) or f"error {result}"
            raise UnsupportedError(f"GPUs cannot open each other's memory: {name}: {reason}")


def find_functions() -> Functions:
    """Find the functions of the driver of this machine's GPUs."""
    if torch.version.hip is None:
        return CUDA
    name = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
    if name not in HIP_GPUS:
        raise UnsupportedError(f"of AMD's GPUs {' and '.join(HIP_GPUS)} push into each other's memory, not {name}")
    return HIP


def find_hip() -> str:
    """The HIP library that torch has loaded: a second copy would not know torch's contexts."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split(maxsplit=5)[5] for line in mapped if f"/{HIP_LIBRARY}" in line), HIP_LIBRARY)


def explain(driver: Any, names: Functions, result: int) -> str:
    """The driver's text for an error code."""
    if names is HIP:
        driver.hipGetErrorString.restype = ctypes.c_char_p
        return bytes(driver.hipGetErrorString(result) or b"").decode()
    text = ctypes.c_char_p()
    driver.cuGetErrorString(result, ctypes.byref(text))
    return (text.value or b"").decode()


def release(driver: Any, names: Functions, address: int, opened: list[int]) -> None:
    for each in opened:
        getattr(driver, names.close)(ctypes.c_uint64(each))
    getattr(driver, names.free)(ctypes.c_uint64(address))
