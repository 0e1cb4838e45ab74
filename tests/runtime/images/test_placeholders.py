from __future__ import annotations

import pytest

from atom.errors import RequestError
from atom.images.types import Image, PlacedImage, placeholder
from atom.runtime.images.placeholders import check_images, hide_placeholders, row_offsets, without_placeholders

IMAGE = Image(2**62 - 2, b"", ((1, 2, 6),), 3)  # whose ids pass the largest one
IDS = [placeholder(IMAGE.digest, at) for at in range(3)]


def test_an_id_says_which_row_it_stands_for() -> None:
    assert IDS == [-(2**62) + 1, -(2**62), -1]
    assert row_offsets([5, *IDS[:2], 9, IDS[2]], IMAGE).tolist() == [-1, 0, 1, -1, 2]


def test_text_has_no_placeholders() -> None:
    assert hide_placeholders([5, *IDS, 6]) == [5, 0, 0, 0, 6]
    assert without_placeholders([5, *IDS, 6]) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "placed", "message"),
    [
        ([5, *IDS, 6], [], "of images that are not given"),
        ([5, *IDS, 6], [PlacedImage(IMAGE, 1, 3)], "tokens 1 to 3 are not the placeholders"),
        ([5, *IDS[::-1], 6], [PlacedImage(IMAGE, 1, 4)], "are not the placeholders"),
        ([5, 6, 7], [PlacedImage(IMAGE, 0, 3)], "are not the placeholders"),
        ([*IDS, *IDS], [PlacedImage(IMAGE, 3, 6), PlacedImage(IMAGE, 0, 3)], "in the order of the prompt"),
        ([5, *IDS], [PlacedImage(IMAGE, 1, 5)], "in the order of the prompt"),
        ([*IDS, *IDS], [PlacedImage(IMAGE, 3, 6)], "of images that are not given"),
    ],
)
def test_images_that_are_not_the_prompts_are_refused(
    prompt: list[int], placed: list[PlacedImage], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_images(prompt, placed, max_rows=3, max_patches=12)


def test_an_image_that_no_step_encodes_or_no_pool_holds_is_refused() -> None:
    check_images([5, *IDS, 6], [PlacedImage(IMAGE, 1, 4)], max_rows=3, max_patches=12)
    with pytest.raises(RequestError, match=r"takes 3 tokens, more than the 2 that serve\.image_memory holds"):
        check_images([5, *IDS, 6], [PlacedImage(IMAGE, 1, 4)], max_rows=2, max_patches=12)
    with pytest.raises(RequestError, match=r"has 12 patches, more than the 11 that a step encodes"):
        check_images([5, *IDS, 6], [PlacedImage(IMAGE, 1, 4)], max_rows=3, max_patches=11)
    with pytest.raises(RequestError, match="an image takes 3 tokens, which see each other, more than a step's 2"):
        check_images([5, *IDS, 6], [PlacedImage(IMAGE, 1, 4)], max_rows=3, max_patches=12, max_tokens=2)
