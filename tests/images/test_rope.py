from __future__ import annotations

from atom.images.rope import rope_positions
from atom.images.types import Image, PlacedImage

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
