"""What values are held to, and how far outputs are apart."""

from __future__ import annotations

import json
import math

import pytest
import torch

from atom.jobs.compare.follow import Comparer, Error, Everything
from atom.jobs.compare.job import finite
from atom.jobs.compare.judge import Allowance, compare_outputs
from atom.jobs.compare.trace import Trace

FP8 = frozenset({"fp8[1, *]"})


def traced(logits: list[list[float]]) -> Trace:
    return Trace(logits={(0, 0): torch.tensor(logits)})


def error_of(ours: list[list[float]], reference: list[list[float]]) -> Error:
    """Of a value of a prompt whose only step is this one."""
    trace = Trace(values={(0, 0): {("body", "h"): torch.tensor(reference)}}, answers=[[]])
    comparer = Comparer([len(ours)], "logits", {("body", "h")}, trace, Everything(), is_forced=True)
    with comparer.prompt(0):
        comparer("body", {"tokens": torch.zeros(len(ours), dtype=torch.int64)})
        comparer("body", {"h": torch.tensor(ours)})
    return comparer.errors["body", "h"]


def test_an_error_has_the_worst_token_and_the_norm_over_all():
    error = error_of([[3.0, 4.0], [0.1, 0.2], [0.0, 0.0]], [[3.0, 4.0], [0.1, 0.4], [0.0, 0.0]])
    assert (error.prompt, error.step, error.token) == (0, 0, 1)
    assert error.relative == pytest.approx(0.2 / 0.4)
    assert error.norm == pytest.approx(0.2 / math.sqrt(9 + 16 + 0.01 + 0.16))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_infinitely_off_by_both(value: float):
    assert error_of([[1.0, value]], [[1.0, 2.0]])[:2] == (math.inf, math.inf)
    assert error_of([[1.0, 2.0]], [[1.0, value]])[:2] == (math.inf, math.inf)
    assert error_of([[1.0, value]], [[1.0, value]])[:2] == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_next_to_a_number_that_is_not_finite_on_both_sides_the_others_are_compared(value: float):
    assert error_of([[1.0, value]], [[2.0, value]])[:2] == (0.5, 0.5)


def test_a_format_is_held_to_the_norm_and_a_dtype_to_the_worst_token():
    error, allowance = Error(0.5, 0.05, 0, 0, 0), Allowance(None, frozenset({"fp32", "bf16"}), FP8)
    assert allowance.hold(error, frozenset())[:3] == (0.5, 0.08, "token")
    assert allowance.hold(error, FP8)[:3] == (0.05, 0.08, "norm")
    assert [allowance.hold(error, formats).is_within for formats in (frozenset[str](), FP8)] == [False, True]


def test_a_format_of_both_sides_widens_nothing():
    held = Allowance(None, frozenset({"fp32"}), frozenset()).hold(Error(0.5, 0.05, 0, 0, 0), FP8)
    assert held == (0.5, 1e-4, "token")


def test_a_bound_holds_the_worst_token_of_any_format():
    assert Allowance(0.2, frozenset({"fp32"}), FP8).hold(Error(0.5, 0.05, 0, 0, 0), FP8) == (0.5, 0.2, "token")


def test_outputs_that_are_not_numbers_have_no_divergence_of_0():
    outputs = compare_outputs(traced([[math.nan, 0.0]]), traced([[1.0, 0.0]]))
    assert math.isnan(outputs.kl) and math.isnan(outputs.max_kl) and outputs.error == math.inf


def test_a_token_that_the_reference_excludes_adds_nothing_to_the_divergence():
    outputs = compare_outputs(traced([[0.0, -math.inf]]), traced([[5.0, -math.inf]]))
    assert (outputs.kl, outputs.error) == (0.0, 1.0)


def test_json_has_null_for_a_number_that_is_not_finite():
    made = finite({"a": [math.nan, 1.5, {"b": math.inf}], "c": (1, "x", None, True)})
    assert json.dumps(made, allow_nan=False) == '{"a": [null, 1.5, {"b": null}], "c": [1, "x", null, true]}'
