"""Placeholders: a prompt's negative token ids, one for each row of an image.

    row_offsets([5, placeholder(image.digest, 0), placeholder(image.digest, 1), 6], image)      # [-1, 0, 1, -1]

Equal ids stand for equal rows, so what compares tokens needs to know nothing of images: the prefix cache, KV on the
host and in files. What reads tokens as text, or sends them to a device, gets 0 in their place, or leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atom.errors import RequestError
from atom.images.types import DIGEST_MASK, Image, PlacedImage


def row_offsets(tokens: Sequence[int], image: Image) -> npt.NDArray[np.int64]:
    """Of each token i64[N], which of the image's rows it stands for; -1 of tokens that are no placeholders."""
    ids = np.array(tokens, np.int64)
    return np.where(ids < 0, (-1 - ids - image.digest) & DIGEST_MASK, -1)


def without_placeholders(tokens: list[int]) -> list[int]:
    """The tokens that are text."""
    return [token for token in tokens if token >= 0]


def hide_placeholders(tokens: list[int]) -> list[int]:
    """The same number of tokens, 0 in place of placeholders."""
    return [max(token, 0) for token in tokens]


def check_images(
    prompt: list[int], images: Sequence[PlacedImage], max_rows: int, max_patches: int, max_tokens: int | None = None
) -> None:
    """Raise RequestError if the images' placeholders are not those of the prompt, or an image is too large.

    max_rows: that there is memory for
    max_patches: that a step encodes
    max_tokens: that a step computes, if an image's have to be in one; None: they need not
    """
    last, num_placeholders = 0, 0
    for image, start, stop in images:
        if not last <= start < stop <= len(prompt):
            raise RequestError("images: they come in the order of the prompt, and each has placeholders of its own")
        offsets = row_offsets(prompt[start:stop], image)
        found = offsets[offsets >= 0]
        if len(found) != image.num_rows or (found != np.arange(image.num_rows)).any():
            raise RequestError(
                f"images: the prompt's tokens {start} to {stop} are not the placeholders of the image that is given "
                f"for them, which takes {image.num_rows}"
            )
        if image.num_rows > max_rows:
            raise RequestError(
                f"an image takes {image.num_rows} tokens, more than the {max_rows} that serve.image_memory holds: "
                "give a smaller image, or raise serve.image_memory"
            )
        if image.num_patches > max_patches:
            raise RequestError(
                f"an image has {image.num_patches} patches, more than the {max_patches} that a step encodes: "
                "give a smaller image, or raise serve.max_patches"
            )
        if max_tokens is not None and stop - start > max_tokens:
            raise RequestError(
                f"an image takes {stop - start} tokens, which see each other, more than a step's {max_tokens}: "
                "raise serve.max_num_batched_tokens"
            )
        last, num_placeholders = stop, num_placeholders + len(found)
    if num_placeholders < sum(token < 0 for token in prompt):
        raise RequestError("the prompt has placeholders of images that are not given")
