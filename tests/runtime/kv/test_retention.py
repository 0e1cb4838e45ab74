"""Retained prefixes: the order of eviction, deadlines, the share of a key, with a clock that the test sets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

import pytest
from kinds import full_kind, recurrent_kind, window_kind

from atom.errors import RequestError
from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.retention import RetentionLimits, retained_prefixes
from atom.runtime.types import RetainedPrefix, Sequence, StateKind
from atom.sampling_params import SamplingParams

FULL, WINDOW, STATE = full_kind(10), window_kind(5, 10), recurrent_kind()
numbers = itertools.count()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(tokens: SequenceOf[int], *spans: tuple[int, float] | tuple[int, float, int], key: str = "") -> Sequence:
    """A prompt, and of its beginnings that are retained: tokens, seconds and priority."""
    retained = tuple(RetainedPrefix(*span[:2], *(span[2:] or (50,))) for span in spans)
    return Sequence(f"r{next(numbers)}", list(tokens), SamplingParams(), tenant=key, retained=retained)


def make_cache(
    clock: Clock,
    *kinds: StateKind,
    num_blocks: int = 10,
    num_states: int = 10,
    share: float = 0.5,
    num_host: int | None = None,
) -> KVCache:
    """A cache with so many usable blocks of each kind, and copies of recurrent state."""
    sizes = {kind.name: (num_states if kind is STATE else num_blocks) + 1 for kind in kinds or (FULL,)}
    host = None if num_host is None else {kind.name: num_host + 1 for kind in kinds or (FULL,)}
    limits = RetentionLimits(share, clock)
    return KVCache(kinds or (FULL,), sizes, 4, enable_prefix_caching=True, retention=limits, num_host_blocks=host)


def run(cache: KVCache, sequence: Sequence) -> int:
    """Compute a prompt step by step, and end it; the number of its tokens that were cached."""
    found = cache.match_prefix(sequence)
    assert found is not None
    sequence.num_computed = sequence.num_planned = found
    while sequence.num_computed < sequence.num_tokens:
        end = cache.chunk_end(sequence, sequence.num_tokens)
        assert cache.allocate(sequence, end) == end
        sequence.num_computed = sequence.num_planned = end
        cache.commit(sequence)
    cache.free(sequence)
    return found


def cached(cache: KVCache, tokens: SequenceOf[int]) -> int:
    return cache.find_cached(make([*tokens, -1])).num_tokens


def fill(cache: KVCache, num_blocks: int, first: int = 1000) -> None:
    """Compute prompts of a block each, and end them."""
    for at in range(num_blocks):
        run(cache, make(range(first + 4 * at, first + 4 * at + 4)))


def test_a_retained_prefix_outlives_others_until_its_deadline():
    cache = make_cache(clock := Clock())
    run(cache, make(range(16), (8, 60.0)))
    run(cache, make(range(100, 116)))
    fill(cache, 10)
    assert cached(cache, range(16)) == 8, "of the prompt, what was asked for"
    assert cached(cache, range(100, 116)) == 0
    assert cache.retention.num_claimed == 2
    clock.now += 60
    fill(cache, 2, first=2000)
    assert cached(cache, range(16)) == 0, "at its deadline it is the next to go"
    assert cache.retention == (0, 0, 0)


def test_a_retained_prefix_is_given_up_from_its_end_on_and_not_before_others():
    cache = make_cache(clock := Clock())
    run(cache, make(range(16), (16, 60.0)))
    fill(cache, 10)
    clock.now += 61
    for left in (12, 8, 4, 0):
        fill(cache, 1, first=3000 + 4 * left)
        assert cached(cache, range(16)) == left


def test_what_is_used_later_than_others_goes_later_though_its_time_is_over():
    """Retention never makes a block go sooner."""
    cache = make_cache(clock := Clock())
    fill(cache, 5)
    run(cache, make(range(16), (16, 1.0)))
    clock.now += 2
    fill(cache, 5, first=2000)
    assert cached(cache, range(16)) == 16
    fill(cache, 3, first=3000)
    assert cached(cache, range(16)) == 8


def test_a_hit_of_who_asks_for_it_begins_its_time_anew():
    cache = make_cache(clock := Clock())
    run(cache, make(range(9), (8, 60.0)))
    clock.now += 50
    assert run(cache, make([*range(8), 77], (8, 60.0))) == 8
    clock.now += 50
    assert run(cache, make([*range(8), 78])) == 8, "asks for nothing"
    clock.now += 5
    fill(cache, 12)
    assert cached(cache, range(8)) == 8
    clock.now += 6
    fill(cache, 2, first=2000)
    assert cached(cache, range(8)) == 0


def test_a_running_sequence_takes_retained_blocks_if_nothing_else_is_free():
    cache = make_cache(Clock(), share=0.9)
    run(cache, make(range(16), (16, 60.0, 10)))
    run(cache, make(range(100, 116), (16, 60.0, 20)))
    assert cache.num_free["full"] == 10
    sequence = make(range(500, 520))
    assert cache.match_prefix(sequence) == 0 and cache.allocate(sequence, 20) == 20
    assert cached(cache, range(100, 116)) == 16, "the lower priority goes first"
    assert cached(cache, range(16)) == 4, "its end first"
    assert cache.retention == (5, 0, 3)
    other = make(range(600, 620))
    assert cache.match_prefix(other) == 0 and cache.allocate(other, 20) == 20
    assert cache.num_free["full"] == 0 and cache.retention == (0, 0, 8)


def test_what_is_found_where_it_would_have_been_evicted_is_counted():
    cache = make_cache(Clock())
    run(cache, make(range(9), (8, 60.0)))
    assert run(cache, make([*range(8), 77])) == 8
    assert cache.retention.num_found == 0, "it was no one's turn yet"
    fill(cache, 12)
    assert run(cache, make([*range(8), 78])) == 8
    assert cache.retention.num_found == 2
    assert cache.num_free["full"] == 10


def test_a_key_has_a_share_and_keeps_what_it_claimed_last():
    cache = make_cache(Clock(), num_blocks=20, share=0.2)
    run(cache, make(range(12), (12, 60.0), key="a"))
    run(cache, make(range(100, 108), (8, 60.0), key="a"))
    run(cache, make(range(200, 216), (16, 60.0), key="b"))
    assert cache.retention.num_claimed == 8
    fill(cache, 20)
    assert cached(cache, range(12)) == 8 and cached(cache, range(100, 108)) == 8
    assert cached(cache, range(200, 216)) == 16, "another key has its own"


def test_the_beginning_remains_of_a_prefix_that_is_longer_than_the_share():
    cache = make_cache(Clock(), num_blocks=10, share=0.3)
    run(cache, make(range(20), (20, 60.0)))
    fill(cache, 10)
    assert cached(cache, range(20)) == 12


def test_all_keys_together_leave_a_tenth_and_who_has_most_gives_way():
    cache = make_cache(Clock(), num_blocks=20, share=0.9)
    run(cache, make(range(60), (60, 60.0), key="a"))
    run(cache, make(range(100, 124), (24, 60.0), key="b"))
    assert cache.retention.num_claimed == 18
    fill(cache, 20)
    assert (cached(cache, range(60)), cached(cache, range(100, 124))) == (48, 24)


def test_a_key_s_low_priorities_give_way_to_its_high_ones():
    cache = make_cache(Clock(), num_blocks=20, share=0.2)
    run(cache, make(range(8), (8, 60.0, 90)))
    run(cache, make(range(100, 116), (16, 60.0, 10)))
    fill(cache, 20)
    assert (cached(cache, range(8)), cached(cache, range(100, 116))) == (8, 8)


def test_a_priority_ends_with_its_time():
    cache = make_cache(clock := Clock(), num_blocks=20, share=0.9)
    run(cache, make(range(8), (8, 60.0, 90)))
    clock.now += 61
    run(cache, make(range(8), (8, 60.0, 10)))
    run(cache, make(range(100, 108), (8, 60.0, 50)))
    sequence = make(range(500, 572))
    assert cache.match_prefix(sequence) == 0 and cache.allocate(sequence, 72) == 72
    assert (cached(cache, range(8)), cached(cache, range(100, 108))) == (0, 8)


def test_nothing_is_retained_without_a_share():
    cache = make_cache(Clock(), share=0.0)
    run(cache, make(range(16), (16, 60.0)))
    fill(cache, 10)
    assert cached(cache, range(16)) == 0 and cache.retention == (0, 0, 0)


def test_the_longest_of_several_times_counts_for_the_blocks_of_each():
    cache = make_cache(clock := Clock(), num_blocks=20)
    run(cache, make(range(16), (4, 3600.0), (12, 60.0)))
    clock.now += 61
    fill(cache, 20)
    assert cached(cache, range(16)) == 4


def test_a_window_keeps_what_the_query_after_the_prefix_reads():
    cache = make_cache(Clock(), FULL, WINDOW)
    run(cache, make(range(24), (12, 60.0)))
    fill(cache, 12)
    assert cached(cache, range(24)) == 12
    assert cache.pools[1].retained.counts.num_claimed == 1


def test_the_recurrent_state_after_a_prefix_is_kept_and_no_copy_takes_its_place():
    cache = make_cache(Clock(), FULL, STATE, num_blocks=20, num_states=4)
    run(cache, make(range(22), (12, 60.0)))
    assert cache.pools[1].retained.counts.num_claimed == 1, "a step ended after the prefix"
    fill(cache, 12)
    assert run(cache, make([*range(12), 77, 78])) == 12
    cache = make_cache(Clock(), FULL, STATE, num_blocks=20, num_states=2, share=0.9)
    run(cache, make(range(5), (4, 60.0)))
    tables = []
    for first in (100, 200):
        sequence = make(range(first, first + 5))
        assert cache.match_prefix(sequence) == 0 and cache.allocate(sequence, 4) == 4
        tables.append(sequence.blocks["state"])
    assert tables[0][0] and tables[1] == [0], "the second has no copy"
    assert cached(cache, range(4)) == 4


def test_copies_in_host_memory_are_retained_for_the_rest_of_the_time():
    cache = make_cache(clock := Clock(), num_blocks=4, share=0.5, num_host=6)
    run(cache, make(range(8), (8, 60.0)))
    first, second = make(range(500, 508)), make(range(600, 608))
    for each in (first, second):  # which takes all
        assert cache.match_prefix(each) == 0 and cache.allocate(each, 8) == 8
        each.num_computed = 8
        cache.commit(each)
    cache.drain_copies({first: 8})
    for each in (first, second):
        cache.free(each)
    for at in range(10):
        fill(cache, 1, first=2000 + 4 * at)
        cache.drain_copies({first: 8})
    assert cached(cache, range(8)) == 8, "the host has it"
    clock.now += 61
    for at in range(10):
        fill(cache, 1, first=3000 + 4 * at)
        cache.drain_copies({first: 8})
    assert cached(cache, range(8)) == 0


def test_forgetting_all_prefixes_drops_the_claims():
    cache = make_cache(Clock())
    run(cache, make(range(16), (16, 60.0)))
    fill(cache, 12)
    cache.forget()
    assert cache.retention.num_claimed == 0 and cache.num_free["full"] == 10
    assert cached(cache, range(16)) == 0


def test_many_claims_that_were_dropped_take_no_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.runtime.kv.retention.SPARE_EXPIRIES", 4)
    cache = make_cache(Clock(), num_blocks=10, share=0.3)
    for at in range(50):
        run(cache, make(range(100 * at, 100 * at + 8), (8, 3600.0)))
    assert len(cache.pools[0].retained._expiries) <= 2 * 3 + 4 + 2


def test_cache_retention_is_of_the_whole_prompt():
    params = SamplingParams(cache_retention={"seconds": 5})
    assert params.cache_retention == {"seconds": 5.0, "priority": 50}
    given = (RetainedPrefix(3, 60.0, 50),)
    assert retained_prefixes(given, params, 9) == (*given, RetainedPrefix(9, 5.0, 50))
    assert retained_prefixes(given, SamplingParams(), 9) == given


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (5, "is not a mapping"),
        ({"second": 5}, "there is no 'second'"),
        ({"seconds": 0}, "seconds=0.0 must be"),
        ({"seconds": 90000}, "seconds=90000.0 must be"),
        ({"priority": 1.5}, "priority=1.5 is not a whole number"),
        ({"priority": 101}, "priority=101 must be"),
    ],
)
def test_a_retention_out_of_its_limits_is_refused(value: object, fault: str):
    with pytest.raises(RequestError, match=fault):
        SamplingParams(cache_retention=value)  # type: ignore[arg-type]
