from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.steps import FIELDS

from atom import LLMEngine


@pytest.fixture(scope="session")
def gpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of all engines of the session, in whichever of its processes: equal kernels are compiled once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "gpu-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def open_engine(checkpoints: Callable[[str], Path], gpu_cache: Path) -> Iterator[Callable[..., LLMEngine]]:
    """Engines on tiny variants on the GPU, in float32 with a small KV pool; closed after the test."""
    opened: list[LLMEngine] = []

    def open(name: str, **fields: Any) -> LLMEngine:
        opened.append(LLMEngine(model=str(checkpoints(name)), **{**FIELDS, "cache": str(gpu_cache), **fields}))
        return opened[-1]

    yield open
    for engine in opened:
        engine.close()
    torch.cuda.empty_cache()
