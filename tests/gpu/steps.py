"""Looks inside an engine on a GPU: what its own steps compute, captured ones where there are some.

engine = open_engine("qwen3", level=3)
logits_of(engine._engine, tokens)              # [T, V] at every position, in the chunks that the scheduler makes
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom import LLMEngine, SamplingParams
from atom.runtime.cuda_graphs import Step
from atom.runtime.device_runner import DeviceRunner
from atom.runtime.engine import Engine
from atom.runtime.program import rows_of, score
from atom.runtime.types import Plan, Sequence

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
FIELDS: dict[str, Any] = {"dtype": "fp32", "device": "cuda", "num_kvcache_blocks": 256, "max_num_seqs": 8,
                          "max_num_batched_tokens": 512, "cudagraph_capture_sizes": [1, 2, 4, 8]}  # fmt: skip


def set_depth(engine: LLMEngine, run_ahead: int) -> None:
    """Steps that the engine may have behind the one that it waits for."""
    engine._engine.runner.run_ahead = engine._engine.scheduler._run_ahead = run_ahead


def run_again(runner: DeviceRunner, plan: Plan) -> Step:
    """A step with prompts that was executed, and not committed, once more: it writes the KV that is there already."""
    return runner.graphs.mix(plan) or runner._mix(plan)


@torch.inference_mode()
def logits_of(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """[T, V] at every position of a prompt, on the host, in the chunks that the scheduler makes."""
    scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(runner, DeviceRunner)
    sequence = Sequence("probe", tokens, SamplingParams(max_tokens=1))
    scheduler.add(sequence)
    parts = []
    while not sequence.finish_reason:
        plan = scheduler.schedule()
        sampled = runner.execute(plan).wait()
        hidden = run_again(runner, plan).hidden
        assert hidden is not None
        parts.append(score(runner.model.head, rows_of(hidden, slice(plan.num_tokens))).cpu())
        scheduler.commit(plan, sampled, lambda _: "max_tokens")
    return torch.cat(parts)
