"""The search for formats, against all assignments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from atom.assemble.format_costs import Group
from atom.assemble.format_search import PLAIN, FormatSearch, bytes_in, format_in
from atom.checkpoint import SILENT
from atom.graph import Dequantize, Quantize, Recipe, Type, W

INT4, FINE, INT8 = "int4[1, 128]", "int4[1, 32]", "int8[1, *]"
LADDER = [INT4, INT8, PLAIN]
COSTS = {
    INT4: [0.3, 0.01, 0.2, 0.04, 0.1, 0.02],
    FINE: [0.2, 0.008, 0.1, 0.03, 0.1, 0.02],
    INT8: [0.002, 0.001, 0.001, 0.003, 0.001, 0.002],
    PLAIN: [0.0] * 6,
}
GROUPS = [Group((Quantize(W(f"w{place}", Type("fp32", (8, 256))), INT8),)) for place in range(6)]


class Meter:
    """Of whose costs the whole is somewhat more than the sum."""

    def __init__(self) -> None:
        self.num_measured = 0

    def advance(self, group: Group, tensors: Mapping[Recipe, Any]) -> None:
        pass

    def rewind(self) -> None:
        pass

    def measure(self, tensors: Mapping[Recipe, Any]) -> float:
        self.num_measured += 1
        return kl_of([tensors[group.weights[0]] for group in GROUPS])


def kl_of(formats: list[str]) -> float:
    total = sum(COSTS[fmt][place] for place, fmt in enumerate(formats))
    return total * (1 + total)


def search(meter: Meter, groups: list[Group] = GROUPS) -> FormatSearch:
    def load(fmt: str, recipes: Mapping[Recipe, Recipe]) -> Any:
        return dict.fromkeys(recipes, fmt)  # in place of its tensor

    return FormatSearch(groups, LADDER, load, meter, {}, SILENT)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_kl", [2.0, 0.3, 0.1, 0.02, 0.011, 0.005, 0.0001])
def test_no_assignment_of_two_formats_within_the_budget_has_fewer_bytes(max_kl: float):
    meter = Meter()
    choice = search(meter).run(max_kl)
    assert choice.kl == kl_of(choice.formats) <= max_kl

    def size(formats: list[str]) -> int:
        return sum(map(bytes_in, formats, GROUPS))

    pair = {choice.smaller, choice.base}
    every = [list(formats) for formats in itertools.product(pair, repeat=len(GROUPS))]
    assert size(choice.formats) == min(size(formats) for formats in every if kl_of(formats) <= max_kl)
    again, known = Meter(), choice.costs
    assert search(again).run(max_kl, lambda fmt: known if fmt == choice.smaller else {}) == choice
    assert again.num_measured == meter.num_measured - len(known), "costs that are kept are not measured again"


def test_a_group_that_a_format_does_not_pack_takes_the_next(monkeypatch: pytest.MonkeyPatch):
    narrow = Group((Quantize(W("narrow", Type("fp32", (8, 40))), INT8),))
    assert [format_in(fmt, narrow, LADDER) for fmt in LADDER] == [INT8, INT8, PLAIN]
    groups = [narrow, *GROUPS[1:]]
    monkeypatch.setitem(globals(), "GROUPS", groups)
    choice = search(Meter(), groups).run(2.0)
    assert choice.formats == [INT8, *[INT4] * 5] and choice.costs == {}


def test_formats_below_the_first_that_is_beyond_the_budget_are_never_loaded():
    """To calibrate weights to a format takes longer than to measure it."""
    loaded = set[str]()

    def load(fmt: str, recipes: Mapping[Recipe, Recipe]) -> Any:
        loaded.add(fmt)
        return dict.fromkeys(recipes, fmt)

    ladder = [INT4, FINE, INT8, PLAIN]
    choice = FormatSearch(GROUPS, ladder, load, Meter(), {}, SILENT).run(0.02)  # type: ignore[arg-type]
    assert (choice.base, choice.smaller) == (INT8, FINE) and loaded == {INT8, FINE}


def test_bytes_are_those_of_values_and_scales():
    """Scales of groups of int4 are in fp16, of rows of int8 in fp32."""
    assert [bytes_in(fmt, GROUPS[0]) for fmt in LADDER] == [8 * (128 + 2 * 2), 8 * (256 + 4), 8 * 256 * 2]


def test_what_is_loaded_has_the_numbers_of_the_format():
    loaded: list[tuple[str, Recipe]] = []

    def load(fmt: str, recipes: Mapping[Recipe, Recipe]) -> Any:
        loaded.extend((fmt, recipe) for recipe in recipes.values())
        return {at: torch.zeros(1) for at in recipes}

    class Zero(Meter):
        def measure(self, tensors: Mapping[Recipe, Any]) -> float:
            return 0.0

    FormatSearch(GROUPS[:1], LADDER, load, Zero(), {}, SILENT).run(0.1)  # type: ignore[arg-type]
    weight = W("w0", Type("fp32", (8, 256)))
    assert loaded == [(INT8, Dequantize(Quantize(weight, INT8))), (INT4, Dequantize(Quantize(weight, "int4")))]
