from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from atom.jobs.compare.job import compare
from atom.jobs.start import load_job
from atom.kernels import find_kernel
from atom.runtime.step import program

PROMPTS = [tiny.prompt(24), tiny.prompt(3, seed=1)]


@pytest.fixture
def compared() -> Callable[..., dict[str, Any]]:
    """The result of `job=compare` on a tiny checkpoint, in float32 and with reference ops unless an override differs."""

    def run(folder: Path, *overrides: str) -> dict[str, Any]:
        fields = ["dtype=fp32", "level=0", "serve.kv_cache_memory=4194304", f"prompts={PROMPTS}"]
        return compare(load_job(["job=compare", f"checkpoint={folder}", *fields, *overrides]))

    return run


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel of RMS norms rounds to bf16."""

    def find(op: Any, backend: str) -> Any:
        kernel = find_kernel(op, backend)
        if (op.name, backend) != ("rms_norm", "torch"):
            return kernel
        return replace(kernel, load=lambda context: lambda *args, **rule: rounded(kernel.load(context)(*args, **rule)))

    monkeypatch.setattr(program, "find_kernel", find)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)
