"""Compile JSON schemas for a vocabulary of single bytes, and ask what the grammar admits.

grammar = compile_schema({"type": "integer"})
admits(grammar, "12")       # True
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from atom.checkpoint import Tokenizer
from atom.errors import RequestError
from atom.runtime.requests.grammar import GrammarCompiler
from atom.runtime.requests.vocabulary import Vocabulary

END = 256


@cache
def byte_compiler() -> GrammarCompiler:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: id for id, letter in enumerate(letters)} | {"</s>": END}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return GrammarCompiler(Vocabulary(END + 1, frozenset({END}), Tokenizer(backend)))


@cache
def _tokens(text: str) -> list[int]:
    tokenizer = byte_compiler()._vocabulary.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, add_special_tokens=False)


def compile_schema(schema: dict[str, Any]) -> Any:
    return byte_compiler().compile({"json": schema})


def admits(grammar: Any, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = grammar.copy()
    is_whole = False
    try:
        for token in _tokens(text):
            is_whole = matcher.push(token)
        return is_whole or matcher.push(END)
    except RequestError:
        return False
