"""Taps and steering on a GPU: hidden states and tokens of the reference, in pieces, CUDA graphs and batches of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hooked import FIRST, LAST, SECOND, pooled, states_of, steered
from safetensors.torch import save_file

from atom import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("level", "method"), [(1, None), (2, None), (3, None), (3, "ngram")])
def test_a_batch_of_all_kinds(level: int, method: str | None, open_engine: Any, references: Any, tmp_path: Path):
    vector, model = torch.randn(48, generator=torch.Generator().manual_seed(0)), references("qwen3")
    save_file({FIRST: vector}, tmp_path / "calm.safetensors")
    fields = {"passes.taps": [SECOND, LAST], "passes.steer": {"calm": str(tmp_path / "calm.safetensors")}}
    fields |= {} if method is None else {"method": method, "num_speculative_tokens": 3}
    engine = open_engine("qwen3", level=level, device="cuda", num_kvcache_blocks=200, max_num_seqs=16, **fields)
    params, taps = SamplingParams(max_tokens=24, temperature=0), {SECOND: "all", LAST: "mean"}
    prompts = [[*tiny.prompt(9 + seed, seed=seed)] * 3 for seed in range(6)]  # which repeat themselves
    asked: list[dict[str, Any]] = [
        {},
        {"taps": taps},
        {"steer": {"calm": 2.0}},
        {"taps": taps, "steer": {"calm": -1.5}},
    ]
    every = [asked[at % len(asked)] for at in range(len(prompts))]
    ids = [engine.add_request([prompt], params, **each)[0] for prompt, each in zip(prompts, every, strict=True)]
    ended = {sequence.request_id: sequence for sequence in engine._finish(ids)}
    for id, prompt, each in zip(ids, prompts, every, strict=True):
        sequence = ended[id]
        with steered(model, {FIRST: vector}, each.get("steer", {}).get("calm", 0.0)):
            tiny.assert_greedy({"token_ids": sequence.output}, prompt, model)
            assert sequence.taps.keys() == each.get("taps", {}).keys()
            for layer, found in sequence.taps.items():
                states = states_of(model, layer, [*prompt, *sequence.output[:-1]])
                expected = pooled(states, taps[layer], len(prompt))
                np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
