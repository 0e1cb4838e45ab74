from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest

from atom.measurement import page
from atom.measurement.page import Bar, Box, Dot

EVIL = "<script>alert('1')</script> & \"2\""


def parsed(part: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{part}</div>")


@pytest.mark.parametrize(
    "part",
    [
        page.table([("a", EVIL), ("1", EVIL)]),
        page.fold(EVIL, page.code(EVIL)),
        page.bars([Bar(EVIL, 1.0, EVIL, 0, 0.5)], limit=2.0),
        page.timeline([Box(EVIL, 0.0, 0.5, 0, 0)], 1.0),
        page.curves({EVIL: [1.0], "b": [2.0]}, "ms"),
        page.frontier([Dot(1.0, 2.0, EVIL)], ("x", "y"), least=0.5),
        page.legend([EVIL]).replace("&nbsp;", " "),
        page.notes([EVIL]) + page.heading(EVIL) + page.paragraph(EVIL),
    ],
)
def test_text_stays_text_and_every_part_is_well_formed(part: str):
    texts = "".join(parsed(part).itertext())
    assert EVIL[:20] in texts and not any(each.tag == "script" for each in parsed(part).iter())


def test_the_line_of_a_limit_strikes_no_text_out():
    drawn = parsed(page.bars([Bar("left for KV", 95.0, "95.00 GiB", 1), Bar("weights", 5.0, "5.00 GiB")], limit=100.0))
    (line,) = (each for each in drawn.iter() if each.tag.endswith("line"))
    notes = [each for each in drawn.iter() if each.tag.endswith("text") and each.get("class") == "quiet"]
    near, far = (float(each.get("x")) - float(line.get("x1")) for each in notes)
    assert near > 0 and far < -100


def test_bars_and_marks_share_one_scale():
    shown = [Bar("a", 1.0, "one"), Bar("b", 2.0, "two", mark_at=4.0)]
    drawn = parsed(page.bars(shown))
    first, second = (float(each.attrib["width"]) for each in drawn.iter("rect"))
    (mark,) = drawn.iter("line")
    assert second == pytest.approx(2 * first, abs=0.1)
    assert float(mark.attrib["x1"]) - page.LABEL == pytest.approx(4 * first, abs=0.2)
    texts = {each.text: float(each.attrib["x"]) for each in drawn.iter("text")}
    assert texts["two"] < page.WIDTH, "it is not cut off"


def test_the_text_of_the_longest_bar_has_room():
    text = "11,696.250 ms, 59.7%; 65% of its limit"
    drawn = parsed(page.bars([Bar("matrix", 11.7, text, mark_at=7.6)]))
    (note,) = (each for each in drawn.iter("text") if each.text == text)
    assert float(note.attrib["x"]) + 7.5 * len(text) < page.WIDTH


def test_each_text_of_a_bar_stands_at_its_own_end():
    bars = [
        Bar("far", 10.0, "10, 10% of the limit", mark_at=100.0, mark="limit 100"),
        Bar("near", 90.0, "90, 90% of the limit", mark_at=100.0, mark="limit 100"),
        Bar("short", 1.0, "1, 33% of the limit", mark_at=3.0, mark="limit 3"),
        Bar("over", 50.0, "50", mark_at=40.0),
    ]
    drawn = parsed(page.bars(bars))
    ends = [page.LABEL + float(each.get("width")) for each in drawn.iter("rect")]
    marks = [float(each.get("x1")) for each in drawn.iter("line")]
    texts = {each.text: each for each in drawn.iter("text")}
    at = {text: float(each.get("x")) for text, each in texts.items()}
    assert at["10, 10% of the limit"] == pytest.approx(ends[0] + 8, abs=0.2)
    assert texts["90, 90% of the limit"].get("text-anchor") == "end" and at["90, 90% of the limit"] < ends[1]
    assert at["limit 100"] == pytest.approx(marks[0] + 8, abs=0.2)
    assert at["1, 33% of the limit, limit 3"] > marks[2], "there is no room ahead of the mark: it says which is which"
    assert at["50"] > ends[3]


def test_words_and_numbers_are_never_broken():
    assert "anywhere" not in page.PAGE


def test_a_box_is_where_and_as_long_as_it_ran():
    drawn = parsed(page.timeline([Box("a", 0.2, 0.7, 1, 2), Box("short", 0.1, 0.1 + 1e-9, 0, 0)], 1.0))
    (box,) = drawn.iter("rect")
    assert (float(box.attrib["x"]), float(box.attrib["width"])) == (0.2 * page.WIDTH, 0.5 * page.WIDTH)
    assert box.find("title").text == "a: 500,000.0 µs"


def test_a_curve_is_the_share_of_values_up_to_each():
    (line,) = parsed(page.curves({"p": [4.0, 1.0, 2.0, 3.0]}, "ms")).iter("polyline")
    points = [tuple(map(float, each.split(","))) for each in line.attrib["points"].split()]
    (left, bottom), *rest = points
    heights = [(bottom - y) / (bottom - rest[-1][1]) for _, y in rest]
    assert heights == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.01)
    steps = [after[0] - before[0] for before, after in itertools.pairwise(rest)]
    assert rest[0][0] == left and steps == pytest.approx([steps[0]] * 3, abs=0.2)


@pytest.mark.parametrize(
    ("top", "expected"), [(10, [0, 2, 4, 6, 8, 10]), (0.07, [0, 0.02, 0.04, 0.06]), (1234, [0, 500, 1000])]
)
def test_ticks_are_round_numbers(top: float, expected: list[float]):
    assert page.ticks(top) == pytest.approx(expected)


def test_a_page_needs_nothing_else():
    text = page.write_page(EVIL, [page.heading("x")])
    assert not re.search(r"<script|src=|href=|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_a_frontier_joins_the_points_that_none_beats():
    dots = [Dot(1.0, 9.0, "a"), Dot(2.0, 4.0, "beaten"), Dot(3.0, 5.0, "b"), Dot(8.0, 1.0, "c"), Dot(7.0, 1.0, "too")]
    assert [each.name for each in page.unbeaten(dots)] == ["a", "b", "c"]
    drawn = parsed(page.frontier(dots, ("x", "y"), least=2.5))
    (line,) = drawn.iter("polyline")
    joined = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert [x for x, _ in joined] == sorted(x for x, _ in joined) and len(joined) == 3
    assert len(list(drawn.iter("circle"))) == 5
    names = [each.text for each in drawn.iter("text")]
    assert {"a", "b", "c"} <= {*names} and "beaten" not in names
