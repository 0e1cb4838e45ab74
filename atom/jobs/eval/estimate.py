"""Estimate means with standard errors.

estimate_mean([losses_of_code, losses_of_verse])         # Estimate(value=2.91, error=0.04)
perplexity(estimate)                                     # Estimate(value=18.4, error=0.74)

Neighbouring tokens are alike in difficulty, so errors are those of the method of batch means: over batches of
consecutive tokens, within each text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BATCH = 64  # consecutive tokens of one


class Estimate(NamedTuple):
    value: float
    error: float | None  # standard; None: there are too few tokens


def estimate_mean(parts: Sequence[Tensor]) -> Estimate:
    """The mean over all values of several texts.

    parts: fp64[tokens] of each text, in its order
    """
    num, total = sum(map(len, parts)), sum(float(part.sum()) for part in parts)
    variances = [variance_of_sum(part) for part in parts]
    known = [each for each in variances if each is not None]
    return Estimate(total / num, math.sqrt(sum(known)) / num if len(known) == len(variances) else None)


def variance_of_sum(values: Tensor) -> float | None:
    """The variance of a sum of values that depend on their neighbours; None of fewer than two batches."""
    batches = torch.split(values, BATCH)
    if len(batches) < 2:
        return None
    mean = float(values.mean())
    off = torch.stack([batch.sum() - len(batch) * mean for batch in batches])
    return float(off.square().sum()) * len(batches) / (len(batches) - 1)


def exponential(estimate: Estimate) -> Estimate:
    """e to the power of an estimate: of a mean loss in nats, the perplexity."""
    value = math.exp(min(estimate.value, 700.0)) if not math.isnan(estimate.value) else math.nan
    return Estimate(value, None if estimate.error is None else value * estimate.error)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, None if estimate.error is None else estimate.error * factor)
