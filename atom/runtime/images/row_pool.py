"""Keep encoded images: which rows of the device's tensor hold which image.

    pool = RowPool(4096)
    rows = pool.find(image.digest)                      # i32[R], or None: it has to be encoded
    rows = pool.add(image.digest, image.num_rows, {})   # in place of those that were not used for the longest time

Only numbers: the tensor is the runner's (`runtime.images.encoder`). Steps run one after the other, so rows may be given
to another image as soon as the step that reads them is built.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import numpy.typing as npt


class RowPool:
    """Rows of encoded images by digest; the least recently used ones make room."""

    def __init__(self, num_rows: int) -> None:
        """num_rows: of the tensor"""
        self.num_rows = num_rows
        self.num_encoded = self.num_patches = self.num_hits = 0  # images encoded, their patches, images found; counts
        self._rows: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()  # by digest, oldest use first
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)

    def __contains__(self, digest: int) -> bool:
        return digest in self._rows

    def find(self, digest: int) -> npt.NDArray[np.int32] | None:
        """The rows i32[R] of an image, which is the last one to make room from now on; None if it has none."""
        rows = self._rows.get(digest)
        if rows is not None:
            self._rows.move_to_end(digest)
        return rows

    def add(self, digest: int, num_rows: int, kept: Collection[int]) -> npt.NDArray[np.int32]:
        """Give an image rows i32[R].

        kept: digests of images that keep theirs; with these it has to fit
        """
        assert digest not in self._rows, "the image has rows"
        for other in list(self._rows):
            if len(self._free) >= num_rows:
                break
            if other not in kept:
                self.forget(other)
        assert len(self._free) >= num_rows, "only images that fit together are planned"
        split = len(self._free) - num_rows
        rows, self._free = self._free[split:], self._free[:split]
        self._rows[digest] = rows
        return rows

    def forget(self, digest: int) -> None:
        """Free the rows of an image, if it has any."""
        rows = self._rows.pop(digest, None)
        if rows is not None:
            self._free = np.concatenate([self._free, rows])

    def clear(self) -> None:
        """Free all rows."""
        for digest in list(self._rows):
            self.forget(digest)
