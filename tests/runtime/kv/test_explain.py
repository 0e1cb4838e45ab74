"""Why a hit in the prefix cache ended where it did."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

import pytest
from kinds import full_kind, recurrent_kind

from atom.images.types import Image, PlacedImage, placeholder
from atom.runtime.kv import explain
from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.retention import RetentionLimits
from atom.runtime.types import Adapter, PrefixHit, Sequence, StateKind
from atom.sampling_params import SamplingParams

FULL, STATE = full_kind(10), recurrent_kind()
numbers = itertools.count()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> KVCache:
    return make_cache(clock)


def make_cache(clock: Clock, *kinds: StateKind, num_states: int = 9, caching: bool = True) -> KVCache:
    sizes = {kind.name: 10 if kind is FULL else num_states for kind in kinds or (FULL,)}
    limits = RetentionLimits(0.5, clock)
    return KVCache(kinds or (FULL,), sizes, 4, enable_prefix_caching=caching, retention=limits)


def make(tokens: SequenceOf[int], key: str = "", salt: bytes = b"", adapter: Adapter | None = None) -> Sequence:
    params = SamplingParams(explain=True)
    return Sequence(f"r{next(numbers)}", list(tokens), params, tenant=key, salt=salt, adapter=adapter)


def start(cache: KVCache, sequence: Sequence) -> PrefixHit:
    """Admit a prompt; what is said of its hit."""
    found = cache.match_prefix(sequence)
    assert found is not None
    sequence.num_computed = sequence.num_planned = found
    cache.note_admission(sequence, found)
    assert sequence.hit is not None
    return sequence.hit


def run(cache: KVCache, sequence: Sequence, *output: int) -> PrefixHit:
    """Compute a prompt, and answer it."""
    hit = start(cache, sequence)
    while sequence.num_computed < len(sequence.prompt):
        end = cache.chunk_end(sequence, sequence.num_tokens)
        assert cache.allocate(sequence, end) == end
        sequence.num_computed = sequence.num_planned = end
        cache.commit(sequence)
    for token in output:
        sequence.output.append(token)
        assert cache.allocate(sequence, sequence.num_tokens)
        sequence.num_computed = sequence.num_planned = sequence.num_tokens - 1
        cache.commit(sequence)
    sequence.finish_reason = "eos"
    cache.free(sequence)
    return hit


def test_the_first_prompt_finds_nothing_and_the_same_once_more_all_that_may_be(cache: KVCache):
    assert run(cache, make(range(9))) == PrefixHit(0, "not_computed", 0, 0)
    assert run(cache, make(range(9))) == PrefixHit(8, "end_of_prompt", 8)
    assert run(cache, make(range(3))) == PrefixHit(0, "end_of_prompt", 0)


def test_the_first_token_that_differs_is_named_and_that_of_the_earlier_prompt(cache: KVCache):
    run(cache, make(range(12)))
    run(cache, make([0, 1, 2, 3, 4, 99, 6, 7, 8, 9, 10, 11]))
    assert run(cache, make([0, 1, 2, 3, 4, 5, 66, 7, 8, 9])) == PrefixHit(4, "different_token", 6, 66, 6)
    assert run(cache, make([7, 1, 2, 3, 4])) == PrefixHit(0, "different_token", 0, 7, 0)


def test_the_next_turn_goes_on_where_the_answer_of_the_last_ended(cache: KVCache):
    run(cache, make(range(10)), 10, 11, 12, 13)
    assert run(cache, make(range(20))) == PrefixHit(12, "not_computed", 14, 14)


def test_a_prompt_that_is_being_computed_is_not_computed(cache: KVCache):
    first = make(range(12))
    start(cache, first)
    assert cache.allocate(first, 4) == 4
    first.num_computed = first.num_planned = 4
    cache.commit(first)
    assert start(cache, make(range(12))) == PrefixHit(4, "not_computed", 4, 4)


def test_an_eviction_is_dated(cache: KVCache, clock: Clock):
    run(cache, make(range(16)))
    clock.now += 5
    run(cache, make(range(100, 128)))
    clock.now += 7
    assert start(cache, make(range(16))) == PrefixHit(8, "evicted", 8, 8, seconds=7.0)


def test_an_eviction_that_is_too_long_ago_has_no_date(cache: KVCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(explain, "MAX_EVICTIONS", 2)
    run(cache, make(range(16)))
    run(cache, make(range(100, 136)))
    run(cache, make(range(200, 236)))
    assert start(cache, make(range(16))) == PrefixHit(0, "evicted", 0, 0)


def test_prefixes_that_were_forgotten_are_evicted(cache: KVCache):
    run(cache, make(range(16)))
    cache.forget()
    assert start(cache, make(range(16))) == PrefixHit(0, "evicted", 0, 0)


def test_another_salt_or_adapter_of_the_same_key_is_named(cache: KVCache):
    run(cache, make(range(12), key="a", salt=b"1"))
    assert run(cache, make(range(12), key="a", salt=b"2")) == PrefixHit(0, "other_salt", 0, 0)
    sql = Adapter("sql", 1, b"digest")
    assert run(cache, make(range(12), key="a", salt=b"3", adapter=sql)) == PrefixHit(0, "other_adapter", 0, 0)
    assert run(cache, make(range(12), key="a", salt=b"4", adapter=sql)) == PrefixHit(0, "other_salt", 0, 0)


def test_nothing_is_said_of_another_key_s_prompts(cache: KVCache, clock: Clock):
    run(cache, make(range(12), key="a", salt=b"1"))
    unknown = PrefixHit(0, "not_computed", 0, 0)
    assert start(cache, make(range(12), key="b", salt=b"2")) == unknown
    assert start(cache, make([0, 1, 99, 3, 4, 5], key="b", salt=b"1")) == unknown, "not where it differs"
    run(cache, make(range(100, 136), key="a"))
    assert start(cache, make(range(12), key="c", salt=b"1")) == unknown, "nor that it was evicted"


def test_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch, cache: KVCache):
    monkeypatch.setattr(explain, "MAX_TOKENS", 30)
    run(cache, make(range(12)))
    run(cache, make(range(100, 115)), 1, 2, 3)
    assert run(cache, make([0, 99, 2, 3, 4])) == PrefixHit(0, "different_token", 1, 99, 1)
    run(cache, make(range(200, 212)))
    assert run(cache, make([0, 98, 2, 3, 4])) == PrefixHit(0, "different_token", 1, 98, 99)
    monkeypatch.setattr(explain, "MAX_PROMPTS", 1)
    run(cache, make(range(300, 304)))
    assert run(cache, make([0, 97, 2, 3, 4])) == PrefixHit(0, "different_token", 0, 0, 300)


def test_a_state_that_was_not_kept_or_was_evicted_is_what_is_missing(clock: Clock):
    cache = make_cache(clock, FULL, STATE, num_states=3)
    run(cache, make(range(15)))
    assert start(cache, make([*range(8), 77, 78])) == PrefixHit(0, "state_not_kept", 0, 0)
    cache = make_cache(clock, FULL, STATE, num_states=3)
    run(cache, make(range(9)))
    for at in range(2):
        run(cache, make(range(100 * at + 100, 100 * at + 105)))
        clock.now += 3
    assert start(cache, make(range(9))) == PrefixHit(0, "evicted", 4, 4, seconds=3.0)


def test_a_prompt_whose_tokens_are_all_needed_and_a_cache_that_is_off(clock: Clock, cache: KVCache):
    run(cache, make(range(9)))
    scored = make(range(9))
    scored.params.prompt_logprobs = 0
    cache.note_admission(scored, 0)
    assert scored.hit == PrefixHit(0, "computed_anew", 0)
    off = make_cache(clock, caching=False)
    assert run(off, make(range(9))) == PrefixHit(0, "prefix_caching_off", 0)


def test_placeholders_of_images_have_no_text(cache: KVCache) -> None:
    first, second = (Image(digest << 40, b"", ((1, 2, 4),), 2) for digest in (1, 2))
    prompts = [
        make([1, 2, 3, 4, *(placeholder(each.digest, row) for row in (0, 1)), 5, 6, 7]) for each in (first, second)
    ]
    for prompt, image in zip(prompts, (first, second), strict=True):
        prompt.images = (PlacedImage(image, 4, 6),)
    run(cache, prompts[0])
    assert start(cache, prompts[1]) == PrefixHit(4, "different_token", 4)
