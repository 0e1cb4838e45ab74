"""Read parameters that are elements, named after them, which may nest.

MiniMax-M3 writes calls so, with a marker before each tag:

    elements = ElementReader(text, form, "</call>", schema)     # of <city>Paris</city><at><lat>48.8</lat></at></call>
    while (yield from elements.is_next()):
        key = yield from elements.read_key()                    # "city"
        yield from elements.write_value(send)                   # sends '"Paris"' in pieces, as it arrives

An element with others in it is an object, or a list if its schema says so, whatever its items are called. A parameter
that can only be a string is sent while it arrives, with all that is in it; others are sent once they are complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from atom.serve.output.incremental_json import MAX_DEPTH
from atom.serve.output.incremental_text import SPACE, ParseError, Reading, TextBuffer, check_unicode
from atom.serve.output.parameter_reader import KEY
from atom.serve.output.parameter_values import find_member, find_options, find_types, write_typed
from atom.serve.output.tool_forms import Form, read_pieces

TEXT = "$text"  # the key of an element's text between others
Value: TypeAlias = "str | list[tuple[str, Value]]"  # an element's text, or the elements in it


@dataclass
class Element:
    """An element that is open."""

    key: str
    text: str = ""  # of it, without the elements in it
    children: list[tuple[str, Value]] = field(default_factory=list)

    @property
    def value(self) -> Value:
        if not self.children:
            return self.text
        return [*self.children, (TEXT, self.text)] if self.text.strip() else self.children


class ElementReader:
    """Reads the parameters of one call."""

    def __init__(self, text: TextBuffer, form: Form, close: str, schema: Any) -> None:
        """
        close: the text that ends the call; "": none
        schema: of all parameters
        """
        assert form.parameter is not None, "such a form has parameters"
        before, value, rest = form.parameter
        self.keys: list[str] = []  # that were read
        self._text, self._schema = text, schema
        self._before, self._close, self._end = before, value.text, rest[-1].text
        self._open = before[0].text
        self._tags = sorted((self._open, self._close), key=len, reverse=True)  # one may begin with the other
        longer, shorter = self._tags
        self._stops = (shorter,) if longer.startswith(shorter) else (longer, shorter)
        self._closers = tuple(filter(None, (close, *form.ends)))

    def is_next(self) -> Reading[bool]:
        """Whether another parameter follows."""
        yield from self._text.skip(SPACE)
        return (yield from self._text.starts_with_any(self._tags)) == self._open

    def read_key(self) -> Reading[str]:
        """Read a parameter up to its value. ParseError if its key is missing or repeated."""
        key = yield from self._read_key()
        if key in self.keys:
            raise ParseError
        self.keys.append(key)
        return key

    def write_value(self, send: Callable[[str], None]) -> Reading[None]:
        """Send the JSON of the last parameter's value. ParseError if it breaks off, after what could be read of it."""
        text, key = self._text, self.keys[-1]
        schema = find_member(self._schema, key)
        if set(find_types(schema, self._schema)) == {"string"}:
            return (yield from self._write_string(key, send))
        opened = [Element(key)]
        try:
            yield from self._read_elements(opened)
        except ParseError:
            if text.is_ended:
                send(self._write_partial(opened, schema))
            raise
        send(self._write(opened[0].value, schema))
        text.take(text.at)

    def _read_key(self) -> Reading[str]:
        key = ""
        for piece in self._before:
            if piece.kind == "key":
                key = check_unicode((yield from self._text.read(KEY)))
            else:
                yield from read_pieces(self._text, [piece])
        if not key:
            raise ParseError
        return key

    def _write_string(self, key: str, send: Callable[[str], None]) -> Reading[None]:
        """Send all up to the element's end, or to the call's, before which models leave it out at times."""
        text, end = self._text, f"{self._close}{key}{self._end}"
        text.take(text.at)
        send('"')
        while True:
            text.at = 0
            at, stop = text.find_any(dict.fromkeys((end, *self._closers)))
            send(json.dumps(text.take(at), ensure_ascii=False)[1:-1])
            if stop is not None:
                text.take(len(stop) if stop == end else 0)
                return send('"')
            if text.is_ended:
                raise ParseError
            yield

    def _read_elements(self, opened: list[Element]) -> Reading[None]:
        """Read up to the end of the first of these elements, each of which is in the one before."""
        text = self._text
        while True:
            last = opened[-1]
            last.text += yield from self._read_text()
            if (yield from text.starts_with_any(self._tags)) == self._open:
                if len(opened) > MAX_DEPTH:
                    raise ParseError
                opened.append(Element((yield from self._read_key())))
                continue
            end = f"{self._close}{last.key}{self._end}"
            if not (yield from text.starts_with(end)):
                raise ParseError
            text.at += len(end)
            if len(opened) == 1:
                return
            opened.pop()
            opened[-1].children.append((last.key, last.value))

    def _read_text(self) -> Reading[str]:
        """Read up to a tag."""
        text, start = self._text, self._text.at
        while True:
            text.at, stop = text.find_any(self._stops)
            if stop is not None or text.is_ended:
                return text.text[start : text.at]
            yield

    def _write_partial(self, opened: list[Element], schema: Any) -> str:
        """The beginning of the JSON of elements that break off."""
        for outer, inner in reversed(list(pairwise(opened))):
            outer.children.append((inner.key, inner.value))
        written = self._write(opened[0].value, schema)
        for _ in opened:  # each is open, and so is a string in the last one
            if written.endswith('"'):
                return written[:-1]
            written = written[:-1] if written.endswith(("}", "]")) else written
        return written

    def _write(self, value: Value, schema: Any) -> str:
        """The JSON of an element by its schema."""
        types = set(find_types(schema, self._schema))
        option, is_list = self._find_container(schema)
        if isinstance(value, str):
            if option is not None and not value.strip() and "string" not in types:
                return "[]" if is_list else "{}"
            return write_typed(check_unicode(value), types)
        if is_list and option is not None:
            return f"[{', '.join(self._write(each, option.get('items')) for _, each in value)}]"
        members: dict[str, list[str]] = {}
        for key, each in value:
            members.setdefault(key, []).append(self._write(each, find_member(option, key)))
        written = []
        for key, several in members.items():
            texts = ", ".join(several)
            written.append(f"{json.dumps(key, ensure_ascii=False)}: {texts if len(several) == 1 else f'[{texts}]'}")
        return f"{{{', '.join(written)}}}"

    def _find_container(self, schema: Any) -> tuple[Any, bool]:
        """The first option of a schema that is a list or an object, and whether it is a list; None if there is none."""
        for option in find_options(schema, self._schema):
            given = option.get("type")
            types = given if isinstance(given, list) else [given]
            if "array" in types or (given is None and "items" in option):
                return option, True
            if "object" in types or (given is None and {"properties", "additionalProperties"} & set(option)):
                return option, False
        return None, False
