"""Parse the tool calls of an answer while it is generated.

    reader = CallReader(read_format("tagged_json"), {"f": {"type": "object"}})
    content, deltas = reader.push('Sure.\\n<tool_call>{"name": "f", "arguments": {"a": ')
    content, deltas         # "Sure.", [ToolDelta(index=0, id="call_1", name="f", arguments='{"a": ')]
    content, deltas = reader.push("1}}</tool_call>")
    content, deltas         # "", [ToolDelta(index=0, id=None, name=None, arguments="1}")]

A call begins once its name and the start of its arguments have been read: from then on it stays a call, since it was
sent. It is complete once its arguments are, even if closing markers are missing. If the arguments break off, at the end
of the text or at an invalid character, the call stays incomplete, with the arguments so far, and what follows is
content again. Text that has not begun a call is content to the last character.

An answer that is not streamed is read by the same reader, in large pieces: the two cannot differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from atom.config.tool_formats import ToolFormat
from atom.serve.output.call_deltas import CallDeltas, ToolDelta, new_call_id
from atom.serve.output.element_reader import ElementReader
from atom.serve.output.field_reader import FieldReader
from atom.serve.output.incremental_json import (
    JSON_DIGITS,
    expect,
    json_text,
    read_items,
    read_json,
    read_json_string,
    read_python,
    skip_char,
    validate_json,
)
from atom.serve.output.incremental_text import (
    NEWLINES,
    SPACE,
    Excerpt,
    ParseError,
    Reading,
    Span,
    TextBuffer,
    check_unicode,
)
from atom.serve.output.parameter_reader import ParameterReader
from atom.serve.output.parameter_values import ValueWriter, write_value
from atom.serve.output.tool_forms import Form, Piece, make_form, read_pieces

CHUNK = 4096  # characters that are read at once: each marker is searched in all of them again and again
NAME = re.compile(r"[\w.-]*")  # of a function, written as a call in Python
WORD = re.compile("[^\\s<>|｜\"'=,;(){}\\[\\]\ufdd1]*")  # {name} or {id}
KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}  # of a call


@dataclass
class Call:
    """The call that is being read."""

    name: str | None = None
    id: str | None = None  # the model's own
    arguments: str | None = None  # what is not sent of their JSON, once it is complete
    has_begun: bool = False  # its name was sent, so that it is of no other form
    is_arriving: bool = False  # its arguments are, and are sent as they are read


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
    ) -> None:
        """
        tools: the functions that can be called, and the JSON schemas of their parameters, by which texts become
            values; a call of any other is content. None: any function
        named: the whole text is the arguments of this function; it has no format
        is_forced: the answer is constrained to calls, so that an unfinished one is no content, however little there is
        """
        assert (tool_format is None) != (named is None), "a text has a format or is the arguments of one function"
        self._format = tool_format
        self._tools = tools
        self._schemas = tools if isinstance(tools, Mapping) else {}
        self._is_forced = is_forced
        self._text = TextBuffer()
        self._content, self._reasoning = Excerpt(), Excerpt()
        self._deltas = CallDeltas(new_id)
        self._call = Call()
        self._reading = self._read_named(named) if named is not None else self._read()

    @property
    def whole(self) -> list[bool]:
        """For each call that has begun, whether it is whole."""
        return self._deltas.whole

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Parse the next text; the new content and calls."""
        assert not (text and self._text.is_ended), "text came after the end"
        for start in range(0, max(len(text), 1), CHUNK):
            self._text.push(text[start : start + CHUNK])
            next(self._reading, None)
            self._send()
        return self._content.take(), self._deltas.take()

    def take_reasoning(self) -> str:
        """The new reasoning, if the format has channels for it."""
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
            opener = yield from text.move_until((*form.openers, *tool_format.content), self._content)
            if opener is None:
                return
            is_call = opener in form.openers
            if not is_call:
                text.move(text.at - len(opener), self._content)  # newlines ahead of it
                text.take(len(opener))
            elif form.openers[opener]:
                text.at -= len(opener)

    def _read_content(self) -> Reading[None]:
        """Take the rest of the text as content."""
        while True:
            self._text.move(len(self._text.text), self._content)
            if self._text.is_ended:
                return
            yield

    def _read_block(self, tool_format: ToolFormat, form: Form) -> Reading[None]:
        """Read calls between an opener and what follows them. The text is content if there are none."""
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
        if firsts:
            return (yield from self._text.starts_with_any(firsts)) is not None
        if (yield from self._text.starts_with_any(form.openers)) is not None:
            return False
        char = yield from self._text.peek()
        return char in ("{", "[") or bool(tool_format.separator and tool_format.end and char.isidentifier())

    def _read_call(self, form: Form) -> Reading[None]:
        """Read a call, or a list of calls, in the first form that it has."""
        text, num_calls = self._text, len(self.whole)
        start = furthest = text.at
        for pieces in form.calls:
            try:
                return (yield from self._read_form(pieces, form))
            except ParseError:
                if len(self.whole) > num_calls:
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
                case "index":
                    yield from text.skip(JSON_DIGITS)
                case "fields":
                    yield from self._read_fields(form.quote)
                    return (yield from self._read_tail(read_pieces(text, pieces[index + 1 :])))
                case "json" | "python":
                    yield from self._read_calls(is_python=piece.kind == "python")
                    return (yield from self._read_tail(read_pieces(text, pieces[index + 1 :])))
                case "arguments":
                    yield from text.skip(SPACE)
                    tail = pieces[index + 1 :]
                    yield from self._read_arguments([each.text for each in tail if each.kind == "text"][:1])
                    self._end_call()
                    return (yield from self._read_tail(read_pieces(text, tail)))
                case "parameters":
                    yield from self._read_parameters(form, pieces[index + 1 :])
                    break
                case _:
                    yield from read_pieces(text, [piece])
        self._end_call()

    def _read_tail(self, reading: Reading[None]) -> Reading[None]:
        """Skip what follows the arguments of a whole call. It may be missing, since they show where they end."""
        text = self._text
        try:
            yield from reading
            text.take(text.at)
        except ParseError:
            text.at = 0

    def _take_id(self, id: str, form: Form) -> None:
        """Take the model's id of a call, in which its name may be."""
        self._call.id = check_unicode(id) or None
        if form.ids:
            names = [match["name"] for each in form.ids if (match := each.fullmatch(id))]
            known = (name for name in names if self._tools is None or name in self._tools)
            self._call.name = self._check_name(next(known, ""))

    def _read_parameters(self, form: Form, tail: list[Piece]) -> Reading[None]:
        """Read parameters, each with a key and a value, as arguments, and the tail of the form.

        The tail may be missing if the calls end, or the next one begins.
        """
        text, schema = self._text, self._schemas.get(self._call.name or "")
        close = next((piece.text for piece in tail if piece.kind == "text"), "")
        assert form.parameter is not None, "such a form has parameters"
        parameters: ElementReader | ParameterReader = (
            ElementReader(text, form, close, schema)
            if form.parameter.is_element
            else ParameterReader(text, form, close, schema)
        )
        while (yield from parameters.is_next()):
            key = yield from parameters.read_key()
            self._begin_call()
            self._deltas.add(f"{'{' if len(parameters.keys) == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            if isinstance(parameters, ElementReader):
                yield from parameters.write_value(self._deltas.add)
                continue
            writer = ValueWriter(schema, key, self._deltas.add, is_text=parameters.is_text)
            is_whole = yield from parameters.read_value(writer.push)
            writer.finish(is_whole=is_whole)
            if not is_whole:
                raise ParseError
        self._call.arguments, end = "}" if parameters.keys else "{}", text.at
        try:
            yield from read_pieces(text, tail)
        except ParseError:
            text.at = end
            if (yield from text.starts_with_any((*form.ends, *form.begins))) is None:
                raise

    def _read_fields(self, quote: str) -> Reading[None]:
        """Read an object with bare keys and strings in quotes of their own as arguments."""
        text, schema = self._text, self._schemas.get(self._call.name or "")
        fields = FieldReader(text, quote, self._deltas.add)
        if (yield from text.peek()) != "{":
            raise ParseError
        self._begin_call()
        text.at += 1
        while (yield from fields.is_next()):
            key = yield from fields.read_key()
            self._deltas.add(f"{'{' if len(fields.keys) == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            text.take(text.at)
            yield from fields.write_value(partial(write_value, schema=schema, key=key))
        self._call.arguments = "}" if fields.keys else "{}"
        self._end_call()

    def _read_calls(self, *, is_python: bool) -> Reading[None]:
        """Read one call, or a list of calls."""
        text, num_calls = self._text, len(self.whole)
        if (yield from text.peek()) != "[":
            return (yield from self._read_item(is_python=is_python))
        yield from read_items(text, "]", lambda: self._read_item(is_python=is_python))
        if len(self.whole) == num_calls:
            raise ParseError
        text.take(text.at)

    def _read_item(self, *, is_python: bool) -> Reading[None]:
        is_object = not is_python or (yield from self._text.peek()) == "{"
        yield from self._read_object() if is_object else self._read_python()

    def _read_object(self) -> Reading[None]:
        """Read a call that is an object. It is whole with its name and arguments, or with its name and its end."""
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

        yield from skip_char(text, "{")
        yield from text.skip(SPACE)
        while (yield from text.peek()) != "}":
            yield from read_member()
            if call.name is not None and call.arguments is not None:
                self._end_call()
                return (yield from self._read_tail(self._read_other_members()))
            yield from text.skip(SPACE)
            if (yield from text.peek()) != "}":
                yield from expect(text, ",")
        if call.name is None:
            raise ParseError
        text.at, call.arguments = text.at + 1, "{}"
        self._end_call()

    def _read_other_members(self) -> Reading[None]:
        """Skip what an object may have after a call's name and arguments, up to its end."""
        text = self._text
        yield from text.skip(SPACE)
        while (yield from text.peek()) == ",":
            yield from expect(text, ",")
            if KEYS.get((yield from read_json_string(text))) not in ("id", "type"):
                raise ParseError
            yield from expect(text, ":")
            yield from read_json(text)
            yield from text.skip(SPACE)
        yield from skip_char(text, "}")

    def _read_arguments(self, ends: Iterable[str] = ()) -> Reading[None]:
        """Read an object; null or nothing, which are an empty one; or a string that has it as JSON.

        If the name is known, an object is sent while it arrives.

        ends: what follows if there is nothing
        """
        text, call, start = self._text, self._call, self._text.at
        char = yield from text.peek()
        if char == "{":
            if call.name is not None:
                self._begin_call()
                call.is_arriving = True
            yield from read_json(text)
            self._send()
            call.arguments = "" if call.is_arriving else json_text(text, start)
            call.is_arriving = False
        elif char == '"':
            call.arguments = object_json((yield from read_json_string(text)))
        elif (yield from text.starts_with("null")):
            text.at += len("null")
            call.arguments = "{}"
        elif (yield from text.starts_with_any(ends)) is not None:
            call.arguments = "{}"
        else:
            raise ParseError

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
        """Send the id and the name of a call whose arguments begin here. Its text is no content any more."""
        if not self._call.has_begun:
            self._deltas.start(self._call.name, self._call.id)
            self._call.has_begun = True
            self._text.take(self._text.at)

    def _send(self) -> None:
        """Send the new part of arguments that arrive as they are sent."""
        if self._call.is_arriving:
            self._deltas.add(json_text(self._text, 0))
            self._text.take(self._text.at)

    def _end_call(self) -> None:
        """Count the call as whole, and drop its text."""
        call = self._call
        assert call.arguments is not None, "a whole call has arguments"
        if call.has_begun:
            self._deltas.add(call.arguments)
        else:
            self._deltas.start(call.name, call.id, call.arguments)
        self._deltas.end()
        self._call = Call()
        self._text.take(self._text.at)

    def _give_up_call(self) -> None:
        """End the call that is being read: its text is content, but for what was sent, and a rest that was cut off."""
        self._send()
        text, call, self._call = self._text, self._call, Call()
        if text.is_ended and (call.has_begun or self._is_forced):
            text.take(len(text.text))
        else:
            text.move(text.at, self._content)


def object_json(text: str) -> str:
    """A text that is the JSON of an object, or nothing. ParseError if it is of anything else."""
    if text.strip()[:1] not in ("{", ""):
        raise ParseError
    return check_unicode(validate_json(text.strip() or "{}"))
