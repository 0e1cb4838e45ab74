"""Bisect a step that fails, to isolate the sequences at fault.

    parts = []
    execute(runner, builder, plan, parts)
    for part, outcome in parts:               # one part, if nothing fails
        if isinstance(outcome, Exception):
            ...                                               # the error of the one row of this part
        else:
            scheduler.commit(part, outcome.wait(), finish)

It relies on the builder, which sends the rows of a step that raised again.
"""

from __future__ import annotations

from typing import Protocol

from atom.errors import CapacityError, EngineDeadError, RequestError
from atom.runtime.step.input import Pending, Runner, StepInput
from atom.runtime.types import Plan, ScheduledRequest

Part = tuple[Plan, Pending | Exception]


class BeginAgain(Exception):
    """The outcome of a step that failed and cannot be run again in halves: the scheduler plans its rows anew."""


class Builder(Protocol):
    """Builds steps, and remembers what it has sent."""

    @property
    def can_repeat(self) -> bool:
        """Whether a step that failed may be run again."""

    def build(self, plan: Plan) -> StepInput: ...

    def retract(self, plan: Plan) -> None: ...


def execute(runner: Runner, builder: Builder, plan: Plan, parts: list[Part], *, has_suspects: bool = False) -> None:
    """Execute a plan, in halves if it fails, and append its parts with their outcomes as they come.

    If every row fails, no row is at fault and the error is raised, unless it is a RequestError, which blames its row. A
    CapacityError is raised as well, since memory is short for all; but once a part runs, which cannot be taken back, it
    is the error of the rows that meet it. A step of several rows that cannot be run again, or whose rows read one
    another's KV, is a part with `BeginAgain`.
    Parts that run when an interrupt comes are in `parts`.

    has_suspects: the rows were in a step that failed before, and others do not, so one that fails by itself is at fault
    """
    execute_parts(runner, builder, plan, parts)
    errors = [outcome for _, outcome in parts if isinstance(outcome, Exception)]
    wrong = next((error for error in errors if not isinstance(error, RequestError | BeginAgain)), None)
    if wrong is not None and len(errors) == len(parts) and (not has_suspects or isinstance(wrong, EngineDeadError)):
        raise wrong


def execute_parts(runner: Runner, builder: Builder, plan: Plan, parts: list[Part]) -> None:
    """Execute a plan, in halves if it fails, and append its parts."""
    try:
        parts.append((plan, start(runner, builder, plan)))
        return
    except Exception as error:
        if isinstance(error, CapacityError) and all(isinstance(outcome, Exception) for _, outcome in parts):
            raise
        if len(plan.rows) == 1:
            parts.append((plan, error))
            return
        if plan.is_chained or not builder.can_repeat:
            parts.append((plan, BeginAgain()))
            return
    middle = len(plan.rows) // 2
    for rows in (plan.rows[:middle], plan.rows[middle:]):
        execute_parts(runner, builder, take(rows), parts)


def start(runner: Runner, builder: Builder, plan: Plan) -> Pending:
    """Start a plan's step; the step is retracted if that raises, also for an interrupt."""
    try:
        return runner.execute(builder.build(plan))
    except BaseException:
        builder.retract(plan)
        raise


def take(rows: list[ScheduledRequest]) -> Plan:
    """Plan some rows of another plan."""
    return Plan(rows, sum(row.is_decode for row in rows))


def describe(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
