"""Compile a piece for a GPU: a module of generated Triton kernels.

`codegen` writes it; Triton compiles its kernels when they are first run.

files = TritonCompiler().compile(text)      # {"piece.py": …}
run = TritonCompiler().load(folder)
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from atom.errors import ArtifactError
from atom.kernels.backend import Kernel, PieceCode, PieceCompiler, Target
from atom.kernels.triton.compile.codegen import kernel_names, write_source

SOURCE = "piece.py"


class TritonCompiler(PieceCompiler):
    uses_processes = False  # Triton releases the interpreter's lock, and takes a fraction of a second a piece

    def takes(self, kernel: Kernel) -> bool:
        return kernel.backend == "generated"

    def compile(self, text: str) -> dict[str, bytes]:
        if torch.cuda.is_available():
            from atom.kernels.triton.compile.binary_cache import BinaryCache
            from atom.kernels.triton.gpu import load_driver

            if BinaryCache.current:
                BinaryCache.current.processes.start()  # a new text's kernels are compiled next
            load_driver()  # once, before threads run the compiled code
        return {SOURCE: write_source(text).encode()}

    def load(self, folder: Path) -> PieceCode:
        return _load_source(folder / SOURCE)

    def kernel_names(self, text: str) -> list[str]:
        return kernel_names(text)

    def ingredients(self, target: Target) -> dict[str, str]:
        return {"device": target.device, "features": " ".join(sorted(target.features))}


class _Loader(SourceFileLoader):
    """Loads a module without reading or writing compiled Python next to it: an entry of the cache does not change."""

    def path_stats(self, path: object) -> dict[str, float]:
        raise OSError("its time is of no interest")


def load_module(path: Path) -> ModuleType:
    """The module of a piece."""
    loader = _Loader("piece", str(path))
    spec = spec_from_loader("piece", loader)
    assert spec is not None, "it has a loader"
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _load_source(path: Path) -> PieceCode:
    try:
        run: PieceCode = load_module(path).run
    except (ImportError, SyntaxError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path.parent}: this piece cannot be loaded: {error}") from None
    return run
