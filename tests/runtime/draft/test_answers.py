"""Kept answers: a bounded number of them, and each only for its salt."""

from __future__ import annotations

import random
from array import array

from atom.runtime.draft.answers import Answers
from atom.runtime.draft.suffix import follow

MINE, OTHER = b"mine", b"other"


def found(answers: Answers, suffix: list[int], salt: bytes = MINE) -> list[int]:
    """What follows a suffix in the answers."""
    match = answers.find(array("i", suffix), salt)
    return [] if match is None else follow(match, 4, 0)


def test_what_follows_in_an_answer_of_the_same_salt_is_found():
    answers = Answers(10)
    assert found(answers, [1, 2, 3]) == []
    for salt, last in ((b"", 7), (OTHER, 8), (MINE, 9)):
        answers.add([1, 2, 3, last], salt)
    assert [found(answers, [5, 1, 2, 3], salt) for salt in (b"", OTHER, MINE)] == [[7], [8], [9]]
    assert found(answers, [1, 2, 3], b"new") == []
    assert found(answers, [9, 1]) == [2, 3, 9], "one answer's end is not the start of the next"
    assert found(answers, [1, 2, 3, 9]) == []


def test_a_match_begins_no_earlier_than_its_answer():
    answers = Answers(10)
    answers.add([1, 2], MINE)
    answers.add([3, 4, 5], MINE)
    match = answers.find(array("i", [1, 2, 3, 4]), MINE)
    assert match is not None and match.length == 2


def test_no_more_answers_are_kept_than_allowed():
    answers = Answers(3)
    for number in range(5):
        answers.add([number, 100, 101], MINE if number % 2 else OTHER)
    assert len(answers) == 3
    kept = [bool(found(answers, [number], MINE if number % 2 else OTHER)) for number in range(5)]
    assert kept == [False, False, True, True, True]
    answers.add([7, 8], OTHER)
    answers.add([7, 9], OTHER)
    assert found(answers, [3, 100]) == [] and not answers.find(array("i", [100]), MINE), "all of a salt are gone"
    assert found(Answers(0), [1]) == []
    none = Answers(0)
    none.add([1, 2, 3], MINE)
    assert len(none) == 0 and found(none, [1]) == [] and none.num_bytes < 10_000


def test_no_more_tokens_are_kept_than_there_is_room_for():
    """Against a list of the answers, as many of the latest as fit."""
    chance, answers = random.Random(1), Answers(1000, max_tokens=1 << 10)
    size, every = answers.num_bytes, list[tuple[bytes, list[int]]]()
    for number in range(200):
        salt = chance.choice([MINE, OTHER])
        answer = [1000 * number + at for at in range(chance.choice([1, 3, 20, 200]))]
        answers.add(answer, salt)
        if len(answer) > 1:
            every.append((salt, answer))
        kept = [bool(found(answers, answer[:1], salt)) for salt, answer in every]
        assert kept == sorted(kept), "the oldest go first"
        assert sum(kept) == len(answers)
        num_tokens = sum(len(answer) + 2 for is_kept, (_, answer) in zip(kept, every, strict=True) if is_kept)
        assert num_tokens <= 1 << 10, "an answer stands between two breaks"
        assert all(kept) or num_tokens > (1 << 10) - 2 * 202, "the rest has no room for the next one"
        assert not any(found(answers, answer[:1], OTHER if salt == MINE else MINE) for salt, answer in every[-9:])
        for is_kept, (salt, answer) in zip(kept, every, strict=True):
            assert not is_kept or found(answers, answer[:1], salt) == answer[1:5]
    assert answers.num_bytes == size


def test_of_a_very_long_answer_the_end_is_kept():
    answers = Answers(10, max_tokens=1 << 10)
    answers.add(range(5000), MINE)
    assert found(answers, [4000]) == [] and found(answers, [4990]) == [4991, 4992, 4993, 4994]


def test_others_answers_hide_none():
    """Chains are of a salt, though all are in one index: many alike of others do not fill them."""
    answers = Answers(1000)
    answers.add([1, 2, 3, 4], MINE)
    for number in range(300):
        answers.add([1, 2, 3, 5], b"%d" % number)
    assert found(answers, [2, 3]) == [4] and found(answers, [1, 2, 3]) == [4]
