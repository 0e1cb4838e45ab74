from __future__ import annotations

import math
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from atom.checkpoint import Tokenizer
from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.runtime.types import Logprobs
from atom.serve.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, token_bytes, token_text

A, B, END = 64, 65, 257  # tokens of the talker


@pytest.fixture(scope="module")
def tokenizer(talker: Path) -> Tokenizer:
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None
    return tokenizer


def test_a_part_of_a_character_is_called_by_its_bytes(tokenizer: Tokenizer):
    tokens = tokenizer.encode("aÉ")
    assert [token_bytes(tokenizer, token) for token in tokens] == [b"a", b"\xc3", b"\x89"]
    assert [token_text(tokenizer, token) for token in tokens] == ["a", "bytes:\\xc3", "bytes:\\x89"]


def test_every_byte_has_its_token(tokenizer: Tokenizer):
    known = {token_bytes(tokenizer, token) for token in range(256)}
    assert known == {bytes([byte]) for byte in range(256)}


def test_a_byte_that_sentencepiece_spells_is_that_byte():
    backend = tokenizers.Tokenizer(models.BPE({"<0xC3>": 0, "<0x89>": 1, "a": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    known = Tokenizer(backend)
    assert known.decode([0, 1]) == "É"
    assert [token_bytes(known, token) for token in (0, 1, 2)] == [b"\xc3", b"\x89", b"a"]


def test_the_character_for_what_is_none_may_be_a_token():
    backend = tokenizers.Tokenizer(models.BPE({"<0xC3>": 0, "\ufffd": 1, "\ufffd!": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found = [token_bytes(Tokenizer(backend), token) for token in (0, 1, 2)]
    assert found == [b"\xc3", b"\xef\xbf\xbd", b"\xef\xbf\xbd!"]


def test_special_tokens_are_shown(tokenizer: Tokenizer):
    assert token_text(tokenizer, END) == "<|im_end|>"
    assert token_bytes(tokenizer, END) == b"<|im_end|>"


def test_without_a_tokenizer_a_token_is_its_number():
    assert token_text(None, 7) == "token_id:7"
    shown = chat_logprobs(None, [Logprobs(7, -1.0, 1, [])], 0)
    assert shown["content"] == [{"token": "token_id:7", "logprob": -1.0, "bytes": None, "top_logprobs": []}]


def test_the_lists_of_a_completion(tokenizer: Tokenizer):
    made = [Logprobs(A, -0.5, 1, [(A, -0.5), (B, -1.0)]), Logprobs(B, -3.0, 9, [(A, -0.25), (END, -2.0)])]
    assert completion_logprobs(tokenizer, made, 2, offset=10) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, {"a": -0.25, "<|im_end|>": -2.0, "b": -3.0}],
        "text_offset": [10, 11],
    }


def test_nothing_predicts_the_first_token_of_a_prompt(tokenizer: Tokenizer):
    shown = completion_logprobs(tokenizer, [None, Logprobs(B, -1.0, 1, [])], 0, first=A)
    assert (shown["tokens"], shown["token_logprobs"], shown["top_logprobs"]) == (
        ["a", "b"],
        [None, -1.0],
        [None, {"b": -1.0}],
    )
    assert prompt_logprobs(tokenizer, [None, Logprobs(B, -1.0, 3, [(A, -0.5)])]) == [
        None,
        {
            "65": {"logprob": -1.0, "rank": 3, "decoded_token": "b"},
            "64": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_an_infinite_logprob_is_a_very_low_one_in_json(tokenizer: Tokenizer):
    shown = chat_logprobs(tokenizer, [Logprobs(A, -math.inf, 9, [(B, 0.0)])], 1)
    assert shown["content"][0]["logprob"] == -9999.0
    assert shown["content"][0]["top_logprobs"] == [{"token": "b", "logprob": 0.0, "bytes": [98]}]


def test_tokens_are_named_by_number_if_asked_and_keep_their_places(tokenizer: Tokenizer):
    a, c, e = tokenizer.encode("aÉ")
    made = [Logprobs(a, -1.0, 1, [(c, -2.0)]), Logprobs(c, -1.0, 1, []), Logprobs(e, -1.0, 1, [])]
    named, numbered = (completion_logprobs(tokenizer, made, 1, as_ids=as_ids) for as_ids in (False, True))
    assert numbered["tokens"] == [f"token_id:{token}" for token in (a, c, e)]
    assert numbered["top_logprobs"][0] == {f"token_id:{c}": -2.0, f"token_id:{a}": -1.0}
    assert numbered["text_offset"] == named["text_offset"]
    (first, *_) = chat_logprobs(tokenizer, made, 1, as_ids=True)["content"]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == (
        f"token_id:{a}",
        [97],
        f"token_id:{c}",
    )
