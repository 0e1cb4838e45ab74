"""Text next to images, as a tokenizer encodes it that has tokens for several newlines."""

from __future__ import annotations

import pytest

from atom.images.layout import join

TEXTS = {1: "a", 2: "b", 11: "\n", 12: "\n\n", 13: "\n\n\n"}


def encode(text: str) -> list[int]:
    whole, rest = divmod(len(text), 3)
    return [13] * whole + ([10 + rest] if rest else [])


def decode(ids: list[int]) -> str:
    return "".join(TEXTS[each] for each in ids)


@pytest.mark.parametrize(
    ("before", "after", "joined"),
    [
        ([1, 11], [12, 2], [1, 13, 2]),
        ([1, 12], [12, 11, 2], [1, 13, 12, 2]),
        ([1, 2], [12, 2], [1, 2, 12, 2]),
        ([1, 11], [2], [1, 11, 2]),
        ([1], [1], [1, 1]),
        ([-5, 11], [12, -7], [-5, 13, -7]),
        ([-5], [12], [-5, 12]),
        ([], [12], [12]),
    ],
)
def test_a_run_of_newlines_is_encoded_as_a_whole(before: list[int], after: list[int], joined: list[int]) -> None:
    assert join(before, after, encode, decode) == joined
