"""tune=true on a GPU: what a first start measures a second one knows, and the answers are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from gpu.steps import FIELDS, GREEDY, ON_GPU

from atom import LLMEngine
from atom.artifact import Cache
from atom.kernels.triton import linear
from atom.kernels.triton.tiles import find_gpu
from atom.kernels.triton.tune import candidates

pytestmark = ON_GPU
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 40)]


@pytest.mark.timeout(900)
def test_a_second_start_knows_all_and_gives_the_same_tokens(
    checkpoints: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def start(**fields: object) -> tuple[list[list[int]], bool, str]:
        """The tokens of the answers, whether what was measured here is used, and what was told."""
        given = {**FIELDS, "dtype": "bf16", "level": 3, "cache": str(tmp_path), **fields}
        engine = LLMEngine(str(checkpoints("qwen3")), **given)
        is_used = bool(engine._engine.runner.model._kernels)  # type: ignore[attr-defined]
        tokens = [answer["token_ids"] for answer in engine.generate(PROMPTS, GREEDY)]
        engine.close()
        return tokens, is_used, capfd.readouterr().err

    _, is_used, told = start()
    assert not is_used and "tune=true" not in told
    first, is_used, told = start(tune=True)
    assert is_used and told.count("tune=true: a step of ") == 2
    assert "tune=true: a step of 1 decodes takes " in told and "tune=true: a step of 8 decodes takes " in told
    assert "differs from the library's result" not in told

    gpu = find_gpu(torch.device("cuda"))
    (file,) = (tmp_path / "tuned").iterdir()
    found, written = json.loads(file.read_text())["linear"], file.stat().st_mtime_ns
    assert {key.split()[0] for key in found} == {"1", "8"}
    assert len(found) == 2 * 5, "qkv, o, gate_up, down, head, for one row and for 8"
    for key, entry in found.items():
        rows, out, inner, gates = map(int, key.split())
        assert linear.from_entry(entry) in [
            linear.choose(rows, out, inner, 2, gates, gpu),
            *candidates(rows, out, inner, 2, gates, gpu),
        ]

    second, is_used, told = start(tune=True)
    assert is_used and f"tune=true knows all 5 products of this model on {gpu.name}: nothing is measured" in told
    third, is_used, told = start()
    assert is_used and "tune=true" not in told
    assert first == second == third
    assert file.stat().st_mtime_ns == written
    assert len(Cache(tmp_path).entries("artifacts")) == 2, "of the first start, and of what was found"
