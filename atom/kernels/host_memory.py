"""Pin host memory, and let the GPU read tensors in it.

    table = HostTensor((262144, 8960), torch.bfloat16, "cuda")
    table.on_host.copy_(weight)                     # on the CPU
    F.embedding(tokens, table.view)                 # on the GPU, which reads the rows over the bus

With unified addressing a kernel reads pinned memory by an address, which torch takes as a tensor's by the CUDA Array
Interface: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html. Copies go by `on_host`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atom.errors import CapacityError, UnsupportedError
from atom.kernels.stable_memory import find_device, open_driver

OPTION = "serve.cpu_offload_params"


class HostTensor:
    """A tensor in host memory, undefined, and the device's view of it; for a GPU it is pinned."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> None:
        """Raises CapacityError if it cannot be pinned, UnsupportedError if the GPU cannot read it."""
        self.on_host = torch.empty(tuple(shape), dtype=dtype)
        self.view = self.on_host if device == "cpu" else _view(self.on_host, device)


def _view(tensor: Tensor, device: str) -> Tensor:
    pin(tensor, f"leave out {OPTION}")
    where = torch.device(device)
    viewed = torch.as_tensor(_Pinned(tensor), device=find_device() if where.index is None else where)
    assert viewed.is_cuda, "a kernel takes its address"
    return viewed.view(tensor.dtype).view(tensor.shape)


class _Pinned:
    """Pinned memory as the GPU's, which torch keeps until no tensor views it."""

    def __init__(self, tensor: Tensor) -> None:
        weakref.finalize(self, unpin, tensor.data_ptr()).atexit = False
        self._tensor = tensor
        self._address = _find_address(tensor)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._tensor.nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}


def _find_address(tensor: Tensor) -> int:
    """The address by which the GPU reads pinned memory."""
    found, none = ctypes.c_uint64(), ctypes.c_uint(0)
    place = ctypes.c_void_p(tensor.data_ptr())
    if error := open_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), place, none):
        raise UnsupportedError(f"{OPTION}: this GPU cannot read host memory (CUDA error {error}); leave it out")
    return found.value


def pin(tensor: Tensor, instead: str) -> None:
    """Pin memory that torch did not allocate, since its allocator rounds up to a power of two.

    instead: what the CapacityError advises if pinning fails
    """
    num_bytes = tensor.nbytes
    if error := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)):  # type: ignore[no-untyped-call]
        raise CapacityError(
            f"{num_bytes} bytes of host memory cannot be pinned (CUDA error {error}): {instead}, or raise the limit of "
            "locked memory (ulimit -l)"
        )


def unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
