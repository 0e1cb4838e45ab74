"""Parse an answer that is several messages, each with a channel: OpenAI's harmony format.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

    reader = ChannelReader(read_format("harmony"), {"f": {}})
    content, deltas = reader.push(text)
    reader.take_reasoning()           # "Let me see."

A message to a function that nobody has, or whose body is no object, is content, with its header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from atom.config.tool_formats import ToolFormat
from atom.serve.output.call_deltas import new_call_id
from atom.serve.output.incremental_text import SPACE, Excerpt, ParseError, Reading, Span
from atom.serve.output.tool_parser import CallReader

RECIPIENT = re.compile(r"\bto=([^\s<\ufdd1]+)")
CHANNEL = re.compile(r"\s*([\w-]+)")
HEADER_SIZE = 512  # characters: a longer one is no header


class ChannelReader(CallReader):
    """Splits a text into reasoning, content and calls."""

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Mapping[str, Any],
        new_id: Callable[[], str] = new_call_id,
        *,
        prompt: str = "",
    ) -> None:
        """prompt: an answer may begin within a message that it has opened"""
        super().__init__(tool_format, tools, new_id)
        assert tool_format.channels is not None, "such a format has them"
        self._channels = tool_format.channels
        self._last: Excerpt | None = None  # where the last message went, if it was text
        opened = prompt[prompt.rfind(self._channels.start) :]
        if opened != prompt and opened.rstrip() != self._channels.prompt and self._channels.body in opened:
            self._text.num_taken = -len(opened)  # it is no part of the answer
            self.push(opened)
            self.take_reasoning()
            self.take_places()

    def _read(self) -> Reading[None]:
        text, marks = self._text, self._channels
        name = re.compile(re.escape(marks.recipient).replace(re.escape("{name}"), "(.+)"))
        while True:
            yield from text.skip(SPACE)
            if not (yield from text.peek()):
                text.at = 0
                if self._last is None:
                    text.move(len(text.text), self._content)
                return
            header = yield from self._read_header()
            if header is None:  # no message
                text.at = 0
                if (yield from text.move_until((marks.start, marks.channel), self._content)) is None:
                    return
                text.at = 0
                continue
            recipient = RECIPIENT.search(header)
            if recipient is not None:
                function = name.fullmatch(recipient[1])
                yield from self._read_message_call(function[1] if function else "")
                self._last = None
                out = self._content  # what follows a call, or is none
            else:
                channel = CHANNEL.match(header.partition(marks.channel)[2])
                out = self._reasoning if channel and channel[1] == marks.reasoning else self._content
                if self._last is out:
                    out.add("\n", -1)
                self._last = out
                text.take(text.at)
            if not (yield from self._read_body(out)):
                return

    def _read_header(self) -> Reading[str | None]:
        """Read up to the body's marker; None if no message begins here."""
        text, marks = self._text, self._channels
        start = text.at
        marker = yield from text.starts_with_any((marks.start, marks.channel, "to="))
        if marker is None:
            return None
        text.at = start + len(marker)
        while True:
            end, stop = text.find_any((marks.body, *marks.end, marks.start))
            if stop == marks.body and end - start <= HEADER_SIZE:
                text.at = end + len(stop)
                return text.text[start:end]
            if stop is not None or text.is_ended or end - start > HEADER_SIZE:
                text.move(start + len(marker), self._content)
                return None
            yield

    def _read_message_call(self, name: str) -> Reading[None]:
        """Read the arguments of a call after its header."""
        text, marks = self._text, self._channels
        try:
            self._call.name = self._check_name(name)
            yield from text.skip(SPACE)
            yield from self._read_arguments(marks.end)
            self._end_call()
            yield from text.skip(SPACE)
            if not (yield from text.peek()) or (yield from text.starts_with_any((*marks.end, marks.start))):
                text.take(text.at)
            text.at = 0
        except ParseError:
            self._give_up_call()

    def _read_body(self, out: Excerpt) -> Reading[bool]:
        """Read a message's text up to its end; whether another message may follow."""
        text, marks = self._text, self._channels
        marker = yield from text.move_until((*marks.end, marks.start), out)
        if marker is None:
            return False
        if marker == marks.start:
            text.at -= len(marker)
        text.take(text.at)
        return True


class ChannelSplitter:
    """Splits a text into reasoning and content; in place of a ReasoningSplitter."""

    def __init__(self, reader: ChannelReader) -> None:
        self._reader = reader

    def push(self, text: str) -> tuple[str, str]:
        content, _ = self._reader.push(text)
        return self._reader.take_reasoning(), content

    def finish(self) -> tuple[str, str]:
        content, _ = self._reader.finish()
        return self._reader.take_reasoning(), content

    def take_places(self) -> list[Span]:
        """Where the new content was in the text."""
        return self._reader.take_places()
