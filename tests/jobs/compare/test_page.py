"""The page of `job=compare`: its plot, its tables, and that a checkpoint's names stay text."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from atom.jobs.compare.page import make_page

EVIL = "<script>alert('1')</script>"
CALL = 'm_1 = cpp.linear(h, W("up", fp32[80, 48]))'


def line(number: int, text: str) -> dict[str, Any]:
    return {"line": number, "text": text, "layer": 1, "kernel": "cpp", "passes": ["fuse_gate_up"]}


def result(errors: list[float], findings: int = 0, *, text: str = CALL) -> dict[str, Any]:
    """A comparison of a model with a layer for each error but the first and the last."""
    places = ["embedding", *range(len(errors) - 2), "head"]
    finding = {
        **line(31, text),
        **{
            "value": "m_1",
            "program": "body",
            "error": 3.0,
            "allowed": 1e-4,
            "measure": "token",
            "prompt": 3,
            "step": 0,
            "token": 7,
        },
        "since": [line(30, "w, ids = router(h)"), line(30, "w, ids = router(h)"), line(31, text)],
    }
    return {
        "agree": not findings,
        "sides": {"a": "level=0", "b": text},
        "judged": "b",
        "synchronized": True,
        "values": 53,
        "lines": 40,
        "findings": [finding] * findings,
        "layers": [
            {"layer": place, "values": 3, "value": "m", "line": 9, "error": error, "allowed": 1e-4, "measure": "token"}
            for place, error in zip(places, errors, strict=True)
        ],
        "choices": [],
        "outputs": {"num": 9, "error": 0.1, "mean_error": 0.01, "agreement": 1.0, "kl": 0.0, "max_kl": 0.0},
        "prompts": [{"tokens": 5, "answer": [1, 2], "expected": [1, 2], "difference": None}],
    }


def plot_of(page: str) -> ElementTree.Element:
    (drawn,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    return ElementTree.fromstring(drawn)


def points_of(page: str) -> list[tuple[float, float, str]]:
    """x, y and color of each layer's point."""
    circles = list(plot_of(page).iter("circle"))
    return [(float(each.attrib["cx"]), float(each.attrib["cy"]), each.attrib["fill"]) for each in circles]


@pytest.mark.parametrize("num", [1, 3, 30])
def test_the_plot_has_a_point_for_each_layer_and_those_around_them(num: int):
    page = make_page(result([0.0, *[1e-6] * num, 1e-7]))
    points = points_of(page)
    assert len(points) == num + 2
    assert sorted({x for x, _, _ in points}) == [x for x, _, _ in points], "from left to right"
    labels = [each.text for each in plot_of(page).iter("text")]
    assert {"embedding", "layer"} <= set(labels) and len(labels) < 28, "not all of many layers are labelled"


def test_a_layer_beyond_the_bound_stands_above_its_line_in_another_color():
    page = make_page(result([0.0, 1e-6, 3.0, 1e-6, 0.0], findings=1))
    points = points_of(page)
    assert [color for _, _, color in points].count("var(--bad)") == 1 and points[2][2] == "var(--bad)"
    dashed, _ = plot_of(page).iter("polyline")
    bound = {float(each.partition(",")[2]) for each in dashed.attrib["points"].split()}
    assert points[2][1] < min(bound) and all(y > max(bound) for at, (_, y, _) in enumerate(points) if at != 2)


def test_zeros_and_infinities_have_places_of_their_own():
    page = make_page(result([0.0, 1e-4, math.inf, 1e-2, 0.0], findings=1))
    texts = [each for each in plot_of(page).iter("text") if each.attrib["text-anchor"] == "end"]
    labels = {each.text: float(each.attrib["y"]) - 4 for each in texts}
    (_, zero, _), (_, allowed, color), (_, infinite, _), *_ = points_of(page)
    assert labels["0"] == pytest.approx(zero, abs=0.1) and labels["∞"] == pytest.approx(infinite, abs=0.1)
    assert labels["1e-4"] == pytest.approx(allowed, abs=0.1) and color == "var(--c0)", "the bound itself is within it"
    assert infinite < labels["1e-2"] < allowed < zero


@pytest.mark.parametrize("errors", [[0.0, 0.0, 0.0], [math.inf, math.inf, math.inf]])
def test_nothing_but_zeros_or_infinities_is_a_level_curve(errors: list[float]):
    assert len({y for _, y, _ in points_of(make_page(result(errors)))}) == 1


def test_what_a_checkpoint_names_stays_text():
    page = make_page(result([0.0, 3.0, 0.0], findings=1, text=EVIL))
    assert EVIL not in page and page.count("&lt;script&gt;") == 2, "as side b, and as the first call"


def test_the_first_finding_names_its_line_and_each_call_before_it_once():
    page = make_page(result([0.0, 3.0, 0.0], findings=1))
    assert "body&#x27;s m_1 of layer 1, kernel cpp: off by 3 at token 7 of prompt 3, allowed 0.0001" in page
    assert page.count("  30  w, ids = router(h)") == 1 and "fuse_gate_up" in page
    assert "The two sides part" in page


def test_many_findings_are_counted_and_not_all_listed():
    page = make_page(result([0.0, 3.0, 0.0], findings=60))
    assert page.count("<td>token 7 of prompt 3</td>") == 50 and "and 10 more" in page


def test_sides_that_agree_have_a_plot_and_no_findings():
    page = make_page(result([0.0, 1e-6, 0.0]))
    assert "The two sides agree" in page and "Where they part" not in page and "<svg" in page
