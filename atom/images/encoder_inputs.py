"""Make the inputs of an encoder: patches, places, starts of segments.

    inputs, order = encoder_inputs(images, vision=config.model.vision)
    inputs["patches"]           # u8[P, F], of all images
    order                       # i64[M]: which row, of those of all images in their order, each row of the result is

All of them are made; an encoder reads those that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from atom.config import VisionConfig
from atom.images.types import Image


def encoder_inputs(
    images: Sequence[Image], vision: VisionConfig
) -> tuple[dict[str, npt.NDArray[np.generic]], npt.NDArray[np.int64]]:
    grids = [grid for image in images for grid in image.grids]
    pixels = b"".join(image.pixels for image in images)
    segments = [height * width for frames, height, width in grids for _ in range(frames)]
    inputs: dict[str, npt.NDArray[np.generic]] = {
        "patches": np.frombuffer(pixels, np.uint8).reshape(-1, vision.patch_size),
        "places": np.concatenate([find_places(grid, vision.merger.side) for grid in grids]),
        "starts": np.array([*accumulate(segments, initial=0)], np.int32),
    }
    if vision.class_token:
        inputs |= with_class_rows(inputs)
    order = np.arange(sum(image.num_rows for image in images))
    if vision.window is not None:
        order, sizes = order_by_window(grids, vision.merger.side, vision.window)
        num = vision.merger.side**2  # patches of a row
        for name in ("patches", "places"):
            inputs[name] = inputs[name].reshape(len(order), num, -1)[order].reshape(len(order) * num, -1)
        inputs["window_starts"] = np.array([*accumulate(sizes * num, initial=0)], np.int32)
    return inputs, order


def with_class_rows(inputs: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
    """Inputs with a row at the beginning of each segment that is no patch, and which rows are so."""
    starts = inputs["starts"].astype(np.int32)
    firsts = starts[:-1]
    made: dict[str, npt.NDArray[np.generic]] = {
        name: np.insert(inputs[name], firsts, inputs[name][firsts], axis=0) for name in ("patches", "places")
    }
    class_rows = np.insert(np.full(starts[-1], -1, np.int32), firsts, 0)
    shifted = starts + np.arange(len(starts), dtype=np.int32)
    return made | {"starts": shifted, "class_rows": class_rows, "patch_rows": (class_rows < 0).nonzero()[0]}


def order_by_window(
    grids: Sequence[tuple[int, int, int]], merge: int, window: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows window by window, those of a window from left to right and from the top, and the rows of each window.

    window: side of a window in rows; those at the right and the bottom of an image may be smaller
    """
    orders, sizes, first = [], [], 0
    for frames, height, width in grids:
        rows, columns = height // merge, width // merge
        y, x = np.indices((rows, columns)) // window
        frame = np.arange(frames)[:, None, None] * y.size  # which has no more windows than rows
        window_of = (frame + y * columns + x).reshape(-1)
        orders.append(first + window_of.argsort(kind="stable"))
        sizes.append(np.unique(window_of, return_counts=True)[1])
        first += len(window_of)
    return np.concatenate(orders), np.concatenate(sizes)


def find_places(grid: tuple[int, int, int], merge: int) -> npt.NDArray[np.int64]:
    """The row, column, height and width i64[P, 4] of each patch of a grid, squares of merge by merge together."""
    frames, height, width = grid
    axes = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    places = axes.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    sizes = np.broadcast_to([height, width], places.shape)
    return np.tile(np.hstack([places, sizes]), (frames, 1)).astype(np.int64)
