"""Describe validation errors of a request body: the field and the reasons.

field, message = describe(error)       # "temperature", "temperature: Input should be a valid number"
"""

from __future__ import annotations

import itertools
from typing import Any

from fastapi.exceptions import RequestValidationError

from atom.serve.http.errors import shown

NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")  # pydantic's types of this error


def describe(error: RequestValidationError) -> tuple[str | None, str]:
    """The first wrong field, and the message for all wrong fields."""
    faults: dict[tuple[str, ...], list[str]] = {}
    for each in error.errors():
        reasons = faults.setdefault(find_field(each, error.body), [])
        if (why := reason(each)) not in reasons:
            reasons.append(why)
    of_parts = {names[:size] for names in faults for size in range(1, len(names))}
    lines = [
        ": ".join(filter(None, (shown(".".join(names)), " or ".join(reasons))))
        for names, reasons in faults.items()
        if names not in of_parts  # what else the value of such a part could be: it is one of a union
    ][:4]
    first = next(iter(faults))
    return first[0] if first else None, "; ".join(lines)


def find_field(fault: Any, body: Any) -> tuple[str, ...]:
    """The path of a wrong field: pydantic's location, in the body without the tags of unions."""
    if fault["loc"][0] != "body":  # of the query, say
        return tuple(map(str, fault["loc"][1:]))
    names: list[str] = []
    *path, last = fault["loc"][1:] or [None]
    is_past_tag = False
    for part, following in itertools.pairwise([*path, last]):
        if not has_part(body, part):
            continue
        is_past_tag = not is_past_tag and is_tag(body, part, following)
        if not is_past_tag:
            names.append(str(part))
            body = body[part]
    if has_part(body, last) or (fault["type"] == "missing" and last is not None):
        names.append(str(last))
    return tuple(names)


def is_tag(value: Any, part: Any, following: Any) -> bool:
    """Whether a part of pydantic's location is the tag of a union, though the value has a field of that name."""
    if not isinstance(value, dict) or value.get("type") != part:
        return False
    return not isinstance(value[part], dict | list) or (following in value and not has_part(value[part], following))


def has_part(value: Any, part: Any) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def reason(fault: Any) -> str:
    if fault["type"] == "json_invalid":
        return f"the body is no JSON: {fault['ctx']['error']} at character {fault['loc'][-1]}"
    if fault["type"] == "not_json":
        kind = f"not {shown(fault['ctx']['kind'])}" if fault["ctx"]["kind"] else "which is missing"
        return f"send JSON with the header Content-Type: application/json, {kind}"
    if tuple(fault["loc"]) == ("body",) and fault["type"] in NO_OBJECT:
        return "the body is no JSON object; send one, with the header Content-Type: application/json"
    return shown(str(fault["msg"]))  # shortened: it may quote a value of the body
