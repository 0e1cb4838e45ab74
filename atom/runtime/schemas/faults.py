"""Find the part of a rewritten schema that llguidance refuses.

find_fault(rewritten, lambda schema: LLMatcher.validate_grammar(…))       # the Place of a pattern, say
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atom.runtime.schemas.references import Place
from atom.runtime.schemas.rewrite import Rewritten

MAX_CHECKS = 300  # of parts of a schema: one takes a millisecond, a large one more
NOTHING = "nsatisfiable"  # in the reason of a schema that no text fits, which may be meant of a part


def find_fault(rewritten: Rewritten, check: Callable[[Mapping[str, Any]], str]) -> Place | None:
    """The place of the smallest schema that is refused for itself; None if it is none within the whole.

    check: why a schema is refused; "" if it is taken
    """
    places = {id(schema): place for schema, place in rewritten.places}
    definitions = {"$defs": rewritten.schema.get("$defs", {})}
    reason = check(rewritten.schema)
    if not reason:
        return None
    schema, found, num_checks = rewritten.schema, None, 0
    while True:
        for part in _parts(schema, places):
            num_checks += 1
            if num_checks > MAX_CHECKS:
                return found
            refused = check(definitions | part)
            if refused and (NOTHING in refused) == (NOTHING in reason):
                schema, found = part, places.get(id(part), found)
                break
        else:
            return found


def _parts(value: Any, places: Mapping[int, Place]) -> Iterator[dict[str, Any]]:
    """The schemas right within one."""
    for each in value.values() if isinstance(value, Mapping) else value:
        if isinstance(each, dict) and id(each) in places:
            yield each
        elif isinstance(each, dict | list):
            yield from _parts(each, places)
