"""Which steps that raise end the engine, and which only their requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atom.errors import CapacityError, EngineDeadError
from atom.runtime.step.guard import StepGuard


class Engine:
    """Steps that raise what a test says, one after the other; None: they do not."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.num_ended = 0

    def step(self, on_plan: Callable[[], object] | None) -> None:
        if (error := self.errors.pop(0)) is not None:
            raise error

    def end_failed(self) -> None:
        self.num_ended += 1


def test_a_step_that_raises_ends_its_requests_and_is_logged(caplog: pytest.LogCaptureFixture):
    engine = Engine(ValueError("a fault"), None, ValueError("a fault"))
    steps = StepGuard(engine)
    for _ in range(3):
        steps.step()
    assert engine.num_ended == 2
    assert [record.message for record in caplog.records] == ["a step failed"] * 2 and "a fault" in caplog.text


def test_two_in_a_row_end_the_engine():
    engine = Engine(ValueError("a fault"), KeyError("another"))
    steps = StepGuard(engine)
    steps.step()
    with pytest.raises(KeyError, match="another"):
        steps.step()
    assert engine.num_ended == 1


@pytest.mark.parametrize("error", [CapacityError("lower this"), EngineDeadError("a rank"), BrokenPipeError()])
def test_what_no_request_is_the_reason_of_ends_the_engine_at_once(error: Exception):
    engine = Engine(error)
    with pytest.raises(type(error)):
        StepGuard(engine).step()
    assert engine.num_ended == 0
