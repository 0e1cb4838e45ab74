"""What a runner is sent is all that it needs: another one that is sent the same gives the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny
from conftest import Place
from runtime.step.test_runner import open_runner

from atom import SamplingParams
from atom.runtime.step.input import Pending, StepInput
from atom.runtime.types import Logprobs, Sampled

WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.8, "prompt_logprobs": 1},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {5: 9.0}, "n": 2},
    {"temperature": 1.0, "top_k": 7, "frequency_penalty": 0.4, "min_tokens": 3, "stop_token_ids": list(range(50))},
    {"temperature": 0.5},
]


@dataclass
class Recorded:
    """A step that runs: what was sent, and what it gave once it was waited for."""

    sent: bytes
    pending: Pending
    sampled: Sampled | None = None

    def wait(self) -> Sampled:
        self.sampled = self.pending.wait()
        return self.sampled


class Odd:
    """A grammar of odd tokens."""

    def allowed(self, vocab: int) -> np.ndarray:
        return np.arange(vocab) % 2 == 1

    def push(self, token: int) -> bool:
        return False


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_s_inputs_give_the_same_tokens_on_another_runner(checkpoints: Any, policy_place: Place, depth: int):
    fields = {
        "enable_prefix_caching": True,
        "num_kvcache_blocks": 12,
        "max_model_len": 40,
        "max_num_batched_tokens": 11,
    }
    engine = open_runner(checkpoints("qwen3"), Place("cpu", "torch"), depth, **fields)
    runner: Any = engine.runner
    execute, recorded = runner.execute, list[Recorded]()

    def record(step: StepInput) -> Recorded:
        recorded.append(Recorded(msgspec.msgpack.encode(step), execute(step)))
        return recorded[-1]

    runner.execute = record
    shared = tiny.prompt(19)
    requests = [
        engine.prepare([*shared[: 9 + 2 * at], at], SamplingParams(max_tokens=9, seed=at, **way))
        for at, way in enumerate(WAYS)
    ]
    bound = requests[-1][0]
    bound.matcher = Odd()
    for at, each in enumerate(requests):
        engine.submit(each)
        if at < 2:
            engine.step()
    while engine.has_work:
        engine.step()
    engine.submit(engine.prepare(bound.prompt, SamplingParams(max_tokens=1)))  # whose prefix is known by now
    while engine.has_work:
        engine.step()

    stats, steps = engine.scheduler.stats, [msgspec.msgpack.decode(each.sent, type=StepInput) for each in recorded]
    assert stats.num_preemptions and stats.num_chunks and stats.num_prefix_hit_tokens
    assert bool(stats.num_ahead) == (depth > 0)
    assert {step.sampling for step in steps} == {"greedy", "random", "filtered"} and any(s.is_decode for s in steps)
    assert all(any(getattr(step, name) for step in steps) for name in ("counted", "shaping", "logprobs", "scored"))
    assert any(step.shaping and step.shaping.allowed for step in steps)
    assert len(bound.output) == 9 and all(token % 2 for token in bound.output)

    other: Any = open_runner(checkpoints("qwen3"), policy_place, depth, **fields).runner
    for step, each in zip(steps, recorded, strict=True):
        ours, theirs = other.execute(step).wait(), each.sampled
        assert theirs is not None and ours.tokens == theirs.tokens
        assert [one and one.rank for one in ours.logprobs] == [one and one.rank for one in theirs.logprobs]
        assert ranks(ours.prompt_logprobs) == ranks(theirs.prompt_logprobs)


def ranks(prompts: dict[int, list[Logprobs]]) -> dict[int, list[tuple[int, int]]]:
    return {row: [(each.token, each.rank) for each in found] for row, found in prompts.items()}
