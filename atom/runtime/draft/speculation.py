"""Draft tokens ahead of the model, which verifies them in one step.

    drafter = NgramDrafter(num_tokens=3, min_n=2, max_n=4)
    sequence.drafts = drafter.draft(sequence, max_drafts=3)     # what followed the last match of its last tokens

A step computes the newest token of a sequence and its drafts, each as a row of one token. The model's own draw at the
newest token decides as ever; the first draft counts if it equals that draw, and then the draw at the draft decides, and
so on. So the tokens are the same as without speculation, seed by seed, whatever was drafted.

If steps run ahead, only the runner knows the newest tokens: it drafts, verifies and accepts by itself
(`Model.decode_drafts`, `Model.verify`), and the scheduler learns at the commit how many tokens there are.
"""

from __future__ import annotations

from itertools import pairwise, zip_longest
from typing import Any, Protocol

from atom.runtime.metrics import SchedulerStats
from atom.runtime.step.input import NUM_REPORTED
from atom.runtime.types import Sequence

LOG_INTERVAL = 1000  # drafts between two lines of a server's log
MAX_INDEXED = 4096  # tokens of a sequence that a step indexes, so that a long prompt delays nobody


class Drafter(Protocol):
    """Proposes the tokens of an answer that come next."""

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """The tokens that may follow the newest one; empty without a guess."""

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""


def is_drafted(sequence: Sequence) -> bool:
    """Whether drafts are verified for a sequence: its draws depend only on logits, and no report was requested."""
    params, num_output = sequence.params, len(sequence.output) + sequence.num_pending
    is_free = params.logprobs is None and not params.has_token_rules and sequence.matcher is None
    return is_free and num_output > 0 and num_output >= params.min_tokens


class NgramDrafter:
    """Prompt lookup (Saxena 2023): what followed the latest match of the last n tokens, for the largest n."""

    def __init__(self, num_tokens: int, min_n: int, max_n: int) -> None:
        assert num_tokens < NUM_REPORTED, "a step's draws of a sequence must be distinguished"
        self._num_tokens, self._sizes = num_tokens, range(max_n, min_n - 1, -1)
        self._indices: dict[str, _Index] = {}  # by sequence id

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        index = self._indices.setdefault(sequence.id, _Index(self._sizes))
        if not index.extend(sequence):
            return []
        tokens, at = index.tokens, index.find()
        if at is None:
            return []
        span = len(tokens) - at  # what follows is repeated if it ends before the draft does
        return [tokens[at + number % span] for number in range(min(max_drafts, self._num_tokens))]

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.id, None)


class RunnerDrafter:
    """Leaves drafting to the runner, which knows the newest tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        return [-1] * min(max_drafts, self._num_tokens)

    def forget(self, sequence: Sequence) -> None: ...


class _Index:
    """The n-grams of a sequence: their tokens -> the index of the token after the latest one."""

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._places: list[tuple[int, dict[tuple[int, ...], int]]] = [(size, {}) for size in sizes]

    def extend(self, sequence: Sequence) -> bool:
        """Index the new tokens, or some of them if there are many; whether all are indexed.

        An n-gram at the very end is indexed once a token follows it.
        """
        first = len(self.tokens)
        self.tokens += sequence.shown_tokens(first, min(sequence.num_tokens, first + MAX_INDEXED))
        for size, places in self._places:
            for at in range(max(first, size), len(self.tokens)):
                places[tuple(self.tokens[at - size : at])] = at
        return len(self.tokens) == sequence.num_tokens

    def find(self) -> int | None:
        """The index of the token that followed the latest of the longest matches of the last tokens."""
        found = (places.get(tuple(self.tokens[-size:])) for size, places in self._places)
        return next((at for at in found if at is not None), None)


def draft_statistics(stats: SchedulerStats) -> dict[str, Any]:
    """Counts of drafts, under ROCm/ATOM's names: distribution is that of the accepted tokens of a draft."""
    num_reaching = [stats.num_drafts, *stats.accepted_per_pos, 0]
    return {
        "total_draft_tokens": stats.num_draft_tokens,
        "total_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.num_accepted_tokens / max(stats.num_draft_tokens, 1),
        "distribution": {number: more - fewer for number, (more, fewer) in enumerate(pairwise(num_reaching))},
        "average_tokens_per_forward": 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1),
    }


def describe_drafts(stats: SchedulerStats, title: str = "MTP Stats") -> str:
    """The counts of drafts as a line, as ROCm/ATOM writes it."""
    if not stats.num_drafts:
        return f"[{title}] no token has been drafted (serve.method=ngram drafts some)"
    found = draft_statistics(stats)
    return (
        f"[{title}] Average toks/fwd: {found['average_tokens_per_forward']:.2f}, "
        f"Accepted/Total Draft tokens: {stats.num_accepted_tokens}/{stats.num_draft_tokens}, "
        f"Acceptance rate: {found['acceptance_rate']:.2%}, "
        f"Accepted tokens distribution: {found['distribution']}"
    )


class DraftLog:
    """Describes drafts once there are `interval` more of them."""

    def __init__(self, interval: int = LOG_INTERVAL) -> None:
        self._interval, self._before = interval, SchedulerStats()

    def describe(self, stats: SchedulerStats) -> str | None:
        """A line about the drafts since the last line; None if they are too few. stats: a copy that nobody changes"""
        before = self._before
        if stats.num_drafts - before.num_drafts < self._interval:
            return None
        self._before = stats
        counts = zip_longest(stats.accepted_per_pos, before.accepted_per_pos, fillvalue=0)
        since = SchedulerStats(
            num_drafts=stats.num_drafts - before.num_drafts,
            num_draft_tokens=stats.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens - before.num_accepted_tokens,
            accepted_per_pos=[count - had for count, had in counts],
        )
        return describe_drafts(since, "MTP Stats Interval")
