"""Parse the tool calls of an answer while it is generated.

    reader = CallReader(FORMATS["tagged_json"], {"f"})
    content, deltas = reader.push('Sure.\\n<tool_call>{"name": "f", "arguments": {"a": ')
    content, deltas         # "Sure.", [ToolDelta(index=0, id="call_1", name="f", arguments='{"a": ')]
    content, deltas = reader.push("1}}</tool_call>")
    content, deltas         # "", [ToolDelta(index=0, id=None, name=None, arguments="1}")]

A call counts once it is complete. If its text breaks off or is no valid call, all of that text is content, so that the
content is the same with and without streamed arguments. What was streamed stays an incomplete call, which is not
counted.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from atom.serve.output.incremental_json import expect, read_items, read_json, read_json_string, read_python
from atom.serve.output.incremental_text import NEWLINES, SPACE, ParseError, Reading, TextBuffer

BETWEEN = re.compile(r"[ \t\r\n;]*")  # between the calls of one answer
NAME = re.compile(r"[\w.-]*")  # of a function, written as a call
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}  # of a call


class ToolFormat(NamedTuple):
    """The format of a model's calls: an object {"name": …, "arguments" or "parameters": {…}} or a list of these."""

    opener: str  # the text before the calls
    closer: str = ""  # the text after them
    is_bare: bool = False  # an answer may begin with a call, without the opener
    is_pythonic: bool = False  # a list may hold [f(a=1)], and further objects and lists may follow


FORMATS = {
    "json": ToolFormat("[TOOL_CALLS]", is_bare=True),
    "tagged_json": ToolFormat("<tool_call>", "</tool_call>"),
    "python_tag": ToolFormat("<|python_tag|>", is_bare=True, is_pythonic=True),
}


class ToolDelta(NamedTuple):
    """The new part of one call."""

    index: int  # type: ignore[assignment]  # of the call; a tuple has a method of that name
    id: str | None  # of the first delta of a call only
    name: str | None  # likewise
    arguments: str  # the next piece of their JSON text


@dataclass
class Call:
    """The call that is being read."""

    name: str | None = None
    arguments: str | None = None  # JSON, once it is complete
    sent: int | None = None  # arguments are sent up to this index of the text; None: they are not streamed


def new_call_id() -> str:
    """call_ and 24 hexadecimal digits that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"


class CallReader:
    """Splits a text into content and calls."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Collection[str] | None,
        new_id: Callable[[], str] = new_call_id,
        *,
        named: str | None = None,
        is_streamed: bool = True,
    ) -> None:
        """
        tools: the functions that can be called; a call of any other is content. None: any function
        named: the whole text is the arguments of this function; it has no format
        is_streamed: arguments are returned while they arrive; else only complete calls are, and one that breaks off is
            content
        """
        assert (tool_format is None) != (named is None), "a text has a format or is the arguments of one function"
        self.num_calls = 0  # complete ones
        self._format = tool_format
        self._tools = tools
        self._new_id = new_id
        self._is_streamed = is_streamed
        self._text = TextBuffer()
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self._num_started = 0
        self._call = Call()
        self._reading = self._read_named(named) if named is not None else self._read()

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Parse the next text; the new content and calls."""
        assert not (text and self._text.is_ended), "text came after the end"
        self._text.push(text)
        next(self._reading, None)
        self._send()
        content, deltas = "".join(self._content), self._deltas
        self._content.clear()
        self._deltas = []
        return content, deltas

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """End the text; the rest of it."""
        self._text.is_ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        text, tool_format = self._text, self._format
        assert tool_format is not None, "no function is forced"
        yield from text.skip(SPACE)
        is_call = yield from text.starts_with(tool_format.opener)
        if is_call:
            text.at += len(tool_format.opener)
        elif tool_format.is_bare:
            is_call = (yield from text.peek()) in ("{", "[")
        while True:
            if is_call:
                yield from self._read_block(tool_format)
            text.at = 0
            is_call = yield from text.move_until(tool_format.opener, self._content)
            if not is_call:
                return

    def _read_block(self, tool_format: ToolFormat) -> Reading[None]:
        """Read calls between an opener and a closer. The text before them is content if there are none."""
        text = self._text
        try:
            yield from text.skip(SPACE)
            is_call = True
            while is_call:
                yield from self._read_calls(tool_format)
                yield from text.skip(BETWEEN if tool_format.is_pythonic else SPACE)
                is_call = tool_format.is_pythonic and (yield from text.peek()) in ("{", "[")
        except ParseError:
            self._move_to_content()
            return
        if tool_format.closer and (yield from text.starts_with(tool_format.closer)):
            text.at += len(tool_format.closer)
            yield from text.skip(NEWLINES)
        text.take(text.at)

    def _read_calls(self, tool_format: ToolFormat) -> Reading[None]:
        """Read one call, or a list of calls."""
        text, num_calls = self._text, self.num_calls
        if (yield from text.peek()) != "[":
            return (yield from self._read_object())
        yield from read_items(text, "]", lambda: self._read_item(tool_format))
        if self.num_calls == num_calls:
            raise ParseError
        text.take(text.at)

    def _read_item(self, tool_format: ToolFormat) -> Reading[None]:
        is_object = not tool_format.is_pythonic or (yield from self._text.peek()) == "{"
        yield from self._read_object() if is_object else self._read_python()

    def _read_object(self) -> Reading[None]:
        text, call, seen = self._text, self._call, set[str]()

        def read_member() -> Reading[None]:
            key = KEYS.get((yield from read_json_string(text)))
            if key is None or key in seen:
                raise ParseError
            seen.add(key)
            yield from expect(text, ":")
            if key == "name":
                call.name = self._check_name((yield from read_json_string(text)))
            elif key == "arguments":
                yield from self._read_arguments()
            else:
                yield from read_json(text)

        if (yield from text.peek()) != "{":
            raise ParseError
        yield from read_items(text, "}", read_member)
        if call.name is None or call.arguments is None:
            raise ParseError
        self._end_call()

    def _read_arguments(self) -> Reading[None]:
        """Read an object. Where arguments are streamed and the name is known, send it while it arrives."""
        text, call, start = self._text, self._call, self._text.at
        if (yield from text.peek()) != "{":
            raise ParseError
        if self._is_streamed and call.name is not None:
            self._start_call("")
            call.sent = start
        yield from read_json(text)
        self._send()
        call.arguments = text.text[start : text.at]

    def _read_python(self) -> Reading[None]:
        """Read a call with literals as named arguments: f(a=1, b="x")."""
        text, call = self._text, self._call
        arguments: dict[str, object] = {}

        def read_argument() -> Reading[None]:
            name = yield from text.read(NAME)
            if not name.isidentifier() or name in arguments:
                raise ParseError
            yield from expect(text, "=")
            arguments[name] = yield from read_python(text)

        name = yield from text.read(NAME)
        if (yield from text.peek()) != "(":
            raise ParseError
        call.name = self._check_name(name)
        yield from read_items(text, ")", read_argument, may_trail=True)
        call.arguments = check_unicode(json.dumps(arguments, ensure_ascii=False))
        self._end_call()

    def _read_named(self, name: str) -> Reading[None]:
        text, call = self._text, self._call
        call.name = name
        try:
            yield from text.skip(SPACE)
            yield from self._read_arguments()
            self._end_call()
            yield from text.skip(SPACE)
            text.take(text.at)
        except ParseError:
            self._move_to_content()
        while not text.is_ended:
            self._content.append(text.take(len(text.text)))
            yield
        self._content.append(text.take(len(text.text)))

    def _check_name(self, name: str) -> str:
        if not name or (self._tools is not None and name not in self._tools):
            raise ParseError
        return check_unicode(name)

    def _start_call(self, arguments: str) -> None:
        """Send the id and the name of a call, with these arguments."""
        self._deltas.append(ToolDelta(self._num_started, self._new_id(), self._call.name, arguments))
        self._num_started += 1

    def _send(self) -> None:
        """Send the new part of the streamed arguments."""
        if self._call.sent is None or self._call.arguments is not None:
            return
        piece = self._text.text[self._call.sent : self._text.at]
        self._call.sent = self._text.at
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.index == self._num_started - 1:
            self._deltas[-1] = last._replace(arguments=last.arguments + piece)
        elif piece:
            self._deltas.append(ToolDelta(self._num_started - 1, None, None, piece))

    def _end_call(self) -> None:
        """Count the complete call, and drop its text."""
        if self._call.sent is None:
            assert self._call.arguments is not None, "a whole call has arguments"
            self._start_call(self._call.arguments)
        self._call = Call()
        self.num_calls += 1
        self._text.take(self._text.at)

    def _move_to_content(self) -> None:
        """Give up the call: the text since the last complete call is content."""
        self._send()
        self._call = Call()
        self._content.append(self._text.take(self._text.at))


def check_unicode(text: str) -> str:
    """The text. ParseError where it has half of a surrogate pair, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParseError from error
    return text
