"""Write numbers beyond 2^53 as regular expressions, since llguidance reads float64.

    say_exactly({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, place)
    # {"anyOf": [{"x-number": "9007199254740993"}]}

A schema with such a number is compiled by outline.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from atom.runtime.requests.schemas.negation import TYPES
from atom.runtime.requests.schemas.number_ranges import integers, numbers, scientific
from atom.runtime.requests.schemas.references import Place

REGEX = "x-number"  # key of a schema: a number that matches this regular expression, a Regex
LARGEST = 1 << 53  # up to here a float64 holds every integer
MAX_DIGITS = 200  # of a bound, but for zeros at its end: a regular expression nests as deep
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


class Regex(str):
    """A regular expression that was made here: a text of the client's under the same key is a plain str."""


def say_exactly(schema: dict[str, Any], place: Place) -> dict[str, Any]:
    """Replace the large numbers of a schema, which are not those of the schemas in it."""
    if not any(has_large(schema.get(key)) for key in (*BOUNDS, "const", "enum")):
        return schema
    types = schema.get("type", [*TYPES])
    types = [types] if isinstance(types, str) else types
    kind = "number" if "number" in types else "integer" if "integer" in types else None
    own = {key: value for key, value in schema.items() if key in (*BOUNDS, "multipleOf", "const", "enum")}
    rest = {key: value for key, value in schema.items() if key not in (*BOUNDS, "multipleOf")}
    if "const" in own or "enum" in own:
        return _say_values(schema, own, kind, place)
    if "multipleOf" in own:
        raise place.fault("multipleOf cannot be kept next to a bound beyond 2^53; leave out the bound")
    if kind and rest.keys() & {"allOf", "anyOf", "$ref"}:
        raise place.fault("a bound beyond 2^53 cannot be kept next to allOf, anyOf, not or $ref; write it within them")
    parts = list(_parts(kind, own, place)) if kind else []
    if others := [each for each in types if each not in ("number", "integer")]:
        parts.append(rest | {"type": others})
    return {"anyOf": parts}


def has_large(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(has_large, value))
    if isinstance(value, Mapping):
        return any(map(has_large, value.values()))
    return _is_number(value) and abs(value) > LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_within(value: Any, bounds: Mapping[str, Any]) -> bool:
    low, is_above = _tighter(bounds.get("minimum"), bounds.get("exclusiveMinimum"), 1)
    high, is_below = _tighter(bounds.get("maximum"), bounds.get("exclusiveMaximum"), -1)
    is_low = low is not None and (value < low or (is_above and value == low))
    return not is_low and not (high is not None and (value > high or (is_below and value == high)))


def _say_values(schema: dict[str, Any], own: dict[str, Any], kind: str | None, place: Place) -> dict[str, Any]:
    values = own["enum"] if "enum" in own else [own["const"]]
    if any(key in own for key in BOUNDS):
        values = [value for value in values if not _is_number(value) or _is_within(value, own)]
        schema = {key: value for key, value in schema.items() if key not in BOUNDS} | {"enum": values}
    large = [value for value in values if has_large(value)]
    if schema.keys() - {"const", "enum", "type"} or not all(map(_is_number, large)):
        raise place.fault(
            "integers beyond 2^53 cannot be kept within lists and objects, or next to other keywords; take texts"
        )
    if not large:
        return schema
    small = [value for value in values if not has_large(value)]
    parts: list[dict[str, Any]] = [{REGEX: Regex(_whole(value, place))} for value in large if kind]
    if small:
        parts.append({"enum": small} | ({"type": schema["type"]} if "type" in schema else {}))
    return {"anyOf": parts}


def _parts(kind: str, own: Mapping[str, Any], place: Place) -> Iterator[dict[str, Any]]:
    """Schemas of the numbers within bounds: those up to 2^53 in size, and those beyond."""
    low, is_above = _tighter(own.get("minimum"), own.get("exclusiveMinimum"), 1)
    high, is_below = _tighter(own.get("maximum"), own.get("exclusiveMaximum"), -1)
    if (low is None or low <= LARGEST) and (high is None or high >= -LARGEST):
        within: dict[str, Any] = {"type": kind}
        if low is not None:
            within |= {"exclusiveMinimum" if is_above and not has_large(low) else "minimum": max(low, -LARGEST)}
        if high is not None:
            within |= {"exclusiveMaximum" if is_below and not has_large(high) else "maximum": min(high, LARGEST)}
        yield within
    for sign, first, is_after, last, is_before in (
        ("", low, is_above, high, is_below),
        ("-", high if high is None else -high, is_below, low if low is None else -low, is_above),
    ):
        is_far = first is not None and first > LARGEST
        if not is_far and (last is None or last <= LARGEST):
            continue  # what is beyond 2^53 on this side is within no bound, or is not bounded at all
        start = _whole(first, place) if is_far else LARGEST
        end = None if last is None else _whole(last, place)
        is_after = is_after and is_far
        if kind == "integer":
            start, end = start + is_after, None if end is None else end - is_before
            if end is None or start <= end:
                yield {REGEX: Regex(sign + integers(start, end))}
        elif end is None or start < end or (start == end and not is_after and not is_before):
            yield {REGEX: Regex(sign + numbers(start, end, open_low=is_after, open_high=is_before))}
            if end is not None and (first is None or first <= 0):
                yield {REGEX: Regex(sign + scientific(end))}


def _tighter(closed: Any, open: Any, sign: int) -> tuple[Any, bool]:
    """The bound that holds of two, and whether it is exclusive."""
    if open is None or (closed is not None and sign * closed > sign * open):
        return closed, False
    return open, True


def _whole(value: Any, place: Place) -> int:
    """A large number as it was written."""
    whole = int(Decimal(repr(value)))
    if len(str(whole).rstrip("0")) > MAX_DIGITS:
        raise place.fault(f"a number has more than {MAX_DIGITS} digits")
    return whole
