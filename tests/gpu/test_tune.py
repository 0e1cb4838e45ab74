"""tune=true on a GPU: what a first start measures a second one knows, and the answers are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from gpu.steps import FIELDS, GREEDY
from law import relative_error
from probe import logits_of

from atom import LLMEngine
from atom.cache import Cache
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear import tiles
from atom.kernels.triton.linear.tiles import Shape
from atom.kernels.triton.linear.tune import candidates

pytestmark = pytest.mark.gpu
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 40)]
SHORT = [tiny.prompt(1 + seed % 8, seed=seed) for seed in range(40)]  # each a step of no more rows than were tuned


class Start(NamedTuple):
    answers: list[tuple[list[int], list[int]]]  # prompts, greedy tokens: of one by itself, and of several together
    logits: torch.Tensor  # of SHORT, at every position
    is_tuned: bool
    err: str


def logits_by(model: Any, prompts: Iterable[list[int]]) -> torch.Tensor:
    return torch.cat([tiny.logits(model, prompt) for prompt in prompts])


@pytest.mark.timeout(900)
def test_a_second_start_knows_all_and_neither_changes_what_the_model_gives(
    checkpoints: Callable[[str], Path], references: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def start(**fields: object) -> Start:
        given = {**FIELDS, "dtype": "bf16", "level": 3, "cache": str(tmp_path), **fields}
        engine = LLMEngine(str(checkpoints("qwen3")), **given)
        is_tuned = bool(engine._engine.runner.model._bindings.kernels)  # type: ignore[attr-defined]
        answers = []
        for prompts in (PROMPTS[:1], PROMPTS):
            generated = [answer["token_ids"] for answer in engine.generate(prompts, GREEDY)]
            answers += zip(prompts, generated, strict=True)
        logits = torch.cat([logits_of(engine, prompt) for prompt in SHORT])
        engine.close()
        return Start(answers, logits, is_tuned, capfd.readouterr().err)

    untuned = start()
    assert not untuned.is_tuned and "tune=true" not in untuned.err
    first = start(tune=True)
    err = first.err
    assert first.is_tuned and err.count("tune=true: a step of ") == 2
    assert "tune=true: a step of 1 decodes takes " in err and "tune=true: a step of 8 decodes takes " in err
    assert "differs from the untuned result" not in err

    reference, half = references("qwen3"), tiny.reference(checkpoints("qwen3"), torch.bfloat16)
    exact = logits_by(reference, SHORT)
    error = relative_error(logits_by(half, SHORT), exact)
    for each in (untuned, first):
        assert relative_error(each.logits, exact) <= 1.25 * error
    for prompt, tokens in untuned.answers + first.answers:  # each token is the best, as near as bf16 can distinguish
        exact, theirs = (tiny.logits(model, prompt + tokens)[len(prompt) - 1 : -1] for model in (reference, half))
        deficit = exact.amax(1) - exact[range(len(tokens)), tokens]
        assert deficit.max() <= 2 * 1.25 * (theirs - exact).abs().max()

    gpu = find_gpu(torch.device("cuda"))
    (file,) = (tmp_path / "tuned").iterdir()
    found, written = json.loads(file.read_text())["linear"], file.stat().st_mtime_ns
    assert {key.split()[0] for key in found} == {"1", "8"}
    assert len(found) == 2 * 5, "qkv, o, gate_up, down, head, for one row and for 8"
    for key, entry in found.items():
        rows, out, inner, gates = map(int, key.split()[:4])
        assert tiles.from_entry(entry) in [
            tiles.choose(Shape(rows, out, inner, gates), gpu),
            *candidates(Shape(rows, out, inner, gates), gpu),
        ]

    second, third = start(tune=True), start()
    assert f"tune=true knows all 5 linears of this model on {gpu.name}: nothing is measured" in second.err
    assert "tune=true" not in third.err
    for again in (second, third):
        assert again.is_tuned and again.answers == first.answers and torch.equal(again.logits, first.logits)
    assert file.stat().st_mtime_ns == written
    assert len(Cache(tmp_path).entries("artifacts")) == 1, "what is compiled depends on no parameters"
