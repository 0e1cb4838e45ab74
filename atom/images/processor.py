"""Processor: the numbers by which a model's images are resized and cut.

processor = Processor(patch=16, frames=2, merge=2, min_pixels=65536, max_pixels=16777216, token=151655)
processor = processor_of(config.model.vision)
"""

from __future__ import annotations

from typing import NamedTuple

from atom.config import TilesConfig, VisionConfig
from atom.errors import RequestError

NO_LIMIT = 1 << 62  # of pixels


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
