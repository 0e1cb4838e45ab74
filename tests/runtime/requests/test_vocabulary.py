"""Bad words as tokens, against vLLM's rule, over a tokenizer whose words are tokens with and without a space."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from atom.checkpoint import Tokenizer
from atom.errors import RequestError
from atom.runtime.requests.vocabulary import Vocabulary
from atom.sampling_params import SamplingParams

PIECES = ["a", "b", "c", "Ġ", "Ġa", "ab", "Ġab"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    merges = [("a", "b"), ("Ġ", "ab"), ("Ġ", "a")]
    backend = tokenizers.Tokenizer(models.BPE({piece: id for id, piece in enumerate(PIECES)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Vocabulary(len(PIECES), frozenset(), Tokenizer(backend))


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("a", [["a"], ["Ġa"]]),
        (" a", [["a"], ["Ġa"]]),
        ("ab", [["ab"], ["Ġab"]]),
        ("c", [["c"]]),  # after a space it is two tokens
        ("ac", [["a", "c"], ["Ġa", "c"]]),
        ("cab", [["c", "ab"]]),
    ],
)
def test_a_bad_word_is_banned_at_the_start_and_after_a_space(
    vocabulary: Vocabulary, word: str, pieces: list[list[str]]
):
    assert vocabulary.encode_bad_words([word]) == [[PIECES.index(piece) for piece in each] for each in pieces]


def test_several_bad_words_are_all_banned(vocabulary: Vocabulary):
    assert vocabulary.encode_bad_words(["c", "b"]) == [[2], [1]]


def test_what_has_no_token_or_no_tokenizer_is_refused(vocabulary: Vocabulary):
    with pytest.raises(RequestError, match="bad_words: '  ' has no token"):
        vocabulary.encode_bad_words(["  "])
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        Vocabulary(8, frozenset(), None).encode_bad_words(["a"])


def test_an_allowed_token_must_be_one_of_the_model(vocabulary: Vocabulary):
    vocabulary.check(SamplingParams(allowed_token_ids=[6]))
    with pytest.raises(RequestError, match="7 is not a token id"):
        vocabulary.check(SamplingParams(allowed_token_ids=[7]))


def test_bad_words_that_take_long_to_encode_are_refused(vocabulary: Vocabulary):
    with pytest.raises(RequestError, match="bad_words: the texts have 65537 characters, more than 65536"):
        vocabulary.encode_bad_words(["b" * 65536, "b"])
