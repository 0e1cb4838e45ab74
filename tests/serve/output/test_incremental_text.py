from __future__ import annotations

import pytest

from atom.serve.output.incremental_text import SPACE, Excerpt, Reading, TextBuffer, partial_marker


def run(reading: Reading[object]) -> object:
    """What a reader returns, or None if it waits for more."""
    try:
        next(reading)
    except StopIteration as end:
        return end.value
    return None


def test_a_reader_waits_for_the_next_character():
    text = TextBuffer()
    reading = text.peek()
    assert run(reading) is None
    text.push("ab")
    assert run(reading) == "a"
    text.at = 2
    text.is_ended = True
    assert run(text.peek()) == ""


def test_a_word_is_waited_for_while_it_may_still_come():
    text = TextBuffer()
    text.push("<a")
    reading = text.starts_with("<abc>")
    assert run(reading) is None
    text.push("b")
    assert run(reading) is None
    text.push("x")
    assert run(reading) is False
    assert run(text.starts_with("<ab")) is True
    text.is_ended = True
    assert run(text.starts_with("<abxyz")) is False


def test_characters_of_a_class_are_read_across_pieces():
    text = TextBuffer()
    text.push(" \n")
    reading = text.read(SPACE)
    assert run(reading) is None
    text.push(" x")
    assert run(reading) == " \n "
    assert text.text[text.at :] == "x"


def test_text_is_given_out_up_to_the_newlines_before_a_marker():
    text, out = TextBuffer(), Excerpt()
    reading = text.move_until(("<a>",), out)
    for piece, given in [("x\n", "x"), ("\ny<", "\n\ny"), ("b\n", "<b"), ("\n<", ""), ("a", "")]:
        text.push(piece)
        assert run(reading) is None
        assert out.take() == given
    text.push(">z")
    assert run(reading) == "<a>"
    assert (text.take(text.at), text.text, out.take()) == ("\n\n<a>", "z", "")
    assert out.take_places() == [(0, 6)], "all but what is in front of the marker"


def test_without_a_marker_all_is_given_out_in_the_end():
    text, out = TextBuffer(), Excerpt()
    text.push("x\n<")
    reading = text.move_until(("<a>",), out)
    assert run(reading) is None
    text.is_ended = True
    assert run(reading) is None
    assert (out.take(), text.text) == ("x\n<", "")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", 0),
        ("ab", 2),
        ("ab<", 2),
        ("a<<", 2),
        ("<a", 0),
        ("<a>", 3),
        ("x<ax", 4),
        ("<a<", 2),
        ("longer text <a", 12),
    ],
)
def test_a_marker_may_begin_where_the_text_ends(text: str, start: int):
    assert partial_marker("<a>", text) == start


def test_a_marker_that_repeats_itself_begins_as_early_as_it_can():
    assert partial_marker("aab", "xaa") == 1
    assert partial_marker("aab", "aaa") == 1


def test_the_first_of_several_markers_counts_and_a_part_of_one_is_waited_for():
    text, out = TextBuffer(), Excerpt()
    reading = text.move_until(("<a>b", "a>"), out)
    text.push("x<a>")
    assert run(reading) is None and out.take() == "x", "it may still be the longer one"
    text.push("c")
    assert run(reading) == "a>"
    assert (out.take(), text.text[text.at :]) == ("<", "c")


def test_a_marker_is_found_from_a_place_on():
    text = TextBuffer()
    text.push("<a>x<a>y<")
    assert text.find_any(("<a>", "<b>")) == (0, "<a>")
    text.at = 1
    assert text.find_any(("<a>", "<b>")) == (4, "<a>")
    text.at = 5
    assert text.find_any(("<a>", "<b>")) == (8, None), "one may begin there"
    text.is_ended = True
    assert text.find_any(("<a>", "<b>")) == (9, None)
