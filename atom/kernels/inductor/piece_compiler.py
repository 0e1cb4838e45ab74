"""Compile a piece for a CPU: aten, Inductor, a shared object.

files = InductorCompiler().compile(text)      # {"piece.so": …, "piece.json": …}, some seconds
run = InductorCompiler().load(folder)         # milliseconds, without a compiler
"""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atom.errors import ArtifactError
from atom.kernels.backend import Kernel, PieceCode, PieceCompiler, Target
from atom.kernels.cpu import instruction_set, libraries
from atom.kernels.registry import find_backend

LIBRARY = "piece.so"
OPTIONS = {  # of Inductor
    "cpp.dynamic_threads": True,  # as many threads as the process has, not as this machine has now
    "cpp.vec_isa_ok": True,  # what the processor says that it has is not tried out, which takes seconds in each process
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
        for backend in ("torch", "cpp"):
            find_backend(backend)  # compiled code calls ops that they register
        try:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)
        except RuntimeError as error:
            raise ArtifactError(f"{folder}: this piece cannot be loaded: {str(error).splitlines()[0]}") from None
        run = runner.run
        lock = threading.Lock()  # the runner has one too, but threads would wait for it while they hold the GIL

        def call(*tensors: Tensor) -> list[Tensor]:
            inputs = [
                tensor if tensor.is_mkldnn or tensor.is_contiguous() else tensor.contiguous() for tensor in tensors
            ]
            with lock:
                return run(inputs)

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
    """Key ingredients of this machine: machines with equal values can run the same code."""
    return {"torch": torch.__version__, "instruction set": instruction_set(), "libraries": libraries()}
