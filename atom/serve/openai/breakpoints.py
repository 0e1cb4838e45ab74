"""Find the parts of a chat that have cache_control; mark all texts.

breakpoints_of(body)                 # {"messages.0.content.1": 300.0}: seconds
mark_texts(body.messages, marker)    # for `find_parts`

Clients of several providers send cache_control in a part of a content, in a message or in a tool. That of a tool, or of
the last system message in front, reaches to the end of system prompt and tools, which a template renders next to each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from atom.serve.openai.schema import ChatMessage, ChatRequest, TextPart, Tool
from atom.serve.prompt_parts import TOOLS, Marker, ttl_of

SYSTEM = ("system", "developer")


def breakpoints_of(body: ChatRequest) -> dict[str, float]:
    """The parts up to which the prompt is kept from eviction, in their order, and for how many seconds."""
    found: dict[str, float] = {}
    for name, control in controls_of(body):
        if (seconds := ttl_of(control)) is not None:
            found[name] = max(seconds, found.get(name, 0.0))
    return found


def controls_of(body: ChatRequest) -> Iterator[tuple[str, object]]:
    """The names of parts, and their cache_control."""
    messages = body.messages or body.prompt or []
    num_system = len(list(takewhile(lambda each: each.role in SYSTEM, messages)))
    for number, message in enumerate(messages):
        last = None
        if not isinstance(message.content, str):
            for at, part in enumerate(message.content or ()):
                last = getattr(part, "cache_control", None)
                yield f"messages.{number}.content.{at}", last
        yield end_of(message, number), message.cache_control
        if body.tools and number == num_system - 1:
            yield TOOLS, message.cache_control or last
        if number == max(num_system - 1, 0):
            for tool in body.tools or ():
                yield TOOLS, tool.cache_control if isinstance(tool, Tool) else None


def end_of(message: ChatMessage, number: int) -> str:
    """The name of the last part of a message."""
    content = message.content
    return f"messages.{number}" + (f".content.{len(content) - 1}" if content and not isinstance(content, str) else "")


def mark_texts(messages: Sequence[ChatMessage], marker: Marker) -> list[ChatMessage]:
    """The messages with a mark at the end of each text, and one where the first turn after the system prompt begins."""
    marked, is_first = list[ChatMessage](), True
    for number, message in enumerate(messages):
        begins = is_first and message.role not in SYSTEM
        marked.append(_mark_message(message, f"messages.{number}", marker, is_first=begins))
        is_first &= not begins
    return marked


def _mark_message(message: ChatMessage, name: str, marker: Marker, *, is_first: bool) -> ChatMessage:
    content, is_result = message.content, message.role == "tool"

    def mark(text: str, name: str, *, is_first: bool) -> str:
        marked = marker.mark(text, name, is_result=is_result)
        return marker.mark_start(marked, TOOLS) if is_first else marked

    if isinstance(content, str):
        return message.model_copy(update={"content": mark(content, name, is_first=is_first)})
    parts = [
        part.model_copy(update={"text": mark(part.text, f"{name}.content.{at}", is_first=is_first and not at)})
        if isinstance(part, TextPart)
        else part
        for at, part in enumerate(content or ())
    ]
    return message.model_copy(update={"content": parts}) if content else message
