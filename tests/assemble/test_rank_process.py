"""A rank's part of a step, of an adapter and of a trace, as its driver sends them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atom.assemble.rank_process import Rank, fail, find_running, profile
from atom.errors import ConfigError
from atom.runtime.profiler import Profiler
from atom.runtime.ranks.driver import WAIT
from atom.runtime.step.input import BatchShape, StepInput
from atom.runtime.types import BlockCopies, LoadAdapter, Profile


class Step:
    """A step under way, by its number."""

    def __init__(self, number: int, is_over: bool = False) -> None:
        self.number, self.is_over, self.is_finished = number, is_over, False

    def finished(self) -> Step:
        self.is_finished = True
        return self


class Runner:
    def __init__(self, defers_logits: bool = False) -> None:
        self.model, self.steps, self.copies = SimpleNamespace(defers_logits=defers_logits), list[Step](), list[Any]()

    def execute(self, step: StepInput) -> Step:
        self.steps.append(Step(len(self.steps)))
        return self.steps[-1]

    def copy(self, copies: BlockCopies) -> None:
        self.copies.append(copies)


STEP = msgspec.msgpack.encode(StepInput(shape=BatchShape(1, 1, 1), is_decode=True, packed=bytearray(4)))


def rank_of(runner: Runner, adapters: Any = None, weights: Any = None) -> tuple[Rank, list[str]]:
    answers: list[str] = []
    made: Any = Rank
    return made(runner, Profiler(None), adapters, weights, answers.append), answers


def test_a_step_is_started_to_its_end_at_once():
    rank, _ = rank_of(runner := Runner())
    assert rank.take(STEP) is runner.steps[0]  # type: ignore[comparison-overlap]
    assert runner.steps[0].is_finished and not rank.pending


def test_of_a_stage_that_waits_for_logits_a_step_is_finished_when_the_driver_waits_for_it():
    rank, _ = rank_of(runner := Runner(defers_logits=True))
    assert rank.take(STEP) is None and rank.take(STEP) is None
    assert rank.take(WAIT) is runner.steps[0]  # type: ignore[comparison-overlap]
    assert [step.is_finished for step in runner.steps] == [True, False]


def test_copies_are_no_step():
    rank, _ = rank_of(runner := Runner())
    assert rank.take(msgspec.msgpack.encode(BlockCopies())) is None
    assert (runner.copies, runner.steps) == ([BlockCopies()], [])


def test_an_adapter_whose_files_differ_from_the_driver_s_is_refused():
    files = SimpleNamespace(hash=lambda: None, digest=b"here")
    written: list[int] = []
    adapters = SimpleNamespace(read=lambda path: files, write=lambda number, files: written.append(number))
    rank, answers = rank_of(Runner(), adapters)
    rank.take(msgspec.msgpack.encode(LoadAdapter(3, "/adapters/sql", b"there")))
    assert "/adapters/sql has other files than on the host that drives" in answers[0] and written == []
    rank.take(msgspec.msgpack.encode(LoadAdapter(3, "/adapters/sql", b"here")))
    assert answers[1:] == [""] and written == [3]


def test_steps_that_the_device_has_ended_are_not_kept():
    steps: Any = [Step(0, is_over=True), Step(1), Step(2, is_over=True)]
    assert [step.number for step in find_running(steps)] == [1]


def test_a_trace_that_cannot_be_written_ends_no_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    profile(Profiler(None), Profile(True))
    assert "a rank has no trace: there is no folder for traces" in capsys.readouterr().err


def test_an_error_is_sent_to_the_driver_before_the_process_ends(monkeypatch: pytest.MonkeyPatch):
    events: list[Any] = []
    monkeypatch.setattr("os._exit", lambda code: events.append(code))
    link: Any = SimpleNamespace(fail=lambda error: events.append(str(error)))
    fail(link, ConfigError("wrong"))
    assert events == ["wrong", 1]
