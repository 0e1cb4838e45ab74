from __future__ import annotations

import itertools

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from atom.checkpoint import Tokenizer
from atom.runtime.types import Logprobs
from atom.sampling_params import SamplingParams
from atom.serve.output.content_tokens import ContentTokens

THINK, END = "</think>", "<|end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte, one for two letters, and special ones."""
    vocabulary = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), itertools.count())) | {"ab": 256}
    backend = Backend(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(THINK, special=True), AddedToken(END, special=True)])
    return Tokenizer(backend)


def scored(tokenizer: Tokenizer, text: str) -> list[Logprobs]:
    """The tokens of a text; the log probability of each is its index."""
    return [Logprobs(token, float(at), 1, []) for at, token in enumerate(tokenizer.encode(text))]


def indices(found: list[Logprobs]) -> list[int]:
    return [int(each.logprob) for each in found]


def test_the_tokens_of_content_are_those_after_its_marker(tokenizer: Tokenizer):
    params = SamplingParams(visible_tokens=[THINK])
    tokens = ContentTokens(tokenizer, [], params)
    tokens.push(scored(tokenizer, f"hm{THINK}\nabc{END}"), is_last=True)  # h m </think> \n ab c <|end|>
    assert indices(tokens.take([(11, 14)])) == [4, 5]
    assert tokens.take([(11, 14)]) == [], "each counts once"


def test_a_token_that_is_content_in_part_belongs_to_it(tokenizer: Tokenizer):
    tokens = ContentTokens(tokenizer, [], SamplingParams())
    tokens.push(scored(tokenizer, "xabyz"), is_last=True)
    assert indices(tokens.take([(0, 2)])) == [0, 1], "x, and ab for its a"
    assert indices(tokens.take([(2, 4)])) == [2], "ab has been taken"
    tokens = ContentTokens(tokenizer, [], SamplingParams())
    tokens.push(scored(tokenizer, "xabyz"), is_last=True)
    assert indices(tokens.take([(2, 3), (4, 5)])) == [1, 3], "ab for its b"


def test_every_token_of_a_character_has_its_place(tokenizer: Tokenizer):
    tokens = ContentTokens(tokenizer, [], SamplingParams())
    logprobs = scored(tokenizer, "a漢b")
    tokens.push(logprobs[:3], is_last=False)
    assert indices(tokens.take([(0, 1)])) == [0], "the character is not whole yet"
    tokens.push(logprobs[3:], is_last=True)
    assert indices(tokens.take([(1, 2)])) == [1, 2, 3]
    assert indices(tokens.take([(2, 3)])) == [4]


def test_half_a_character_at_the_end_counts(tokenizer: Tokenizer):
    tokens = ContentTokens(tokenizer, [], SamplingParams())
    tokens.push(scored(tokenizer, "a漢")[:3], is_last=True)
    assert indices(tokens.take([(0, 2)])) == [0, 1, 2], "the text ends with U+FFFD"


def test_a_token_without_text_is_left_out(tokenizer: Tokenizer):
    tokens = ContentTokens(tokenizer, [], SamplingParams())
    tokens.push(scored(tokenizer, f"x{END}y{END}"), is_last=True)
    assert indices(tokens.take([(0, 2)])) == [0, 2]


def test_what_follows_a_stop_string_is_left_out(tokenizer: Tokenizer):
    tokens = ContentTokens(tokenizer, [], SamplingParams(stop_strings=["yz"]))
    tokens.push(scored(tokenizer, "xyz"), is_last=True)
    assert indices(tokens.take([(0, 1)])) == [0]
