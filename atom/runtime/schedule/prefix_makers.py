"""Find the prompts that compute what waiting sequences begin with.

    makers = PrefixMakers(cache, planned)     # planned: the rows of the step so far, and their numbers of tokens
    makers.add(sequence)                      # of a row, or of a pending plan
    makers.is_awaited_by(waiting)             # True: admit it once more of its prefix is computed

A waiting sequence waits on as long as a prompt advances that computes more of its prefix than is there, and that is not
served after it: to compute the same tokens itself would take it as long. Meanwhile it has neither blocks nor a slot.

With attention only, a sequence may begin after blocks that other rows of its own step compute. So it waits only for
prompts that take several steps. Recurrent state is copied where a step ends: a prompt ends a step where those that wait
part from it, and they begin in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from atom.runtime.kv.cache import KVCache
from atom.runtime.types import Sequence

MAX_COMPARED = 64  # waiting sequences whose prompts are compared with one that is admitted


class PrefixMakers:
    """The prompts of which a part is being computed, and a part is not there yet."""

    def __init__(self, cache: KVCache, planned: Mapping[Sequence, int]) -> None:
        """planned: the number of tokens of each row of the step, to which others may be added later"""
        self._cache, self._planned = cache, planned
        self._prompts: dict[Sequence, None] = {}

    def add(self, sequence: Sequence) -> None:
        """Publish the blocks of a prompt that a row of the step fills, and note the prompt if that is not all of it."""
        num_tokens = self._planned.get(sequence, 0)
        if num_tokens > 1 and not sequence.num_pending:  # a row of one token may be a decode
            self._cache.publish_planned(sequence, sequence.num_planned + num_tokens)
        if self._count_visible(sequence) < len(sequence.prompt):
            self._prompts[sequence] = None

    def is_awaited_by(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a prompt that computes more of its prefix than is there."""
        if not self._prompts or not self._cache.enable_prefix_caching or sequence.needs_prompt:
            return False
        if sequence.awaits is None or not self._has_to_come(*sequence.awaits):
            sequence.awaits = self._find_awaited(sequence)
        return sequence.awaits is not None

    def _count_visible(self, sequence: Sequence) -> int:
        """The tokens of a prompt after which a sequence that is admitted now can begin."""
        return sequence.num_planned + (self._planned.get(sequence, 0) if self._cache.shares_step else 0)

    def _has_to_come(self, prompt: Sequence, end: int) -> bool:
        """Whether a prompt advances, and has not come to `end`."""
        return prompt in self._prompts and self._count_visible(prompt) < end

    def _find_awaited(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        """The prompt that computes most of a sequence's prefix, and up to which token; None: all of that is there."""
        best, awaited = 0, None
        for prompt in self._prompts:
            if prompt.priority > sequence.priority:
                continue
            num_shared = self._cache.count_shared(prompt, sequence, self._count_visible(prompt))
            if num_shared <= best:
                continue
            end = self._cache.find_kept(prompt, num_shared, prompt.num_planned + self._planned.get(prompt, 0))
            if end > best and self._has_to_come(prompt, end):
                best, awaited = end, (prompt, end)
        if awaited is not None and awaited[0].needs_prompt and self._cache.find_cached(sequence).num_tokens >= best:
            return None  # that prompt is computed anew though it is cached
        return awaited


def find_parting(cache: KVCache, sequence: Sequence, waiting: Iterable[Sequence]) -> int:
    """After how many tokens a copy of a prompt's recurrent state spares waiting sequences most; 0: it spares none."""
    num_sharing, most_spared, parting = 0, 0, 0
    others = (each for each in islice(waiting, MAX_COMPARED) if not each.needs_prompt)
    lengths = Counter(cache.count_shared(sequence, each, sequence.num_computed) for each in others)
    for length, number in sorted(lengths.items(), reverse=True):
        num_sharing += number
        if (spared := num_sharing * (length - sequence.num_computed)) > most_spared:
            most_spared, parting = spared, length
    return parting
