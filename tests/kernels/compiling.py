"""Compile for NVIDIA's Hopper where there is no GPU, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def compile_for_hopper(program: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program, which calls `use_hopper`, without Triton's interpreter; it must succeed."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join((str(root), str(root / "tests"), environment.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done
