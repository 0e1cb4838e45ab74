"""Put the placeholders of images into tokenized prompts.

tokens, placed = place_images([1, 9, 2], [image], token=9)      # [1, -17, -18, …, 2], (PlacedImage(image, 1, 1 + n),)
show_placeholders(tokens, token=9)                              # [1, 9, 9, …, 2]
"""

from __future__ import annotations

from collections.abc import Sequence

from atom.errors import RequestError
from atom.images.types import Image, PlacedImage, placeholder


def show_placeholders(tokens: Sequence[int], token: int | None) -> list[int]:
    """A prompt's tokens with the image token in place of each placeholder. token: None: the prompt has none"""
    return [each if each >= 0 or token is None else token for each in tokens]


def place_images(
    tokens: Sequence[int], images: Sequence[Image], token: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt's tokens with placeholders for each image in place of one image token, in order.

    A prompt that has as many image tokens as the images have rows, as transformers' processors write them, gets the
    placeholders in their place. RequestError if the prompt has more or fewer image tokens than images.

    token: the id of the image token
    """
    count, num_rows = sum(each == token for each in tokens), sum(image.num_rows for image in images)
    if count not in (len(images), num_rows):
        raise RequestError(
            f"the prompt has {count} image tokens (id {token}) and {len(images)} images; give one for each"
        )
    made: list[int] = []
    placed: list[PlacedImage] = []
    at = 0
    for image in images:
        start = tokens.index(token, at)
        stop = start + (1 if count == len(images) else image.num_rows)
        if any(each != token for each in tokens[start:stop]):
            raise RequestError(
                f"image {len(placed)} takes {image.num_rows} tokens; the prompt has fewer in a row for it"
            )
        made += tokens[at:start]
        first, at = len(made), stop
        made += (placeholder(image.digest, row) for row in range(image.num_rows))
        placed.append(PlacedImage(image, first, len(made)))
    return [*made, *tokens[at:]], tuple(placed)
