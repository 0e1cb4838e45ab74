"""A piece's code as a function, without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from atom.errors import ArtifactError

PieceCode = Callable[..., list[Tensor]]  # of a piece's inputs and weights


def load_piece(folder: Path) -> PieceCode:
    """A piece's code as a function of its inputs and weights. ArtifactError where it cannot be loaded."""
    from atom.kernels import torch as _  # noqa: F401  compiled code calls ops that it registers

    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / "piece.so"), 1)
    except RuntimeError as error:
        raise ArtifactError(f"{folder}: this piece cannot be loaded: {str(error).splitlines()[0]}") from None
    run = runner.run

    def call(*tensors: Tensor) -> list[Tensor]:
        return run(
            [tensor if tensor.is_mkldnn or tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        )

    return call
