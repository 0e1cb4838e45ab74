from __future__ import annotations

from typing import Any

import pytest

from atom.errors import RequestError
from atom.runtime.requests.schemas.references import Place, References

INNER = {"$id": "inner.json", "$defs": {"n": {"const": "inner"}}}
DOCUMENT: dict[str, Any] = {
    "$id": "https://example.org/root.json",
    "$defs": {"n": {"const": "root"}, "a/b": {"const": "slash"}, "list": [{"const": 0}, {"const": 1}], "inner": INNER},
}
ROOT = Place("#", DOCUMENT, "").enter(DOCUMENT)


@pytest.mark.parametrize(
    ("reference", "value", "place"),
    [
        ("#/$defs/n", {"const": "root"}, "https://example.org/root.json#/$defs/n"),
        ("#/$defs/a~1b", {"const": "slash"}, "https://example.org/root.json#/$defs/a~1b"),
        ("#/%24defs/list/1", {"const": 1}, "https://example.org/root.json#/$defs/list/1"),
        ("root.json#/$defs/n", {"const": "root"}, "https://example.org/root.json#/$defs/n"),
        ("inner.json", INNER, "https://example.org/inner.json#"),
        ("https://example.org/inner.json#/$defs/n", {"const": "inner"}, "https://example.org/inner.json#/$defs/n"),
    ],
)
def test_a_reference_means_a_schema_of_the_document(reference: str, value: Any, place: str):
    found, at = References(DOCUMENT).resolve(reference, ROOT)
    assert (found, at.text) == (value, place)


def test_a_reference_is_within_the_nearest_schema_with_an_id():
    within = ROOT.at("$defs", "inner").enter(INNER)
    found, at = References(DOCUMENT).resolve("#/$defs/n", within.at("properties", "a"))
    assert (found, at.text) == ({"const": "inner"}, "inner.json#/$defs/n")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("#/$defs/m", "there is no #/$defs/m"),
        ("#/$defs/list/2", "there is no"),
        ("#/$defs/list/n", "there is no"),
        ("#n", "#n is an anchor; write a path as #/$defs/name"),
        ("other.json#/a", "other.json#/a is in another document, which is not fetched; copy it to $defs"),
        (5, "5 is no reference"),
    ],
)
def test_what_means_nothing_is_refused_where_it_stands(reference: Any, reason: str):
    with pytest.raises(RequestError) as error:
        References(DOCUMENT).resolve(reference, Place("#/properties/a~1b", DOCUMENT, ROOT.base))
    assert str(error.value).startswith(f"structured_outputs: #/properties/a~1b: {reason}")


def test_a_long_place_is_shown_by_its_ends():
    message = str(Place("#", None, "").at(*["name"] * 100).fault("no"))
    assert len(message) < 130 and message.startswith("structured_outputs: #/name/") and message.endswith("/name: no")
