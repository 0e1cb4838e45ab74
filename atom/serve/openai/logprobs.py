"""Format log probabilities for OpenAI's two APIs.

completion_logprobs(tokenizer, choice.logprobs, num_top=2)     # tokens, token_logprobs, top_logprobs, text_offset
chat_logprobs(tokenizer, choice.logprobs, num_top=2)           # content: [{token, logprob, bytes, top_logprobs}]

A token that is part of a character is named by its bytes, "bytes:\\xe2\\x82", as OpenAI does it, so that two tokens of
a position never share a name.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from atom.checkpoint import Tokenizer
from atom.runtime.requests.detokenizer import BROKEN
from atom.runtime.types import Logprobs

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in SentencePiece vocabularies
LOWEST = -9999.0  # JSON has no infinity


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a single token, special ones too."""
    if tokenizer is None:
        return f"token_id:{token}"
    text = tokenizer.decode([token], skip_special_tokens=False)
    if BROKEN in text and (found := token_bytes(tokenizer, token)) is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
    return text


def token_bytes(tokenizer: Tokenizer | None, token: int) -> bytes | None:
    """The bytes of a token, which may be part of a character; None if the tokenizer does not say."""
    if tokenizer is None:
        return None
    text = tokenizer.decode([token], skip_special_tokens=False)
    if BROKEN not in text:
        return text.encode()
    piece, known = tokenizer.piece(token) or "", byte_alphabet()
    if BROKEN in piece:  # it is that character
        return text.encode()
    if byte := BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return bytes(known[character] for character in piece) if piece and known.keys() >= set(piece) else None


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters that represent bytes in byte-level BPE vocabularies (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def completion_logprobs(
    tokenizer: Tokenizer | None,
    logprobs: Sequence[Logprobs | None],
    num_top: int,
    first: int | None = None,
    offset: int = 0,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The logprobs of consecutive tokens. None: the first token of a prompt, `first`. offset: characters.

    as_ids: tokens are named by their numbers, "token_id:7"
    """
    names = None if as_ids else tokenizer
    tokens, chosen, top, offsets = [], [], [], []
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    for each in logprobs:
        token = each.token if each is not None else first or 0
        tokens.append(token_text(names, token))
        offsets.append(offset)
        found = token_bytes(tokenizer, token)
        offset += len(token_text(tokenizer, token) if found is None else characters.decode(found))
        chosen.append(None if each is None else finite(each.logprob))
        top.append(None if each is None else top_logprobs(names, each, num_top))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def top_logprobs(tokenizer: Tokenizer | None, at: Logprobs, num_top: int) -> dict[str, float]:
    """The most likely tokens by text, and the chosen one, as with OpenAI."""
    likely = {token_text(tokenizer, token): finite(logprob) for token, logprob in reversed(at.top[:num_top])}
    return dict(reversed(likely.items())) | {token_text(tokenizer, at.token): finite(at.logprob)}


def chat_logprobs(
    tokenizer: Tokenizer | None, logprobs: Sequence[Logprobs], num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    names = None if as_ids else tokenizer

    def describe(token: int, logprob: float) -> dict[str, Any]:
        found = token_bytes(tokenizer, token)
        numbers = None if found is None else list(found)
        return {"token": token_text(names, token), "logprob": finite(logprob), "bytes": numbers}

    content = [
        describe(each.token, each.logprob) | {"top_logprobs": [describe(*one) for one in each.top[:num_top]]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def raw(items: Sequence[Any]) -> list[msgspec.Raw]:
    """Encode a list as JSON item by item, so that other threads run in between."""
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]


def prompt_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """For each position of the prompt, as in vLLM: token id -> logprob, rank, decoded_token."""

    def describe(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}

    return [
        None
        if each is None
        else {str(each.token): describe(each.token, each.logprob, each.rank)}
        | {str(token): describe(token, logprob, rank) for rank, (token, logprob) in enumerate(each.top, 1)}
        for each in logprobs
    ]
