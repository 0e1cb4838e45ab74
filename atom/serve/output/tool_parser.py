"""Parse the tool calls of an answer while it is generated.

    reader = CallReader(FORMATS["tagged_json"], {"f"}, new_id)
    content, deltas = reader.push('Sure.\\n<tool_call>{"name": "f", "arguments": {"a": ')
    content, deltas         # "Sure.", [ToolDelta(index=0, id="call_1", name="f", arguments='{"a": ')]
    content, deltas = reader.push("1}}</tool_call>")
    content, deltas         # "", [ToolDelta(index=0, id=None, name=None, arguments="1}")]

A call counts once it is complete. Where the text breaks off or cannot be a call, all of it is content, so that content
is the same whether arguments were streamed before that or not; the streamed part stays a call that never ends and is
not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from atom.serve.output.incremental_json import expect, read_items, read_json, read_json_string, read_python
from atom.serve.output.incremental_text import NEWLINES, SPACE, Arriving, Reading, Unreadable

BETWEEN = re.compile(r"[ \t\r\n;]*")  # between the calls of one answer
NAME = re.compile(r"[\w.-]*")  # of a function, written as a call
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}  # of a call


class ToolFormat(NamedTuple):
    """The format of a model's calls: an object {"name": …, "arguments" or "parameters": {…}} or a list of these."""

    opener: str  # the text before them
    closer: str = ""  # and behind them
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
    arguments: str  # the next piece of a JSON text


@dataclass
class Call:
    """The call that is being read."""

    name: str | None = None
    arguments: str | None = None  # JSON, once it is complete
    sent: int | None = None  # how far in the text the arguments were sent; None: they are not streamed


class CallReader:
    """Splits a text into content and calls."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Collection[str] | None,
        new_id: Callable[[], str],
        *,
        named: str | None = None,
        is_streamed: bool = True,
    ) -> None:
        """tools: names of functions, None: any. named: the whole text is the arguments of this function."""
        assert (tool_format is None) != (named is None), "a text has a format or is the arguments of one function"
        self.num_calls = 0  # complete ones
        self._format = tool_format
        self._tools = tools
        self._new_id = new_id
        self._is_streamed = is_streamed
        self._text = Arriving()
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self._num_begun = 0
        self._call = Call()
        self._reading = self._read_named(named) if named is not None else self._read()

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Take text; the new content and calls."""
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
        text, form = self._text, self._format
        assert form is not None, "it has no name"
        yield from text.skip(SPACE)
        is_call = yield from text.starts_with(form.opener)
        if is_call:
            text.at += len(form.opener)
        elif form.is_bare:
            is_call = (yield from text.peek()) in ("{", "[")
        while True:
            if is_call:
                yield from self._read_block(form)
            text.at = 0
            is_call = yield from text.give_until(form.opener, self._content)
            if not is_call:
                return

    def _read_block(self, form: ToolFormat) -> Reading[None]:
        """Read calls between an opener and a closer. The text before them is content if there are none."""
        text = self._text
        try:
            yield from text.skip(SPACE)
            is_call = True
            while is_call:
                yield from self._read_calls(form)
                yield from text.skip(BETWEEN if form.is_pythonic else SPACE)
                is_call = form.is_pythonic and (yield from text.peek()) in ("{", "[")
        except Unreadable:
            self._give_up()
            return
        if form.closer and (yield from text.starts_with(form.closer)):
            text.at += len(form.closer)
            yield from text.skip(NEWLINES)
        text.take(text.at)

    def _read_calls(self, form: ToolFormat) -> Reading[None]:
        """Read one call, or a list of calls."""
        text, num_calls = self._text, self.num_calls
        if (yield from text.peek()) != "[":
            return (yield from self._read_object())
        yield from read_items(text, "]", lambda: self._read_item(form))
        if self.num_calls == num_calls:
            raise Unreadable
        text.take(text.at)

    def _read_item(self, form: ToolFormat) -> Reading[None]:
        is_object = not form.is_pythonic or (yield from self._text.peek()) == "{"
        yield from self._read_object() if is_object else self._read_python()

    def _read_object(self) -> Reading[None]:
        text, call, seen = self._text, self._call, set[str]()

        def read_member() -> Reading[None]:
            key = KEYS.get((yield from read_json_string(text)))
            if key is None or key in seen:
                raise Unreadable
            seen.add(key)
            yield from expect(text, ":")
            if key == "name":
                call.name = self._known((yield from read_json_string(text)))
            elif key == "arguments":
                yield from self._read_arguments()
            else:
                yield from read_json(text)

        if (yield from text.peek()) != "{":
            raise Unreadable
        yield from read_items(text, "}", read_member)
        if call.name is None or call.arguments is None:
            raise Unreadable
        self._complete()

    def _read_arguments(self) -> Reading[None]:
        """Read an object, and send it while it is read where the name is known and arguments are streamed."""
        text, call, start = self._text, self._call, self._text.at
        if (yield from text.peek()) != "{":
            raise Unreadable
        if self._is_streamed and call.name is not None:
            self._begin("")
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
                raise Unreadable
            yield from expect(text, "=")
            arguments[name] = yield from read_python(text)

        name = yield from text.read(NAME)
        if (yield from text.peek()) != "(":
            raise Unreadable
        call.name = self._known(name)
        yield from read_items(text, ")", read_argument, may_trail=True)
        call.arguments = sayable(json.dumps(arguments, ensure_ascii=False))
        self._complete()

    def _read_named(self, name: str) -> Reading[None]:
        text, call = self._text, self._call
        call.name = name
        try:
            yield from text.skip(SPACE)
            yield from self._read_arguments()
            self._complete()
            yield from text.skip(SPACE)
            text.take(text.at)
        except Unreadable:
            self._give_up()
        while not text.is_ended:
            self._content.append(text.take(len(text.text)))
            yield
        self._content.append(text.take(len(text.text)))

    def _known(self, name: str) -> str:
        if not name or (self._tools is not None and name not in self._tools):
            raise Unreadable
        return sayable(name)

    def _begin(self, arguments: str) -> None:
        """Send the id and the name of a call, with these arguments."""
        self._deltas.append(ToolDelta(self._num_begun, self._new_id(), self._call.name, arguments))
        self._num_begun += 1

    def _send(self) -> None:
        """Send the new part of the streamed arguments."""
        if self._call.sent is None or self._call.arguments is not None:
            return
        piece = self._text.text[self._call.sent : self._text.at]
        self._call.sent = self._text.at
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.index == self._num_begun - 1:
            self._deltas[-1] = last._replace(arguments=last.arguments + piece)
        elif piece:
            self._deltas.append(ToolDelta(self._num_begun - 1, None, None, piece))

    def _complete(self) -> None:
        """Count the call, which is complete: its text is not content."""
        if self._call.sent is None:
            assert self._call.arguments is not None, "a whole call has arguments"
            self._begin(self._call.arguments)
        self._call = Call()
        self.num_calls += 1
        self._text.take(self._text.at)

    def _give_up(self) -> None:
        """Give up the call: the text since the last complete call is content."""
        self._send()
        self._call = Call()
        self._content.append(self._text.take(self._text.at))


def sayable(text: str) -> str:
    """The text, if it can be sent: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unreadable from error
    return text
