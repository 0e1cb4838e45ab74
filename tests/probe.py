"""Looks inside an engine: what its own steps compute."""

from __future__ import annotations

import torch

from atom import LLMEngine, SamplingParams
from atom.runtime.batch import build_inputs
from atom.runtime.program import score
from atom.runtime.types import Sequence


@torch.inference_mode()
def logits_of(engine: LLMEngine, tokens: list[int]) -> torch.Tensor:
    """[T, V] at every position, in the chunks that the scheduler makes."""
    scheduler, runner = engine._engine.scheduler, engine._engine.runner
    sequence = Sequence("probe", tokens, SamplingParams(max_tokens=1))
    scheduler.add(sequence)
    parts = []
    while not sequence.finish_reason:
        plan = scheduler.schedule()
        hidden = runner.body(build_inputs(plan, runner.body.inputs, runner.block_size))
        parts.append(score(runner.head, hidden))
        scheduler.commit(plan, runner.execute(plan), lambda _: "max_tokens")
    return torch.cat(parts)
