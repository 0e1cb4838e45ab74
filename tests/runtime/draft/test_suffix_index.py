"""The index of suffixes finds what comparing with every earlier place finds."""

from __future__ import annotations

import random

import pytest

from atom.runtime.draft import suffix_index
from atom.runtime.draft.suffix_index import FEW, MAX_PLACES, SuffixIndex

DEPTH = 12


def compare_all(tokens: list[int]) -> tuple[int, list[int]]:
    """The longest match of the last tokens, and the places after it, the latest first. The first token is at 1."""
    lengths = dict[int, int]()
    for place in range(2, len(tokens) + 1):
        length, before = 0, tokens[: place - 1]
        while length < min(DEPTH, len(before)) and before[-length - 1] == tokens[-length - 1]:
            length += 1
        lengths[place] = length
    longest = max(lengths.values(), default=0)
    return longest, [place for place in reversed(lengths) if lengths[place] == longest > 0]


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_match_and_all_its_places_are_found(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suffix_index, "MAX_PLACES", 1 << 30)
    chance = random.Random(seed)
    vocab = chance.choice([2, 9, 260_000])
    phrases = [[chance.randrange(vocab) for _ in range(chance.randint(1, 20))] for _ in range(4)]
    tokens, index = list[int](), SuffixIndex(chance.choice([1, 1000]))
    while len(tokens) < 400:
        new = [chance.randrange(vocab)]
        for _ in range(chance.choice([1, 1, 1, 2 * FEW])):
            new += chance.choice(phrases)
        index.extend(new)
        tokens += new
        assert index.suffix(DEPTH).tolist() == tokens[-DEPTH:]
        length, places = index.find(index.suffix(DEPTH))
        assert (length, places) == compare_all(tokens)
        assert {index.match(index.suffix(DEPTH), place) for place in places} <= {length}


def test_the_latest_places_of_many_are_found():
    index = SuffixIndex(1)
    index.extend([1, 2, 3, 4] * 30)
    length, places = index.find(index.suffix(DEPTH))
    assert length == DEPTH and places == [117 - 4 * number for number in range(MAX_PLACES)]
    assert [index.tokens[index.offset(place)] for place in places] == [1] * MAX_PLACES


def test_nothing_is_found_where_nothing_is_repeated():
    index = SuffixIndex(1)
    assert index.find(index.suffix(DEPTH)) == (0, [])
    index.extend(range(100))
    assert index.find(index.suffix(DEPTH)) == (0, [])


def test_a_token_takes_twenty_bytes_of_twice_the_room():
    index = SuffixIndex(1)
    index.extend(range(10_000))
    assert index.num_bytes == 20 * index.size and index.size == 16_384
