"""Merge the tokens that a tokenizer's files declare, by the rules of transformers 5.

    declared = read_declared(folder, config, backend.get_added_tokens_decoder())
    declared.add_to(backend)
    declared.special_tokens         # the named ones, for templates: {"bos_token": "<s>", "image_token": "<img>"}

As in its `TokenizersBackend`, tokenizer_config.json wins: the flags in its `added_tokens_decoder` replace those of
tokenizer.json. Only without one do special_tokens_map.json, which overrides the config's names, and added_tokens.json
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from atom.checkpoint.base import read_json

STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class DeclaredTokens(NamedTuple):
    """Tokens as files declare them.

    added: with their flags, by the ids of their file.
    named: bos_token, ...
    extra: special tokens without a name.
    """

    added: dict[int, AddedToken]
    named: dict[str, AddedToken]
    extra: list[AddedToken]

    @property
    def special_tokens(self) -> dict[str, str]:
        return {name: token.content for name, token in self.named.items()}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add the tokens that the backend lacks, and replace the flags of those that it has; named ones are special."""
        listed = [token for _, token in sorted(self.added.items())]
        names = set(self.special_tokens.values())
        for token in listed:
            token.special |= token.content in names
        known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *listed)}
        unlisted = [token for token in (*self.named.values(), *self.extra) if token.content not in known]
        backend.add_tokens([*listed, *unlisted])


def read_declared(folder: Path, config: Mapping[str, Any], own: Mapping[int, AddedToken]) -> DeclaredTokens:
    """Read what the files next to tokenizer.json declare.

    own: the added tokens of tokenizer.json.
    """
    listed, extra = config.get("added_tokens_decoder"), config.get("extra_special_tokens")
    extras = [extra, None if extra and isinstance(extra, list) else config.get("additional_special_tokens")]
    if listed is not None:
        added = {int(id): read_token(entry, special=False) for id, entry in listed.items()}
        return DeclaredTokens(added, *split_named(config, extras))
    overriding = read_optional(folder / "special_tokens_map.json")
    config = {**config, **overriding}
    extras.append(overriding.get("extra_special_tokens"))
    named, others = split_named(config, extras)
    special = {token.content for token in (*named.values(), *others)}
    encoder = read_optional(folder / "added_tokens.json")
    added = {int(id): AddedToken(text, special=text in special) for text, id in encoder.items()} | dict(own)
    if not others:
        extras.append(overriding.get("additional_special_tokens"))
    return DeclaredTokens(added, *split_named(config, extras))


def split_named(config: Mapping[str, Any], extras: Iterable[Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The special tokens of a config that have names, the standard ones first, and those without.

    extras: each a list, an object with names, or None
    """
    specific = {key: value for key, value in config.items() if key.endswith("_token") and key not in STANDARD}
    unnamed: list[Any] = []
    for extra in extras:
        if isinstance(extra, dict):
            specific |= extra
        else:
            unnamed += extra or []
    given = {key: config.get(key) for key in STANDARD} | (specific or config.get("model_specific_special_tokens", {}))
    named = {key: token for key, value in given.items() if (token := find_token(value))}
    for token in named.values():
        token.special = True
    return named, list(filter(None, map(find_token, unnamed)))


def find_token(value: Any) -> AddedToken | None:
    """A special token that is stored as text or as an object; None for other values."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return read_token(value, special=True) if isinstance(value, dict) and "content" in value else None


def read_token(entry: Mapping[str, Any], *, special: bool) -> AddedToken:
    flags = {"special": special} | {flag: entry[flag] for flag in FLAGS if flag in entry}
    return AddedToken(entry["content"], **flags)


def read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
