"""Write a JSON schema's grammar with numbers as regular expressions.

    write_outline({"type": "array", "items": {"x-number": "[0-9]{20}"}}, [])       # in Lark's notation

llguidance takes a number's bounds as float64, and no regular expression for it. So the objects, arrays and choices
around such a number are written here, and each schema without one is llguidance's `%json`.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from atom.errors import RequestError
from atom.runtime.requests.schemas.exact_numbers import REGEX, Regex
from atom.runtime.requests.schemas.negation import TYPES
from atom.runtime.requests.schemas.patterns import is_match
from atom.runtime.requests.schemas.references import Place

OBJECT = {"type", "properties", "patternProperties", "additionalProperties", "required"}
ARRAY = {"type", "items", "minItems", "maxItems"}
STRING = r'"(?:[^"\\\x00-\x1F\x7F]|\\(?:["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
MAX_PAIRS = 10_000  # of patterns and names that are compared
ADVICE = "a number beyond 2^53 can be kept in properties, items and anyOf, and not within {}; write it there"


def is_outlined(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has such a number."""
    return REGEX in _words(schema)


def write_outline(schema: Mapping[str, Any], places: Iterable[tuple[Any, Place]]) -> str:
    """Write the grammar. RequestError if a number is where it cannot be kept.

    places: of the schemas, for errors
    """
    return _Writer(schema, places).write()


def _words(value: Any) -> Iterator[str]:
    """REGEX and the references within a schema."""
    if isinstance(value, Mapping):
        if isinstance(value.get(REGEX), Regex):
            yield REGEX
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        value = value.values()
    if not isinstance(value, str | int | float | None):
        for each in value:
            yield from _words(each)


class _Writer:
    def __init__(self, schema: Mapping[str, Any], places: Iterable[tuple[Any, Place]]) -> None:
        self._schema = {key: value for key, value in schema.items() if key not in ("$defs", "x-guidance")}
        self._defs: Mapping[str, Any] = schema.get("$defs", {})
        self._options: Mapping[str, Any] = schema.get("x-guidance", {})
        self._places = {id(self._schema if each is schema else each): place for each, place in places}
        self._rules: list[str] = []
        self._waiting: deque[str] = deque()  # names in $defs without a rule
        self._known: dict[str, str] = {}  # what is written -> its rule
        self._outlined = self._find_outlined()

    def write(self) -> str:
        start = self._form(self._schema)
        while self._waiting:
            name = self._waiting.popleft()
            self._rules.append(f"def{name}: {self._form(self._defs[name])}")
        spaces = r"[ \t\n\r]+" if self._options.get("whitespace_flexible", True) else ""
        spaces = self._options.get("whitespace_pattern") or spaces
        return "\n".join([f"start: {start}", f"sp: /{spaces}/?" if spaces else 'sp: ""', *self._rules])

    def _find_outlined(self) -> set[str]:
        """The references to what has such a number, or refers to one that has."""
        users = defaultdict[str, list[str]](list)  # of a reference or REGEX, those that have it
        for name, each in self._defs.items():
            for word in set(_words(each)):
                users[word].append(f"#/$defs/{name}")
        found, waiting = set[str](), [REGEX]
        while waiting:
            more = [user for user in users[waiting.pop()] if user not in found]
            found.update(more)
            waiting += more
        return found

    def _needs(self, schema: Any) -> bool:
        return any(word == REGEX or word in self._outlined for word in _words(schema))

    def _form(self, schema: Any) -> str:
        """A schema's form: the name of its rule."""
        if not isinstance(schema, Mapping) or not self._needs(schema):
            return self._json(schema)
        if isinstance(schema.get(REGEX), Regex):
            return self._rule(f"/{schema[REGEX]}/", is_terminal=True)
        if schema.keys() == {"$ref"}:
            name = str(schema["$ref"]).rpartition("/")[2]
            if schema["$ref"] not in self._known:
                self._known[schema["$ref"]] = f"def{name}"
                self._waiting.append(name)
            return self._known[schema["$ref"]]
        if schema.keys() == {"anyOf"}:
            return self._rule(" | ".join(self._form(each) for each in schema["anyOf"] if each is not False))
        if wrong := [key for key in schema if key not in OBJECT | ARRAY]:
            raise self._fault(schema, wrong[0])
        types = schema.get("type", TYPES)
        types = [types] if isinstance(types, str) else types
        needed = {
            name: write
            for name, keys, write in (("object", OBJECT, self._object), ("array", ARRAY, self._array))
            if any(self._needs(schema[key]) for key in keys & schema.keys())
        }
        forms = [write(schema) for name, write in needed.items() if name in types]
        if others := [each for each in types if each not in needed]:
            kept = {key: value for key, value in schema.items() if not self._needs(value)}
            forms.append(self._json(kept | {"type": others}))
        return self._rule(" | ".join(forms))

    def _fault(self, schema: Mapping[str, Any], word: str) -> RequestError:
        place = self._places.get(id(schema))
        reason = ADVICE.format(word)
        return place.fault(reason) if place else RequestError(f"structured_outputs: {reason}")

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Properties in their order, then any number of others."""
        required = list(schema.get("required", ()))
        properties = dict(schema.get("properties", {}))
        others = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        if patterns and (others is not False or may_match(patterns, {*properties, *required})):
            raise self._fault(schema, "patternProperties next to other properties")
        properties |= {name: others for name in required if name not in properties}
        more = [self._pair(self._json({"type": "string", "pattern": key}), each) for key, each in patterns.items()]
        if others is not False:
            more.append(self._pair(self._other_name(properties), others))
        end = f"({' | '.join(more)})" if more else ""
        after = self._rule(f'(sp "," sp {end})*') if end else '""'
        first = self._rule(f'({end} (sp "," sp {end})*)?') if end else '""'
        for name, each in reversed(properties.items()):
            if each is False and name not in required:
                continue
            pair = self._pair(quote(name), each)
            if name in required:
                first, after = self._rule(f"{pair} {after}"), self._rule(f'sp "," sp {pair} {after}')
            else:
                first, after = self._rule(f"{pair} {after} | {first}"), self._rule(f'(sp "," sp {pair})? {after}')
        return self._rule(f'"{{" sp {first} sp "}}"')

    def _pair(self, name: str, schema: Any) -> str:
        return self._rule(f'{name} sp ":" sp {self._form(schema)}')

    def _other_name(self, taken: Iterable[str]) -> str:
        known = " | ".join(map(quote, taken))
        text = self._rule(f"/{STRING}/", is_terminal=True)
        return self._rule(f"{text} & ~({known})", is_terminal=True) if known else text

    def _array(self, schema: Mapping[str, Any]) -> str:
        lowest, highest = schema.get("minItems", 0), schema.get("maxItems")
        items = item = self._form(schema["items"])
        if highest is None or highest > 1:
            items += f' (sp "," sp {item}){{{max(lowest - 1, 0)},{"" if highest is None else highest - 1}}}'
        items = "" if highest == 0 else f"{items} sp" if lowest else f"({items} sp)?"
        return self._rule(f'"[" sp {items} "]"')

    def _json(self, schema: Any) -> str:
        """llguidance's form of a schema, with the definitions that it refers to."""
        whole: dict[str, Any] = {"x-guidance": self._options}
        whole |= schema if isinstance(schema, Mapping) else {"allOf": [schema]}
        if "$ref" in json.dumps(schema):
            whole["$defs"] = self._defs
        return self._rule(f"%json {json.dumps(whole)}")

    def _rule(self, body: str, *, is_terminal: bool = False) -> str:
        if body not in self._known:
            self._known[body] = name = f"{'NUMBER' if is_terminal else 'rule'}{len(self._known)}"
            self._rules.append(f"{name}: {body}")
        return self._known[body]


def may_match(patterns: Collection[str], names: Collection[str]) -> bool:
    """Whether a pattern is found in one of the names; true if that is not known."""
    if len(patterns) * len(names) > MAX_PAIRS:
        return True
    return any(is_match(pattern, name) is not False for pattern in patterns for name in names)


def quote(name: str) -> str:
    """A property's name as Lark's text of its JSON."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
