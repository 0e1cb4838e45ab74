"""The parts of a prompt, found by marks in its texts."""

from __future__ import annotations

import pytest

from atom.errors import RequestError
from atom.serve.prompt_parts import MARK, Marker, Part, find_parts, name_of, ttl_of

TEXTS = {"system": "Be brief. ", "messages.0": "\n Hello", "messages.1": "4 rows"}


def render(marker: Marker) -> str:
    """A template that ends each text with a bar; the last one is a tool's result."""
    names = list(TEXTS)
    texts = [marker.mark(TEXTS[name], name, is_result=name == names[-1]) for name in names]
    texts[1] = marker.mark_start(texts[1], "tools")
    return "|".join(texts) + "|"


TEXT = "Be brief. |\n Hello|4 rows|"
FOUND = [Part("system", 9), Part("tools", 13), Part("messages.0", 18), Part("messages.1", 25)]


def test_each_text_ends_before_its_white_space_and_the_first_turn_begins_after_it():
    assert find_parts(render, TEXT) == FOUND
    assert [name_of(FOUND, place) for place in (0, 8, 9, 13, 24, 25)] == [
        "system", "system", "tools", "messages.0", "messages.1", None,
    ]  # fmt: skip


def test_results_of_tools_have_no_mark_if_a_template_writes_them_otherwise():
    def escape(marker: Marker) -> str:
        *others, result, end = render(marker).split("|")
        return "|".join([*others, result.encode("ascii", "backslashreplace").decode(), end])

    assert find_parts(escape, TEXT) == FOUND[:-1]


def test_a_template_that_changes_with_the_marks_has_no_parts():
    assert find_parts(lambda marker: f"{len(render(marker))}|{render(marker)}", f"{len(TEXT)}|{TEXT}") == []


def test_a_template_that_refuses_the_marks_has_no_parts():
    def refuse(marker: Marker) -> str:
        if MARK.search(render(marker)):
            raise RequestError("no")
        return TEXT

    assert find_parts(refuse, TEXT) == []


def test_blank_texts_have_no_mark():
    marker = Marker()
    assert marker.mark(" \n", "a") == marker.mark_start(" \n", "b") == " \n" and marker.names == []


@pytest.mark.parametrize(
    ("control", "seconds"),
    [
        ({"type": "ephemeral"}, 300.0),
        ({"type": "ephemeral", "ttl": None}, 300.0),
        ({"type": "ephemeral", "ttl": "1h"}, 3600.0),
        ({"type": "ephemeral", "ttl": "2h"}, None),
        ({"type": "ephemeral", "ttl": ["1h"]}, None),
        ({"ttl": "1h"}, None),
        (None, None),
    ],
)
def test_the_forms_of_cache_control(control: object, seconds: float | None):
    assert ttl_of(control) == seconds
