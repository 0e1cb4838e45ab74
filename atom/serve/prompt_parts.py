"""Find a conversation's parts in its prompt: texts of messages, tools.

    def render(marker: Marker) -> str:                       # the prompt once more, with marks in its texts
        return render_plain(context, [{"role": "user", "content": marker.mark("Hello", "messages.0")}])

    parts = find_parts(render, conversation.text)            # [Part("messages.0", 27)]
    retained = retained_parts(context, conversation, parts, {"messages.0": 300.0})
    name_of(parts, 12)                                       # "messages.0": the part of a place

A chat template may write a text anywhere, or trim it. So a text gets a mark at its end, and the prompt that is rendered
with all marks has to be the same but for these. Otherwise the results of tools get none, which some templates write as
JSON, and if that does not help, no part is found.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh64_intdigest

from atom.errors import RequestError
from atom.runtime.kv.prefix_cache import count_common
from atom.runtime.types import PrefixHit, RetainedPrefix
from atom.sampling_params import RETENTION
from atom.serve.chat_template import Conversation, shown_tokens
from atom.serve.context import Context

MARK = re.compile("\ufdd2(\\d+)\ufdd3")  # noncharacters of Unicode occur in no text
TTL = {"5m": 300.0, "1h": 3600.0}  # seconds
TOOLS = "tools"  # the part that ends where the first turn begins: what is left of the system prompt, and the tools
END = "prompt"  # the whole prompt, as a part
MAX_BREAKPOINTS = 8  # of a request, that are looked up: the first ones and the last
MAX_COUNTS = 4096  # beginnings of prompts whose number of tokens is remembered


class Part(NamedTuple):
    name: str  # as a path of the body: system.0, messages.3.content.1
    end: int  # characters of the prompt up to its end


class Located(NamedTuple):
    """What is known of the parts of a prompt."""

    parts: Sequence[Part] = ()
    retained: tuple[RetainedPrefix, ...] = ()  # by cache_control


NOWHERE = Located()


class Marker:
    """Puts a mark at the end of each text, or at its start."""

    def __init__(self, *, marks_results: bool = True) -> None:
        """marks_results: also in the results of tools"""
        self.names: list[str] = []
        self.marks_results = marks_results

    def mark(self, text: str, name: str, *, is_result: bool = False) -> str:
        """The text with a mark before the white space at its end; unchanged if it has nothing else."""
        end = len(text.rstrip())
        if not end or (is_result and not self.marks_results):
            return text
        return text[:end] + self._make(name) + text[end:]

    def mark_start(self, text: str, name: str) -> str:
        """The text with a mark after the white space at its start."""
        start = len(text) - len(text.lstrip())
        return text if start == len(text) else text[:start] + self._make(name) + text[start:]

    def _make(self, name: str) -> str:
        self.names.append(name)
        return f"\ufdd2{len(self.names) - 1}\ufdd3"


def find_parts(render: Callable[[Marker], str], text: str) -> list[Part]:
    """The parts of a prompt in its order; none if they cannot be found.

    render: renders the prompt with marks
    text: of the prompt without them
    """
    for marker in (Marker(), Marker(marks_results=False)):
        try:
            marked = render(marker)
        except RequestError:  # of a template that looks at the texts
            continue
        found, place, length = list[Part](), 0, 0
        for match in MARK.finditer(marked):
            length += match.start() - place
            place = match.end()
            found.append(Part(marker.names[int(match[1])], length))
        if MARK.sub("", marked) == text:
            return found
    return []


def ttl_of(control: Any) -> float | None:
    """The seconds of a cache_control, an object or a model; None if there is none, or none of Anthropic's forms."""
    if control is None:
        return None
    if not isinstance(control, Mapping):
        control = {"type": control.type, "ttl": control.ttl}
    ttl = control.get("ttl") or "5m"
    return TTL.get(ttl) if control.get("type") == "ephemeral" and isinstance(ttl, str) else None


def retained_parts(
    context: Context, conversation: Conversation, parts: Sequence[Part], breakpoints: Mapping[str, float]
) -> tuple[RetainedPrefix, ...]:
    """The beginnings of a prompt that are kept from eviction. A part that was not found counts up to the one before it.

    breakpoints: names of parts -> seconds, in their order
    """
    if not breakpoints:
        return ()
    ends = {part.name: part.end for part in parts} | {END: len(conversation.text)}
    names = list(breakpoints)
    found, end = list[RetainedPrefix](), 0
    for name in names[: MAX_BREAKPOINTS - 1] + names[MAX_BREAKPOINTS - 1 :][-1:]:
        end = max(ends.get(name, end), end)
        if num_tokens := count_tokens(context, conversation, end) if end else 0:
            found.append(RetainedPrefix(num_tokens, breakpoints[name], RETENTION["priority"].default))
    return tuple(found)


def retained_whole(conversation: Conversation, breakpoints: Mapping[str, float]) -> tuple[RetainedPrefix, ...]:
    """The whole prompt, kept as long as the longest of its breakpoints; of a prompt with images no part is found."""
    if not breakpoints:
        return ()
    return (RetainedPrefix(len(conversation.tokens), max(breakpoints.values()), RETENTION["priority"].default),)


def count_tokens(context: Context, conversation: Conversation, end: int) -> int:
    """The number of a prompt's tokens up to a character; that of its beginning is remembered, since it comes again."""
    text, tokens = conversation.text, conversation.tokens
    encode = context.need_tokenizer().encode
    if len(text) - end < end // 4:  # few characters are left
        rest = encode(text[end:], add_special_tokens=False)
        return len(tokens) - count_common(tokens[::-1], rest[::-1])
    known, key = context.token_counts, xxh64_intdigest(text[:end].encode())
    if key not in known:
        if len(known) >= MAX_COUNTS:
            known.clear()
        known[key] = count_common(tokens, encode(text[:end], add_special_tokens=False))
    return min(known[key], len(tokens))


def name_of(parts: Sequence[Part], place: int) -> str | None:
    """The name of the part that has the character at a place; None past the last one."""
    at = bisect_right(parts, place, key=lambda part: part.end)
    return parts[at].name if at < len(parts) else None


def describe_hit(
    context: Context, hit: PrefixHit, tokens: Sequence[int], parts: Sequence[Part], engine: int, *, shows_earlier: bool
) -> dict[str, Any]:
    """An explanation of a hit as a response has it.

    tokens: of the prompt
    shows_earlier: with the token of the earlier prompt, which was the same client's
    engine: its number
    """
    decode = context.tokenizer.decode if context.tokenizer is not None else None
    found: dict[str, Any] = {"cached_tokens": hit.num_tokens, "reason": hit.reason, "index": hit.index}
    tokens = shown_tokens(context, list(tokens[: hit.index + 1]))
    if decode is not None and parts and hit.index < len(tokens):
        found["part"] = name_of(parts, len(decode(tokens[: hit.index], skip_special_tokens=False)))
    for name, token in (("token", hit.token), ("earlier_token", hit.earlier if shows_earlier else None)):
        if token is not None:
            found[name] = {"id": token} | ({"text": decode([token], skip_special_tokens=False)} if decode else {})
    if hit.seconds is not None:
        found["evicted_at"] = round(time.time() - hit.seconds, 3)
    return found | {"engine": engine}
