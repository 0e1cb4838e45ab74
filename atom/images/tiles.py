"""Cut an image into tiles of one size, with a thumbnail of it all.

    pieces, (lines, columns) = cut_tiles(pixels, tiles, max_tiles, resize, thumbnail=(448, 448))

As `Idefics3ImageProcessorPil` does (fit=edge), or `GotOcr2ImageProcessorPil` and `Lfm2VlImageProcessor` (fit=ratio).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from atom.config import TilesConfig

Pixels = npt.NDArray[np.uint8]  # [height, width, channels]
Resize = Callable[[Pixels, int, int], Pixels]  # to a height and width


def cut_tiles(
    pixels: Pixels, tiles: TilesConfig, max_tiles: int, resize: Resize, thumbnail: tuple[int, int]
) -> tuple[list[Pixels], tuple[int, int]]:
    """The pieces u8[side, side, 3] of an image u8[height, width, 3], and the numbers of lines and columns of tiles.

    max_tiles: without the thumbnail; an image that would have more is cut into fewer
    thumbnail: its height and width
    """
    max_tiles = max_tiles if tiles.max is None else min(max_tiles, tiles.max)
    height, width, side = *pixels.shape[:2], tiles.side
    if tiles.fit == "edge":
        edge = tiles.edge
        while max_tiles > 1 and edge > side and math.prod(count_by_edge(height, width, edge, side)) > max_tiles:
            edge = max(edge - side, side)
        lines, columns = count_by_edge(height, width, edge, side) if max_tiles > 1 else (1, 1)
        pixels = resize(pixels, *fit_edge(height, width, edge))
    else:
        lines, columns = count_by_ratio(height, width, tiles, max_tiles)
    canvas = resize(pixels, lines * side, columns * side)
    pieces = [
        canvas[top : top + side, left : left + side]
        for top in range(0, lines * side, side)
        for left in range(0, columns * side, side)
    ]
    if len(pieces) > 1:
        pieces.append(resize(canvas if tiles.fit == "edge" else pixels, *thumbnail))
    return pieces, (lines, columns)


def fit_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """The height and width of an image whose longer side gets a size; the shorter one is rounded to an even number."""
    ratio = width / height
    if width >= height:
        shorter = int(edge / ratio)
        return max(shorter + shorter % 2, 1), edge
    shorter = int(edge * ratio)
    return edge, max(shorter + shorter % 2, 1)


def count_by_edge(height: int, width: int, edge: int, side: int) -> tuple[int, int]:
    """The lines and columns of tiles that an image takes whose longer side gets a size."""
    height, width = fit_edge(height, width, edge)
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return math.ceil(int(columns * side / ratio) / side), columns
    lines = math.ceil(height / side)
    return lines, math.ceil(int(lines * side * ratio) / side)


def count_by_ratio(height: int, width: int, tiles: TilesConfig, max_tiles: int) -> tuple[int, int]:
    """The lines and columns whose ratio is nearest to that of an image's sides.

    Of equal ratios it is the one of most tiles, as long as these have less than twice the pixels of the image.
    """
    counts = range(1, max_tiles + 1)
    arrangements = [
        (columns, lines)
        for columns in counts
        for lines in counts
        if min(tiles.min, max_tiles) <= columns * lines <= max_tiles
    ]
    best, least = (1, 1), math.inf
    for columns, lines in sorted(arrangements, key=math.prod):
        distance = abs(width / height - columns / lines)
        is_enough = height * width > 0.5 * tiles.side**2 * columns * lines
        if distance < least or (distance == least and is_enough):
            best, least = (lines, columns), distance
    return best
