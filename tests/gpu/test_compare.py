"""`job=compare` on a GPU: levels, formats and transformers agree, and CUDA graphs answer as what they capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.jobs.compare.job import compare
from atom.jobs.start import load_job

pytestmark = pytest.mark.gpu

PROMPTS = "prompts=[[1,2,3,4,5,6,7],[9],[5,3,8,8,1,2,40,30,20,10,11,12,13,14,15,16,17]]"


@pytest.fixture
def compared(checkpoints: Any, gpu_cache: Path) -> Any:
    """The result of `job=compare` on a tiny variant."""

    def run(name: str, *overrides: str) -> dict[str, Any]:
        fields = [f"checkpoint={checkpoints(name)}", "device=cuda", f"cache={gpu_cache}", PROMPTS]
        return compare(load_job(["job=compare", *fields, "serve.kv_cache_memory=16777216", *overrides]))

    return run


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_each_level_agrees_with_level_0(compared: Any, name: str, level: int):
    for dtype in ("fp32", "bf16"):
        result = compared(name, "job.a=level=0", f"job.b=level={level}", f"dtype={dtype}")
        assert result["agree"], result["findings"][0]
        assert result["values"] >= (20 if level < 2 else 4)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_each_level_agrees_with_transformers(compared: Any, level: int):
    result = compared("llama", "job.b=transformers", f"level={level}", "dtype=fp32")
    assert result["agree"], result["findings"][0]
    assert [prompt["difference"] for prompt in result["prompts"]] == [None] * 3


def test_the_cpu_agrees(compared: Any):
    result = compared("llama", "job.a=device=cpu", "job.b=level=1", "dtype=fp32")
    assert result["agree"], result["findings"][0]


def test_a_wrong_eps_is_found(compared: Any):
    result = compared("llama", "job.b='level=2 model.norm.eps=1e-3'", "job.a=level=0", "dtype=fp32")
    assert not result["agree"]
    assert result["findings"][0]["layer"] == 0
