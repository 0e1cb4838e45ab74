from __future__ import annotations

import numpy as np
import pytest
import torch

from atom.config import SamplingParams
from atom.runtime.batch_shape import Layout
from atom.runtime.types import Plan, Row, Sequence

PADDING = 9  # the slot that is nobody's


def sequence(slot: int, num_prompt: int, num_given: int | None = None, output: list[int] | None = None) -> Sequence:
    prompt = [100 * slot + place for place in range(num_prompt)]
    given = num_prompt if num_given is None else num_given
    return Sequence(f"s{slot}", prompt, SamplingParams(), slot=slot, num_given=given, output=output or [])


def mixed() -> Plan:
    """A decode, the end of a prompt, and a chunk of one that goes on: 1 + 3 + 2 tokens, 2 rows that sample."""
    rows = [
        Row(sequence(4, 5, output=[7]), 5, 1, True),
        Row(sequence(1, 8), 5, 3, True),
        Row(sequence(2, 9), 4, 2, False),
    ]
    return Plan(rows, 1)


def parts(layout: Layout, packed: np.ndarray) -> dict[str, list[int]]:
    names = ("slots", "starts", "ends", "given", "row_of")
    told = dict(zip(names, layout.rows(torch.from_numpy(packed)), strict=True))
    told["sampled"], told["places"] = layout.samples(torch.from_numpy(packed))
    return {name: part.tolist() for name, part in told.items()}


def test_a_plan_is_laid_out_row_by_row() -> None:
    layout = Layout.of(mixed())
    assert layout == Layout(num_tokens=6, num_rows=3, num_samples=2, num_decodes=1)
    packed = layout.pack(mixed(), PADDING)
    assert packed.dtype == np.int32
    assert parts(layout, packed) == {
        "slots": [4, 1, 2],
        "starts": [0, 1, 4, 6],
        "ends": [0, 8, 6],
        "given": [-1, 105, 106, 107, 204, 205],
        "row_of": [0, 1, 1, 1, 2, 2],
        "sampled": [4, 1],
        "places": [0, 3],
    }


def test_what_a_larger_layout_has_left_is_padding_of_nobody_s_slot_in_rows_without_tokens() -> None:
    layout = Layout(num_tokens=9, num_rows=5, num_samples=4, num_decodes=1)
    assert parts(layout, layout.pack(mixed(), PADDING)) == {
        "slots": [4, 1, 2, 9, 9],
        "starts": [0, 1, 4, 6, 6, 6],
        "ends": [0, 8, 6, 0, 0],
        "given": [-1, 105, 106, 107, 204, 205, 0, 0, 0],
        "row_of": [0, 1, 1, 1, 2, 2, 3, 3, 3],
        "sampled": [4, 1, 9, 9],
        "places": [0, 3, 0, 0],
    }


def test_decodes_that_a_larger_layout_has_left_have_tokens_of_nobody_s_slot_before_those_of_prompts() -> None:
    layout = Layout(num_tokens=10, num_rows=6, num_samples=4, num_decodes=3)
    assert parts(layout, layout.pack(mixed(), PADDING)) == {
        "slots": [4, 9, 9, 1, 2, 9],
        "starts": [0, 1, 2, 3, 6, 8, 8],
        "ends": [0, 0, 0, 8, 6, 0],
        "given": [-1, 0, 0, 105, 106, 107, 204, 205, 0, 0],
        "row_of": [0, 1, 2, 3, 3, 3, 4, 4, 5, 5],
        "sampled": [4, 1, 9, 9],
        "places": [0, 5, 0, 0],
    }


def test_decodes_alone_leave_what_is_behind_them_to_padding() -> None:
    layout = Layout(num_tokens=5, num_rows=3, num_samples=3, num_decodes=2)
    assert parts(layout, layout.pack(Plan(mixed().rows[:1], 1), PADDING)) == {
        "slots": [4, 9, 9],
        "starts": [0, 1, 2, 2],
        "ends": [0, 0, 0],
        "given": [-1, 0, 0, 0, 0],
        "row_of": [0, 1, 2, 2, 2],
        "sampled": [4, 9, 9],
        "places": [0, 0, 0],
    }


def test_a_layout_of_padding_alone_gives_what_is_behind_its_decodes_to_its_next_row() -> None:
    layout = Layout(num_tokens=3, num_rows=3, num_samples=1, num_decodes=1)
    assert parts(layout, layout.padding(PADDING)) == {
        "slots": [9, 9, 9],
        "starts": [0, 1, 1, 1],
        "ends": [0, 0, 0],
        "given": [0, 0, 0],
        "row_of": [0, 1, 1],
        "sampled": [9],
        "places": [0],
    }


def test_a_sequence_that_was_preempted_gives_its_own_output_as_a_prompt() -> None:
    plan = Plan([Row(sequence(3, 4, num_given=6, output=[7, 8]), 3, 3, True)], 0)
    layout = Layout.of(plan)
    assert parts(layout, layout.pack(plan, PADDING)) == {
        "slots": [3],
        "starts": [0, 3],
        "ends": [6],
        "given": [303, 7, 8],
        "row_of": [0, 0, 0],
        "sampled": [3],
        "places": [2],
    }


def test_the_last_given_token_is_given_though_its_row_is_a_decode() -> None:
    plan = Plan([Row(sequence(0, 1), 0, 1, True), Row(sequence(1, 7), 6, 1, True)], 2)
    layout = Layout.of(plan)
    told = parts(layout, layout.pack(plan, PADDING))
    assert (told["given"], told["ends"]) == ([0, 106], [1, 7])


@pytest.mark.parametrize(
    ("larger", "is_held"),
    [
        (Layout(7, 4, 2, 2), True),  # itself
        (Layout(7, 5, 2, 2), True),
        (Layout(8, 5, 2, 2), True),
        (Layout(8, 4, 2, 2), False),  # no row for the token of padding
        (Layout(6, 5, 2, 2), False),
        (Layout(7, 3, 2, 2), False),
        (Layout(7, 4, 1, 2), False),
        (Layout(8, 5, 2, 3), True),
        (Layout(7, 5, 2, 3), False),  # four tokens behind three decodes
        (Layout(8, 4, 2, 3), False),
        (Layout(9, 9, 9, 1), False),  # two decodes
    ],
)
def test_a_layout_holds_what_fits_with_a_row_for_its_padding(larger: Layout, is_held: bool) -> None:
    assert larger.holds(Layout(7, 4, 2, 2)) == is_held
