"""Read conversations from ShareGPT files and other forms of data sets.

for prompt, answer in read_sharegpt(Path("ShareGPT.json")):
    ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

MIN_TOKENS = 4  # of a prompt and of an answer: shorter ones say nothing about a server
MAX_PROMPT, MAX_TOTAL = 1024, 2048  # tokens, the bounds that published ShareGPT numbers use
NO_ANSWER_LEN = 128  # tokens, if a dataset has only prompts and no length of answers is given

Conversation = tuple[str, str | None]  # a prompt, and the answer to it, if any


def read_sharegpt(path: Path) -> list[Conversation]:
    """The first two turns of each conversation in a ShareGPT JSON file."""
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file ({error})") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a list of conversations")
    return [turns for entry in entries if (turns := read_entry(entry)) is not None]


def is_usable(prompt_len: int, output_len: int, *, is_own: bool) -> bool:
    """Whether lengths in tokens are within the bounds. is_own: the answer's own length, not one that was asked for."""
    is_short = prompt_len < MIN_TOKENS or (is_own and output_len < MIN_TOKENS)
    return not is_short and prompt_len <= MAX_PROMPT and prompt_len + output_len <= MAX_TOTAL


def read_entry(entry: Any) -> Conversation | None:
    """A prompt and its answer, from any of the forms that data sets have them in; None without any."""
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations") or entry.get("conversation") or entry.get("messages")
    if isinstance(turns, list):
        found = [turn.get("value") or turn.get("content") for turn in turns[:2] if isinstance(turn, dict)]
        texts = [each for each in found if is_text(each)]
        return (texts[0], texts[1]) if len(texts) == 2 else None
    prompts = (entry.get(name) for name in ("prompt", "instruction", "question", "text"))
    prompt = next(filter(is_text, prompts), None)
    answers = (entry.get(name) for name in ("completion", "response", "output", "answer"))
    return (prompt, next(filter(is_text, answers), None)) if prompt else None


def is_text(value: Any) -> TypeGuard[str]:
    """Whether it is a text that is not empty and can be sent: published data has halves of surrogate pairs."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= each <= "\udfff" for each in value)
