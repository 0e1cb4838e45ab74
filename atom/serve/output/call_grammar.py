"""Write the grammar of an answer: a response format's text, or tool calls.

    text = call_grammar(read_format("tagged_json"), ["f"], {"f": None}, token_id)
    SamplingParams(structured_outputs={"json": schema}, tool_calls=text)

The grammar is Lark's as llguidance reads it; `@answer` in it stands for the structured output. Arguments are any JSON
object: if the model may choose, a schema binds its final text only, as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from atom.config.tool_formats import ELEMENT, FIELD, MARKER, ToolFormat, openers
from atom.serve.output.parameter_reader import ENTITIES
from atom.serve.output.tool_forms import Piece, split_form

SPACE = "/[ \\t\\r\\n]{0,16}/"
TEXT = "/(?s:.*)/"
# a call's arguments in Python, to the closing parenthesis: other characters, strings, and parentheses once nested
_PLAIN = r"""[^()"'\\]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
PYTHON = rf"/\((?:{_PLAIN}|\((?:{_PLAIN})*\))*\)/"
ELEMENT_KEY = '/[^<>"\\n\\/][^<>"\\n]{0,199}/'
HOLDS_SEVERAL = re.compile(r"\{(json|python)\}")
TokenId = Callable[[str], int | None]  # of a text that is one token of the checkpoint


def call_grammar(
    tool_format: ToolFormat, parameters: Mapping[str, Any], token_id: TokenId, *, is_parallel: bool = True
) -> str:
    """Lark grammar of an answer that is @answer or calls of these tools.

    tool_format: without marks
    parameters: the JSON schema of each tool's parameters by the tool's name
    is_parallel: the answer may have several calls
    """
    writer = _Writer(tool_format, token_id)
    if tool_format.channels:
        return writer.channels(list(parameters))
    return writer.calls(parameters, is_parallel=is_parallel)


def property_names(schema: Any) -> list[str]:
    """The names of an object's members that its schema lists."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return list(map(str, properties)) if isinstance(properties, Mapping) else []


class _Writer:
    def __init__(self, tool_format: ToolFormat, token_id: TokenId) -> None:
        self._format, self._token_id = tool_format, token_id
        constrain = MARKER.findall(tool_format.channels.constrain) if tool_format.channels else []
        markers = [*tool_format.markers, *constrain]
        known = {marker: id for marker in markers if (id := token_id(marker)) is not None}
        self._tokens = known
        self._pattern = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._numbers = count()

    def calls(self, parameters: Mapping[str, Any], *, is_parallel: bool) -> str:
        each = self._format
        forms = [form for form in each.call if not HOLDS_SEVERAL.search(form)]
        call = self._any(
            [self._several(form, list(parameters), is_parallel) for form in each.call if form not in forms]
            + [self._call(form, name, schema) for form in forms for name, schema in parameters.items()]
        )
        between = f"/[ \\t\\r\\n{re.escape(each.separator)}]{{0,16}}/"
        calls = f"{call} ({between} {call})*" if is_parallel else call
        end = f"({SPACE} {self._any(map(self._text, each.end))})?" if each.end else ""
        begins = self._any(map(self._text, filter(None, each.begin)))
        begin = f"({begins} {SPACE})" if begins else ""
        if begin and (not all(openers(each)) or "" in each.begin or each.bare):
            begin += "?"
        block = self._rule(" ".join(filter(None, (begin, calls, end))))
        several = f"{block} ({SPACE} {block})*" if is_parallel else block
        return "\n".join([f"start: {self._answer()} | {SPACE} {several}", *self._rules])

    def channels(self, names: Sequence[str]) -> str:
        each = self._format.channels
        assert each is not None, "the format has channels"
        final = self._text(f"{each.channel}{each.content}{each.body}")
        to = [self._literal(f"to={each.recipient.replace('{name}', name)}") for name in names]
        recipient = self._rule(self._any(to))
        marker, kind = (MARKER.findall(each.constrain) or [""])[0], MARKER.sub("", each.constrain)
        kind = f'(" "? {self._optional(self._text(marker))} {self._literal(kind)})?' if kind else ""
        channel = self._text(f"{each.channel}commentary")
        headers = f'(" " {recipient} {channel} | {channel} " " {recipient})'
        call = f"{headers} {kind} {self._text(each.body)} {self._json({'type': 'object'})}"
        return "\n".join([f"start: {final} @answer | {call}", *self._rules])

    def _answer(self) -> str:
        """What a constraint says, between the markers of content."""
        if not self._format.content:
            return "@answer"
        first, *others = map(self._text, self._format.content)
        ends = f" ({SPACE} {self._any(others)})*" if others else ""
        return f"({first})? @answer{ends}"

    def _call(self, form: str, name: str, schema: Any) -> str:
        """A call of one function, in a form that has its name."""
        parts = {
            "name": self._literal(name),
            "id": self._id(name),
            "index": "/[0-9]{1,4}/",
            "arguments": self._json({"type": "object"}),
        }
        if "{parameters}" in form:
            parts["parameters"] = self._parameters(schema)
        if "{fields}" in form:
            parts["fields"] = self._fields(schema)
        return self._fill(form, parts)

    def _several(self, form: str, names: Sequence[str], is_parallel: bool) -> str:
        """Calls in JSON or Python: one of the functions, or a list of them."""
        objects = [
            {
                "type": "object",
                "properties": {"name": {"enum": names}, key: {"type": "object"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for key in ("arguments", "parameters")
        ]
        several = {"type": "array", "items": {"anyOf": objects}, "minItems": 1}
        written = self._json({"anyOf": [*objects, several if is_parallel else several | {"maxItems": 1}]})
        call = f"({self._any(map(self._literal, names))} {PYTHON})"
        calls = f'{call} ("," {SPACE} {call})*' if is_parallel else call
        return self._fill(form, {"json": written, "python": self._any([call, f'"[" {calls} "]"', written])})

    def _fill(self, form: str, parts: Mapping[str, str]) -> str:
        return self._rule(" ".join(parts.get(piece.kind) or self._piece(piece) for piece in split_form(form)))

    def _piece(self, piece: Piece) -> str:
        return SPACE if piece.kind == "space" else self._text(piece.text)

    def _id(self, name: str) -> str:
        if not self._format.id:
            return "/[A-Za-z0-9_.:-]{1,64}/"
        fields = {"name": self._literal(name), "index": "/[0-9]{1,4}/"}
        forms = (
            " ".join(
                fields[part] if index % 2 else self._text(part) for index, part in enumerate(FIELD.split(id)) if part
            )
            for id in self._format.id
        )
        return self._any(forms)

    def _parameters(self, schema: Any) -> str:
        if ELEMENT.fullmatch(self._format.parameter):
            return self._elements(schema)
        pieces = split_form(self._format.parameter.strip())
        parts: list[str] = []
        for piece in pieces:
            if piece.kind == "key":
                parts.append(self._key(schema))
            elif piece.kind == "type":
                parts.append("/[a-z]{1,16}/")
            elif piece.kind == "value":
                parts.append(self._value(piece.text))
            else:
                parts.append(self._piece(piece))
        return f"({SPACE} {self._rule(' '.join(parts))})*"

    def _elements(self, schema: Any) -> str:
        """Parameters whose values may be parameters too, of any names."""
        before, _, rest = self._format.parameter.partition("{value}")
        (opens, opened), (closes, closed) = before.split("{key}"), rest.split("{key}")
        nested = f"rule{next(self._numbers)}"

        def element(key: str, name: str = "") -> str:
            begin = f"{self._text(opens)} {key} {self._text(opened)}"
            if not self._pattern.search(closes):
                end = "" if name else f" {key} {self._text(closed)}"
                return f"{begin} {self._value(closes + name + closed if name else closes)}{end}"
            value = f"({TEXT} | ({SPACE} {nested})+ {SPACE})"
            return f"{begin} {value} {self._text(closes)} {key} {self._text(closed)}"

        known = self._any(element(self._literal(name), name) for name in property_names(schema))
        if not known or nested in known:
            self._rules.append(f"{nested}: {element(ELEMENT_KEY)}")
        return f"({SPACE} {known or nested})*"

    def _fields(self, schema: Any) -> str:
        """An object with bare keys and strings in quotes of their own."""
        value = f"rule{next(self._numbers)}"
        string = f"{self._text(self._format.quote)} {self._value(self._format.quote)}"
        member = f'/[A-Za-z_][A-Za-z0-9_.-]{{0,199}}/ ":" {value}'
        nested = [f'"{{" ({member} ("," {member})*)? "}}"', f'"[" ({value} ("," {value})*)? "]"']
        plain = ["/-?[0-9]+(\\.[0-9]+)?([eE][+-]?[0-9]+)?/", '"true"', '"false"', '"null"']
        self._rules.append(f"{value}: {' | '.join([string, *plain, *nested])}")
        own = f'{self._key(schema)} ":" {value}'
        return f'"{{" ({own} ("," {own})*)? "}}"'

    def _key(self, schema: Any) -> str:
        return self._any(self._literal(self._escape(name)) for name in property_names(schema)) or '/[^<>"\\n]{1,200}/'

    def _value(self, stop: str) -> str:
        """Any text up to a stop."""
        if self._pattern.search(stop):
            return f"{TEXT} {self._text(stop)}"
        name = f"rule{next(self._numbers)}"
        self._rules.append(f"{name}[suffix={json.dumps(stop)}]: {TEXT}")
        return name

    def _text(self, text: str) -> str:
        """A text in which markers that are tokens of the checkpoint are those tokens."""
        parts: list[str] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += [self._literal(text[at : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            at = match.end()
        parts.append(self._literal(text[at:]))
        return " ".join(filter(None, parts))

    def _escape(self, key: str) -> str:
        for entity, char in reversed(ENTITIES.items()) if self._format.entities else ():
            key = key.replace(char, entity)
        return key

    def _literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _optional(self, form: str) -> str:
        return f"({form})?" if form else ""

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(schema)}")

    def _any(self, forms: Iterable[str]) -> str:
        found = list(dict.fromkeys(filter(None, forms)))
        return found[0] if len(found) == 1 else f"({' | '.join(found)})" if found else ""

    def _rule(self, body: str) -> str:
        name = f"rule{next(self._numbers)}"
        self._rules.append(f"{name}: {body}")
        return name
