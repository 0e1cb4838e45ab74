"""What a state kind answers of its blocks."""

from __future__ import annotations

import pytest
from kinds import every_kind, full_kind, window_kind


def test_a_full_kind_needs_each_block_from_the_first_one_on():
    kind = full_kind()
    assert [kind.blocks(num_tokens) for num_tokens in (0, 1, 4, 5, 100)] == [0, 1, 1, 2, 25]
    assert kind.blocks(100, step=40) == 25
    assert kind.first_visible(99) == 0
    assert kind.is_usable(0, 12) and not kind.is_usable(1, 12)


@pytest.mark.parametrize(("num_tokens", "first"), [(4, 0), (5, 0), (8, 1), (12, 2), (13, 2), (15, 2), (16, 3)])
def test_a_window_kind_needs_the_blocks_that_its_query_sees(num_tokens: int, first: int):
    """A window of 5, of which the query is the last: 4 tokens before it."""
    kind = window_kind(5)
    assert kind.first_visible(num_tokens) == first
    assert kind.is_usable(first, num_tokens) and not kind.is_usable(first + 1, num_tokens)


def test_a_window_kind_holds_a_window_a_step_and_a_block_for_siblings():
    kind = window_kind(5)
    assert [kind.blocks(num_tokens) for num_tokens in (4, 8, 12, 100)] == [1, 2, 3, 3]
    assert kind.blocks(100, step=8) == 5, "12 tokens lie in up to 4 blocks"
    assert kind.blocks(12, step=40) == 3, "no more than it has tokens"


def test_entries_of_several_tokens_lie_in_each_block_or_in_the_last_of_several():
    small, large = every_kind(2), every_kind(12)
    assert [small.blocks(num_tokens) for num_tokens in (0, 1, 4, 5, 100)] == [0, 1, 1, 2, 25]
    assert [*small.places(1, 4)] == [1, 2, 3]
    assert large.blocks(100) == 9
    assert [[*large.places(*span)] for span in ((0, 2), (0, 3), (2, 9), (3, 9))] == [[], [2], [2, 5, 8], [5, 8]]
    assert all(kind.is_usable(0, 12) for kind in (small, large))
