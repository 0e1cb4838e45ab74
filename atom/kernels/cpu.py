"""Key ingredients of compiled CPU code: instruction set and C libraries.

oneDNN's variable ONEDNN_MAX_CPU_ISA, say AVX512_CORE_VNNI, limits our own code too: it runs as on an older CPU.
Values that are not in LIMITS limit oneDNN's code only.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

LIMITS = {  # values of ONEDNN_MAX_CPU_ISA in order, and the instructions that each adds to those before it
    "AVX2": (),
    "AVX512_CORE": ("avx512f",),
    "AVX512_CORE_VNNI": ("avx512_vnni",),
    "AVX512_CORE_BF16": ("avx512_bf16",),
    "AVX512_CORE_FP16": ("avx512_fp16", "avx_vnni"),
    "AVX512_CORE_AMX": ("amx_tile", "amx_int8", "amx_bf16"),
}


@cache
def instruction_set() -> str:
    """The instruction set that compiled code may use on this CPU."""
    kinds = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "neon", "asimd", "sve", "bf16", "i8", "popcnt", "movbe")
    without = tuple("avx512" if flag == "avx512f" else flag for flag in left_out())
    used = {flag for flag in _flags() if flag.startswith(kinds) and not flag.startswith(without)}
    return " ".join([torch.backends.cpu.get_cpu_capability(), *sorted(used)])


@cache
def left_out() -> tuple[str, ...]:
    """This CPU's instructions that ONEDNN_MAX_CPU_ISA leaves out, as /proc/cpuinfo names them."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    later = list(LIMITS)[list(LIMITS).index(limit) + 1 :] if limit in LIMITS else []
    return tuple(flag for name in later for flag in LIMITS[name] if flag in _flags())


def _flags() -> list[str]:
    lines = (line for line in _lines_of("/proc/cpuinfo") if line.lower().startswith(("flags", "features")))
    return next(lines, "").partition(":")[2].split()


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
