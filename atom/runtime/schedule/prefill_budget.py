"""Size prompt chunks so that decodes keep their inter-token latency.

    budget = PrefillBudget(0.03, block_size=16, max_tokens=8192)      # 30 ms
    budget.begin(is_idle=True)                                        # nothing is in flight: the next step begins now
    budget.limit(StepLoad(num_decodes=8, context=16000))              # tokens of prompts that it may have
    budget.commit(StepLoad(8, 16000, 512, 600_000))                   # what it computed; it ends now

A step lasts from the commit before it, or from its plan if nothing was in flight, to its own: that is the latency of
its decodes, whatever runs ahead. Without decodes, prompts have the whole step. Next to some, they have as many tokens
as `StepCosts` predicts to end in time, with a margin for what nine of ten steps took longer than predicted, and at most
twice as many as any measured step had; before the first one, START.

Prompts are never starved: even if decodes need all of the latency, or more, prompts take a fifth of a step's time, and
at least a block of tokens (16 if blocks are smaller). So decodes wait at most a quarter longer than they would without
prompts, or as long as a block takes.

With pipeline stages a decode's next token takes as many commits as there are stages.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

from atom.runtime.schedule.step_costs import StepCosts, StepLoad

START = 64  # tokens of prompts next to decodes, before any step with prompts was measured
MIN_SHARE = 0.2  # of a step's time that prompts may take, whatever the latency
MIN_TOKENS = 16


class PrefillBudget:
    """How many tokens of prompts the next step may have, learned from the times of steps."""

    def __init__(
        self,
        max_itl: float,
        block_size: int,
        max_tokens: int,
        num_stages: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        max_itl: seconds between two tokens of a sequence
        block_size: tokens
        max_tokens: of a step
        num_stages: pipeline stages that compute steps of different sequences at a time
        clock: seconds
        """
        self._max_seconds = max_itl / num_stages
        self._num_stages = num_stages
        self._sizes = chunk_sizes(-(-MIN_TOKENS // block_size) * block_size, max_tokens)
        self._clock = clock
        self._began = clock()
        self._costs = StepCosts(self._max_seconds)
        self._depth = 0.0  # tokens before a prompt's chunk, on average of the last step with prompts

    def begin(self, *, is_idle: bool) -> None:
        """Plan a step. is_idle: no other is in flight"""
        if is_idle:
            self._began = self._clock()

    def limit(self, decodes: StepLoad) -> int | None:
        """Max tokens of prompts in a step; None: any number. decodes: of all stages"""
        if not decodes.num_decodes:
            return None
        own = StepLoad(decodes.num_decodes // self._num_stages, decodes.context // self._num_stages)
        without = self._costs.predict(own)
        limit = max(self._max_seconds / self._costs.spread, without / (1 - MIN_SHARE))
        num_tried = max(2 * self._costs.max_prompt, START)
        end = bisect_right(self._sizes, num_tried)
        at = bisect_right(self._sizes, limit, hi=end, key=lambda size: self._costs.predict(self._with(own, size)))
        return self._sizes[max(at - 1, 0)]

    def commit(self, load: StepLoad) -> None:
        """Learn from a step that ends now."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        if load.num_prompt:
            self._depth = max(load.attended / load.num_prompt - load.num_prompt / 2, 0.0)
        self._costs.observe(load, seconds)

    def _with(self, decodes: StepLoad, num_prompt: int) -> StepLoad:
        attended = num_prompt * (self._depth + num_prompt / 2)
        return decodes._replace(num_prompt=num_prompt, attended=int(attended))


def chunk_sizes(unit: int, max_tokens: int) -> list[int]:
    """Ascending tokens of a chunk, from a unit on: a quarter more at most, multiples of a power of two that grows.

    So the more tokens there are, the larger are the tiles of GEMMs that they fill.
    """
    sizes, step = [min(unit, max_tokens)], max(unit // 4, 1)
    while sizes[-1] + step <= max_tokens:
        sizes.append(sizes[-1] + step)
        if sizes[-1] >= 8 * step:
            step *= 2
    return sizes if sizes[-1] == max_tokens else [*sizes, max_tokens]
