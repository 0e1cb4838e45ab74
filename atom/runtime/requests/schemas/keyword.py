"""A keyword of a JSON schema that is being rewritten.

keyword = Keyword(rewriter, "items", {"type": "string"}, given, out, place)
keyword.out["items"] = keyword.rewrite(keyword.value)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from atom.runtime.requests.schemas.negation import ASSERTIONS, negate
from atom.runtime.requests.schemas.references import Place

# keywords of which the answer says which of their schemas hold
COMPOSED = {"anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"}


class Rewriter(Protocol):
    def rewrite(self, schema: Any, place: Place) -> Any: ...

    def resolve(self, reference: Any, place: Place) -> tuple[Any, Place]: ...

    def note(self, text: str) -> None: ...

    def work(self, amount: int, place: Place) -> None: ...


class Keyword(NamedTuple):
    """A keyword of a schema that is being rewritten."""

    rewriter: Rewriter
    name: str
    value: Any
    given: Mapping[str, Any]  # the schema as it was
    out: dict[str, Any]  # what is kept of it, and what the keywords before this one have added
    place: Place  # of the schema

    @property
    def at(self) -> Place:
        return self.place.at(self.name)

    def rewrite(self, schema: Any, *keys: str | int) -> Any:
        return self.rewriter.rewrite(schema, self.at.at(*keys) if keys else self.at)

    def work(self, amount: int) -> None:
        self.rewriter.work(amount, self.place)

    def negate(self, schema: Any, advice: str) -> Any:
        negated = negate(schema, lambda reference: self.rewriter.resolve(reference, self.place)[0])
        if negated is None:
            raise self.at.fault(f"{self.name} cannot be kept for this schema; {advice}")
        return self.rewriter.rewrite(negated, self.at)

    def require(self, schema: Any) -> None:
        """Add a schema, rewritten, that holds too."""
        if schema not in (True, {}):
            self.out["allOf"] = [*self.out.get("allOf", ()), schema]

    def follow(self, schema: Any) -> Any:
        """The schema that a mere reference means."""
        for _ in range(20):
            if not isinstance(schema, Mapping) or "$ref" not in schema or schema.keys() & ASSERTIONS != {"$ref"}:
                break
            schema, _place = self.rewriter.resolve(schema["$ref"], self.place)
        return schema


def listed(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else list(types)
