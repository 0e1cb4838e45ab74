from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
import vision

from atom.images.rope import rope_positions
from atom.images.types import Image, PlacedImage

GRIDS = ((1, 6, 4), (1, 2, 10))
SIZES = [6, 5]  # tokens of each
TALL, WIDE = Image(1, b"", ((1, 6, 4),), 6), Image(2, b"", ((1, 2, 6),), 3)


def test_text_counts_on_from_the_largest_position_of_an_image() -> None:
    """By hand: 2 tokens of text, 3 rows of 2, a token, 1 row of 3, a token."""
    positions, delta = rope_positions(13, [PlacedImage(TALL, 2, 8), PlacedImage(WIDE, 9, 12)], merge=2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 9],
        [0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 6, 9],
        [0, 1, 2, 3, 2, 3, 2, 3, 5, 6, 7, 8, 9],
    ]
    assert delta == 10 - 13, "the next token, 13, is at 10"


def test_text_has_its_own_positions() -> None:
    positions, delta = rope_positions(3, [], merge=2)
    assert (positions.tolist(), delta) == ([[0, 1, 2]] * 3, 0)


def test_an_image_may_follow_another_at_once() -> None:
    """By hand, since transformers takes a run of image tokens for one image."""
    positions, delta = rope_positions(9, [PlacedImage(TALL, 0, 6), PlacedImage(WIDE, 6, 9)], merge=2)
    assert positions.tolist() == [
        [0, 0, 0, 0, 0, 0, 3, 3, 3],
        [0, 0, 1, 1, 2, 2, 3, 3, 3],
        [0, 1, 0, 1, 0, 1, 3, 4, 5],
    ]
    assert delta == 6 - 9


@pytest.mark.parametrize("times", [(0, 1, 2), (0, 2, 5), (0, 0, 1), (0, 50, 100)])
@pytest.mark.parametrize("grid", [(3, 4, 6), (3, 2, 2)])
def test_images_of_a_video_begin_together_each_at_its_time(grid: tuple[int, int, int], times: tuple[int, ...]) -> None:
    """Rows as transformers has them; text counts on from the largest of all positions, as in the models' first code."""
    model, size = model_of("Qwen2_5_VL").model, grid[1] * grid[2] // 4
    interval = {(0, 1, 2): 1.0, (0, 2, 5): 2.5, (0, 0, 1): 0.5, (0, 50, 100): 50.0}[times]
    rows = model.get_vision_position_ids(2, torch.tensor(grid), 1, 2, interval)
    after = int(rows.max()) + 1
    again = rows + after + 1 - 2  # the same video after a token
    parts = torch.arange(2), rows, torch.tensor([after]), again, torch.tensor([int(again.max()) + 1])
    expected = torch.cat([part.expand(3, -1) for part in parts], dim=1)
    frames = [
        PlacedImage(Image(0, b"", ((1, *grid[1:]),), size, in_video=place), begin + size * at, begin + size * (at + 1))
        for begin in (2, 3 + 3 * size)
        for at, place in enumerate(zip(range(3), times, strict=True))
    ]
    num_tokens = 4 + 6 * size
    positions, delta = rope_positions(num_tokens, frames, merge=2)
    assert positions.tolist() == expected.tolist()
    assert delta == int(expected.max()) + 1 - num_tokens


def model_of(name: str) -> Any:
    """A model of transformers that has its configuration only."""
    made = getattr(transformers, f"{name}ForConditionalGeneration")
    body: Any = getattr(transformers, f"{name}Model")
    model = body.__new__(body)
    torch.nn.Module.__init__(model)
    fields, tower = vision.MODELS[name]
    model.config = made.config_class(
        text_config={**tiny.SIZES, **fields}, vision_config=tower, image_token_id=vision.IMAGE
    )
    return SimpleNamespace(model=model)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5"])
@pytest.mark.parametrize("texts", [(0, 1, 0), (0, 3, 2), (2, 1, 4), (2, 3, 0)])
def test_positions_are_those_of_transformers(texts: tuple[int, int, int], name: str) -> None:
    """texts: tokens before, between and after two images, of which one may be first or last"""
    begins = [texts[0], texts[0] + SIZES[0] + texts[1]]
    tokens = [5] * (sum(texts) + sum(SIZES))
    placed = [
        PlacedImage(Image(0, b"", (grid,), size), begin, begin + size)
        for grid, size, begin in zip(GRIDS, SIZES, begins, strict=True)
    ]
    for each in placed:
        tokens[each.start : each.stop] = [vision.IMAGE] * each.image.num_rows
    expected = vision.rope_positions(model_of(name), vision.Prompt(tokens, GRIDS, torch.empty(0), 2))
    positions, delta = rope_positions(len(tokens), placed, merge=2)
    assert positions.T.tolist() == expected.tolist()
    assert delta == int(expected.max()) + 1 - len(tokens)
