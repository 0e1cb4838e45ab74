from __future__ import annotations

import base64
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from atom.checkpoint import Tokenizer, encoder, open_checkpoint
from atom.checkpoint.bounds import Bounds, check_decoder, is_linear_pattern, measure
from atom.errors import CheckpointError, RequestError

ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
USUAL = {  # as published tokenizer.json files have them
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "marks": ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "punctuation first": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "digits": r"\p{N}{1,3}",
    "three": "[0-9][0-9][0-9]",
    "ideographs": "[一-龥぀-ゟ゠-ヿ]+",
    "a set in a set": " ?[^(\\s|[.,!?…。，、।۔،])]+",
    "spaces": " {2,}",
}
NOT_LINEAR = [
    "(a|aa)+$", "(a+)+$", "a*b", "[ab]*[bc]", r"\s*[\r\n]+", r"\s+$", "a?a?a?a?b", "a{0,100}b", "a{,9}{,9}", "(?:a|b)*c",
    r"\d{1,3}(?=(?:\d{3})*\b)", r"(a)\1", r"(?<n>a)\g<n>", "a**", "(?<=a)b", "a+?b", r"\w+\s", "(?:a+)?", "((a))", "(?~a)b",
    f"[^\\r\\n\\p{{L}}\\p{{N}}]?{UPPER}*{LOWER}+", "a*|", "(", "[a", "a)", "\\",
]  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_expressions_are_known_to_be_linear(name: str) -> None:
    assert is_linear_pattern(USUAL[name])
    Regex(USUAL[name])  # it is one


@pytest.mark.parametrize("pattern", NOT_LINEAR)
def test_what_may_go_back_over_a_text_is_not(pattern: str) -> None:
    assert not is_linear_pattern(pattern)


@pytest.mark.slow
@given(st.text(st.sampled_from("ab[]()|*+?{},1 \\s.^$"), max_size=12))
def test_an_expression_that_is_called_linear_comes_to_an_end(pattern: str) -> None:
    """Within the time that a test has: an expression that is not linear takes minutes for these texts."""
    if not is_linear_pattern(pattern):
        return
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:  # it is none
        return
    for text in ("a" * 20_000, "ab" * 10_000, " " * 20_000 + "b", "1," * 10_000):
        split.pre_tokenize_str(text)


def charsmap(*texts: bytes) -> str:
    return base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"\0".join(texts) + b"\0").decode()


def precompiled(*texts: bytes) -> Any:
    class Precompiled:  # the Rust library reads only whole ones
        def __getstate__(self) -> bytes:
            return json.dumps({"type": "Precompiled", "precompiled_charsmap": charsmap(*texts)}).encode()

    return Precompiled()


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (None, 1),
        (normalizers.NFC(), 3),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), 12),
        (normalizers.Replace("``", '"'), 1),
        (normalizers.Replace(Regex(" {2,}"), "▁"), 4),
        (normalizers.Replace("", "ab"), 3),
        (normalizers.Sequence([normalizers.Replace("a", "aa")] * 100), 2.0**100),
        (normalizers.Sequence([normalizers.Sequence([normalizers.NFKC()]), normalizers.Lowercase()]), 16.5),
    ],
    ids=str,
)
def test_growth_is_the_product_of_the_links(normalizer: Any, growth: float) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if normalizer is not None:
        backend.normalizer = normalizer
    assert measure(backend) == Bounds(growth, True, 1)


def test_a_precompiled_charsmap_grows_by_its_longest_text() -> None:
    from atom.checkpoint.bounds import grow, links

    assert grow(*links(precompiled(b"a", b"x" * 33, b"yy"))) == 33


def tokenizer_of(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    (folder / "config.json").write_text("{}")
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = open_checkpoint(str(folder)).tokenizer()
    assert tokenizer is not None
    return tokenizer


def letters() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))


def doubling() -> tokenizers.Tokenizer:
    backend = letters()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 60)
    return backend


def backtracking() -> tokenizers.Tokenizer:
    backend = letters()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a*a*a*(?=[bc]d))|(?:(a|aa)+$)"), "isolated")
    return backend


def surrounding() -> tokenizers.Tokenizer:
    backend = letters()
    around = " ".join(["$A"] * 20_000)
    backend.post_processor = processors.TemplateProcessing(single=around, pair="$A $B", special_tokens=[])
    return backend


def long_words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(
        models.WordPiece({"a": 0, "##a": 1, "b": 2}, unk_token="b", max_input_chars_per_word=1 << 30)
    )


def long_pieces() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *(("a" * size, -1.0) for size in range(1, 1000))], unk_id=0)
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "make", [doubling, backtracking, surrounding, long_words, long_pieces], ids=lambda each: each.__name__
)
def test_a_text_that_a_tokenizer_would_never_be_done_with_ends_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    limits = "encoder.SECONDS, encoder.MEMORY = 1, 1 << 30"
    monkeypatch.setattr(encoder, "CODE", f"from atom.checkpoint import encoder; {limits}; encoder.work()")
    tokenizer, text = tokenizer_of(make(), tmp_path), "a" * 60_000 + "b"
    assert not tokenizer.encodes_here(len(text))
    with pytest.raises(
        RequestError, match=r"the checkpoint's tokenizer takes more than .*, for these 60001 characters"
    ):
        tokenizer.encode(text)
    assert tokenizer.encode("bb", add_special_tokens=False) == make().encode("bb", add_special_tokens=False).ids


def test_the_process_ends_with_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(doubling(), tmp_path)
    assert tokenizer.encode("bb") == [1, 1]
    process = tokenizer._encoder_process._process
    assert process is not None and os.path.exists(f"/proc/{process.pid}")
    del tokenizer
    assert process.returncode is not None


def test_half_a_surrogate_pair_is_named_there_too(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a valid Unicode string"):
        tokenizer_of(doubling(), tmp_path).encode("\ud800")


def test_an_ordinary_tokenizer_needs_no_process_for_ordinary_texts(tmp_path: Path) -> None:
    backend = letters()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(USUAL["cl100k"]), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    tokenizer = tokenizer_of(backend, tmp_path)
    assert tokenizer.encodes_here(2 << 20) and not tokenizer.encodes_here(4 << 20)
    assert tokenizer.encode("ab" * 100_000) == [0, 1] * 100_000
    assert tokenizer._encoder_process._process is None


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.Sequence([decoders.Replace("a", "aa")] * 5), "may make 32 bytes of one, the maximum is 16"),
        (decoders.Replace(Regex("(a|aa)+$"), ""), "has a regular expression that may take for ever"),
    ],
)
def test_a_decoder_that_never_ends_is_refused_when_it_is_read(tmp_path: Path, decoder: Any, message: str) -> None:
    backend = letters()
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(backend, tmp_path)


def test_the_usual_decoders_are_taken() -> None:
    backend = letters()
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    for decoder in (decoders.Sequence(pieces), decoders.ByteLevel(), decoders.Metaspace(), decoders.WordPiece()):
        backend.decoder = decoder
        check_decoder(backend)


def test_a_token_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a" * (1 << 20): 0}, unk_token="a"))
    with pytest.raises(CheckpointError, match="a token of its vocabulary has 1048576 characters, the maximum is 1024"):
        tokenizer_of(backend, tmp_path)


def test_tokens_that_are_too_long_a_text_are_not_decoded_at_once(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b" * 1000: 1}, unk_token="a")), tmp_path)
    assert len(tokenizer.decode([0] * 20_000)) >= 20_000
    with pytest.raises(RequestError, match="20000 tokens are more than 16777216 characters; decode fewer at once"):
        tokenizer.decode([1] * 20_000)
