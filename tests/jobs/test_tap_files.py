"""`job.taps` and `job.steer`: files of hidden states, and prompts steered by such a file, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hooked import FIRST, states_of, steered
from safetensors.torch import load_file

from atom.config.load import load
from atom.errors import ConfigError, RequestError
from atom.jobs import generate

PROMPTS = [tiny.prompt(size, seed=size) for size in (5, 16)]


def test_a_job_writes_states_that_steer(
    checkpoints: Callable[[str], Path],
    references: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    prompts, folder = PROMPTS, tmp_path / "states"
    common = [f"checkpoint={checkpoints('llama')}", "dtype=fp32", "level=1", "sampling.temperature=0"]
    common += [
        f"prompts={json.dumps(prompts)}",
        "sampling.max_tokens=4",
        "job.output=json",
        "serve.kv_cache_memory=4MiB",
    ]
    tapped = [f"passes.taps=[{FIRST}]", f"job.taps={{{FIRST}: mean}}", f"job.taps_folder={folder}"]
    assert generate.run(load([*common, *tapped])) == 0
    model, lines = references("llama"), capsys.readouterr().out.splitlines()
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True)):
        assert json.loads(line)["taps"] == str(folder / f"{number}.safetensors")
        found = load_file(folder / f"{number}.safetensors")
        expected = torch.from_numpy(states_of(model, FIRST, prompt).mean(0))
        assert found.keys() == {FIRST}
        torch.testing.assert_close(found[FIRST], expected, atol=1e-5, rtol=1e-5)
    steer = [f"passes.steer={{it: {folder / '0.safetensors'}}}", "job.steer={it: 1.5}"]
    assert generate.run(load([*common, *steer])) == 0
    with steered(model, load_file(folder / "0.safetensors"), 1.5):
        for prompt, line in zip(prompts, capsys.readouterr().out.splitlines(), strict=True):
            tiny.assert_greedy(json.loads(line), prompt, model)


def test_what_is_asked_wrongly_is_refused_at_once(checkpoints: Callable[[str], Path]):
    common = [f"checkpoint={checkpoints('llama')}", "prompts=[[1,2]]", f"passes.taps=[{FIRST}]"]
    for fields, kind, message in (
        (["job.taps=3"], RequestError, "taps=3 is no list of names"),
        (["job.steer={it: much}"], RequestError, "steer: the scale 'much' is no number"),
        ([f"job.taps=[{FIRST}]", "job.resume=true", "job.output_file=a.jsonl"], ConfigError, "leave out job.resume"),
    ):
        with pytest.raises(kind, match=message):
            generate.run(load([*common, *fields]))
