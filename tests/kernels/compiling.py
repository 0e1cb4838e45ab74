"""A driver that compiles for NVIDIA's Hopper where there is no GPU, for processes of tests."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use_hopper() -> None:
    """Have Triton compile for sm_90 from here on; nothing can be launched."""
    triton.runtime.driver.set_active(_Driver())
