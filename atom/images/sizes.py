"""Choose the size of an image, as the processors of transformers do.

    rows, columns = fit_size(height, width, processor)      # multiples of processor.side

Sizes are those of `Qwen2VLImageProcessorPil`, `Glm4vImageProcessorPil` and `PixtralImageProcessorPil`, and of MoonViT's
code on the hub.
"""

from __future__ import annotations

import math

from atom.errors import RequestError
from atom.images.processor import NO_LIMIT, Processor

MAX_RATIO = 200  # of an image's sides, from which on transformers refuses it


def fit_size(height: int, width: int, processor: Processor, max_pixels: int = NO_LIMIT) -> tuple[int, int]:
    """The height and width to which an image is resized: multiples of the side, unless it is filled up to them.

    RequestError if one side is more than MAX_RATIO times the other.

    max_pixels: a further limit than the processor's, of one frame
    """
    side, num_frames, counted = processor.side, processor.num_frames, processor.counted_frames
    given = f"{width} x {height} pixels"
    if processor.min_edge is not None and min(height, width) < processor.min_edge:
        grow = max(processor.min_edge / height, processor.min_edge / width)
        height, width = int(height * grow), int(width * grow)
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(f"an image of {given}: no side may be over {MAX_RATIO} times the other")
    if processor.max_edge is not None and processor.pad:
        return fit_inside(height, width, processor, processor.max_edge, max_pixels)
    limit = max(max_pixels, side**2) * min(num_frames, counted)
    max_pixels = max(min(limit, processor.max_pixels), side**2)
    if processor.area is not None:
        return fit_area(height, width, side, min(processor.area * processor.patch**2, max_pixels))
    if processor.max_edge is not None:
        return fit_edge(height, width, processor.max_edge, side, max_pixels)
    # Python's round, to the even one of two neighbours, as in transformers
    least = 0 if processor.tiles.over is None else 1  # rows and columns, at first
    fitted = max(round(height / side), least) * side, max(round(width / side), least) * side
    if counted * fitted[0] * fitted[1] > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows, columns = (max(side, math.floor(each / shrink / side) * side) for each in (height, width))
    elif counted * fitted[0] * fitted[1] < processor.min_pixels:
        grow = math.sqrt(processor.min_pixels / (num_frames * height * width))
        rows, columns = (math.ceil(each * grow / side) * side for each in (height, width))
    else:
        rows, columns = fitted
    return rows, columns


def fit_area(height: int, width: int, side: int, pixels: int) -> tuple[int, int]:
    """As fit_size, for an image that gets as many pixels, as far as its sides are multiples of side."""
    factor = math.sqrt(pixels / (height * width))
    rows, columns = (math.floor(each * factor / side) for each in (height, width))
    longest = pixels // side**2
    if not rows:
        rows, columns = 1, min(width // height, longest)
    elif not columns:
        rows, columns = min(height // width, longest), 1
    return rows * side, columns * side


def fit_edge(height: int, width: int, edge: int, side: int, max_pixels: int) -> tuple[int, int]:
    """As fit_size, for an image whose longer side is reduced to an edge; sides are rounded up to multiples of side."""
    ratio = max(height / edge, width / edge, 1.0)
    rows, columns = (max(math.ceil(math.floor(each / ratio) / side), 1) for each in (height, width))
    most = max_pixels // side**2
    if rows * columns > most:
        shrink = math.sqrt(rows * columns / most)
        rows = min(max(math.floor(rows / shrink), 1), most)
        columns = min(max(math.floor(columns / shrink), 1), most // rows)
    return rows * side, columns * side


def fit_inside(height: int, width: int, processor: Processor, edge: int, max_pixels: int) -> tuple[int, int]:
    """As fit_size, for an image that is filled up to whole squares, as `navit_resize` of transformers' Kimi_K25.

    max_pixels: of whole squares; the processor's are of whole patches of the image ahead
    """
    patch, side = processor.patch, processor.side
    num_patches = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(processor.max_pixels // patch**2 / num_patches), edge / height, edge / width)
    rows, columns = (min(max(1, int(each * scale)), edge) for each in (height, width))
    most = max_pixels // side**2
    while (squares := math.ceil(rows / side) * math.ceil(columns / side)) > most:
        rows, columns = (max(1, math.ceil(each * math.sqrt(most / squares)) - 1) for each in (rows, columns))
    return rows, columns


def count_room(height: int, width: int, processor: Processor, max_pixels: int) -> int:
    """How many tiles besides a thumbnail an image may be cut into; 0: it is not, and keeps the ratio of its sides.

    Of a processor with `tiles.over`, an image that has no more pixels, rounded to whole rows, is not cut, and one that
    has keeps its ratio as the thumbnail, as `Lfm2VlImageProcessor` has it. Others cut all images, maybe into one tile.
    """
    tiles, side = processor.tiles, processor.side
    if tiles.fit == "none":
        return 0
    kept = tiles.side // processor.patch * processor.patch  # pixels of a tile's side that are encoded
    if tiles.over is None:
        return max(max_pixels // kept**2 - 1, 1)
    rows, columns = (max(round(each / side) * side, processor.patch) for each in (height, width))
    room = (max_pixels - math.prod(fit_size(height, width, processor, max_pixels))) // kept**2
    return room if rows * columns > tiles.over and tiles.max != 1 and room >= tiles.min else 0
