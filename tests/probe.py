"""Looks inside an engine: what its own steps compute, captured ones if any.

engine = open_engine("qwen3", level=3)
logits_of(engine, tokens)              # [T, V] at every position, in the chunks that the scheduler makes
assert_logits(engine, tokens, model)   # they are those of transformers; if not, the line that parts is named
"""

from __future__ import annotations

from typing import Any

import tiny
import torch
from law import assert_same_logits
from parting import naming_line

from atom import LLMEngine, SamplingParams
from atom.images.types import PlacedImage
from atom.runtime.step.cuda_graphs import Started
from atom.runtime.step.input import StepInput
from atom.runtime.step.program import rows_of, score
from atom.runtime.step.runner import Runner
from atom.runtime.types import RequestOptions, Sequence


class WholePrompt(Sequence):
    """A sequence whose prompt is computed, whatever the cache holds of it."""

    needs_prompt = True


@torch.inference_mode()
def logits_of(engine: LLMEngine, tokens: list[int], images: tuple[PlacedImage, ...] = ()) -> torch.Tensor:
    """[T, V] at every position, on the host."""
    scheduler, builder, runner = engine._engine.scheduler, engine._engine.builder, engine._engine.runner
    assert isinstance(runner, Runner)
    params = SamplingParams(max_tokens=1)
    (made,) = engine._engine.prepare(tokens, params, RequestOptions(images=images))
    rope = {"rope_positions": made.rope_positions, "rope_delta": made.rope_delta}
    sequence = WholePrompt("probe", tokens, params, images=images, **rope)
    scheduler.add(sequence)
    parts = []
    while not sequence.finish_reason:
        plan = scheduler.schedule()
        step = builder.build(plan)
        slots = runner.model.slots
        before = {state: tensor.clone() for state, tensor in slots.items()}
        sampled = runner.execute(step).wait()
        for state, tensor in before.items():
            slots[state].copy_(tensor)
        hidden = start(runner, step).hidden  # once more: it writes the KV that is there already
        assert hidden is not None
        parts.append(score(runner.model.head, rows_of(hidden, slice(plan.num_tokens))).cpu())
        scheduler.commit(plan, sampled, lambda _: "max_tokens")
    return torch.cat(parts)


def start(runner: Runner, step: StepInput) -> Started:
    """A step's tokens through the model, captured where it is; nothing is drawn."""
    return runner.graphs.start(step) or runner._start(step)


def assert_logits(engine: LLMEngine, tokens: list[int], model: Any) -> None:
    """The logits at every position are those of a model of transformers, under the law of numbers."""
    with naming_line(engine.config, model, tokens):
        assert_same_logits(logits_of(engine, tokens), tiny.logits(model, tokens))
