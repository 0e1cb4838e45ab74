"""Image, PlacedImage: an image for its encoder, and its place in a prompt.

    image = Image(digest, pixels, grids=((1, 28, 40),), num_rows=280)
    prompt = [5, *(placeholder(image.digest, row) for row in range(image.num_rows)), 6]
    placed = PlacedImage(image, start=1, stop=281)

A tower, the vision transformer, turns patches of pixels into rows. Each row takes the place of a token, its
placeholder.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

DIGEST_MASK = (1 << 62) - 1
OF_VIDEO = 1 << 61  # the bit of digests that those of a video's images have, and no other
Grid = tuple[int, int, int]  # frames, height and width of a segment, in patches


class Image(msgspec.Struct, array_like=True, frozen=True):
    """An image as an encoder takes it: pixels by patch."""

    digest: int  # 62 bits, of pixels, grids and the numbers of the processor: equal digests are taken as equal images
    pixels: bytes  # u8[P, F] of P patches, in the order in which those that become one row come together
    grids: tuple[Grid, ...]  # of each segment, which attends to itself
    num_rows: int  # that it becomes, as many as it has placeholders
    tiles: tuple[int, int] = (1, 1)  # lines and columns of tiles, whose grids come first, line by line
    in_video: tuple[int, int] = (0, 0)  # its number among a video's images, and its position in time after the first

    @property
    def num_patches(self) -> int:
        return sum(frames * height * width for frames, height, width in self.grids)


class PlacedImage(NamedTuple):
    """An image and its place among a prompt's tokens."""

    image: Image
    start: int  # its first placeholder
    stop: int  # after its last one; tokens between them that are none are ordinary ids


def placeholder(digest: int, row: int) -> int:
    """The negative token id that stands for a row of an image."""
    return -1 - ((digest + row) & DIGEST_MASK)


def is_of_video(token: int) -> bool:
    """Whether a placeholder stands for a row of a video's image."""
    return bool(-1 - token & OF_VIDEO)


def placeholders_of(image: Image) -> list[int]:
    """The placeholders of all rows of an image."""
    return [placeholder(image.digest, row) for row in range(image.num_rows)]
