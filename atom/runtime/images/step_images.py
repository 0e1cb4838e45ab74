"""Add images to a step: what it encodes, which rows its tokens take.

images = StepImages(pool, encoder_inputs)
images.add(step, plan.rows, firsts)     # of a step with prompts that is built
images.retract(plan.rows)               # if it did not take place: it may have left rows unwritten
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from atom.images.types import Image
from atom.runtime.images.placeholders import row_offsets
from atom.runtime.images.row_pool import RowPool
from atom.runtime.step.input import Encode, StepInput
from atom.runtime.types import ScheduledRequest

# of a step's images, in order: the inputs of the program VISION, and which of all their rows each row of its result is
EncoderInputs = Callable[[List[Image]], tuple[Mapping[str, npt.NDArray[np.generic]], npt.NDArray[np.int64]]]


class StepImages:
    def __init__(self, pool: RowPool, encoder_inputs: EncoderInputs, *, has_ends: bool = False) -> None:
        """has_ends: an image's tokens see each other, so a step sends up to where they see"""
        self._pool, self._encoder_inputs, self._has_ends = pool, encoder_inputs, has_ends

    def add(self, step: StepInput, rows: List[ScheduledRequest], firsts: Iterable[int]) -> None:
        """Add what the plan's rows need of images, if anything. firsts: of each row, its first token in the batch"""
        chunks = [
            (row, first)
            for row, first in zip(rows, firsts, strict=True)
            if row.sequence.images and row.start < row.sequence.images[-1].stop
        ]
        if not chunks:
            return
        step.encode = self._plan_encode(find_images(row for row, _ in chunks))
        image_rows, ends = np.full((2, step.shape.num_tokens), -1, np.int32)
        rope: list[npt.NDArray[np.int32]] = []
        for row, first in chunks:
            sequence, start = row.sequence, row.start
            stop = min(start + row.num_tokens, sequence.images[-1].stop)
            for image, begin, image_end in sequence.images:
                begin, end = max(begin, start), min(image_end, stop)
                if begin < end:
                    is_whole = end == image_end or not self._has_ends
                    assert is_whole, "a chunk divides no image whose tokens see each other"
                    offsets = row_offsets(sequence.prompt[begin:end], image)
                    (places,) = (offsets >= 0).nonzero()
                    image_rows[first + begin - start + places] = self._rows_of(image)[offsets[places]]
                    ends[first + begin - start + places] = begin + places.max(initial=0)
            if sequence.rope_positions is not None:
                tokens = np.arange(first, first + stop - start, dtype=np.int32)
                rope.append(np.vstack([tokens, sequence.rope_positions[:, start:stop]]))
        step.image_rows = bytearray(image_rows)
        step.image_ends = bytearray(ends) if self._has_ends else bytearray()
        step.rope_positions = bytearray(np.hstack(rope).tobytes()) if rope else bytearray()

    def retract(self, rows: Iterable[ScheduledRequest]) -> None:
        """Forget the images of a step that did not take place; they are encoded again."""
        for digest in find_images(rows):
            self._pool.forget(digest)

    def _rows_of(self, image: Image) -> npt.NDArray[np.int32]:
        rows = self._pool.find(image.digest)
        assert rows is not None, "all images of the step were given rows"
        return rows

    def _plan_encode(self, needed: Mapping[int, tuple[Image, bool]]) -> Encode | None:
        """Give rows to the images that have none, and count those that have some. needed: as of `find_images`"""
        pool, missing = self._pool, list[Image]()
        for digest, (image, is_begun) in needed.items():
            if pool.find(digest) is None:
                missing.append(image)
            else:
                pool.num_hits += is_begun
        if not missing:
            return None
        places = np.concatenate([pool.add(image.digest, image.num_rows, needed) for image in missing])
        pool.num_encoded += len(missing)
        pool.num_patches += sum(image.num_patches for image in missing)
        return pack_encode(self._encoder_inputs(missing), places)


def pack_encode(
    made: tuple[Mapping[str, npt.NDArray[np.generic]], npt.NDArray[np.int64]], places: npt.NDArray[np.int32]
) -> Encode:
    """Pack the images that a step encodes.

    made: as of `EncoderInputs`
    places: i32[M], where the rows of all images go, in order
    """
    inputs, order = made
    sent = {name: (each.dtype.name, each.shape, each.tobytes()) for name, each in inputs.items()}
    return Encode(sent, bytearray(places[order]))


def find_images(rows: Iterable[ScheduledRequest]) -> dict[int, tuple[Image, bool]]:
    """The images of which rows compute placeholders, by digest, and whether one of them computes the first one."""
    found: dict[int, tuple[Image, bool]] = {}
    for sequence, start, num_tokens, *_ in rows:
        for image, begin, end in sequence.images:
            if begin < start + num_tokens and start < end:
                _, is_begun = found.get(image.digest, (image, False))
                found[image.digest] = image, is_begun or begin >= start
    return found
