"""Choose how many tokens to draft, by sequences and by acceptance.

    table = DraftTable({1: [4.0, 4.4, 4.8], 32: [5.3, 6.0, 7.4]})     # a step with 0, 1 and 2 drafts of each
    acceptance = Acceptance(2)
    table.best(20, acceptance.rates)                                  # 2, as long as most are accepted

`tune=true` measures the steps (`runtime.tune`); the scheduler counts what is accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

LIKELY = (0.5, 0.6, 0.7, 0.8)  # usual rates of acceptance
WINDOW = 256  # drafts that are remembered, about; and steps without drafts in which most of them are forgotten


class DraftTable:
    """How long steps of decodes take, with drafts and without."""

    def __init__(self, times: Mapping[int, Sequence[float]]) -> None:
        """times: sequences of a step -> its time with 0, 1, … drafts of each; above the max nothing is drafted"""
        self.times = {size: list(times[size]) for size in sorted(times)}
        self._sizes = list(self.times)

    def best(self, num_decodes: int, rates: Sequence[float]) -> int:
        """The number of drafts with the most tokens per time.

        rates: chance to accept each draft, given that those before it were accepted
        """
        times = self._of(num_decodes)
        if not times:
            return 0
        tokens = chance = 1.0
        best, speed = 0, tokens / times[0]
        for number, (rate, time) in enumerate(zip(rates, times[1:], strict=False), 1):
            chance *= rate
            tokens += chance
            if tokens / time > speed:
                best, speed = number, tokens / time
        return best

    def choices(self, num_decodes: int) -> list[int]:
        """The numbers of drafts that may be the best, ascending: those that pay if all are accepted."""
        times = self._of(num_decodes)
        return [number for number, time in enumerate(times) if number and (1 + number) * times[0] > time]

    def likely(self, num_decodes: int) -> list[int]:
        """The numbers of drafts that are the best at usual rates of acceptance, ascending."""
        times = self._of(num_decodes)
        return sorted({self.best(num_decodes, [rate] * (len(times) - 1)) for rate in LIKELY if times} - {0})

    def _of(self, num_decodes: int) -> list[float]:
        at = bisect_left(self._sizes, num_decodes)
        return self.times[self._sizes[at]] if at < len(self._sizes) else []


class Acceptance:
    """How often each draft of a step is accepted, given that those before it were.

    A draft that was rarely tried counts as accepted, so that it is tried.
    """

    def __init__(self, num_drafts: int) -> None:
        self._tried, self._accepted = [0.0] * num_drafts, [0.0] * num_drafts

    @property
    def rates(self) -> list[float]:
        return [(right + 1) / (tried + 1) for right, tried in zip(self._accepted, self._tried, strict=True)]

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a sequence in a step."""
        for at in range(min(num_drafts, num_accepted + 1)):
            if self._tried[at] >= WINDOW:
                self._scale(at, 0.5)
            self._tried[at] += 1
            self._accepted[at] += at < num_accepted

    def forget(self) -> None:
        """Note a step that did not draft because it would not pay, so that drafts are tried again eventually."""
        for at in range(len(self._tried)):
            self._scale(at, 1 - 1 / WINDOW)

    def _scale(self, at: int, factor: float) -> None:
        self._tried[at] *= factor
        self._accepted[at] *= factor
