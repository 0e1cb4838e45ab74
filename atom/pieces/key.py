"""What a piece's code depends on, in words: equal ingredients, equal code.

key_of(identity(piece.text, find_target("cuda")))     # 32 hex digits
"""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from pathlib import Path

import torch

from atom.kernels import Target

CPU = Target("cpu")
OPTIONS = {  # of Inductor
    "cpp.dynamic_threads": True,  # as many threads as the process has, not as this machine has now
    "aot_inductor.precompile_headers": False,  # needs openssl, and takes what lies at a known path in /tmp
}
PACKAGE = Path(__file__).parents[1]


def identity(text: str, target: Target = CPU) -> dict[str, str]:
    """All that a piece's code depends on, in words; equal ones have equal code."""
    return {
        "text": digest(text),
        **machine(target),
        **({"strides": "contiguous", "compiler options": json.dumps(OPTIONS)} if target.device == "cpu" else {}),
        "sources": sources_of("graph/ops", "kernels", "pieces"),
    }


def machine(target: Target) -> dict[str, str]:
    """What compiled code depends on of this machine: another one of equal ingredients can run it."""
    if target.device == "cpu":
        return {"torch": torch.__version__, "instruction set": instruction_set(), "libraries": libraries()}
    import triton

    features = " ".join(sorted(target.features))
    return {"torch": torch.__version__, "triton": triton.__version__, "device": target.device, "features": features}


def key_of(ingredients: dict[str, str]) -> str:
    return digest(json.dumps(ingredients, sort_keys=True))


def digest(text: str) -> str:
    """32 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def sources_of(*parts: str) -> str:
    """A digest of the sources of these parts of atom, files or folders."""
    files = [
        file
        for part in parts
        for file in ([PACKAGE / part] if part.endswith(".py") else (PACKAGE / part).rglob("*.py"))
    ]
    return digest("".join(f"{file.relative_to(PACKAGE)}\n{file.read_text()}" for file in sorted(files)))


@cache
def instruction_set() -> str:
    """What compiled code may use of this CPU."""
    kinds = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "neon", "asimd", "sve", "bf16", "popcnt", "movbe")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    stated = next(
        (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    return " ".join(
        [torch.backends.cpu.get_cpu_capability(), *sorted({flag for flag in stated if flag.startswith(kinds)})]
    )


@cache
def libraries() -> str:
    """The libc and the libstdc++ that compiled code is loaded with: those of another machine may lack a symbol."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    loaded = {Path(line.split()[-1]).resolve().name for line in lines if "libstdc++" in line}
    return " ".join([*platform.libc_ver(), *sorted(loaded)])
