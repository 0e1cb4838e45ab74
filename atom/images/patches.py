"""Resize an image and cut it into patches, as the processors of transformers do.

    image = prepare(pixels, processor)          # pixels u8[height, width, 3]

Patches are those of processors that have Pillow resize. Twins that have torchvision do so round otherwise: a pixel may
differ by a level or two.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import msgspec
import numpy as np

from atom.errors import ConfigError, RequestError
from atom.images.processor import NO_LIMIT, Processor
from atom.images.sizes import count_room, fit_size
from atom.images.tiles import Pixels, cut_tiles
from atom.images.types import OF_VIDEO, Image


def prepare(pixels: Pixels, processor: Processor, *, max_pixels: int = NO_LIMIT) -> Image:
    """Make what the encoder takes of an image u8[height, width, 3].

    RequestError if its sides differ too much, also for a tower's table of positions.

    max_pixels: of all tiles, a further limit than the processor's
    """
    return with_digest(make_patches(pixels, processor, max_pixels), processor)


def make_patches(pixels: Pixels, processor: Processor, max_pixels: int = NO_LIMIT) -> Image:
    """As `prepare`, without a digest."""
    scale = functools.partial(resize, resample=processor.resample)
    height, width, limit = *pixels.shape[:2], max(max_pixels, processor.side**2)
    num_tiles = count_room(height, width, processor, limit)
    if num_tiles:
        side = processor.tiles.side
        small = (side, side) if processor.tiles.over is None else fit_size(height, width, processor, limit)
        pieces, tiles = cut_tiles(pixels, processor.tiles, num_tiles, scale, small)
    else:
        pieces, tiles = [fill(scale(pixels, *fit_size(height, width, processor, limit)), processor.side)], (1, 1)
    grids = tuple((1, *(size // processor.patch for size in piece.shape[:2])) for piece in pieces)
    line = max(max(grid) for grid in grids)
    if processor.max_line is not None and line > processor.max_line:
        raise RequestError(
            f"an image of {width} x {height} pixels: a side has {line} patches, the model takes {processor.max_line}"
        )
    content = b"".join(cut(piece, processor).tobytes() for piece in pieces)
    num_rows = sum(height * width for _, height, width in grids) // processor.merge**2
    return Image(0, content, grids, num_rows, tiles)


def with_digest(image: Image, processor: Processor, *, is_of_video: bool = False) -> Image:
    """An image with 61 bits of SHA-256, so that nobody can make one that is taken for one of somebody else."""
    made = hashlib.sha256(repr((image.grids, image.in_video, processor[:3])).encode())
    made.update(image.pixels)
    number = int.from_bytes(made.digest()[:8], "little") % OF_VIDEO
    return msgspec.structs.replace(image, digest=number + OF_VIDEO * is_of_video)


def is_whole(image: Image, processor: Processor) -> bool:
    """Whether the patches of an image are as many as its grids and rows say, and its grids as many as its tiles.

    It is of no video.
    """
    merge, patch_bytes = processor.merge, 3 * processor.frames * processor.patch**2
    if image.in_video != (0, 0):
        return False
    are_squares = all(
        frames == 1 and rows > 0 and columns > 0 and rows % merge == columns % merge == 0
        for frames, rows, columns in image.grids
    )
    num_patches, (lines, columns) = image.num_patches, image.tiles
    num_thumbnails = len(image.grids) - lines * columns
    if lines < 1 or columns < 1 or num_thumbnails not in ((0,) if lines * columns == 1 else (0, 1)):
        return False
    return are_squares and num_patches == image.num_rows * merge**2 and len(image.pixels) == num_patches * patch_bytes


def fill(pixels: Pixels, side: int) -> Pixels:
    """pixels u8[h, w, 3], with black at the right and below up to multiples of the side"""
    height, width, _ = pixels.shape
    if not height % side and not width % side:
        return pixels
    return np.pad(pixels, ((0, -height % side), (0, -width % side), (0, 0)))


def resize(pixels: Pixels, height: int, width: int, resample: str = "bicubic") -> Pixels:
    """pixels u8[h, w, 3] -> u8[height, width, 3], by Pillow"""
    if pixels.shape[:2] == (height, width):
        return pixels
    pillow = import_pillow()
    kind = pillow.Resampling[resample.upper()]
    return np.asarray(pillow.fromarray(pixels).resize((width, height), kind))


def cut(pixels: Pixels, processor: Processor) -> Pixels:
    """pixels u8[height, width, C] -> u8[P, C * frames * patch * patch], those that become one row next to each other

    Pixels beyond the last whole patch are left out.
    """
    patch, merge, side = processor.patch, processor.merge, processor.side
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    whole = pixels[: rows * side, : columns * side].reshape(rows, merge, patch, columns, merge, patch, -1)
    ordered = whole.transpose(0, 3, 1, 4, 6, 2, 5)  # [rows, columns, merge, merge, C, patch, patch]
    repeated = np.repeat(ordered[:, :, :, :, :, None], processor.frames, axis=5)
    return repeated.reshape(rows * columns * merge**2, -1)


def import_pillow() -> Any:
    """Pillow's module Image. ConfigError without Pillow, which images need."""
    try:
        from PIL import Image as pillow
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'atom-run[images]'") from None
    return pillow
