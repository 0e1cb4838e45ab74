"""Resolve `$ref` in a JSON schema, and name places within it.

references = References(document)
references.resolve("#/$defs/unit", Place("#/properties/a", document, ""))      # the schema, and its place
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from atom.errors import RequestError

MAX_SHOWN = 90  # characters of a place in an error


class Place(NamedTuple):
    """Where a schema stands in a document."""

    text: str  # "#/properties/a", after the $id of the schema that it is within
    root: Any  # that schema, or the document: its references are within it
    base: str  # that schema's URI

    def at(self, *keys: str | int) -> Place:
        path = [str(key).replace("~", "~0").replace("/", "~1") for key in keys]
        return self._replace(text="/".join([self.text, *path]))

    def enter(self, schema: Mapping[str, Any]) -> Place:
        """The place within a schema here, which may have an $id."""
        id = schema.get("$id")
        if not isinstance(id, str) or id.startswith("#"):
            return self
        return Place(f"{id}#", schema, urljoin(self.base, id))

    def fault(self, reason: str) -> RequestError:
        text, half = self.text, MAX_SHOWN // 2
        shown = text if len(text) <= MAX_SHOWN else f"{text[:half]}…{text[-half:]}"
        return RequestError(f"structured_outputs: {shown}: {reason}")


class References:
    def __init__(self, document: Any) -> None:
        self._roots = dict(_find_ids(document, "")) | {"": document}

    def resolve(self, reference: Any, place: Place) -> tuple[Any, Place]:
        """The schema that a reference means, and its place. RequestError if there is none."""
        if not isinstance(reference, str):
            raise place.fault(f"{reference!r} is no reference; write a path as #/$defs/name")
        uri, fragment = urldefrag(reference)
        uri = urljoin(place.base, uri) if uri else place.base
        path = unquote(fragment)
        if uri not in self._roots:
            raise place.fault(f"{reference} is in another document, which is not fetched; copy it to $defs")
        if path and not path.startswith("/"):
            raise place.fault(f"{reference} is an anchor; write a path as #/$defs/name")
        root = found = self._roots[uri]
        for key in path.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (LookupError, ValueError, TypeError):
                raise place.fault(f"there is no {reference}") from None
        start = place.text.partition("#")[0] if uri == place.base else uri
        return found, Place(f"{start}#{path}", root, uri)


def _find_ids(value: Any, base: str) -> Iterator[tuple[str, Any]]:
    """The URI of each schema with an $id, and the schema."""
    if isinstance(value, Mapping):
        place = Place("", None, base).enter(value)
        if place.base != base:
            yield place.base, value
        for each in value.values():
            yield from _find_ids(each, place.base)
    elif isinstance(value, list):
        for each in value:
            yield from _find_ids(each, base)
