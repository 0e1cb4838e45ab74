"""Positions in time, row and column (Wang et al. 2024, M-RoPE).

    positions, delta = rope_positions(len(prompt), images, merge=2)     # i32[3, L]
    position_of_answer = index + delta                                  # in all three

Text counts on in all three. An image begins where the text before it ends, and counts its rows and columns from there;
what follows it counts on from the largest of them. As `get_rope_index` of transformers' Qwen models. All images of a
video may begin where the first one does, each at its time; text after them counts on from the largest of all three, as
in the models' first code and vLLM (transformers 5.24 leaves out the time).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atom.images.types import PlacedImage


def rope_positions(num_tokens: int, images: Sequence[PlacedImage], merge: int) -> tuple[npt.NDArray[np.int32], int]:
    """The positions i32[3, L] of a prompt's tokens, and what is added to the indices of those that follow it.

    merge: side of the square of patches that becomes one row
    """
    positions, last, begin, first = np.empty((3, num_tokens), np.int32), 0, 0, 0
    for image, start, stop in images:  # begin: the position of the next token; first: of a video's first row
        ((frames, height, width),), (number, time) = image.grids, image.in_video
        sizes = frames, height // merge, width // merge
        positions[:, last:start] = np.arange(begin, begin + start - last)
        begin += start - last
        first = first if number else begin
        positions[:, start:stop] = first + np.indices(sizes).reshape(3, -1)
        positions[0, start:stop] += time
        begin, last = max(begin, first + max(time + frames, *sizes)), stop
    positions[:, last:] = np.arange(begin, begin + num_tokens - last)
    return positions, begin - last
