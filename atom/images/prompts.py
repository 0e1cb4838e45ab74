"""Put the placeholders of images into tokenized prompts.

tokens, placed = place_images([1, 9, 2], [image], token=9)      # [1, -17, -18, …, 2], (PlacedImage(image, 1, 1 + n),)
show_placeholders(tokens, token=9)                              # [1, 9, 9, …, 2]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atom.errors import RequestError
from atom.images.types import Image, PlacedImage, placeholder


def show_placeholders(tokens: Sequence[int], token: int | None) -> list[int]:
    """A prompt's tokens with the image token in place of each placeholder. token: None: the prompt has none"""
    return [each if each >= 0 or token is None else token for each in tokens]


def place_images(
    tokens: Sequence[int], images: Sequence[Image], token: int, ends: tuple[int, int] | None = None
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt's tokens with placeholders for each image in place of one image token, in order.

    A prompt that has what transformers' processors write of the images gets the placeholders in place of its image
    tokens. RequestError if the prompt has more or fewer of them than images.

    token: the id of the image token
    ends: ids that follow each line of an image, and its last one; None: nothing does
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
        start, ids = tokens.index(token, at), expand(image, ends)
        stop = start + len(ids)
        is_expanded = count == num_rows and list(tokens[start:stop]) == show_placeholders(ids, token)
        if not is_expanded and count != len(images):
            raise RequestError(f"image {len(placed)} takes {len(ids)} tokens; the prompt has others for it")
        stop = stop if is_expanded else start + 1
        made += tokens[at:start]
        placed.append(PlacedImage(image, len(made), len(made) + len(ids)))
        made += ids
        at = stop
    return [*made, *tokens[at:]], tuple(placed)


def expand(image: Image, ends: tuple[int, int] | None) -> list[int]:
    """The ids that an image takes in a prompt."""
    ids = [placeholder(image.digest, row) for row in range(image.num_rows)]
    if ends is None:
        return ids
    ((_, _, width),) = image.grids
    columns = width // math.isqrt(image.num_patches // image.num_rows)
    made: list[int] = []
    for at in range(0, len(ids), columns):
        made += [*ids[at : at + columns], ends[0]]
    made[-1] = ends[1]
    return made
