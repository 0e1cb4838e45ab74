"""Compile tool-call formats for their parser: the pieces of each form.

form = make_form(read_format("tagged_json"))
form.openers               # {"<tool_call>": False}: it begins a block, and is no part of the first call
form.calls                 # [[Piece("json")]]
yield from read_pieces(text, form.calls[0])     # skips its texts and spaces
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from atom.config.tool_formats import FIELD, ToolFormat, openers
from atom.serve.output.incremental_text import SPACE, ParseError, Reading, TextBuffer


class Piece(NamedTuple):
    """A part of a call's or parameter's form."""

    kind: str  # text, space, or the name of a field
    text: str = ""  # a text; of a value, the text after it
    trims: bool = False  # of a value: a newline that touches it belongs to the form


class Parameter(NamedTuple):
    """The form of a parameter."""

    before: list[Piece]  # its value
    value: Piece
    rest: list[Piece]  # after the text that ends the value

    @property
    def is_element(self) -> bool:
        """Whether its end repeats the key, so that its value may be such parameters too."""
        return any(piece.kind == "key" for piece in self.rest)


class Form(NamedTuple):
    """A format, made ready to be read."""

    openers: dict[str, bool]  # a text with which calls begin -> whether it is a part of the first one
    calls: list[list[Piece]]
    parameter: Parameter | None
    entities: bool  # keys have them
    quote: str  # around strings in fields
    begins: tuple[str, ...]  # texts with which another call begins
    ends: tuple[str, ...]  # texts after the calls
    ids: list[re.Pattern[str]]  # what {id} may be
    between: re.Pattern[str]  # characters between the calls of a block


@lru_cache(maxsize=64)
def make_form(tool_format: ToolFormat) -> Form:
    firsts = {opener: opener not in tool_format.begin for opener in openers(tool_format) if opener}
    parts = {"name": "(?P<name>.+)", "index": r"\d+"}
    ids = [
        "".join(parts.get(text, ".*") if index % 2 else re.escape(text) for index, text in enumerate(FIELD.split(id)))
        for id in tool_format.id
    ]
    between = re.compile(rf"[ \t\r\n{re.escape(tool_format.separator)}]*")
    calls = [split_form(call) for call in tool_format.call]
    parameter = split_parameter(tool_format.parameter.strip()) if tool_format.parameter else None
    begins = (*firsts, *(call[0].text for call in calls if call[0].kind == "text"))
    return Form(
        firsts,
        calls,
        parameter,
        tool_format.entities,
        tool_format.quote,
        begins,
        tool_format.end,
        list(map(re.compile, ids)),
        between,
    )


def split_parameter(text: str) -> Parameter:
    pieces = split_form(text)
    at = next(index for index, piece in enumerate(pieces) if piece.kind == "value")
    return Parameter(pieces[:at], pieces[at], pieces[at + 1 :])


def split_form(text: str) -> list[Piece]:
    """Split `<a>{name} {value}</a>` into its pieces."""
    pieces: list[Piece] = []
    for index, part in enumerate(FIELD.split(text)):
        if index % 2:
            pieces.append(Piece(part))
            continue
        pieces += [Piece("space" if word.isspace() else "text", word) for word in re.split(r"(\s+)", part) if word]
    for index, piece in enumerate(pieces):
        if piece.kind == "value":
            around = pieces[index - 1 : index + 2]
            trims = any(each.kind == "space" and "\n" in each.text for each in around)
            rest = [each for each in pieces[index + 1 :] if each.kind != "space"]
            kept = pieces[:index] if pieces[index - 1].kind != "space" or not trims else pieces[: index - 1]
            after = pieces.index(rest[0], index) + 1
            return [*kept, Piece("value", rest[0].text, trims), *pieces[after:]]
    return pieces


def read_pieces(text: TextBuffer, pieces: Iterable[Piece]) -> Reading[None]:
    """Skip the texts and spaces of a form. ParseError if they are not next."""
    for piece in pieces:
        if piece.kind == "space":
            yield from text.skip(SPACE)
        elif (yield from text.starts_with(piece.text)):
            text.at += len(piece.text)
        else:
            raise ParseError
