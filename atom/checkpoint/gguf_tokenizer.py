"""Build a tokenizer from the metadata of a GGUF file.

The file has the vocabulary, but only names the rule that splits a text into words.

    build_tokenizer(metadata, "tiny.gguf", split={"gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|\\S+|\\s+"})

Three kinds: byte-level BPE (tokenizer.ggml.model "gpt2"), sentencepiece's BPE ("llama"), whose merges follow from the
scores, and the same with merges in the file ("gemma4"). `split` maps tokenizer.ggml.pre to the regular expression of
the words; `ignore_merges` lists those whose words are looked up whole in the vocabulary before they are merged, and
whose texts begin with BOS unless the file says otherwise. llama.cpp has these facts in its code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from atom.checkpoint.bounds import MAX_TOKEN
from atom.checkpoint.tokenizer import Tokenizer
from atom.errors import CheckpointError, UnsupportedError, first_line

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
KINDS = ("gpt2", "llama", "gemma4")
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(
    metadata: Mapping[str, Any], location: str, *, split: Mapping[str, str] = {}, ignore_merges: Collection[str] = ()
) -> Tokenizer | None:
    """Build a tokenizer; None if the file has none, UnsupportedError for an unknown kind or pre-tokenizer."""
    prefix = "tokenizer.ggml."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind, pre = str(own.get("model", "none")), str(own.get("pre", "default"))
    if kind in ("none", "no_vocab"):
        return None
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UnsupportedError(f"{location}: tokenizer.ggml.model {kind!r} is not supported (supported: {known})")
    if kind == "gpt2" and pre not in split:
        raise UnsupportedError(
            f"{location}: unknown pre-tokenizer {pre!r}; gguf.split of a model file can give its regular expression"
        )
    try:
        tokens = own["tokens"]
        ids = {name: own.get(f"{key}_token_id") for name, key in NAMED.items()}
        special_tokens = {name: tokens[i] for name, i in ids.items() if i in range(len(tokens))}  # 2**32 - 1 means none
        if max(map(len, tokens)) > MAX_TOKEN:
            raise ValueError(f"a token has more than {MAX_TOKEN} characters")
        if kind == "gpt2":
            backend = byte_level(own, split[pre], ignore_merges=pre in ignore_merges)
        else:
            backend = sentencepiece(own, special_tokens.get("unk_token"))
        for token_type, special in ((CONTROL, True), (USER_DEFINED, False)):
            chosen = [token for token, its in zip(tokens, own.get("token_type", ()), strict=False) if its == token_type]
            backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
        begins_with_bos = own.get("add_bos_token", kind == "llama" or pre in ignore_merges)
        begins_with_bos |= kind == "gemma4"  # llama.cpp adds it whatever the file says
        bos = special_tokens.get("bos_token") if begins_with_bos else None
        eos = special_tokens.get("eos_token") if own.get("add_eos_token", False) else None
        add_around(backend, bos, eos)
        names = {name: f"tokenizer.chat_template.{name}" for name in metadata.get("tokenizer.chat_templates", ())}
        names["default"] = "tokenizer.chat_template"
        templates = {name: metadata[key] for name, key in names.items() if key in metadata}
        return Tokenizer(backend, special_tokens=special_tokens, templates=templates)
    except Exception as error:  # the Rust library raises plain Exception, malformed metadata much else
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{location}: its vocabulary makes no tokenizer ({reason})") from error


def byte_level(own: Mapping[str, Any], split: str, *, ignore_merges: bool) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocabulary(own), merges=read_merges(own), ignore_merges=ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(own: Mapping[str, Any], unknown: str | None) -> tokenizers.Tokenizer:
    """sentencepiece's BPE: the pair with the best score is merged first; unknown characters become bytes."""
    vocab = vocabulary(own)
    merges = read_merges(own) or merges_by_score(vocab, own["scores"].tolist())
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    has_prefix = own.get("add_space_prefix", own.get("model") != "gemma4")
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_by_score(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every merge of two tokens to a third, best first: by the score of the whole, then the ids of the halves."""
    pairs = [
        (-scores[whole], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, whole in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def add_around(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make the backend add these tokens, and no others, around every text that it encodes with special tokens."""
    ids = {name: backend.token_to_id(token) for name, token in (("BOS", bos), ("EOS", eos)) if token is not None}
    single = [name for name in ("BOS", "$A", "EOS") if name == "$A" or ids.get(name) is not None]
    tokens = [{"id": name, "ids": [ids[name]], "tokens": [name]} for name in single if name != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=tokens)


def read_merges(own: Mapping[str, Any]) -> list[tuple[str, str]]:
    halves = (merge.partition(" ") for merge in own.get("merges", ()))
    return [(left, right) for left, _, right in halves]


def vocabulary(own: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(own["tokens"])}
