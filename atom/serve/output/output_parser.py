"""Split an answer into reasoning, content and tool calls while it streams.

    tags = ("<think>", "</think>")
    splitter = ReasoningSplitter(tags, is_inside=is_opened(prompt, tags))
    parser = OutputParser(splitter, CallReader(read_format("tagged_json"), names))
    for text in answer:
        delta = parser.push(text)          # Delta(content="", reasoning="Let me", tools=[])
    delta = parser.finish()                # what was held back
    parser.has_whole_calls                 # True: the answer ends with tool_calls

    gather([parser.push(text), parser.finish()])     # the same for an answer that is not streamed

Each sequence has its own parser. The deltas add up to the same answer however the text is split. A `tool_choice` that
forces calls constrains the answer to `tool_schema(tools, choice, tool_format)`; such an answer is parsed as "json" for
"required", and with `named=` for one function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atom.config.tool_formats import MARKER, ToolFormat
from atom.runtime.requests.detokenizer import MARK
from atom.serve.output.call_deltas import ToolDelta
from atom.serve.output.channel_parser import ChannelSplitter
from atom.serve.output.incremental_text import Span, add_span
from atom.serve.output.reasoning_parser import ReasoningSplitter, is_opened
from atom.serve.output.tool_parser import CallReader
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
    "tool_names",
    "tool_schema",
]


class Delta(NamedTuple):
    """The new part of an answer."""

    content: str
    reasoning: str
    tools: list[ToolDelta]
    places: tuple[Span, ...] = ()  # where the content was in the text that was pushed, in order

    def join(self, other: Delta) -> Delta:
        """This part and the next one as one."""
        content, reasoning = self.content + other.content, self.reasoning + other.reasoning
        return Delta(content, reasoning, self.tools + other.tools, self.places + other.places)


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON text of an object, or the beginning of one
    id: str
    is_whole: bool = True


class Answer(NamedTuple):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    has_whole_calls: bool = False  # there are calls, and all of them are whole


def markers(tool_format: ToolFormat | None, reasoning: tuple[str, str] | None) -> list[str]:
    """The markers that the parser needs in the text, though they may be special tokens."""
    found = (marker for text in reasoning or () for marker in (text, *MARKER.findall(text)))
    return list(dict.fromkeys([*(tool_format.markers if tool_format else ()), *found]))


class OutputParser:
    """Parses one answer. It holds back only text that may begin a marker or a call."""

    def __init__(
        self,
        splitter: ReasoningSplitter | ChannelSplitter | None,
        reader: CallReader | None,
        *,
        is_marked: bool = False,
        is_parallel: bool = True,
    ) -> None:
        """
        splitter: None if reasoning is not parsed
        reader: None if calls are not
        is_marked: the text has a MARK before some special tokens, which is left out of the answer
        is_parallel: the answer may have several calls; else those after the first are left out
        """
        self._splitter, self._reader = splitter, reader
        self._is_marked, self._is_parallel = is_marked, is_parallel
        self._num_pushed = 0  # characters
        self._read: list[Span] = []  # where the reader's text was in the text

    @property
    def whole(self) -> list[bool]:
        """For each call so far, whether it is whole."""
        whole = self._reader.whole if self._reader else []
        return whole if self._is_parallel else whole[:1]

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls so far, all of them whole: no client must act on one that was cut off."""
        return bool(self.whole) and all(self.whole)

    def push(self, text: str) -> Delta:
        """Parse the next text; the new part of the answer."""
        reasoning, places = "", [(self._num_pushed, self._num_pushed + len(text))] if text else []
        self._num_pushed += len(text)
        if self._splitter:
            reasoning, text = self._splitter.push(text)
            places = self._splitter.take_places()
        return self._parse(text, places, reasoning)

    def finish(self) -> Delta:
        """End the text; the rest of the answer."""
        reasoning, content = self._splitter.finish() if self._splitter else ("", "")
        delta = self._parse(content, self._splitter.take_places() if self._splitter else [], reasoning)
        if not self._reader:
            return delta
        content, tools = self._reader.finish()
        places = locate(self._reader.take_places(), self._read)
        return delta.join(self._delta(content, self._reader.take_reasoning(), tools, places))

    def _parse(self, content: str, places: list[Span], reasoning: str) -> Delta:
        """Read the calls in new content, which was at these places."""
        tools: list[ToolDelta] = []
        if self._reader and content:
            for place in places:
                add_span(self._read, place)
            content, tools = self._reader.push(content)
            reasoning += self._reader.take_reasoning()
            places = locate(self._reader.take_places(), self._read)
        return self._delta(content, reasoning, tools, places)

    def _delta(self, content: str, reasoning: str, tools: list[ToolDelta], places: list[Span]) -> Delta:
        """Without marks, and without calls that are one too many."""
        if not self._is_parallel:
            tools = [tool for tool in tools if not tool.index]
        if not self._is_marked:
            return Delta(content, reasoning, tools, tuple(places))
        tools = [tool._replace(arguments=tool.arguments.replace(MARK, "")) for tool in tools]
        return Delta(content.replace(MARK, ""), reasoning.replace(MARK, ""), tools, tuple(places))


def locate(places: Iterable[Span], parts: Iterable[Span]) -> list[Span]:
    """The places of a text within another one, of which these parts, in order, are that text."""
    found: list[Span] = []
    for start, end in places:
        first = 0  # index of the part in the text that the parts are
        for part_start, part_end in parts:
            shift, last = part_start - first, first + part_end - part_start
            if (low := max(start, first)) < (high := min(end, last)):
                add_span(found, (low + shift, high + shift))
            first = last
    return found


def gather(deltas: Iterable[Delta]) -> Answer:
    """Add up deltas to an answer."""
    deltas = list(deltas)
    calls: dict[int, ToolCall] = {}
    for index, id, name, arguments in (tool for delta in deltas for tool in delta.tools):
        call = calls.get(index) or ToolCall(name or "", "", id or "")
        calls[index] = call._replace(arguments=call.arguments + arguments)
    content, reasoning = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    return Answer(content, reasoning, list(calls.values()))
