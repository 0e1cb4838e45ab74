"""RequestImages: the images of an engine's requests.

images = RequestImages(pool, max_patches, functools.partial(rope_positions, merge=2))
images.check(prompt, options.images)                            # RequestError if they are not the prompt's
positions, delta = images.find_rope(prompt, options.images)     # of prompts whose rope has sections
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from atom.images.types import PlacedImage
from atom.runtime.images.placeholders import check_images
from atom.runtime.images.row_pool import RowPool

# of the number of a prompt's tokens and its images: their positions i32[3, L], and what is added to those after them
FindRope = Callable[[int, Sequence[PlacedImage]], tuple[npt.NDArray[np.int32], int]]


class RequestImages:
    def __init__(
        self, pool: RowPool, max_patches: int, find_rope: FindRope | None = None, max_tokens: int | None = None
    ) -> None:
        """
        pool: of the engine's steps
        max_patches: that a step encodes
        max_tokens: of a step, if it computes all tokens of an image; None: they may be divided
        find_rope: computes rope positions; None: they are the tokens' own
        """
        self.pool, self._max_patches, self._find_rope = pool, max_patches, find_rope
        self._max_tokens = max_tokens

    def check(self, prompt: list[int], images: Sequence[PlacedImage]) -> None:
        """Raise RequestError if the images are not those of the prompt's placeholders, or one is too large."""
        check_images(prompt, images, self.pool.num_rows, self._max_patches, self._max_tokens)

    def find_rope(self, prompt: list[int], images: Sequence[PlacedImage]) -> tuple[npt.NDArray[np.int32] | None, int]:
        """The rope positions i32[3, L] up to the end of the last image, None if they are the tokens' own.

        Also what is added to the positions of later tokens.
        """
        if self._find_rope is None or not images:
            return None, 0
        positions, delta = self._find_rope(len(prompt), images)
        return positions[:, : images[-1].stop], delta
