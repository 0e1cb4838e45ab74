"""A piece's code as a function, without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import torch
from torch import Tensor

from atom.errors import ArtifactError

LIBRARY, SOURCE = "piece.so", "piece.py"  # a piece's code: for a CPU, and for Triton
PieceCode = Callable[..., list[Tensor]]  # of a piece's inputs and weights


def load_piece(folder: Path) -> PieceCode:
    """A piece's code as a function of its inputs and weights. ArtifactError where it cannot be loaded."""
    return _load_source(folder / SOURCE) if (folder / SOURCE).exists() else _load_library(folder)


class _Loader(SourceFileLoader):
    """Neither reads nor writes compiled Python beside the source: an entry of the cache stays as it is."""

    def path_stats(self, path: object) -> dict[str, float]:
        raise OSError("its time is of no interest")


def _load_source(path: Path) -> PieceCode:
    loader = _Loader("piece", str(path))
    spec = spec_from_loader("piece", loader)
    assert spec is not None, "it has a loader"
    module = module_from_spec(spec)
    try:
        loader.exec_module(module)
        run: PieceCode = module.run
    except (ImportError, SyntaxError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path.parent}: this piece cannot be loaded: {error}") from None
    return run


def _load_library(folder: Path) -> PieceCode:
    from atom.kernels import torch as _  # noqa: F401  compiled code calls ops that it registers

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
