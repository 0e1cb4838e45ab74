r"""Bound the time and tokens that a tokenizer may take for a text.

The bounds are read off its components before it gets any text.

    bounds = find_bounds(backend, folder)       # CheckpointError if it is refused
    bounds.growth           # bytes that one byte may become on the way to the model: 3 where " " becomes "▁"
    bounds.is_linear        # time and memory grow linearly with the text
    bounds.longest          # characters of its longest token

A tokenizer.json is an untrusted program: a chain of replacements doubles a text with each link, and a regular
expression may take forever for a few lines. A tokenizer that is not known to be harmless is not refused: it runs in a
process that may be killed (`encoder.py`).
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atom.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

MAX_TOKEN = 1024  # characters; the longest known have some 100
MAX_PIECE = 64  # characters of a token that a Unigram model looks for at every position of a text
MAX_WORD = 256  # characters of a word whose parts a WordPiece model looks up
MAX_AROUND = 64  # tokens added around a text
MAX_DECODED = 16  # bytes that a decoder may make of one

# The max bytes of UTF-8 that a component makes of one: Unicode's limits (UAX 15), BERT's spaces around ideographs,
# ByteLevel's characters of two bytes.
GROWTH = {
    "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5, "Strip": 1, "StripAccents": 1, "Nmt": 1,
    "BertNormalizer": 9, "ByteLevel": 2, "Metaspace": 4, "Split": 1, "Digits": 1, "Punctuation": 1, "Whitespace": 1,
    "WhitespaceSplit": 1, "BertPreTokenizer": 1, "CharDelimiterSplit": 1, "UnicodeScripts": 1, "FixedLength": 1,
}  # fmt: skip
DECODERS = {"ByteFallback": 3, "Fuse": 1, "Strip": 1, "Metaspace": 1, "ByteLevel": 3, "WordPiece": 2, "BPEDecoder": 2,
            "CTC": 2}  # fmt: skip
PROCESSORS = ("ByteLevel", "BertProcessing", "RobertaProcessing")  # add at most two tokens around a text
PARTS = ("normalizers", "pretokenizers", "decoders", "processors")  # of a Sequence

# Alternatives in the usual regular expressions that backtrack -> a later alternative that must then match at once; "":
# none is needed, since they backtrack by one character.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
BACKTRACKING = {r"\s+(?!\S)": "", r"\s*[\r\n]+": r"\s+", r"\s*[\r\n]": r"\s+"} | {
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{end}": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{end}" for end in ENDINGS
}
MAX_REPEATS, MAX_OPTIONAL = 16, 3  # repeats of an atom, and optional atoms, that may be tried in all combinations


class Bounds(NamedTuple):
    growth: float
    is_linear: bool
    longest: int


def find_bounds(backend: Any, folder: Path) -> Bounds:
    """Measure the backend's bounds. CheckpointError, with the folder, if it is refused."""
    try:
        check_decoder(backend)
        return measure(backend)
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer of {folder}: {error}") from None


def measure(backend: tokenizers.Tokenizer) -> Bounds:
    """Measure a backend's bounds. CheckpointError for a token of more than MAX_TOKEN characters."""
    longest = max(map(len, backend.get_vocab()), default=0)
    if longest > MAX_TOKEN:
        raise CheckpointError(f"a token of its vocabulary has {longest} characters, the maximum is {MAX_TOKEN}")
    steps = [*links(backend.normalizer), *links(backend.pre_tokenizer)]
    growth = math.prod(grow(step) for step in steps)
    is_linear = all(map(is_linear_step, steps)) and has_linear_model(backend)
    is_linear &= num_around(links(backend.post_processor)) <= MAX_AROUND
    return Bounds(growth, is_linear, longest)


def check_decoder(backend: tokenizers.Tokenizer) -> None:
    """Raise CheckpointError if decoded text may be far longer than its tokens, or take far too long."""
    steps = links(backend.decoder)
    growth = math.prod(grow(step, DECODERS) for step in steps)
    if growth > MAX_DECODED or not all(map(is_linear_step, steps)):
        names = ", ".join(str(step.get("type")) for step in steps)[:100]
        why = f"may make {growth:.3g} bytes of one, the maximum is {MAX_DECODED}"
        why = why if growth > MAX_DECODED else "has a regular expression that may take for ever"
        raise CheckpointError(f"its decoder ({names}) {why}; use the tokenizer.json of its authors")


def links(component: Any) -> list[dict[str, Any]]:
    """The components of a chain, as in tokenizer.json."""

    def flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step.get("type") != "Sequence":
            return [step]
        return [link for key in PARTS for part in step.get(key, ()) for link in flatten(part)]

    return [] if component is None else flatten(json.loads(component.__getstate__()))


def grow(step: Mapping[str, Any], known: Mapping[str, float] = GROWTH) -> float:
    """Bytes that one byte may become; inf if that is unknown."""
    match step.get("type"):
        case "Replace":
            content, pattern = len(step["content"].encode()), step["pattern"]
            if "Regex" in pattern:
                return 1 + content  # it may match nothing, between any two
            return max(1.0, content / len(pattern["String"].encode())) if pattern["String"] else 1 + content
        case "Prepend":
            return 1 + len(step["prepend"].encode())  # in front of each part between two added tokens
        case "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
            start = 4 + int.from_bytes(charsmap[:4], "little")
            return max(1, *map(len, charsmap[start:].split(b"\0")))
        case kind:
            return known.get(str(kind), math.inf)


def is_linear_step(step: Mapping[str, Any]) -> bool:
    """Whether a component's time grows linearly with its text."""
    pattern = step.get("pattern")
    return not isinstance(pattern, dict) or "Regex" not in pattern or is_linear_pattern(pattern["Regex"])


def has_linear_model(backend: tokenizers.Tokenizer) -> bool:
    model: Any = backend.model
    match type(model).__name__:
        case "Unigram":
            return max(map(len, backend.get_vocab(with_added_tokens=False)), default=0) <= MAX_PIECE
        case "WordPiece":
            return bool(model.max_input_chars_per_word <= MAX_WORD)
        case "BPE":
            around = (model.continuing_subword_prefix, model.end_of_word_suffix)
            return all(len(text or "") <= MAX_PIECE for text in around)
    return type(model).__name__ == "WordLevel"


def num_around(steps: Iterable[Mapping[str, Any]]) -> float:
    """Tokens that post-processing adds around a text; inf if it repeats the text itself."""
    total = 0.0
    for step in steps:
        if step.get("type") != "TemplateProcessing":
            total += 2 if step.get("type") in PROCESSORS else math.inf
            continue
        named = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
        total += sum(len(step["special_tokens"][name]["ids"]) for name in named)
        total += math.inf if len(step["single"]) - len(named) > 1 else 0
    return total


def is_linear_pattern(pattern: str) -> bool:
    """Whether a regular expression backtracks over a bounded number of characters, wherever it is tried.

    That holds if all after the first unlimited repeat is optional, and for the alternatives in BACKTRACKING.
    """
    alternatives = split_alternatives(pattern)
    return all(
        BACKTRACKING[each] in ("", *alternatives[index:]) if each in BACKTRACKING else is_linear_alternative(each)
        for index, each in enumerate(alternatives)
    )


ATOM = re.compile(
    r"\\[pP]\{\^?\w+\}|\\[sSdDwWhHrntfv]|\\x[0-9a-fA-F]{2}|\\[^\w\s]"  # a property, a class, an escaped character
    r"|\[(?:\\.|[^\[\]\\]|\[(?:\\.|[^\[\]\\])*\])+\]"  # a set, and sets in it
    r"|\((?:\?i?:)?(?P<group>(?:\\[^\w]|\[[^\[\]\\]+\]|[^\\()\[\]*+?{}^$.])+)\)"  # texts
    r"|[^\\()\[\]*+?{}|^$]",  # a character
    re.DOTALL,
)
REPEAT = re.compile(r"(?P<sign>[*+?])[?+]?|\{(?P<low>\d*)(?P<comma>,)?(?P<high>\d*)\}(?![?+*])|")


def is_linear_alternative(pattern: str) -> bool:
    position, num_optional, is_unlimited = 0, 0, False
    while position < len(pattern):
        atom = ATOM.match(pattern, position)
        repeat = REPEAT.match(pattern, atom.end()) if atom else None
        if atom is None or repeat is None or pattern[repeat.end() : repeat.end() + 1] in tuple("*+?{"):
            return False
        position = repeat.end()
        low, high = limits(repeat)
        if (low and is_unlimited) or (atom["group"] and high > 1):
            return False
        is_unlimited |= high == math.inf
        num_optional += low != high or atom["group"] is not None
        if not is_unlimited and (high > MAX_REPEATS or num_optional > MAX_OPTIONAL):
            return False
    return bool(pattern)


def limits(repeat: re.Match[str]) -> tuple[int, float]:
    """The min and max number of matches of a repeated atom."""
    if repeat["sign"]:
        return int(repeat["sign"] == "+"), 1 if repeat["sign"] == "?" else math.inf
    if repeat["low"] is None:
        return 1, 1
    low = int(repeat["low"] or 0)
    return low, int(repeat["high"]) if repeat["high"] else math.inf if repeat["comma"] else low


def split_alternatives(pattern: str) -> list[str]:
    """Split a pattern at each | outside of groups and sets."""
    alternatives, depth, start, position = [], 0, 0, 0
    while position < len(pattern):
        character = pattern[position]
        depth += (character in "([") - (character in ")]")
        if character == "|" and not depth:
            alternatives.append(pattern[start:position])
            start = position + 1
        position += 2 if character == "\\" else 1
    return [*alternatives, pattern[start:]]
