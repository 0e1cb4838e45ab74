"""Judge how far two runs are apart, value by value and in their outputs.

Values are held to the law of numbers (CONTRIBUTING.md): in float32, 1e-4 of the token's largest number. In 16 bits a
value may be off by what the roundings of the few calls since the last value come to. Formats of fewer bits are held to
the norm over all tokens, as a token whose sums cancel out may be off by any amount.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch

from atom.assemble.divergence import kl_divergence
from atom.graph import Graph
from atom.jobs.compare.follow import Error, relative_errors
from atom.jobs.compare.lines import Line, between
from atom.jobs.compare.trace import Trace, Value

BY_DTYPE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 8e-2}  # the error allowed of a value
CHOICES = {"fp32": 0.01, "fp16": 0.1, "bf16": 0.25}  # share of the tokens for which a router's best may nearly tie
BY_BITS = {8: 0.08, 6: 0.08, 5: 0.15, 4: 0.3, 3: 0.5, 2: 0.8}  # of the norm, after a matmul in so many bits


class Held(NamedTuple):
    """A value's error and what it may be."""

    error: float
    allowed: float
    measure: str  # token: relative, where it is off the most; norm: over all tokens; choices: share of the tokens

    @property
    def is_within(self) -> bool:
        return self.error <= self.allowed


class Allowance(NamedTuple):
    """What values may be off by."""

    bound: float | None  # job.bound; None: by dtypes and formats
    dtypes: frozenset[str]  # that the sides compute in
    formats: frozenset[str]  # that only one side rounds to, or that activations are rounded to

    def hold(self, error: Error, formats: frozenset[str]) -> Held:
        """The error of a value that calls with these formats have computed."""
        if self.bound is not None:
            return Held(error.relative, self.bound, "token")
        if bits := [bits_of(fmt) for fmt in formats & self.formats]:
            return Held(error.norm, BY_BITS[min(bits)], "norm")
        return Held(error.relative, BY_DTYPE[self.dtype], "token")

    def hold_choices(self, error: Error) -> Held:
        """The share of the tokens for which a router chooses other experts."""
        return Held(error.relative, CHOICES["bf16" if self.formats else self.dtype], "choices")

    @property
    def dtype(self) -> str:
        """The coarsest."""
        return max(self.dtypes, key=BY_DTYPE.__getitem__)


class Finding(NamedTuple):
    """A value that is off by more than it may be."""

    value: Value
    held: Held
    at: Error
    line: Line
    since: list[Line]  # the calls since the values before it that were compared, its own last


class Judged(NamedTuple):
    values: dict[Value, Held]  # that were compared, in the order of the text
    findings: list[Finding]  # in the same order


class Outputs(NamedTuple):
    """How far the logits of two runs are apart, over all positions."""

    num: int  # positions
    error: float  # the largest max |a - b| / max |b|
    mean_error: float
    agreement: float  # share of the positions with the same best token
    kl: float  # mean of the reference's divergence, in nats
    max_kl: float


def judge(
    errors: Mapping[Value, Error],
    choices: Container[Value],
    lines: Mapping[Value, Line],
    graph: Graph,
    allowance: Allowance,
) -> Judged:
    """Judge the errors of values.

    errors: of the values that both sides have
    choices: those that are choices of routers
    lines, graph: of the text that is judged
    """
    values, findings = dict[Value, Held](), list[Finding]()
    for value, line in lines.items():
        if (error := errors.get(value)) is None:
            continue
        since = list({(each[0], lines[each].number): lines[each] for each in between(graph, value, errors)}.values())
        formats = frozenset(fmt for each in since for fmt in each.formats | each.stored)
        values[value] = allowance.hold_choices(error) if value in choices else allowance.hold(error, formats)
        if not values[value].is_within:
            findings.append(Finding(value, values[value], error, line, since))
    return Judged(values, findings)


def bits_of(fmt: str) -> int:
    """The bits of a format's numbers, by its name: fp8[1, *], int4[1, 128], q4_k, mxfp4; 8 if it has none."""
    match = re.match(r"[a-z]+?(\d)", fmt)
    return min(max(int(match[1]), 2), 8) if match and int(match[1]) != 7 else 8


def compare_outputs(trace: Trace, reference: Trace) -> Outputs:
    """Compare the logits of all steps that both have."""
    shared = [at for at in reference.logits if at in trace.logits]
    ours, theirs = (torch.cat([each.logits[at] for at in shared]) for each in (trace, reference))
    errors = relative_errors(ours, theirs)
    kl = kl_divergence(ours, theirs.log_softmax(-1))
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return Outputs(len(ours), *(float(each) for each in (errors.max(), errors.mean(), agreement, kl.mean(), kl.max())))


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first token at which two answers differ."""
    return next((at for at, (ours, theirs) in enumerate(zip(answer, expected, strict=True)) if ours != theirs), None)


def gap_before(trace: Trace, prompt: int, token: int) -> float:
    """How far the two best logits are apart before a token of an answer, against the largest."""
    logits = trace.logits[prompt, token][-1]
    best = logits.topk(2).values
    return float((best[0] - best[1]) / logits.abs().max())
