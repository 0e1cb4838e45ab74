"""The search for formats, against all assignments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from atom.assemble.format_costs import Group
from atom.assemble.format_search import PLAIN, FormatSearch, bytes_in, format_in
from atom.checkpoint import SILENT
from atom.graph import Dequantize, Quantize, Recipe, Type, W

INT4, FINE, INT8 = "int4[1, 128]", "int4[1, 32]", "int8[1, *]"
LADDER, LONG = [INT4, INT8, PLAIN], [INT4, FINE, INT8, PLAIN]
COSTS = {
    INT4: [0.11, 0.01, 0.1, 0.04, 0.09, 0.02],
    FINE: [0.05, 0.008, 0.096, 0.039, 0.03, 0.021],  # of the last it is worse, as a rounding may be
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


def size(formats: list[str]) -> int:
    return sum(map(bytes_in, formats, GROUPS))


def assignments(formats: Iterable[str]) -> list[list[str]]:
    return [list(each) for each in itertools.product(formats, repeat=len(GROUPS))]


def search(meter: Meter, groups: list[Group] = GROUPS, ladder: list[str] = LADDER) -> FormatSearch:
    def load(fmt: str, recipes: Mapping[Recipe, Recipe]) -> Any:
        return dict.fromkeys(recipes, fmt)  # in place of its tensor

    return FormatSearch(groups, ladder, load, meter, {}, SILENT)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_kl", [2.0, 0.3, 0.1, 0.02, 0.011])
def test_no_assignment_of_two_formats_within_the_budget_has_fewer_bytes(max_kl: float):
    meter = Meter()
    choice = search(meter).run(max_kl)
    assert choice.kl == kl_of(choice.formats) <= max_kl
    assert size(choice.formats) == min(size(each) for each in assignments((INT4, INT8)) if kl_of(each) <= max_kl)
    again, known = Meter(), choice.costs
    assert search(again).run(max_kl, lambda base: known if base == choice.base else {}) == choice
    assert again.num_measured == meter.num_measured - sum(map(len, known.values())), "kept costs are not measured again"


def test_no_assignment_of_any_formats_has_fewer_bytes_and_no_more_divergence():
    chosen = set[tuple[str, ...]]()
    every = {base: [(kl_of(each), size(each)) for each in assignments(LONG[: LONG.index(base) + 1])] for base in LONG}
    for max_kl in [num / 300 for num in range(1, 300)]:
        choice = search(Meter(), ladder=LONG).run(max_kl)
        assert choice.kl == kl_of(choice.formats) <= max_kl
        assert size(choice.formats) == min(num_bytes for kl, num_bytes in every[choice.base] if kl <= choice.kl)
        within = min(num_bytes for kl, num_bytes in every[choice.base] if kl <= max_kl)
        assert size(choice.formats) - within < bytes_in(choice.base, GROUPS[0]), "no more than one group's step"
        chosen.add(tuple(choice.formats))
    assert len(chosen) > 6


def test_a_choice_has_all_formats_but_the_one_that_is_never_worth_its_bytes():
    choice = search(Meter(), ladder=LONG).run(0.2)
    assert choice.base == INT8 and [*choice.costs] == [INT4, FINE]
    assert {*choice.formats} == {INT4, FINE, INT8} and choice.formats[-1] == INT4


def test_a_group_that_a_format_does_not_pack_takes_the_next(monkeypatch: pytest.MonkeyPatch):
    narrow = Group((Quantize(W("narrow", Type("fp32", (8, 40))), INT8),))
    assert [format_in(fmt, narrow, LADDER) for fmt in LADDER] == [INT8, INT8, PLAIN]
    groups = [narrow, *GROUPS[1:]]
    monkeypatch.setitem(globals(), "GROUPS", groups)
    choice = search(Meter(), groups).run(2.0)
    assert choice.formats == [INT8, *[INT4] * 5] and choice.costs == {}


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
    assert loaded == [(INT4, Dequantize(Quantize(W("w0", Type("fp32", (8, 256))), "int4")))]
