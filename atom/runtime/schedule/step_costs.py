"""Learn how long steps take from those that were measured.

    costs = StepCosts(0.03)                                     # errors of steps of 30 ms count most
    costs.observe(StepLoad(num_decodes=8, context=16000, num_prompt=512, attended=600_000), 0.021)
    costs.predict(StepLoad(num_decodes=8, context=16000, num_prompt=1024, attended=1_400_000))     # seconds
    costs.spread                                                # most steps took at most so many times that

A step takes a + b rows + c decodes + d context + e attended seconds, where a row costs more beyond some numbers of
rows: the time of few is that of reading the weights, the time of many that of the GEMMs. No coefficient is negative, so
more work never takes less time. They minimize the sum of absolute errors, so that a step that waited for something else
counts no more than others. Newer steps count more, so that a size that has not been seen for long decides only what
newer steps leave open.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from atom.runtime.types import Plan

HINGES = (64, 256, 1024, 4096)  # rows beyond which a row may cost more
NUM_KEPT = 32  # newest steps of about the same rows
HALF_LIFE = 64  # later steps after which one counts half; of those with prompts, and of those without
MAX_AGE = 1024  # after which it is forgotten
REFIT_EVERY = 16  # steps, earlier while few are known
NUM_REWEIGHTS = 5
SMALL_ERROR = 0.02  # relative; smaller ones count by their squares
QUANTILE, MAX_SPREAD = 0.9, 2.0  # of steps up to HALF_LIFE
# relative, of each feature: if steps do not tell coefficients apart, a constant and rows explain them
RIDGE = np.array([1, 1, *[100] * len(HINGES), 10, 10, 100]) * 1e-7


class StepLoad(NamedTuple):
    """What the time of a step depends on, summed over its rows."""

    num_decodes: int = 0  # tokens of decodes, drafts included
    context: int = 0  # tokens whose KV these decodes read
    num_prompt: int = 0  # tokens of prompts
    attended: int = 0  # tokens whose KV each of these reads, on average half of their own chunk's


def load_of(plan: Plan) -> StepLoad:
    """The load of a planned step."""
    decodes, prompts = plan.rows[: plan.num_decodes], plan.rows[plan.num_decodes :]
    return StepLoad(
        sum(row.num_tokens for row in decodes),
        sum(row.start + row.num_tokens for row in decodes),
        sum(row.num_tokens for row in prompts),
        sum(row.num_tokens * (row.start + row.num_tokens // 2) for row in prompts),
    )


class _Measured(NamedTuple):
    load: StepLoad
    features: tuple[float, ...]
    seconds: float
    number: int  # of steps with prompts, or of those without


class StepCosts:
    """Nonnegative coefficients of the features of a step, fitted to recent steps of each size."""

    def __init__(self, typical_seconds: float) -> None:
        """typical_seconds: of steps whose prediction matters; errors of longer ones are relative to their time"""
        self.max_prompt = 0  # most tokens of prompts in a step that is remembered
        self.spread = 1.0  # measured over predicted seconds of steps with decodes and prompts, which few exceed
        self._typical_seconds = typical_seconds
        self._measured: dict[tuple[int, bool], deque[_Measured]] = {}  # by the logarithm of rows, and prompts or none
        self._num_steps = [0, 0]  # without prompts, and with some
        self._coefficients = [0.0] * len(_features(StepLoad()))
        self._num_new = 0  # steps since the last fit
        self._num_fitted = 0

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Take the time of a step."""
        has_prompts, size = load.num_prompt > 0, (load.num_decodes + load.num_prompt).bit_length()
        steps = self._measured.setdefault((size, has_prompts), deque(maxlen=NUM_KEPT))
        steps.append(_Measured(load, _features(load), seconds, self._num_steps[has_prompts]))
        self._num_steps[has_prompts] += 1
        self.max_prompt = max(self.max_prompt, load.num_prompt)
        self._num_new += 1

    def predict(self, load: StepLoad) -> float:
        """Seconds of a step, not less than those of one with less to do; 0 if none was measured."""
        if self._num_new >= REFIT_EVERY or self._num_new > self._num_fitted // REFIT_EVERY:
            self._fit()
        return sum(a * b for a, b in zip(self._coefficients, _features(load), strict=True))

    def _fit(self) -> None:
        self._num_new = 0
        for (_, has_prompts), steps in self._measured.items():
            while steps and steps[0].number < self._num_steps[has_prompts] - MAX_AGE:
                steps.popleft()
        known = [each for steps in self._measured.values() for each in steps]
        self.max_prompt = max((each.load.num_prompt for each in known), default=0)
        if not known:
            return
        self._num_fitted = len(known)
        seconds = np.array([each.seconds for each in known])
        features = np.array([each.features for each in known])
        units = np.maximum(features.max(axis=0), 1e-9)
        ages = np.array([self._num_steps[each.load.num_prompt > 0] - each.number for each in known])
        scales = np.maximum(seconds, self._typical_seconds)
        found = _fit_absolute(features / units, seconds, scales, 0.5 ** (ages / HALF_LIFE)) / units
        self._coefficients = found.tolist()
        is_mixed = np.array([each.load.num_decodes > 0 and each.load.num_prompt > 0 for each in known])
        ratios = (seconds / np.maximum(features @ found, 1e-9))[is_mixed & (ages <= HALF_LIFE)]
        self.spread = min(max(float(np.quantile(ratios, QUANTILE)), 1.0), MAX_SPREAD) if len(ratios) else 1.0


def _features(load: StepLoad) -> tuple[float, ...]:
    rows = load.num_decodes + load.num_prompt
    beyond = [float(max(rows - hinge, 0)) for hinge in HINGES]
    return 1.0, float(rows), *beyond, float(load.num_decodes), float(load.context), float(load.attended)


def _fit_absolute(
    features: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    scales: npt.NDArray[np.float64],
    shares: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Nonnegative coefficients [F] with a small sum of absolute errors over scales, by reweighted least squares.

    features: [N, F]
    seconds, scales: [N]
    shares: [N], how much each counts
    """
    weights = shares / scales**2
    for _ in range(NUM_REWEIGHTS):
        weighted = features * weights[:, None]
        found = _solve_nonnegative(features.T @ weighted, weighted.T @ seconds)
        errors = np.abs(seconds - features @ found) / scales
        weights = shares / (scales**2 * np.maximum(errors, SMALL_ERROR))
    return found


def _solve_nonnegative(gram: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x with gram x = target but for the coordinates that would be negative, which are left out one by one."""
    ridged = gram + gram.diagonal().max() * np.diag(RIDGE)
    found = np.zeros(len(gram))
    used = list(range(len(gram)))
    while used:
        found[used] = np.linalg.solve(ridged[np.ix_(used, used)], target[used])
        lowest = min(used, key=found.__getitem__)
        if found[lowest] >= 0:
            break
        found[lowest] = 0.0
        used.remove(lowest)
    return found
