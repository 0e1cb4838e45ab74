"""Explain where a prompt's hit in the prefix cache ended, and why.

    history = PrefixHistory(block_size=16)
    history.record(sequence)                             # each admitted prompt
    history.evictions.add("full", prefix.key)            # each block that is evicted
    history.note_end(sequence)                           # its answer counts too
    history.explain(other, num_cached=48, kinds=["full"])    # PrefixHit(48, "different_token", 53, token=7, earlier=9)

Of the prompts on record, an explanation uses only those of the same API key: it shows no token of another key's, nor
that another key has a prefix. The record is bounded: MAX_PROMPTS of at most MAX_TOKENS together, of 4 bytes each, and
MAX_EVICTIONS, of some 150 bytes each; what is older is `not_computed`.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from atom.runtime.kv.prefix_cache import chain_hash, count_common, pack
from atom.runtime.types import PrefixHit, Sequence

END_OF_PROMPT = "end_of_prompt"  # all that could be
DIFFERENT_TOKEN = "different_token"  # than in the earlier prompt that begins most alike
NOT_COMPUTED = "not_computed"  # no earlier prompt goes on so, or it has not come so far yet
EVICTED = "evicted"
STATE_NOT_KEPT = "state_not_kept"  # the KV is there, but no copy of the recurrent state after it
OTHER_SALT = "other_salt"  # another cache_salt has it
OTHER_ADAPTER = "other_adapter"  # another LoRA adapter has it, or the model without one
CACHING_OFF = "prefix_caching_off"
COMPUTED_ANEW = "computed_anew"  # log probabilities of the prompt, or its mean, need each token

MAX_PROMPTS = 1024
MAX_TOKENS = 4 << 20
MAX_EVICTIONS = 1 << 16


class EvictionLog:
    """When blocks were evicted, by state kind and by the hash of the prefix whose last tokens they held."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: OrderedDict[tuple[str, int], float] = OrderedDict()

    def add(self, kind: str, key: int) -> None:
        self._times.pop((kind, key), None)
        self._times[kind, key] = self._clock()
        if len(self._times) > MAX_EVICTIONS:
            self._times.popitem(last=False)

    def find(self, kinds: Iterable[str], key: int) -> float | None:
        """Seconds since a prefix lost a block of these kinds; None if that is not on record."""
        times = [self._times[kind, key] for kind in kinds if (kind, key) in self._times]
        return self._clock() - max(times) if times else None


def pack_ids(sequence: Sequence) -> array[int]:
    """A prompt's tokens; placeholders of images have 63 bits."""
    return array("q" if sequence.images else "i", sequence.prompt)


def shown(token: int) -> int | None:
    """A token that has text; None of an image's placeholder."""
    return token if token >= 0 else None


class Prompted:
    """A prompt on record, with its answer once it has ended."""

    def __init__(self, sequence: Sequence) -> None:
        self.tenant, self.salt = sequence.tenant, sequence.salt
        self.adapter = b"" if sequence.adapter is None else sequence.adapter.digest
        self.tokens = pack_ids(sequence)
        self.num_computed = 0  # tokens, once it has ended
        self.sequence: Sequence | None = sequence  # until then

    @property
    def num_known(self) -> int:
        """The tokens whose KV was computed."""
        return max(self.num_computed, 0 if self.sequence is None else self.sequence.num_computed)


class PrefixHistory:
    """Recent prompts and evictions of a KV cache."""

    def __init__(self, block_size: int, salt: bytes = b"", clock: Callable[[], float] = time.monotonic) -> None:
        """salt: of the cache"""
        self.evictions = EvictionLog(clock)
        self._block_size, self._salt = block_size, salt
        self._prompts: OrderedDict[str, Prompted] = OrderedDict()  # by the sequence's id, oldest first
        self._num_tokens = 0

    def record(self, sequence: Sequence) -> None:
        """Record a prompt that is admitted."""
        if sequence.parent is not None:  # the same prompt
            return
        self._remove(sequence.id)
        self._prompts[sequence.id] = made = Prompted(sequence)
        self._add_tokens(len(made.tokens))

    def note_end(self, sequence: Sequence) -> None:
        """Record what a sequence has computed, its answer too; its blocks are freed."""
        found = self._prompts.get(sequence.id)
        if found is None or found.sequence is not sequence:
            return
        found.num_computed = max(found.num_computed, sequence.num_computed)
        if sequence.finish_reason is not None:
            found.tokens.extend(sequence.output)
            found.sequence = None
            self._add_tokens(len(sequence.output))

    def explain(
        self, sequence: Sequence, num_cached: int, kinds: SequenceOf[str], *, lacks_state: bool = False
    ) -> PrefixHit:
        """Why no more of a prompt than its first `num_cached` tokens was cached; before `record`.

        kinds: names of the pools whose blocks may be what is missing
        lacks_state: the KV of more tokens is there, but not the recurrent state after them
        """
        prompt, size = sequence.prompt, self._block_size
        if sequence.needs_prompt:
            return PrefixHit(0, COMPUTED_ANEW, 0)
        if num_cached >= (len(prompt) - 1) // size * size:
            return PrefixHit(num_cached, END_OF_PROMPT, num_cached)
        asked = Prompted(sequence)
        tokens = asked.tokens
        own = [each for each in self._prompts.values() if each.tenant == asked.tenant and each.sequence is not sequence]
        common = [(count_common(tokens, each.tokens), each) for each in own]
        alike = [(length, each) for length, each in common if (each.salt, each.adapter) == (asked.salt, asked.adapter)]
        length, earlier = max(alike, key=lambda each: each[0], default=(0, None))
        if length >= num_cached + size:
            num_known = max(min(length, each.num_known) for length, each in alike)
            return self._explain_lost(
                sequence, num_cached, num_known, kinds, STATE_NOT_KEPT if lacks_state else EVICTED
            )
        for reason, others in (
            (OTHER_SALT, [found for found, each in common if each.adapter == asked.adapter]),
            (OTHER_ADAPTER, [found for found, each in common if each.adapter != asked.adapter]),
        ):
            if max(others, default=0) >= num_cached + size:
                return PrefixHit(num_cached, reason, num_cached, shown(prompt[num_cached]))
        if earlier is None or length < num_cached or length == len(earlier.tokens):
            at = max(length, num_cached)
            return PrefixHit(num_cached, NOT_COMPUTED, at, shown(prompt[at]))
        return PrefixHit(num_cached, DIFFERENT_TOKEN, length, shown(prompt[length]), shown(earlier.tokens[length]))

    def _explain_lost(
        self, sequence: Sequence, num_cached: int, num_known: int, kinds: SequenceOf[str], reason: str
    ) -> PrefixHit:
        """Explain why a prefix is not there that an earlier prompt had too.

        num_known: the prompt's tokens that earlier ones have computed
        reason: if no eviction is on record
        """
        size, key = self._block_size, chain_hash(0, self._salt + sequence.salt)
        if num_known < num_cached + size:
            return PrefixHit(num_cached, NOT_COMPUTED, num_cached, shown(sequence.prompt[num_cached]))
        for start in range(0, min(num_known, len(sequence.prompt) - 1) // size * size, size):
            key = chain_hash(key, pack(sequence.prompt[start : start + size]))
            if start >= num_cached and (seconds := self.evictions.find(kinds, key)) is not None:
                return PrefixHit(num_cached, EVICTED, start, shown(sequence.prompt[start]), seconds=seconds)
        return PrefixHit(num_cached, reason, num_cached, shown(sequence.prompt[num_cached]))

    def _add_tokens(self, number: int) -> None:
        self._num_tokens += number
        while self._num_tokens > MAX_TOKENS or len(self._prompts) > MAX_PROMPTS:
            self._remove(next(iter(self._prompts)))

    def _remove(self, id: str) -> None:
        if (found := self._prompts.pop(id, None)) is not None:
            self._num_tokens -= len(found.tokens)
