"""Properties of a GPU that launches depend on, and Triton's driver.

load_driver().get_current_target()
gpu = find_gpu(x.device)
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from atom.kernels.triton.compile.binary_cache import kept


class Gpu(NamedTuple):
    """The properties of a GPU that launches depend on."""

    units: int  # multiprocessors
    shared_memory: int  # bytes per program
    capability: tuple[int, int]  # NVIDIA's; (0, 0) of others
    name: str = ""  # in files of tuned parameters

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may be launched while the preceding one still runs (PDL)."""
        return self.capability >= (9, 0)

    @property
    def options(self) -> dict[str, bool]:
        """Arguments of a kernel that waits for its inputs if it has PDL."""
        return {"PDL": True, "launch_pdl": True} if self.has_dependent_launch else {"PDL": False}


@functools.cache
def find_gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu(2, 0, (0, 0))  # Triton's interpreter: few programs make short tests
    properties = load_driver().utils.get_device_properties(device.index or 0)
    capability = torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
    name = torch.cuda.get_device_name(device)
    return Gpu(properties["multiprocessor_count"], properties["max_shared_mem"], capability, name)


def load_driver() -> Any:
    """Load Triton's driver, which several threads must not do at a time; it is compiled on first use."""
    with _loading, kept():
        return driver.active


_loading = threading.Lock()


def next_power_of_2(num: int) -> int:
    """The smallest power of two from num on; num >= 1. Triton's own function is made for kernels, and slow."""
    return 1 << (num - 1).bit_length()
