"""An answer may be what a response format says, or calls as each family's chat template writes them."""

from __future__ import annotations

import pytest
from serve.output.test_tool_formats import TOOLS, WRITTEN, element, m3
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from atom.checkpoint import Tokenizer
from atom.config.tool_formats import read_format
from atom.runtime.requests.grammar import GrammarCompiler
from atom.runtime.requests.vocabulary import Vocabulary
from atom.serve.output.call_grammar import call_grammar

ANSWER = {"json": {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}}


def make_tokenizer(markers: list[str]) -> Tokenizer:
    """Of bytes, with markers as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ["<end>", *markers]])
    return Tokenizer(backend, special_tokens={"eos_token": "<end>"})


def accepts(name: str, text: str, *, has_markers: bool, is_parallel: bool = True) -> bool:
    """Whether an answer may be this text, as a whole."""
    tool_format = read_format(name)
    markers = sorted({*tool_format.markers, "<|constrain|>"}) if has_markers else []
    tokenizer = make_tokenizer(markers)
    (end,) = tokenizer.eos_ids
    compiler = GrammarCompiler(Vocabulary(tokenizer.vocab_size, frozenset({end}), tokenizer))

    def token_id(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    matcher = compiler.compile(ANSWER, None, call_grammar(tool_format, TOOLS, token_id, is_parallel=is_parallel))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for number, token in enumerate(tokens, 1):
        if not matcher.allowed(tokenizer.vocab_size)[token]:
            return False
        if matcher.push(token):
            return number == len(tokens)
    return bool(matcher.allowed(tokenizer.vocab_size)[end])


def one_call(name: str) -> str:
    """What is written of a format's first call, and its end."""
    text = WRITTEN[name]
    return text[: text.index("<|end|>")] if name == "harmony" else text


def answer_of(name: str) -> str:
    return '<|channel|>final<|message|>{"kind": "cat"}' if name == "harmony" else '{"kind": "cat"}'


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_with_a_format_may_be_that_or_calls(name: str, has_markers: bool):
    assert accepts(name, one_call(name), has_markers=has_markers)
    assert accepts(name, answer_of(name), has_markers=has_markers)
    assert not accepts(name, one_call(name).replace("get_weather", "nobody"), has_markers=has_markers)
    assert not accepts(name, answer_of(name).replace("cat", "cow"), has_markers=has_markers)
    assert not accepts(name, "Sure.", has_markers=has_markers)


@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "texts"])
def test_elements_may_nest(has_markers: bool):
    places = m3(element("places", element("item", element("name", "x"), element("size", "3"))))
    assert accepts("minimax_m3", places, has_markers=has_markers)
    assert not accepts("minimax_m3", places.replace("places", "other"), has_markers=has_markers)
    if has_markers:
        assert not accepts("minimax_m3", places.replace("</item>", ""), has_markers=True)


@pytest.mark.parametrize("has_markers", [True, False], ids=["tokens", "texts"])
def test_an_answer_with_a_format_may_have_the_markers_of_content(has_markers: bool):
    start, end, message = read_format("kimi_k3").content
    for text in (start + answer_of("kimi_k3") + end + message, answer_of("kimi_k3") + end):
        assert accepts("kimi_k3", text, has_markers=has_markers)
        assert not accepts("kimi_k3", text.replace("cat", "cow"), has_markers=has_markers)
    assert not accepts("kimi_k3", f"{start}Sure.{end}", has_markers=has_markers)


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"harmony"}))
def test_without_parallel_calls_one_is_all(name: str):
    assert not accepts(name, WRITTEN[name], has_markers=True, is_parallel=False)
