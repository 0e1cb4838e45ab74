"""Key ingredients of compiled CPU code: instruction set and C libraries."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def instruction_set() -> str:
    """The instruction set that compiled code may use on this CPU."""
    kinds = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "neon", "asimd", "sve", "bf16", "i8", "popcnt", "movbe")
    lines = (line for line in _lines_of("/proc/cpuinfo") if line.lower().startswith(("flags", "features")))
    listed = next(lines, "").partition(":")[2].split()
    return " ".join(
        [torch.backends.cpu.get_cpu_capability(), *sorted({flag for flag in listed if flag.startswith(kinds)})]
    )


@cache
def libraries() -> str:
    """The libc and the libstdc++ that compiled code is linked to: those of another machine may lack a symbol."""
    loaded = {Path(line.split()[-1]).resolve().name for line in _lines_of("/proc/self/maps") if "libstdc++" in line}
    return " ".join([*platform.libc_ver(), *sorted(loaded)])


def _lines_of(path: str) -> list[str]:
    """The lines of a file; none if the system has no such file, as outside Linux."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
