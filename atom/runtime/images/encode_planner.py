"""Plan which images a step encodes: those that its chunks need and lack.

    planner = EncodePlanner(pool, max_patches=16384)
    planner.begin()                                       # a step
    num_tokens = planner.fit(sequence, num_tokens)        # up to the first image that has to wait for another step

An image is encoded in the step that first computes a placeholder of it, at most once as long as its rows are kept. A
prefix that is cached needs no rows. No image is held between steps: if others have taken its rows before its last
placeholder is computed, it is encoded again, so no sequence waits for one that does not run.

Images whose tokens see each other are not divided: a chunk ends ahead of one for which it has no room. But a cached
prefix may end within one. The KV before its end is that of the whole image, since placeholders of other images differ;
and a step that begins there computes all tokens that are left.
"""

from __future__ import annotations

from atom.images.types import Image
from atom.runtime.images.row_pool import RowPool
from atom.runtime.types import Sequence


class EncodePlanner:
    def __init__(self, pool: RowPool, max_patches: int, *, is_whole: bool = False) -> None:
        """
        max_patches: that a step encodes; no image has more
        is_whole: a step computes all tokens of an image that are left, since they see each other
        """
        self._pool, self._max_patches, self._is_whole = pool, max_patches, is_whole
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
            is_cut = self._is_whole and stop > start + num_tokens
            if stop > start and (is_cut or not self._take(image)):
                return max(first - start, 0)
        return num_tokens

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Where a step that could compute the sequence's tokens up to `end` stops, so that it divides no image."""
        if self._is_whole:
            return next((first for _, first, stop in sequence.images if first < end < stop), end)
        return end

    def min_tokens(self, sequence: Sequence) -> int:
        """How many tokens the sequence's next step must have room for: those of an image that is not divided.

        Of a sequence that waits, the largest one, since its prefix may be cached.
        """
        if not self._is_whole:
            return 0
        start = sequence.num_planned
        sizes = (stop - max(first, start) for _, first, stop in sequence.images if start < stop and first <= start)
        return next(sizes, 0) if sequence.slot >= 0 else self.largest(sequence)

    def largest(self, sequence: Sequence) -> int:
        """The tokens of a sequence's largest image that is not divided, at least 1."""
        images = sequence.images if self._is_whole else ()
        return max((stop - first for _, first, stop in images), default=1)

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
