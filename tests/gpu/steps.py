"""What the tests on a GPU share: marks, fields of an engine, how far it runs ahead."""

from __future__ import annotations

from typing import Any

from atom import LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
FIELDS: dict[str, Any] = {"dtype": "fp32", "device": "cuda", "num_kvcache_blocks": 256, "max_num_seqs": 8,
                          "max_num_batched_tokens": 512, "cudagraph_capture_sizes": [1, 2, 4, 8]}  # fmt: skip


def set_depth(engine: LLMEngine, run_ahead: int) -> None:
    """Steps that the engine may have after the one that it waits for."""
    engine._engine.runner.run_ahead = engine._engine.scheduler._run_ahead = run_ahead
