"""Suffix drafts: from where they come, and how long they are."""

from __future__ import annotations

import random
from array import array
from itertools import count

import pytest

from atom import SamplingParams
from atom.config.limits import SuffixLimits
from atom.runtime.draft import suffix as module
from atom.runtime.draft.answers import Answers, Match
from atom.runtime.draft.suffix import SuffixDrafter, follow
from atom.runtime.draft.suffix_index import SuffixIndex
from atom.runtime.types import Sequence

LIMITS = SuffixLimits(max_spec_factor=10)
NUMBERS = count()


def sequence_of(prompt: list[int], output: list[int] | None = None, salt: bytes = b"") -> Sequence:
    return Sequence(str(next(NUMBERS)), prompt, SamplingParams(), salt=salt, output=output or [])


def draft(tokens: list[int], limits: SuffixLimits = LIMITS, num_tokens: int = 7, max_drafts: int = 9) -> list[int]:
    return SuffixDrafter(num_tokens, limits).draft(sequence_of(tokens), max_drafts)


def test_what_followed_the_longest_match_is_drafted():
    assert draft([1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3]) == [4, 5, 2, 3, 6, 1, 2], "three tokens, not the later two"
    assert draft([2, 3, 4, 2, 3, 5, 2, 3], max_drafts=3) == [5, 2, 3], "the latest"
    assert draft([1, 2, 1, 2]) == [1, 2, 1, 2, 1, 2, 1], "what ends is repeated"
    assert draft([1, 2, 3]) == draft([7]) == []


@pytest.mark.parametrize(("factor", "lengths"), [(0, [0, 0, 0]), (0.5, [0, 1, 1]), (1, [1, 2, 3]), (2, [2, 4, 6])])
def test_a_longer_match_is_followed_for_longer(factor: float, lengths: list[int]):
    text = list(range(10, 40))
    found = [draft([*text, *text[9 - num : 9]], SuffixLimits(max_spec_factor=factor)) for num in (1, 2, 3)]
    assert found == [text[9 : 9 + length] for length in lengths]


@pytest.mark.parametrize(("depth", "factor", "length"), [(8, 1, 4), (8, 3, 6), (3, 1, 1), (64, 1, 7)])
def test_match_and_draft_are_no_longer_than_the_tree_is_deep(depth: int, factor: float, length: int):
    text = list(range(10, 60))
    assert draft([*text, *text[:20]], SuffixLimits(depth, max_spec_factor=factor)) == text[20 : 20 + length]


def test_a_draft_ends_where_too_few_places_agree():
    places = [1, 2, 3, 4] * 3 + [1, 2, 3, 5]  # of 4 places after 1, 2, one is followed by 3, 5
    index = SuffixIndex(1)
    index.extend([*places, 9, 1, 2])
    length, found = index.find(array("i", [1, 2]))
    match = Match(length, index, found)
    assert [len(follow(match, 2, share)) for share in (0, 0.25, 0.26, 1)] == [2, 2, 1, 1]
    assert draft([*places, 9, 1, 2], SuffixLimits(max_spec_factor=1, min_token_prob=0.25)) == [3, 5]
    assert draft([*places, 9, 1, 2], SuffixLimits(max_spec_factor=1, min_token_prob=0.26)) == [3]


def test_answers_are_looked_up_by_requests_of_the_same_salt():
    drafter, text = SuffixDrafter(4, LIMITS), list(range(100, 120))
    first = sequence_of([1, 2], text, salt=b"a")
    assert drafter.draft(sequence_of([7, 100, 101], salt=b"a"), 9) == []
    drafter.draft(first, 9)
    drafter.forget(first)
    mine, others = sequence_of([7, 100, 101], salt=b"a"), sequence_of([7, 100, 101], salt=b"b")
    assert drafter.draft(mine, 9) == [102, 103, 104, 105] and drafter.draft(others, 9) == []
    mine.output += [102, 103]
    assert drafter.draft(mine, 9) == [104, 105, 106, 107]
    own = sequence_of([100, 101, 5, 100, 101], salt=b"a")
    assert drafter.draft(own, 9)[:1] == [5], "the request's own text, if no longer match is elsewhere"
    prompt = sequence_of([1, 2, 7, 1, 2], salt=b"a")
    assert drafter.draft(prompt, 9)[:1] == [7], "a prompt is not an answer"
    assert first.id not in drafter._streams


def test_the_oldest_answers_are_forgotten():
    drafter = SuffixDrafter(4, LIMITS._replace(max_cached_requests=2))
    for number in range(3):
        drafter.forget(sequence_of([1], [100 + number, 50, 51, 52]))
    found = [drafter.draft(sequence_of([7, 100 + number]), 9) for number in range(3)]
    assert found == [[], [50, 51, 52], [50, 51, 52]] and len(drafter.answers) == 2


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_of_tokens_of_their_salt_while_answers_are_overwritten(seed: int):
    """Tokens of a salt are in a range of their own. Places that sequences follow are overwritten meanwhile."""
    chance, drafter = random.Random(seed), SuffixDrafter(5, LIMITS)
    drafter.answers = Answers(40, max_tokens=256)
    phrases = [[salt * 100 + chance.randrange(30) for _ in range(12)] for salt in range(3) for _ in range(3)]
    running, num_shared = list[tuple[int, Sequence]](), 0
    for _ in range(1500):
        if len(running) < 6:
            salt = chance.randrange(3)
            running.append((salt, sequence_of([salt * 100 + 50], salt=b"%d" % salt)))
        at = chance.randrange(len(running))
        salt, sequence = running[at]
        drafts = drafter.draft(sequence, 5)
        assert {token // 100 for token in drafts} <= {salt} and len(drafts) <= 5
        num_shared += bool({*drafts} - {*sequence.prompt, *sequence.output})
        phrase = chance.choice(phrases[3 * salt : 3 * salt + 3])
        sequence.output += (drafts if drafts and chance.random() < 0.5 else phrase)[: chance.randint(1, 12)]
        if len(sequence.output) > chance.choice([9, 60, 150]):
            drafter.forget(running.pop(at)[1])
    assert num_shared > 50, "answers of others were of use"


def test_a_text_is_copied_on_after_a_change():
    """After the changed token, a match of one token is followed: near the source, it tells enough."""
    text = [*range(100, 110), 7, *range(110, 130)]
    tail = [7, 55, 56, 57, 58]  # stood after a 7 later than the text
    answer = [*text[:10], 99, 7]  # 99 is new
    drafter, sequence = SuffixDrafter(4, LIMITS), sequence_of([*text, *tail])
    drafts = list[list[int]]()
    for token in answer:
        sequence.output.append(token)
        drafts.append(drafter.draft(sequence, 4))
    assert drafts[8:10] == [[109, 7, 110, 111], [7, 110, 111, 112]]
    assert drafts[10] == [], "99 has never been seen"
    assert drafts[11] == [110, 111, 112, 113]
    fresh = sequence_of([*text, *tail, 99, 7])
    assert drafter.draft(fresh, 4) == [55, 56, 57, 58], "which has copied nothing"


def test_a_long_prompt_is_indexed_in_several_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_INDEXED", 100)
    drafter, sequence = SuffixDrafter(3, LIMITS), sequence_of([*range(250), 5, 6])
    assert [drafter.draft(sequence, 9) for _ in range(4)] == [[], [], [7, 8, 9], [7, 8, 9]]
