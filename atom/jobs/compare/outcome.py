"""Measure the side that is judged against a reference, and describe the result.

outcome = Comparison(sides, reference, prompts, bound=None).measure(side)
outcome.judged.findings[0]               # the first line that parts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from atom.jobs.compare.follow import Choices, Comparer, Error, Everything, Follower
from atom.jobs.compare.judge import (
    Allowance,
    Finding,
    Judged,
    Outputs,
    compare_outputs,
    first_difference,
    gap_before,
    judge,
)
from atom.jobs.compare.lines import Line
from atom.jobs.compare.sides import Opened, Side
from atom.jobs.compare.trace import Trace, Value


class Outcome(NamedTuple):
    """How far the values of a side are off."""

    lines: dict[Value, Line]
    errors: dict[Value, Error]
    choices: dict[Value, Choices]
    judged: Judged
    is_synchronized: bool  # each error is of the calls since the values before it

    @property
    def agrees(self) -> bool:
        return not self.judged.findings


class Answered(NamedTuple):
    """What a side answers by itself."""

    answers: list[list[int]]
    outputs: Outputs  # while the answers are the reference's


class Comparison(NamedTuple):
    """What two sides are compared by."""

    sides: Sequence[Side]  # that atom runs; the last one is judged
    reference: Trace  # of the other, or of transformers
    prompts: Sequence[Sequence[int]]
    bound: float | None  # the error allowed of values; None: by dtypes and formats

    @property
    def tested(self) -> Side:
        return self.sides[-1]

    def open(self, side: Side) -> AbstractContextManager[Opened]:
        return side.open(self.prompts, len(self.reference.answers[0]))

    def measure(self, opened: Opened) -> Outcome:
        """Compare a side's values with the reference's: of the one that is judged, which may be changed."""
        is_forced = opened.is_one_rank  # values of other ranks are not shown, nor tokens replaced
        replaced: Container[Value] = Everything() if is_forced else ()
        comparer = Comparer(opened.lengths, opened.logits, opened.values, self.reference, replaced, is_forced=is_forced)
        opened.answer(comparer)
        lines = opened.lines()
        allowance = allowance_of(opened.side, self.sides, lines, self.bound)
        judged = judge(comparer.errors, comparer.choices, lines, opened.compiled.graph, allowance)
        return Outcome(lines, comparer.errors, comparer.choices, judged, is_forced)

    def answer(self, opened: Opened, replaced: Container[Value] = ()) -> Answered:
        """Let a side answer by itself.

        replaced: values that it computes with, in place of its own
        """
        follower = Follower(opened.lengths, opened.logits, opened.values, self.reference, replaced)
        own = opened.answer() if opened.runner.graphs.sizes else None  # CUDA graphs show no values
        answers = opened.answer(follower)
        return Answered(own or answers, compare_outputs(follower.trace, self.reference))


def allowance_of(side: Side, sides: Sequence[Side], lines: Mapping[Value, Line], bound: float | None) -> Allowance:
    """What values may be off by: without another side of atom's, the reference computes in float32."""
    dtypes = {"fp32" if len(sides) == 1 else sides[0].dtype, side.dtype}
    formats = frozenset(line.act for line in lines.values() if line.act)
    if len(sides) == 1:  # transformers reads the weights as they are stored
        return Allowance(bound, frozenset(dtypes), formats | rounded(lines))
    others = sides[0].lines()
    return Allowance(
        bound, frozenset(dtypes), formats | rounded(lines) ^ rounded(others) | stored(lines) ^ stored(others)
    )


def rounded(lines: Mapping[Value, Line]) -> frozenset[str]:
    """The formats that atom rounds weights and activations to."""
    return frozenset(fmt for line in lines.values() for fmt in line.formats)


def stored(lines: Mapping[Value, Line]) -> frozenset[str]:
    """The formats of a checkpoint's weights."""
    return frozenset(fmt for line in lines.values() for fmt in line.stored)


def describe(comparison: Comparison, outcome: Outcome, answered: Answered) -> dict[str, Any]:
    """What `job.output=json` prints."""
    names = dict.fromkeys(("a", "b"), "transformers, float32")
    sides, prompts, reference = comparison.sides, comparison.prompts, comparison.reference
    findings = outcome.judged.findings
    return {
        "agree": outcome.agrees,
        "sides": names | {side.name: side.shown for side in sides},
        "judged": sides[-1].name,
        "synchronized": outcome.is_synchronized,
        "values": len(outcome.judged.values),
        "lines": len({(program, outcome.lines[program, name].number) for program, name in outcome.judged.values}),
        "findings": list(map(describe_finding, findings)),
        "layers": describe_layers(outcome),
        "choices": describe_choices(outcome),
        "outputs": answered.outputs._asdict(),
        "prompts": [
            describe_prompt(number, prompt, answered.answers[number], reference)
            for number, prompt in enumerate(prompts)
        ],
    }


def describe_finding(finding: Finding) -> dict[str, Any]:
    program, name = finding.value
    return {
        "value": name,
        "program": program,
        **describe_line(finding.line),
        **finding.held._asdict(),
        "prompt": finding.at.prompt,
        "step": finding.at.step,
        "token": finding.at.token,
        "since": list(map(describe_line, finding.since)),
    }


def describe_line(line: Line) -> dict[str, Any]:
    return {
        "line": line.number,
        "text": line.text,
        "layer": line.layer,
        "kernel": line.kernel,
        "passes": line.passes,
    }


def describe_layers(outcome: Outcome) -> list[dict[str, Any]]:
    """The value of each layer that is off the most, against what it may be."""
    found: dict[int | str, tuple[float, Value]] = {}
    counts = Counter[int | str]()
    for value, held in outcome.judged.values.items():
        layer = outcome.lines[value].layer
        place = layer if layer is not None else "head" if found.keys() - {"embedding"} else "embedding"
        counts[place] += 1
        share = held.error / held.allowed
        if place not in found or share > found[place][0]:
            found[place] = share, value
    return [
        {
            "layer": place,
            "values": counts[place],
            "value": value[1],
            "line": outcome.lines[value].number,
            **outcome.judged.values[value]._asdict(),
        }
        for place, (_, value) in found.items()
    ]


def describe_choices(outcome: Outcome) -> list[dict[str, Any]]:
    """The choices of each router."""
    return [
        {
            "layer": outcome.lines[value].layer,
            "value": value[1],
            "tokens": choices.num_tokens,
            "differing": choices.num_differing,
        }
        for value, choices in outcome.choices.items()
    ]


def describe_prompt(number: int, prompt: Sequence[int], answer: Sequence[int], reference: Trace) -> dict[str, Any]:
    expected = reference.answers[number]
    at = first_difference(answer, expected)
    differs = {} if at is None else {"token": at, "gap": gap_before(reference, number, at)}
    return {"tokens": len(prompt), "answer": list(answer), "expected": expected, "difference": differs or None}
