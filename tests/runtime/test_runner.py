from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atom import LLMEngine, SamplingParams
from atom.errors import CapacityError
from atom.runtime import runner


@pytest.fixture
def engine(checkpoints: Callable[[str], Path]) -> Iterator[LLMEngine]:
    engine = LLMEngine(model=str(checkpoints("llama")), level=1, kv_cache_memory=1 << 22)
    yield engine
    engine.close()


def allocate_too_much(inputs: Any) -> None:
    torch.empty(10**15)


def lack(error: Exception) -> Callable[[Any], None]:
    def body(inputs: Any) -> None:
        raise error

    return body


@pytest.mark.parametrize(
    "body",
    [
        allocate_too_much,
        lack(MemoryError()),
        lack(torch.OutOfMemoryError("CUDA out of memory")),
        lack(RuntimeError("CUDA error: out of memory")),
        lack(RuntimeError("MemoryError: <EMPTY MESSAGE>\n\nAt:\n  linear.py(33): packed_linear\n")),
    ],
    ids=["cpu", "python", "cuda", "driver", "piece"],
)
def test_a_step_that_memory_does_not_hold_names_the_knobs(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, body: Callable[[Any], None]
):
    body_of = {"inputs": engine._engine.runner.body.inputs, "__call__": lambda self, inputs: body(inputs)}
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine.runner, "body", type("Body", (), body_of)())
        with pytest.raises(
            CapacityError, match=r"a step of 30 tokens of 3 sequences .* serve.max_num_batched_tokens \(to 15\)"
        ):
            engine.generate([[1] * 10] * 3)
    (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert answer["num_tokens_output"] == 2, "and the next request is served"


def test_another_error_is_not_taken_for_a_lack_of_memory(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "score", lambda *_: lack(RuntimeError("size mismatch"))(None))
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.generate([[1] * 10] * 3)


def test_ctrl_c_within_a_compiled_piece_is_still_ctrl_c(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    text = "KeyboardInterrupt: <EMPTY MESSAGE>\n\nAt:\n  linear.py(33): packed_linear\n"
    monkeypatch.setattr(runner, "score", lambda *_: lack(RuntimeError(text))(None))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1] * 10] * 3)
    assert engine.is_finished()
