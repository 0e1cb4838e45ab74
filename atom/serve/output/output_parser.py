"""Split an answer into reasoning, content and tool calls while it streams.

    tags = ("<think>", "</think>")
    parser = OutputParser("tagged_json", tags, is_in_reasoning=is_opened(prompt, tags), tools=names)
    for text in answer:
        delta = parser.push(text)          # Delta(content="", reasoning="Let me", tools=[])
    delta = parser.finish()                # what was held back
    parser.num_tool_calls                  # > 0: the answer ends with tool_calls

    gather([parser.push(text), parser.finish()])     # the same for an answer that is not streamed

Each sequence has its own parser. The deltas add up to the same answer however the text is split. A `tool_choice` that
forces calls constrains the answer to `tool_schema(tools, choice, tool_format)`; such an answer is parsed as "json" for
"required", and with `named=` for one function.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from atom.serve.output.reasoning_parser import ReasoningSplitter, is_opened
from atom.serve.output.tool_parser import FORMATS, CallReader, ToolDelta
from atom.serve.output.tool_schema import tool_names, tool_schema

__all__ = [
    "Answer",
    "Delta",
    "OutputParser",
    "ToolCall",
    "ToolDelta",
    "gather",
    "is_opened",
    "markers",
    "new_call_id",
    "tool_names",
    "tool_schema",
]


class Delta(NamedTuple):
    """The new part of an answer."""

    content: str
    reasoning: str
    tools: list[ToolDelta]


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON text of an object
    id: str


class Answer(NamedTuple):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def new_call_id() -> str:
    """call_ and 24 hexadecimal digits that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"


def markers(tool_format: str | None, reasoning: tuple[str, str] | None) -> list[str]:
    """The markers that the parser needs in the text, though they may be special tokens."""
    tags = FORMATS[tool_format][:2] if tool_format else ()
    return [text for text in (*tags, *(reasoning or ())) if text]


class OutputParser:
    """Parses one answer. It holds back only text that may begin a marker or a call."""

    def __init__(
        self,
        tool_format: str | None,
        reasoning: tuple[str, str] | None,
        *,
        is_in_reasoning: bool = False,
        tools: Collection[str] | None = None,
        named: str | None = None,
        is_streamed: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """
        tool_format: json, tagged_json or python_tag; None: calls are not parsed
        reasoning: the two markers; None: reasoning is not parsed
        is_in_reasoning: the prompt ends with the opening marker (`is_opened`)
        tools: the functions that can be called; a call of any other is content. None: any function
        named: the whole answer is the arguments of this function; the format is ignored
        is_streamed: arguments are returned while they arrive; else only complete calls are, and one that breaks off is
            content
        """
        self._splitter = ReasoningSplitter(reasoning, is_inside=is_in_reasoning) if reasoning else None
        self._reader: CallReader | None = None
        if tool_format is not None or named is not None:
            call_format = FORMATS[tool_format] if tool_format is not None and named is None else None
            self._reader = CallReader(call_format, tools, new_id, named=named, is_streamed=is_streamed)

    @property
    def num_tool_calls(self) -> int:
        """The number of complete calls."""
        return self._reader.num_calls if self._reader else 0

    def push(self, text: str) -> Delta:
        """Parse the next text; the new part of the answer."""
        reasoning, tools = "", list[ToolDelta]()
        if self._splitter:
            reasoning, text = self._splitter.push(text)
        if self._reader and text:
            text, tools = self._reader.push(text)
        return Delta(text, reasoning, tools)

    def finish(self) -> Delta:
        """End the text; the rest of the answer."""
        reasoning, content = self._splitter.finish() if self._splitter else ("", "")
        if not self._reader:
            return Delta(content, reasoning, [])
        content, tools = self._reader.push(content)
        rest, more = self._reader.finish()
        return Delta(content + rest, reasoning, tools + more)


def gather(deltas: Iterable[Delta]) -> Answer:
    """Add up deltas to an answer."""
    deltas = list(deltas)
    calls: dict[int, ToolCall] = {}
    for index, id, name, arguments in (tool for delta in deltas for tool in delta.tools):
        call = calls.get(index) or ToolCall(name or "", "", id or "")
        calls[index] = call._replace(arguments=call.arguments + arguments)
    content, reasoning = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    return Answer(content, reasoning, list(calls.values()))
