from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sampled import sample

from atom.runtime.requests.logit_processors import find_shaping
from atom.runtime.types import Sequence
from atom.sampling_params import SamplingParams

VOCAB = 8


class Only:
    """A grammar that allows these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def allowed(self, vocab: int) -> np.ndarray:
        return np.isin(np.arange(vocab), self.tokens)

    def push(self, token: int) -> bool:
        raise AssertionError("nothing is taken here")


Asked = tuple[int, Sequence, int]


def row(num_output: int = 0, matcher: Any = None, stop_ids: frozenset[int] = frozenset(), **params: Any) -> Asked:
    """The second that samples, as many tokens into its answer as the device has."""
    return 1, Sequence("a", [1, 2, 3], SamplingParams(**params), matcher=matcher, stop_ids=stop_ids), num_output


def answered(output: list[int], words: list[list[int]], **params: Any) -> Asked:
    """The same with an answer so far, of which the prompt is no part."""
    _, sequence, _ = row(**params)
    sequence.output, sequence.bad_words = output, words
    return 1, sequence, len(output)


def test_rows_without_biases_bans_and_grammars_have_no_shaping() -> None:
    assert find_shaping([row(), row(num_output=5, min_tokens=5, stop_token_ids=[1])], VOCAB) is None
    assert find_shaping([], VOCAB) is None


def test_biases_are_added_but_for_tokens_that_the_logits_do_not_have() -> None:
    shaping = find_shaping([row(logit_bias={2: 1.5, 7: -3, 8: 9})], VOCAB)
    assert shaping is not None
    assert (shaping.added, shaping.banned, shaping.allowed) == ([(1, 2, 1.5), (1, 7, -3)], [], [])


@pytest.mark.parametrize(("num_output", "is_early"), [(0, True), (2, True), (3, False), (4, False)])
def test_stops_are_banned_while_they_come_too_early(num_output: int, is_early: bool) -> None:
    shaping = find_shaping([row(num_output, min_tokens=3, stop_token_ids=[5, 9], stop_ids=frozenset({0}))], VOCAB)
    found = None if shaping is None else sorted(shaping.banned)
    assert found == ([(1, 0), (1, 5)] if is_early else None)


@pytest.mark.parametrize(("allowed", "is_banned"), [((5,), False), ((4, 5), True), ((0, 5), False)])
def test_a_grammar_that_allows_nothing_but_stops_counts_before_min_tokens(
    allowed: tuple[int, ...], is_banned: bool
) -> None:
    shaping = find_shaping([row(matcher=Only(*allowed), min_tokens=3, stop_token_ids=[0, 5])], VOCAB)
    assert shaping is not None
    ((place, mask),) = shaping.allowed
    assert (place, np.frombuffer(mask, np.bool_).tolist()) == (1, [token in allowed for token in range(VOCAB)])
    assert bool(shaping.banned) == is_banned


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [4]),
        ([5], [4, 6]),
        ([5, 6], [4, 7]),
        ([5, 5], [4, 6]),
        ([6, 5, 6], [4, 7]),
        ([5, 6, 0], [4]),
        ([3], [4]),  # which stands in the prompt
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(output: list[int], banned: list[int]) -> None:
    shaping = find_shaping([answered(output, [[4], [5, 6], [5, 6, 7], [6, 9], [2, 3, 1]], bad_words=["x"])], VOCAB)
    assert shaping is not None
    assert sorted(shaping.banned) == [(1, token) for token in banned]


def test_only_allowed_tokens_may_come() -> None:
    shaping = find_shaping([row(allowed_token_ids=[2, 7, 8])], VOCAB)
    assert shaping is not None
    ((place, mask),) = shaping.allowed
    assert (place, np.frombuffer(mask, np.bool_).nonzero()[0].tolist()) == (1, [2, 7])


def test_bad_words_are_ignored_where_nothing_else_is_allowed() -> None:
    for ids, is_banned in (([4], False), ([4, 5], True)):
        shaping = find_shaping([answered([], [[4]], bad_words=["x"], allowed_token_ids=ids)], VOCAB)
        assert shaping is not None
        assert bool(shaping.banned) == is_banned


@pytest.mark.parametrize(("words", "needs_host"), [([], False), ([[4]], False), ([[4], [5, 6]], True)])
def test_only_a_bad_word_of_several_tokens_waits_for_the_tokens(words: list[list[int]], needs_host: bool) -> None:
    assert answered([], words)[1].needs_host == needs_host


@pytest.mark.parametrize("bias", [None, {5: 40.0}, {3: 30.0, 0: 20.0}])
@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("matcher", [None, Only(0, 3, 5), Only(5)])
def test_a_greedy_choice_keeps_the_rules(bias: Any, min_tokens: int, matcher: Any) -> None:
    asked = row(matcher=matcher, logit_bias=bias, min_tokens=min_tokens, stop_token_ids=[5], temperature=0)
    values = [3.0, 1.0, 2.0, 2.5, 9.0, 4.0, 0.0, 1.0]
    tokens = range(VOCAB) if matcher is None else matcher.tokens
    if min_tokens and len(tokens) > 1:
        tokens = [token for token in tokens if token != 5]
    expected = max(tokens, key=lambda token: values[token] + (bias or {}).get(token, 0.0))
    assert sample(torch.tensor([values]), [asked[1]])[0] == [expected]


@pytest.mark.parametrize(
    ("matcher", "allowed"), [(None, [5]), (Only(5, 6), [5]), (Only(2, 6), [2, 6])], ids=["free", "allowed", "forbidden"]
)
def test_a_forced_token_is_the_only_one_unless_the_grammar_forbids_it(matcher: Any, allowed: list[int]) -> None:
    _, sequence, num_output = asked = row(matcher=matcher, logit_bias={5: -100}, min_tokens=4, stop_token_ids=[5])
    sequence.thinking = SimpleNamespace(forced=5, num_free=0)  # type: ignore[assignment]
    shaping = find_shaping([asked], VOCAB)
    assert shaping is not None and num_output == 0
    ((at, found),) = shaping.allowed
    assert (at, np.frombuffer(found, np.bool_).nonzero()[0].tolist()) == (1, allowed)
    assert [token for _, token in shaping.banned] == ([] if 5 in allowed else [5]), "nothing else keeps it out"
