"""What windows have moved past does not push out what idle conversations need."""

from __future__ import annotations

import itertools
import random

import pytest
from kinds import full_kind, recurrent_kind, window_kind

from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.eviction import EvictionOrder
from atom.runtime.types import Sequence, StateKind
from atom.sampling_params import SamplingParams

BLOCK, STEP = 4, 32  # tokens
NUM_TALKS, SHARED, NEW = 12, 41, 50


def test_what_is_skipped_goes_first_as_long_as_it_is_more_than_its_share() -> None:
    order = EvictionOrder(min_skipped=2)
    for block in (1, 2, 3, 4):
        order.add(block, is_skipped=True)
    for block in (5, 6):
        order.add(block)
    assert list(order) == [1, 2, 5, 6, 3, 4]
    assert order.newest_first == [6, 5, 4, 3, 2, 1]
    evicted = []
    while (block := order.first) is not None:
        evicted.append(block)
        order.remove(block)
    assert evicted == [1, 2, 5, 6, 3, 4] and len(order) == 0


def test_a_block_moves_to_the_queue_of_its_last_use() -> None:
    order = EvictionOrder(min_skipped=1)
    for block in (1, 2, 3):
        order.add(block, is_skipped=True)
    order.remove(1)
    order.add(1)
    assert 1 in order and not order.is_skipped(1) and order.is_skipped(2)
    assert list(order) == [2, 1, 3]
    order.add_first(7)
    assert list(order) == [7, 2, 1, 3]
    for block in (7, 2):
        order.remove(block)
    order.add_first(8)
    assert list(order) == [8, 1, 3] and not order.is_skipped(8)
    with pytest.raises(KeyError):
        order.remove(9)


@pytest.mark.parametrize(
    ("kind", "num_blocks"),
    [(window_kind(8, block_tokens=BLOCK), 70), (recurrent_kind(block_tokens=BLOCK), 20)],
    ids=["window", "state"],
)
def test_idle_conversations_go_on_where_they_ended(kind: StateKind, num_blocks: int) -> None:
    """Each turn adds more tokens than the pool has room for; a conversation needs three blocks of it, or one copy."""
    cache = KVCache([full_kind(), kind], {"full": 2000, kind.name: num_blocks}, BLOCK, enable_prefix_caching=True)
    random_order, numbers = random.Random(1), itertools.count(1000)
    talks = [list(range(SHARED)) for _ in range(NUM_TALKS)]
    assert num_blocks < NUM_TALKS * NEW // BLOCK
    for turn in range(3):
        for talk in random_order.sample(talks, NUM_TALKS):
            known = len(talk)
            talk += itertools.islice(numbers, NEW)
            sequence = Sequence(str(next(numbers)), talk[:], SamplingParams())
            sequence.num_computed = cache.match_prefix(sequence)
            if turn:
                assert sequence.num_computed == known // BLOCK * BLOCK
            while sequence.num_computed < len(talk):
                stop = cache.chunk_end(sequence, min(sequence.num_computed + STEP, len(talk)))
                assert cache.allocate(sequence, stop) == stop
                sequence.num_computed = stop
                cache.commit(sequence)
            cache.free(sequence)
