"""Resize an image and cut it into patches, as the processors of transformers do.

    processor = Processor(patch=16, frames=2, merge=2, min_pixels=65536, max_pixels=16777216, token=151655)
    image = prepare(pixels, processor)          # pixels u8[height, width, 3]

Sizes and patches are those of `Qwen2VLImageProcessorPil`, `Glm4vImageProcessorPil` and `PixtralImageProcessorPil`,
which have Pillow resize, and of MoonViT's code on the hub. Twins that have torchvision do so round otherwise: a pixel
may differ by a level or two.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atom.config import TilesConfig, VisionConfig
from atom.errors import ConfigError, RequestError
from atom.images.tiles import Pixels, cut_tiles
from atom.images.types import OF_VIDEO, Image

NO_LIMIT = 1 << 62  # of pixels
MAX_RATIO = 200  # of an image's sides, from which on transformers refuses it


class Processor(NamedTuple):
    """The numbers of a model's processor."""

    patch: int  # pixels of a patch's side
    frames: int  # that a patch has; a still image has all alike
    merge: int  # side of the square of patches that become one row
    min_pixels: int  # of an image, which is enlarged to them
    max_pixels: int  # to which a larger one is reduced
    token: int  # id of the token that stands for an image in a chat template
    resample: str = "bicubic"  # by Pillow's names
    min_edge: int | None = None  # to which a shorter side is enlarged first
    max_edge: int | None = None  # to which a longer side is reduced, and none is enlarged; None: by pixels only
    pad: bool = False  # with max_edge, an image is filled up to whole squares, instead of being stretched
    tiles: TilesConfig = TilesConfig()  # that an image is cut into
    area: int | None = None  # patches to which every image is resized, or a few less
    own_row_token: int | None = None  # id of the token that stands for a row in a prompt; None: token
    num_frames: int = 1  # of a video; the limits are of the pixels of all of them
    max_line: int | None = None  # patches of a side; the tower has a table of that many

    @property
    def row_token(self) -> int:
        """The id of the token that stands for each row of an image."""
        return self.token if self.own_row_token is None else self.own_row_token

    @property
    def counted_frames(self) -> int:
        """The frames of a video, rounded to whole patches."""
        return 1 if self.num_frames == 1 else round(self.num_frames / self.frames) * self.frames

    @property
    def side(self) -> int:
        """Pixels of the side of the square that becomes one row; sides of images are multiples of it."""
        return self.patch * self.merge


def processor_of(vision: VisionConfig) -> Processor:
    """The numbers of a tower's processor. RequestError if nothing in a prompt stands for an image."""
    if vision.token is None:
        raise RequestError("the checkpoint's config.json has no image_token_id, so prompts take no images")
    numbers = vision.patch, vision.frames, vision.merger.side, vision.min_pixels, vision.max_pixels
    edges = vision.min_edge, vision.max_edge
    return Processor(
        *numbers, vision.token, vision.resample, *edges, vision.pad, vision.tiles, vision.area, vision.row_token,
        max_line=vision.table_length,
    )  # fmt: skip


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
