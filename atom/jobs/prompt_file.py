"""Read the prompts of `job=generate`, and the answers that its output file already has.

    entries = read_prompts("@questions.jsonl", is_chat=True)
    entries[0].content, entries[0].fields              # [{"role": "user", …}], {"id": 7, "messages": [{…}]}
    left = without_answered(entries, Path("answers.jsonl"), num_answers=1)

A line of a file is a plain text, a JSON text or list of token ids, or an object with `prompt` or `messages`. The other
fields of an object are copied to its answer, so that whoever reads it finds what it belongs to.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.errors import ConfigError

OBJECT_START = re.compile(r'\s*\{\s*"')
BATCH_FIELDS = {"custom_id", "method", "url", "body"}  # of a line of OpenAI's batches
# fields of an answer, which an object in the file may not have too: one of the two would be lost
ANSWER_FIELDS = frozenset({
    *("text", "token_ids", "finish_reason", "num_tokens_input", "num_tokens_output", "ttft", "tpot", "latency"),
    *("error", "index", "logprobs", "prompt_logprobs", "taps"),
})  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A prompt, and what its answer repeats of it."""

    where: str  # as an error names it: prompt 0, line 3 of FILE
    content: Any  # a text, token ids, or the messages of a conversation
    fields: Mapping[str, Any]  # prompt or messages, and the other fields of an object

    @property
    def is_conversation(self) -> bool:
        return "messages" in self.fields


def read_prompts(prompts: Any, *, is_chat: bool = False) -> list[Entry]:
    """Read the prompts of a configuration: a prompt (text or token ids), a list of prompts, @FILE, or null for stdin.

    is_chat: entries may be conversations, objects with `messages`. ConfigError names the line that cannot be sent.
    """
    if prompts is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("there are no prompts: give prompts='[\"…\"]' or prompts=@FILE, or pipe them in")
        given = _parse_prompts(sys.stdin.read(), "stdin")
    elif isinstance(prompts, str) and prompts.startswith("@"):
        try:
            given = _parse_prompts(Path(prompts[1:]).read_text(), prompts[1:])
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts={prompts}: {getattr(error, 'strerror', error)}") from None
    else:
        given = _number(prompts)
    if not given:
        raise ConfigError("there are no prompts: the list is empty")
    return [_make_entry(where, value, is_chat) for where, value in given]


def is_batch(path: Path) -> bool:
    """Whether a file's first line is one of OpenAI's batches."""
    if not path.is_file():  # a pipe can be read only once
        return False
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError:
        return False
    value = _read_json(first.decode("utf-8-sig", "replace"))
    return isinstance(value, dict) and value.keys() >= BATCH_FIELDS


def without_answered(entries: Sequence[Entry], path: Path, num_answers: int) -> list[Entry]:
    """The entries for which a file has no num_answers answers yet. A last line that was cut off leaves the file.

    Equal entries count one by one; an answer with `error` counts as none. ConfigError if a line is no answer.
    """
    if not path.exists():
        return list(entries)
    done = Counter(_identity(fields) for fields in _read_answers(path))
    left = []
    for entry in entries:
        identity = _identity(entry.fields)
        if done[identity] < num_answers:
            left.append(entry)
        else:
            done[identity] -= num_answers
    return left


def _parse_prompts(text: str, source: str) -> list[tuple[str, Any]]:
    """The prompts of a file, each with its place in it."""
    whole = _read_json(text)
    if isinstance(whole, list):
        return _number(whole, f" of {source}")
    if isinstance(whole, dict) and "\n" in text.strip():
        return [(source, whole)]
    lines = [(f"line {at} of {source}", line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"there are no prompts in {source}")
    return [(where, _parse_line(line, where)) for where, line in lines]


def _number(prompts: Any, of: str = "") -> list[tuple[str, Any]]:
    is_single = isinstance(prompts, str | Mapping) or (prompts and all(isinstance(token, int) for token in prompts))
    return [(f"prompt {at}{of}", each) for at, each in enumerate([prompts] if is_single else prompts)]


def _parse_line(line: str, where: str) -> Any:
    value = _read_json(line)
    if value is None and OBJECT_START.match(line):
        raise ConfigError(f'{where} begins like an object and is not valid JSON; as a text, write it as "…" in JSON')
    return value if isinstance(value, str | list | dict) else line


def _read_json(text: str) -> Any:
    """The value of a JSON text; None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _make_entry(where: str, value: Any, is_chat: bool) -> Entry:
    if not isinstance(value, Mapping):
        return Entry(where, value, {"prompt": value})
    if value.keys() >= BATCH_FIELDS:
        raise ConfigError(
            f"{where} is a line of an OpenAI batch (custom_id, method, url, body); answer it with job=batch, "
            "and leave out what else is for job=generate"
        )
    if ("prompt" in value) == ("messages" in value):
        which = 'both "prompt" and' if "prompt" in value else 'neither "prompt" nor'
        raise ConfigError(f'{where} has {which} "messages"; an object needs one of them')
    if lost := sorted(ANSWER_FIELDS & value.keys()):
        raise ConfigError(f"{where} has the field {lost[0]}, which its answer has too; rename it or leave it out")
    if "prompt" in value:
        if not isinstance(value["prompt"], str | list):
            raise ConfigError(f'{where}: "prompt" is {value["prompt"]!r:.80}; give a text or a list of token ids')
        return Entry(where, value["prompt"], dict(value))
    if not is_chat:
        raise ConfigError(f'{where} has "messages", which are rendered by the chat template: add job.chat=true')
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        given = f'{where}: "messages" is {messages!r:.80}'
        raise ConfigError(f'{given}; give a list of objects such as {{"role": "user", "content": "…"}}')
    return Entry(where, messages, dict(value))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _identity(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True)


def _read_answers(path: Path) -> list[dict[str, Any]]:
    """Read the fields of their prompts that a file's answers repeat, without those that failed."""
    *lines, rest = path.read_bytes().split(b"\n")
    if _read_json(rest.decode("utf-8", "replace")) is not None:  # whole, though without its end
        lines, rest = [*lines, rest], b""
    answers = []
    for at, line in enumerate(lines, 1):
        value = _read_json(line.decode("utf-8", "replace"))
        if not isinstance(value, dict) or "finish_reason" not in value:
            raise _no_answer(path, at)
        if "error" not in value:
            answers.append({name: field for name, field in value.items() if name not in ANSWER_FIELDS})
    if rest and not rest.startswith(b"{"):
        raise _no_answer(path, len(lines) + 1)
    if rest:  # the process ended while it wrote this line
        os.truncate(path, path.stat().st_size - len(rest))
    return answers


def _no_answer(path: Path, number: int) -> ConfigError:
    return ConfigError(f"job.output_file={path}: line {number} is not an answer of job=generate; name another file")
