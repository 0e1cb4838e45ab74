"""Find the part of a rewritten schema that llguidance refuses.

find_fault(rewritten, lambda schema: LLMatcher.validate_grammar(…))       # the Place of a pattern, say
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atom.runtime.requests.schemas.references import Place
from atom.runtime.requests.schemas.rewrite import Rewritten

MAX_CHECKS = 200  # of parts of a schema: one takes a millisecond, a large one more
NOTHING = "nsatisfiable"  # in the reason of a schema that no text fits, which may be meant of a part


def find_fault(rewritten: Rewritten, check: Callable[[Mapping[str, Any]], str]) -> Place | None:
    """The place of the smallest schema that is refused for itself; None if it is none within the whole.

    check: why a schema is refused; "" if it is taken
    """
    reason = check(rewritten.schema)
    definitions = {"$defs": rewritten.schema.get("$defs", {})}
    places = {id(schema): place for schema, place in rewritten.places}
    schema, found, num_checks = rewritten.schema, None, 0
    within = {id(schema)}
    while reason and num_checks < MAX_CHECKS:
        for part in _parts(schema, definitions["$defs"], places):
            if id(part) in within:  # it refers to a schema around it
                continue
            num_checks += 1
            refused = check(definitions | part)
            if refused and (NOTHING in refused) == (NOTHING in reason):
                schema, found = part, places[id(part)]
                within.add(id(part))
                break
            if num_checks == MAX_CHECKS:
                break
        else:
            break
    return found


def _parts(value: Any, definitions: Mapping[str, Any], places: Mapping[int, Place]) -> Iterator[dict[str, Any]]:
    """The schemas right within one, and what it refers to, if they have a place."""
    if isinstance(value, Mapping) and isinstance(reference := value.get("$ref"), str):  # or a value that has the word
        value = {**value, "$ref": definitions.get(reference.rpartition("/")[2], True)}
    for each in value.values() if isinstance(value, Mapping) else value:
        if isinstance(each, dict) and id(each) in places:
            yield each
        elif isinstance(each, dict | list):
            yield from _parts(each, definitions, places)
