"""Plan which images a step encodes: those that its chunks need and lack.

    planner = EncodePlanner(pool, max_patches=16384)
    planner.begin()                                       # a step
    num_tokens = planner.fit(sequence, num_tokens)        # up to the first image that has to wait for another step

An image is encoded in the step that first computes a placeholder of it, at most once as long as its rows are kept. A
prefix that is cached needs no rows. No image is held between steps: if others have taken its rows before its last
placeholder is computed, it is encoded again, so no sequence waits for one that does not run.
"""

from __future__ import annotations

from atom.images.types import Image
from atom.runtime.images.row_pool import RowPool
from atom.runtime.types import Sequence


class EncodePlanner:
    def __init__(self, pool: RowPool, max_patches: int) -> None:
        """max_patches: that a step encodes; no image has more"""
        self._pool, self._max_patches = pool, max_patches
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._needed: set[int] = set()  # digests
        self._num_rows = self._num_patches = 0  # of all that it needs; of those that it encodes

    def fit(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the sequence's next `num_tokens` tokens the step can compute, as far as images go."""
        start = sequence.num_planned
        for image, first, stop in sequence.images:
            if first >= start + num_tokens:
                break
            if stop > start and not self._take(image):
                return max(first - start, 0)
        return num_tokens

    def clear(self) -> None:
        """Forget all rows: other weights would encode other ones."""
        self._pool.clear()

    def _take(self, image: Image) -> bool:
        """Count an image among those that the step needs, if it has room."""
        if image.digest in self._needed:
            return True
        num_patches = 0 if image.digest in self._pool else image.num_patches
        is_too_much = num_patches and self._num_patches + num_patches > self._max_patches
        if is_too_much or self._num_rows + image.num_rows > self._pool.num_rows:
            return False
        self._needed.add(image.digest)
        self._num_rows += image.num_rows
        self._num_patches += num_patches
        return True
