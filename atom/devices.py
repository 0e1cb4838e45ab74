"""Find this machine's device without importing torch.

`--help` and the HTTP process do not import it.

find_device()     # cuda, which is AMD's GPUs too, or cpu
count_devices()   # the GPUs that this process may use
open_early()      # the GPU's context is made while torch is imported
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# library of torch for a vendor's GPUs -> the driver's library, its init function and its count of devices
VENDORS = {
    "libtorch_cuda.so": ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    "libtorch_hip.so": ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
}


@cache
def find_device() -> str:
    """Find the device: cuda if torch is built for GPUs and the driver has one for this process, else cpu."""
    return "cuda" if count_devices() else "cpu"


def is_built_for_amd() -> bool:
    return (_torch_folder() / "libtorch_hip.so").exists()


def _torch_folder() -> Path:
    spec = find_spec("torch")
    return Path(spec.origin).parent / "lib" if spec is not None and spec.origin else Path()


def count_devices() -> int:
    """Count the GPUs that torch is built for and that the driver has for this process."""
    folder = _torch_folder()
    counts = (_num_devices(folder, *driver) for built, driver in VENDORS.items() if (folder / built).exists())
    return next((count for count in counts if count > 0), 0)


def _num_devices(folder: Path, library: str, start: str, count: str) -> int:
    for path in (library, str(folder / library)):  # torch for AMD includes the driver's library
        try:
            driver = ctypes.CDLL(path)
        except OSError:
            continue
        num = ctypes.c_int(0)
        if getattr(driver, start)(0) == 0 and getattr(driver, count)(ctypes.byref(num)) == 0:
            return num.value
    return 0


def open_early() -> threading.Thread:
    """Create the first GPU's context in a thread, while this one imports torch, which then uses it.

    If that fails, torch creates it, or reports the error.
    """
    thread = threading.Thread(target=_retain_context)
    thread.start()
    return thread


def _retain_context() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # the GPU is another vendor's
    device, context = ctypes.c_int(0), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
