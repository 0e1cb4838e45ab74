"""Which rows of a plan ran, and which failed, with runners that a test makes up."""

from __future__ import annotations

from typing import Any

import pytest
from runtime.test_engine import AsPlanned

from atom import SamplingParams
from atom.errors import CapacityError
from atom.runtime.step import bisect_failures
from atom.runtime.types import Plan, ScheduledRequest, Sequence

SHORT = CapacityError("lower this")
WRONG = ValueError("a grammar that fails")
BUILDER: Any = AsPlanned()


class Runner:
    """Draws for the rows of a plan, but raises what stands at its ids in `errors`."""

    run_ahead = 0

    def __init__(self, errors: dict[str, Exception]) -> None:
        self.errors = errors
        self.drawn: list[str] = []

    def execute(self, plan: Plan) -> Any:
        ids = ids_of(plan)
        if ids in self.errors:
            raise self.errors[ids]
        self.drawn += ids
        return ids


def ids_of(plan: Plan) -> str:
    return "".join(row.sequence.id for row in plan.rows)


def plan_of(ids: str) -> Plan:
    rows = [ScheduledRequest(Sequence(id, [1], SamplingParams(), slot=slot), 0, 1, True) for slot, id in enumerate(ids)]
    return Plan(rows, len(rows))


@pytest.mark.parametrize(
    ("errors", "outcomes", "drawn"),
    [
        ({}, [("abcd", "abcd")], "abcd"),
        ({"abcd": WRONG, "cd": WRONG, "d": WRONG}, [("ab", "ab"), ("c", "c"), ("d", WRONG)], "abc"),
        ({"abcd": WRONG, "cd": SHORT}, [("ab", "ab"), ("c", "c"), ("d", "d")], "abcd"),
        ({"abcd": WRONG, "cd": SHORT, "c": SHORT}, [("ab", "ab"), ("c", SHORT), ("d", "d")], "abd"),
    ],
    ids=["whole", "one wrong", "short after a part that runs", "short even by itself"],
)
def test_parts_that_run_are_returned_and_run_once(errors: dict[str, Exception], outcomes: list[Any], drawn: str):
    runner = Runner(errors)
    parts: list[bisect_failures.Part] = []
    bisect_failures.execute(runner, BUILDER, plan_of("abcd"), parts)
    assert [(ids_of(part), outcome) for part, outcome in parts] == outcomes
    assert "".join(runner.drawn) == drawn


@pytest.mark.parametrize(
    "errors",
    [{"abcd": SHORT}, {"abcd": WRONG, "ab": SHORT}, {"abcd": WRONG, "ab": WRONG, "a": WRONG, "b": SHORT}],
    ids=["at once", "in the first half", "after a row that failed"],
)
def test_a_lack_of_memory_is_raised_while_nothing_runs(errors: dict[str, Exception]):
    runner = Runner(errors)
    with pytest.raises(CapacityError, match="lower this"):
        bisect_failures.execute(runner, BUILDER, plan_of("abcd"), [])
    assert runner.drawn == []


def test_what_all_rows_raise_is_raised():
    with pytest.raises(ValueError, match="a grammar that fails"):
        bisect_failures.execute(Runner({"ab": WRONG, "a": WRONG, "b": WRONG}), BUILDER, plan_of("ab"), [])
