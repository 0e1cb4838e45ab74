"""Memory of a GPU that the ranks of a host share by CUDA IPC.

    memory = IpcMemory(1 << 25)                     # of zeros, on the current device
    address = memory.open(handle)                   # of what another rank has, by its memory.handle

Handles and addresses come from CUDA's driver, since torch's own allocator may give memory that cannot be shared. Each
process may see its own GPU alone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch

from atom.errors import UnsupportedError

LIBRARY = "libcuda.so.1"
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that there is


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class IpcMemory:
    """Memory of this rank that others may open. UnsupportedError where the driver has none that can be shared."""

    device = torch.device("cuda")

    def __init__(self, size: int) -> None:
        """size: in bytes"""
        if torch.version.hip is not None:
            raise UnsupportedError("AMD's GPUs show each other what they write in uncached memory alone")
        torch.cuda.synchronize()  # there is a context now, in this thread
        address, handle, pointer = ctypes.c_uint64(), Handle(), ctypes.c_uint64
        self._driver = ctypes.CDLL(LIBRARY)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value
        self._opened: list[int] = []
        weakref.finalize(self, release, self._driver, self.address, self._opened).atexit = False
        self._call("cuMemsetD8_v2", pointer(self.address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer(self.address))
        self.handle = bytes(handle)
        torch.cuda.synchronize()

    def open(self, handle: bytes) -> int:
        """The address here of another rank's memory."""
        address = ctypes.c_uint64()
        opened = Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(PEER_ACCESS))
        self._opened.append(address.value)
        return address.value

    def _call(self, name: str, *args: Any) -> None:
        function: Callable[..., int] = getattr(self._driver, name)
        if (result := function(*args)) != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {result}"
            raise UnsupportedError(f"GPUs cannot open each other's memory: {name}: {reason}")


def release(driver: Any, address: int, opened: list[int]) -> None:
    for each in opened:
        driver.cuIpcCloseMemHandle(ctypes.c_uint64(each))
    driver.cuMemFree_v2(ctypes.c_uint64(address))
