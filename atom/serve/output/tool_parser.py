"""Parse the tool calls of an answer while it is generated.

    reader = CallReader(read_format("tagged_json"), {"f": {"type": "object"}})
    content, deltas = reader.push('Sure.\\n<tool_call>{"name": "f", "arguments": {"a": ')
    content, deltas         # "Sure.", [ToolDelta(index=0, id="call_1", name="f", arguments='{"a": ')]
    content, deltas = reader.push("1}}</tool_call>")
    content, deltas         # "", [ToolDelta(index=0, id=None, name=None, arguments="1}")]

A call counts once it is complete. An answer that ends within the arguments of a call ends with an incomplete one, which
has the arguments so far and does not count; its text is not content too. Text that is no valid call is content, so that
the content is the same with and without streamed arguments; what was streamed of it stays an incomplete call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from atom.config.tool_formats import ToolFormat
from atom.serve.output.incremental_json import expect, read_items, read_json, read_json_string, read_python
from atom.serve.output.incremental_text import NEWLINES, SPACE, Excerpt, ParseError, Reading, Span, TextBuffer
from atom.serve.output.parameter_values import write_value
from atom.serve.output.tool_forms import Form, Piece, make_form

NAME = re.compile(r"[\w.-]*")  # of a function, written as a call in Python
WORD = re.compile("[^\\s<>|｜\"'=,;(){}\\[\\]\ufdd1]*")  # {name} or {id}
KEY = re.compile('[^<>"\\n\ufdd1]*')  # {key}
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}  # of a call


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
    id: str | None = None  # the model's own
    arguments: str | None = None  # JSON, once it is complete
    has_begun: bool = False  # its arguments have, so that it is of no other form
    sent: int | None = None  # its arguments are sent up to this index of the text; None: they are no part of the text


def new_call_id() -> str:
    """call_ and 24 hexadecimal digits that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"


class CallReader:
    """Splits a text into content and calls."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Mapping[str, Any] | Collection[str] | None,
        new_id: Callable[[], str] = new_call_id,
        *,
        named: str | None = None,
        is_forced: bool = False,
        is_streamed: bool = True,
    ) -> None:
        """
        tools: the functions that can be called, and the JSON schemas of their parameters, by which texts become
            values; a call of any other is content. None: any function
        named: the whole text is the arguments of this function; it has no format
        is_forced: the answer is constrained to calls, so that an unfinished one is no content, however little there is
        is_streamed: arguments are returned while they arrive; else once the call or the text ends
        """
        assert (tool_format is None) != (named is None), "a text has a format or is the arguments of one function"
        self.num_calls = 0  # complete ones
        self.num_started = 0  # complete or not
        self._format = tool_format
        self._tools = tools
        self._schemas = tools if isinstance(tools, Mapping) else {}
        self._new_id = new_id
        self._is_forced, self._is_streamed = is_forced, is_streamed
        self._text = TextBuffer()
        self._content, self._reasoning = Excerpt(), Excerpt()
        self._deltas: list[ToolDelta] = []
        self._call = Call()
        self._reading = self._read_named(named) if named is not None else self._read()

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Parse the next text; the new content and calls."""
        assert not (text and self._text.is_ended), "text came after the end"
        self._text.push(text)
        next(self._reading, None)
        self._send()
        content, deltas = self._content.take(), self._deltas
        self._deltas = [] if self._is_streamed or not self._call.has_begun else [deltas.pop()]
        return content, deltas

    def take_reasoning(self) -> str:
        """The new reasoning, where the format has channels for it."""
        return self._reasoning.take()

    def take_places(self) -> list[Span]:
        """Where the new content was in the text."""
        return self._content.take_places()

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """End the text; the rest of it."""
        self._text.is_ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        text, tool_format = self._text, self._format
        assert tool_format is not None, "no function is forced"
        form = make_form(tool_format)
        yield from text.skip(SPACE)
        opener = yield from text.starts_with_any(form.openers)
        is_call = opener is not None
        if opener is not None:
            text.at += 0 if form.openers[opener] else len(opener)
        elif tool_format.bare:
            is_call = (yield from text.peek()) in ("{", "[")
        while True:
            if is_call:
                yield from self._read_block(tool_format, form)
            text.at = 0
            if not form.openers:
                yield from self._read_content()
                return
            opener = yield from text.move_until(tuple(form.openers), self._content)
            if opener is None:
                return
            is_call = True
            if form.openers[opener]:
                text.at -= len(opener)

    def _read_content(self) -> Reading[None]:
        """Take the rest of the text as content."""
        while True:
            self._text.move(len(self._text.text), self._content)
            if self._text.is_ended:
                return
            yield

    def _read_block(self, tool_format: ToolFormat, form: Form) -> Reading[None]:
        """Read calls between an opener and what is behind them. The text is content where there are none."""
        text = self._text
        try:
            yield from text.skip(SPACE)
            is_call = True
            while is_call:
                yield from self._read_call(form)
                yield from text.skip(form.between)
                is_call = yield from self._is_call(tool_format, form)
        except ParseError:
            self._give_up_call()
            return
        if (end := (yield from text.starts_with_any(tool_format.end))) is not None:
            text.at += len(end)
            yield from text.skip(NEWLINES)
        text.take(text.at)

    def _is_call(self, tool_format: ToolFormat, form: Form) -> Reading[bool]:
        """Whether another call follows in a block."""
        firsts = [call[0].text for call in form.calls if call[0].kind == "text"]
        if firsts or not tool_format.separator:
            return (yield from self._text.starts_with_any(firsts)) is not None
        char = yield from self._text.peek()
        return char in ("{", "[") or bool(tool_format.end and char.isidentifier())

    def _read_call(self, form: Form) -> Reading[None]:
        """Read a call, or a list of calls, in the first form that it has."""
        text, num_calls = self._text, self.num_calls
        start = furthest = text.at
        for pieces in form.calls:
            try:
                return (yield from self._read_form(pieces, form))
            except ParseError:
                if self._call.has_begun or self.num_calls != num_calls:
                    raise
                furthest, text.at, self._call = max(furthest, text.at), start, Call()
        text.at = furthest
        raise ParseError

    def _read_form(self, pieces: list[Piece], form: Form) -> Reading[None]:
        text, call = self._text, self._call
        for index, piece in enumerate(pieces):
            match piece.kind:
                case "name":
                    call.name = self._check_name((yield from text.read(WORD)))
                case "id":
                    self._take_id((yield from text.read(WORD)), form)
                case "json" | "python":
                    return (yield from self._read_calls(is_python=piece.kind == "python"))
                case "arguments":
                    yield from text.skip(SPACE)
                    yield from self._read_arguments()
                    yield from self._read_tail(pieces[index + 1 :])
                    self._end_call()
                    return
                case "parameters":
                    yield from self._read_parameters(form)
                case _:
                    yield from self._read_piece(piece)
        self._end_call()

    def _read_piece(self, piece: Piece) -> Reading[None]:
        """Skip a text or a space of a form."""
        if piece.kind == "space":
            yield from self._text.skip(SPACE)
            return
        if not (yield from self._text.starts_with(piece.text)):
            raise ParseError
        self._text.at += len(piece.text)

    def _read_tail(self, pieces: list[Piece]) -> Reading[None]:
        """Skip what follows an object in a form. It may be missing, since the object shows where it ends."""
        end = self._text.at
        try:
            for piece in pieces:
                yield from self._read_piece(piece)
        except ParseError:
            self._text.at = end

    def _take_id(self, id: str, form: Form) -> None:
        """Take the model's id of a call, in which its name may be."""
        self._call.id = check_unicode(id) or None
        if form.ids:
            names = [match["name"] for each in form.ids if (match := each.fullmatch(id))]
            known = (name for name in names if self._tools is None or name in self._tools)
            self._call.name = self._check_name(next(known, ""))

    def _read_parameters(self, form: Form) -> Reading[None]:
        """Read parameters, each with a key and a value, as arguments."""
        text, call, parts = self._text, self._call, dict[str, str]()
        assert call.name is not None, "its name stands before its parameters"
        while True:
            yield from text.skip(SPACE)
            if not (yield from text.starts_with(form.parameter[0].text)):
                break
            self._begin_call()
            key = ""
            for piece in form.parameter:
                if piece.kind == "key":
                    key = (yield from text.read(KEY)).strip()
                elif piece.kind != "value":
                    yield from self._read_piece(piece)
                elif not key or key in parts:
                    raise ParseError
                else:
                    if piece.trims and (yield from text.starts_with("\n")):
                        text.at += 1
                    value = yield from text.read_until(piece.text)
                    value = value.removesuffix("\n") if piece.trims else value
                    parts[key] = write_value(value, self._schemas.get(call.name), key)
            member = check_unicode(f"{json.dumps(key, ensure_ascii=False)}: {parts[key]}")
            self._send_piece(f"{'{' if len(parts) == 1 else ', '}{member}")
            parts[key] = member
        call.arguments = "{" + ", ".join(parts.values()) + "}"

    def _read_calls(self, *, is_python: bool) -> Reading[None]:
        """Read one call, or a list of calls."""
        text, num_calls = self._text, self.num_calls
        if (yield from text.peek()) != "[":
            return (yield from self._read_item(is_python=is_python))
        yield from read_items(text, "]", lambda: self._read_item(is_python=is_python))
        if self.num_calls == num_calls:
            raise ParseError
        text.take(text.at)

    def _read_item(self, *, is_python: bool) -> Reading[None]:
        is_object = not is_python or (yield from self._text.peek()) == "{"
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
        """Read an object. Where the name is known, send it while it arrives."""
        text, call, start = self._text, self._call, self._text.at
        if (yield from text.peek()) != "{":
            raise ParseError
        if call.name is not None:
            self._begin_call()
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
            self._give_up_call()
        yield from self._read_content()

    def _check_name(self, name: str) -> str:
        if not name or (self._tools is not None and name not in self._tools):
            raise ParseError
        return check_unicode(name)

    def _begin_call(self) -> None:
        """Note that a call of this name has arguments, and send its id and name."""
        if not self._call.has_begun:
            self._start_call("")
        self._call.has_begun = True

    def _start_call(self, arguments: str) -> None:
        """Send the id and the name of a call, with these arguments."""
        self._deltas.append(ToolDelta(self.num_started, self._call.id or self._new_id(), self._call.name, arguments))
        self.num_started += 1

    def _send(self) -> None:
        """Send the new part of the arguments that are part of the text."""
        if self._call.sent is None or self._call.arguments is not None:
            return
        piece = self._text.text[self._call.sent : self._text.at]
        self._call.sent = self._text.at
        self._send_piece(piece)

    def _send_piece(self, piece: str) -> None:
        """Send the next piece of the arguments of the call that was started last."""
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.index == self.num_started - 1:
            self._deltas[-1] = last._replace(arguments=last.arguments + piece)
        elif piece:
            self._deltas.append(ToolDelta(self.num_started - 1, None, None, piece))

    def _end_call(self) -> None:
        """Count the complete call, and drop its text."""
        call = self._call
        assert call.arguments is not None, "a whole call has arguments"
        if not call.has_begun:
            self._start_call(call.arguments)
        elif call.sent is None:
            self._send_piece("}")
        self._call = Call()
        self.num_calls += 1
        self._text.take(self._text.at)

    def _give_up_call(self) -> None:
        """End the call that is being read as incomplete if the text has ended; else its text is content."""
        self._send()
        text, call, self._call = self._text, self._call, Call()
        if text.is_ended and (call.has_begun or self._is_forced):
            text.take(len(text.text))
            return
        if call.has_begun and not self._is_streamed:
            self._deltas.pop()
            self.num_started -= 1
        text.move(text.at, self._content)


def check_unicode(text: str) -> str:
    """The text. ParseError where it has half of a surrogate pair, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParseError from error
    return text
