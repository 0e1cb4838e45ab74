"""Standard errors against what repeated draws show."""

from __future__ import annotations

import math
import random

import pytest
import torch

from atom.jobs.eval.estimate import Estimate, estimate_mean, exponential


def draw(num: int, seed: int, kept: float) -> torch.Tensor:
    """Numbers of variance 1 and mean 0, each with a share of the one before it."""
    noise = random.Random(seed)
    values = [noise.gauss(0, 1)]
    for _ in range(num - 1):
        values.append(kept * values[-1] + math.sqrt(1 - kept**2) * noise.gauss(0, 1))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("kept", [0.0, 0.8])
def test_errors_are_the_spread_of_means_over_draws(kept: float):
    estimates = [estimate_mean([draw(640, 2 * seed, kept), 5 + draw(320, 2 * seed + 1, kept)]) for seed in range(40)]
    spread = float(torch.tensor([each.value for each in estimates]).std())
    errors = [each.error or 0.0 for each in estimates]
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.35), "what the texts differ in is no error"


def test_the_mean_of_texts_is_that_of_their_tokens():
    parts = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([6.0], dtype=torch.float64)]
    assert estimate_mean(parts) == Estimate(3.0, None), "of a batch there is no error"


def test_a_perplexity_has_the_relative_error_of_the_absolute_one_of_its_loss():
    assert exponential(Estimate(math.log(20.0), 0.05)) == pytest.approx((20.0, 1.0))
    assert exponential(Estimate(1e6, None)).value > 1e300 and math.isnan(exponential(Estimate(math.nan, None)).value)
