"""A tokenizer from the metadata of a GGUF file, which has the vocabulary but only names how text is split into words.

    build_tokenizer(metadata, "tiny.gguf", split={"gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|\\S+|\\s+"})

Two kinds: byte-level BPE (tokenizer.ggml.model "gpt2"), and sentencepiece's BPE ("llama"), whose merges follow from
the scores. `split` maps tokenizer.ggml.pre to the regular expression of the words; `ignore_merges` lists those whose
words are looked up in the vocabulary as a whole before they are merged, and whose texts begin with BOS unless the file
says otherwise. These are facts that llama.cpp keeps in its code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from atom.checkpoint.tokenizer import Tokenizer, add_around, first_line
from atom.errors import CheckpointError, UnsupportedError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(
    metadata: Mapping[str, Any], location: str, *, split: Mapping[str, str] = {}, ignore_merges: Collection[str] = ()
) -> Tokenizer | None:
    """None where the file has no tokenizer; UnsupportedError for a kind or a pre-tokenizer that is not known here."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = own.get("model", "none")
    if kind in ("none", "no_vocab"):
        return None
    tokens = own.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{location} has a tokenizer without tokens")
    special_tokens = {name: tokens[i] for name, key in NAMED.items() if (i := token_id(own, key, location)) is not None}
    try:
        if kind == "gpt2":
            backend = byte_level(own, location, split, ignore_merges)
        elif kind == "llama":
            backend = sentencepiece(own, special_tokens.get("unk_token"))
        else:
            raise UnsupportedError(f"{location}: tokenizer.ggml.model {kind!r} is not supported (gpt2, llama)")
        for token_type, special in ((CONTROL, True), (USER_DEFINED, False)):
            chosen = [token for token, its in zip(tokens, own.get("token_type", ()), strict=False) if its == token_type]
            backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
    except UnsupportedError:
        raise
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{location}: its vocabulary makes no tokenizer: {first_line(error)}") from error
    begins_with_bos = own.get("add_bos_token", kind == "llama" or own.get("pre") in ignore_merges)
    bos = special_tokens.get("bos_token") if begins_with_bos else None
    eos = special_tokens.get("eos_token") if own.get("add_eos_token", False) else None
    add_around(backend, bos, eos)
    named = {
        name: metadata.get(f"tokenizer.chat_template.{name}") for name in metadata.get("tokenizer.chat_templates", ())
    }
    templates = {"default": metadata.get("tokenizer.chat_template"), **named}
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        templates={name: template for name, template in templates.items() if template},
    )


def byte_level(
    own: Mapping[str, Any], location: str, split: Mapping[str, str], ignore_merges: Collection[str]
) -> tokenizers.Tokenizer:
    pre = own.get("pre", "default")
    if pre not in split:
        raise UnsupportedError(
            f"{location}: unknown pre-tokenizer {pre!r}; gguf.split of a model file can give its regular expression"
        )
    model = models.BPE(vocab=vocabulary(own), merges=read_merges(own), ignore_merges=pre in ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(own: Mapping[str, Any], unknown: str | None) -> tokenizers.Tokenizer:
    """The pair with the best score is merged first; bytes stand for what is not in the vocabulary."""
    vocab = vocabulary(own)
    merges = read_merges(own) or merges_by_score(vocab, own["scores"].tolist())
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    has_prefix = own.get("add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_by_score(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best first: the score of the whole, then the ids of the halves."""
    pairs = [
        (-scores[whole], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, whole in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def read_merges(own: Mapping[str, Any]) -> list[tuple[str, str]]:
    halves = (merge.partition(" ") for merge in own.get("merges", ()))
    return [(left, right) for left, _, right in halves]


def vocabulary(own: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(own["tokens"])}


def token_id(own: Mapping[str, Any], name: str, location: str) -> int | None:
    index: Any = own.get(f"{name}_token_id")
    if index is not None and not (type(index) is int and 0 <= index < len(own["tokens"])):
        raise CheckpointError(f"{location}: {name}_token_id {index!r} is no token of the vocabulary")
    return index
