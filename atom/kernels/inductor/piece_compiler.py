"""Compile a piece for a CPU: aten, Inductor, a shared object.

files = InductorCompiler().compile(text)      # {"piece.so": …, "piece.json": …}, some seconds
run = InductorCompiler().load(folder)         # milliseconds, without a compiler
"""

from __future__ import annotations

import importlib
import json
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atom.errors import ArtifactError
from atom.kernels.backend import Kernel, PieceCode, PieceCompiler, Target
from atom.kernels.registry import find_backend

LIBRARY = "piece.so"
OPTIONS = {  # of Inductor
    "cpp.dynamic_threads": True,  # as many threads as the process has, not as this machine has now
    "aot_inductor.precompile_headers": False,  # needs openssl, and reads a fixed path in /tmp
}


class InductorCompiler(PieceCompiler):
    uses_processes = True

    def takes(self, kernel: Kernel) -> bool:
        return kernel.trace is not None

    def compile(self, text: str) -> dict[str, bytes]:
        files: dict[str, bytes] = _aot().compile_text(text)
        return files

    def load(self, folder: Path) -> PieceCode:
        find_backend("torch")  # compiled code calls ops that it registers

        try:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)
        except RuntimeError as error:
            raise ArtifactError(f"{folder}: this piece cannot be loaded: {str(error).splitlines()[0]}") from None
        run = runner.run

        def call(*tensors: Tensor) -> list[Tensor]:
            return run(
                [tensor if tensor.is_mkldnn or tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
            )

        return call

    def ingredients(self, target: Target) -> dict[str, str]:
        return {"strides": "contiguous", "compiler options": json.dumps(OPTIONS)}

    def find_missing(self) -> str | None:
        """Inductor takes a C++ compiler."""
        return None if _aot().has_compiler() else "a C++ compiler: install g++"


def _aot() -> Any:
    """The module that compiles, imported when there is something to compile."""
    return importlib.import_module("atom.kernels.inductor.aot")


def find_versions() -> dict[str, str]:
    """What compiled code depends on of this machine: a machine with equal values can run it."""
    return {"torch": torch.__version__, "instruction set": instruction_set(), "libraries": libraries()}


@cache
def instruction_set() -> str:
    """The instruction set that compiled code may use on this CPU."""
    kinds = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "neon", "asimd", "sve", "bf16", "popcnt", "movbe")
    lines = (line for line in _lines_of("/proc/cpuinfo") if line.lower().startswith(("flags", "features")))
    stated = next(lines, "").partition(":")[2].split()
    return " ".join(
        [torch.backends.cpu.get_cpu_capability(), *sorted({flag for flag in stated if flag.startswith(kinds)})]
    )


@cache
def libraries() -> str:
    """The libc and the libstdc++ that compiled code is loaded with: those of another machine may lack a symbol."""
    loaded = {Path(line.split()[-1]).resolve().name for line in _lines_of("/proc/self/maps") if "libstdc++" in line}
    return " ".join([*platform.libc_ver(), *sorted(loaded)])


def _lines_of(path: str) -> list[str]:
    """The lines of a file that only Linux has, none elsewhere."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
