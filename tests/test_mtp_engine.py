"""Drafts of a model's own layer: the double's, in an engine, and the tokens of none."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mtp
import pytest
import tiny
import torch
from test_speculation import EVENTFUL, PARAMS, prompts, tokens_of
from torch import Tensor

from atom import LLMEngine, SamplingParams
from atom.runtime.model import Model
from atom.runtime.runner import Runner

NAMES = ["deepseek_v3", "glm4_moe"]
FEW = {"vocab_size": 11, "pad_token_id": None}  # so that drafts of random weights are right now and then


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: mtp.save(name, tmp_path_factory.mktemp(name) / "mtp", **FEW) for name in NAMES}


def opened(folder: Path, **fields: Any) -> LLMEngine:
    fields = {"dtype": "fp32", "device": "cpu", "level": 1, "max_num_seqs": 8, "max_verified_tokens": 100, **fields}
    return LLMEngine(str(folder), **fields)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_double(
    name: str, num_drafts: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """At each step of an answer, whose prompt came in chunks; drafts that were accepted and rejected lie behind it."""
    double, draft = mtp.Double(folders[name]), Model._draft
    found: list[tuple[int, list[int]]] = []

    def record(model: Model, slots: Tensor, inputs: Any, num_drafts: int) -> None:
        draft(model, slots, inputs, num_drafts)
        assert model.state.drafts is not None
        found.append((int(model.state.lengths[slots[0]]), model.state.drafts[slots[0], :num_drafts].tolist()))

    monkeypatch.setattr(Model, "_draft", record)
    engine = opened(folders[name], method="mtp", num_speculative_tokens=num_drafts, max_num_batched_tokens=16)
    prompt = [token % 11 for token in tiny.prompt(39)]
    answer = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]["token_ids"]
    engine.close()
    tokens = torch.tensor(prompt + answer)
    assert len(found) >= 24 // (1 + num_drafts) and max(length for length, _ in found) > 50
    for length, drafts in found:
        known = tokens[:length]
        assert len(known) == length
        hidden, given = double.hidden(known)[:-1], known[1:]
        for expected in drafts:
            drafted = double.draft(given, hidden)
            assert double.logits(drafted[-1:]).argmax(-1).item() == expected
            given = torch.cat([given, torch.tensor([expected])])
            hidden = torch.cat([hidden, drafted[-1:]])


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("limits", [{}, EVENTFUL], ids=["roomy", "eventful"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_none(
    name: str, limits: dict[str, Any], run_ahead: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    params = [each for each in PARAMS if each.n == 1]
    every = [[token % 11 for token in prompt] for prompt in prompts(len(params))]
    expected = tokens_of(opened(folders[name]), params, every)
    monkeypatch.setattr("atom.build.Runner", partial(Runner, run_ahead=run_ahead))
    engine = opened(folders[name], method="mtp", num_speculative_tokens=2, **limits)
    for _ in range(2):
        assert tokens_of(engine, params, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert not limits or (stats.num_preemptions > 0 and stats.num_chunks > 0)
    engine.close()
