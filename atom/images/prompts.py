"""Put the placeholders of images into tokenized prompts.

tokens, placed = place_images([1, 9, 2], [image], token=9)      # [1, -17, -18, …, 2], (PlacedImage(image, 1, 1 + n),)
"""

from __future__ import annotations

from collections.abc import Sequence

from atom.errors import RequestError
from atom.images.types import Image, PlacedImage, placeholder


def place_images(
    tokens: Sequence[int], images: Sequence[Image], token: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt's tokens with placeholders for each image in place of one image token, in order.

    If there are more image tokens than images, then as many in a row as an image has rows, as transformers' processors
    write them, get its placeholders in their place. RequestError if there are more or fewer of them than images.

    token: the id of the image token
    """
    made: list[int] = []
    placed: list[PlacedImage] = []
    may_expand, at = sum(each == token for each in tokens) != len(images), 0
    while at < len(tokens):
        if tokens[at] != token:
            made.append(tokens[at])
            at += 1
            continue
        if len(placed) == len(images):
            raise fault(tokens, images, token)
        image, start = images[len(placed)], len(made)
        made += (placeholder(image.digest, row) for row in range(image.num_rows))
        placed.append(PlacedImage(image, start, len(made)))
        run = tokens[at : at + image.num_rows]
        is_whole = len(run) == image.num_rows and all(each == token for each in run)
        is_expanded = may_expand and image.num_rows > 1 and is_whole
        at += image.num_rows if is_expanded and tokens[at + image.num_rows : at + image.num_rows + 1] != [token] else 1
    if len(placed) < len(images):
        raise fault(tokens, images, token)
    return made, tuple(placed)


def fault(tokens: Sequence[int], images: Sequence[Image], token: int) -> RequestError:
    count = sum(each == token for each in tokens)
    return RequestError(f"the prompt has {count} image tokens (id {token}) and {len(images)} images; give one for each")
