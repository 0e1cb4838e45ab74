"""Prompts that are retained, by the Python API: they are found after others took all blocks, and answered as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom import LLMEngine, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
KEPT, LOST = tiny.prompt(45), tiny.prompt(45, seed=1)
OTHERS = [tiny.prompt(61, seed=seed) for seed in range(2, 10)]  # 8 of 18 blocks


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_a_retained_prompt_is_found_and_answered_as_before(
    name: str, checkpoints: Callable[[str], Path], references: Callable[[str], Any]
):
    pools = {"block_size": 4, "num_kvcache_blocks": 80, "state_memory": 90_000}  # 16 copies of recurrent state
    engine = LLMEngine(model=str(checkpoints(name)), dtype="fp32", level=1, max_num_seqs=4, **pools)
    params = SamplingParams(**GREEDY, cache_retention={"seconds": 600})
    asking = SamplingParams(**GREEDY, explain=True)
    engine.generate([KEPT], params)
    engine.generate([LOST], SamplingParams(**GREEDY))
    engine.generate(OTHERS, SamplingParams(**GREEDY))
    kept, lost = engine.generate([KEPT + tiny.prompt(9, seed=11), LOST + tiny.prompt(9, seed=11)], asking)
    assert kept["prefix_hit"]["num_tokens"] == 44 and kept["prefix_hit"]["reason"] == "different_token"
    assert kept["prefix_hit"]["index"] == 45, "where the answer went on otherwise"
    assert lost["prefix_hit"]["num_tokens"] == 0 and lost["prefix_hit"]["reason"] == "evicted"
    tiny.assert_greedy(kept, KEPT + tiny.prompt(9, seed=11), references(name))
    stats = engine.metrics
    assert stats.num_retained_blocks >= 11 and stats.num_retained_found > 0
    assert "prefix_hit" not in engine.generate([KEPT], params)[0]
    engine.close()
