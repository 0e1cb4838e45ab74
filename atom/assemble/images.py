"""Open what an engine needs for the images of its requests."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from atom.config import Config, VisionConfig
from atom.errors import ConfigError
from atom.graph import BODY, VISION, Graph, Type
from atom.graph.graph import ROPE_POSITIONS
from atom.images.encoder_inputs import encoder_inputs
from atom.images.rope import rope_positions
from atom.images.types import Grid, Image
from atom.runtime.images.encode_planner import EncodePlanner
from atom.runtime.images.encoder import encoded_type
from atom.runtime.images.request_images import RequestImages
from atom.runtime.images.row_pool import RowPool
from atom.runtime.images.step_images import StepImages, pack_encode
from atom.runtime.step.input import Encode


class EngineImages(NamedTuple):
    """The parts of an engine that know of images."""

    planner: EncodePlanner  # of its scheduler
    of_steps: StepImages  # of its step builder
    of_requests: RequestImages


def open_images(graph: Graph, config: Config) -> EngineImages | None:
    """The parts of an engine that know of images, which share a pool; None if its text encodes none."""
    if VISION not in graph.programs:
        return None
    vision, pool = config.model.vision, RowPool(count_rows(graph, config))
    assert vision is not None, "the text was written of it"
    has_sections = any(node.name == ROPE_POSITIONS for node in graph.programs[BODY].inputs)
    find_rope = functools.partial(rope_positions, merge=vision.merger.side) if has_sections else None
    is_whole, max_patches = bool(vision.bidirectional), config.serve.max_patches
    max_tokens = config.serve.max_num_batched_tokens if is_whole else None
    return EngineImages(
        EncodePlanner(pool, max_patches, is_whole=is_whole),
        StepImages(pool, functools.partial(encoder_inputs, vision=vision), has_ends=is_whole),
        RequestImages(pool, max_patches, find_rope, max_tokens),
    )


def count_rows(graph: Graph, config: Config) -> int:
    """The rows of encoded images that serve.image_memory holds; 0 if the text encodes none."""
    if VISION not in graph.programs:
        return 0
    rows, given = encoded_type(graph), config.serve.image_memory
    row_bytes = Type(rows.dtype, (1, *rows.shape[1:])).num_bytes
    if given < row_bytes:
        raise ConfigError(f"serve.image_memory={given} holds no row of an image, which takes {row_bytes}; raise it")
    return given // row_bytes


def largest_encode(graph: Graph, config: Config) -> Encode | None:
    """The largest step of the encoder: one image of serve.max_patches; None if the text encodes none."""
    vision, num_rows = config.model.vision, count_rows(graph, config)
    if vision is None or not num_rows:
        return None
    grids = largest_grids(vision, config.serve.max_patches)
    num_patches = sum(frames * height * width for frames, height, width in grids)
    num_made = num_patches // vision.merger.side**2
    image = Image(0, bytes(num_patches * vision.patch_size), grids, num_made)
    return pack_encode(encoder_inputs([image], vision), np.arange(num_made, dtype=np.int32) % num_rows)


def largest_grids(vision: VisionConfig, max_patches: int) -> tuple[Grid, ...]:
    """The grids of an image of so many patches, or slightly fewer; at least one."""
    if vision.tiles.fit != "none":
        side = vision.tiles.side // vision.patch
        return ((1, side, side),) * max(max_patches // side**2, 1)
    side = vision.merger.side
    height = max(math.isqrt(max_patches) // side, 1)
    width = max(max_patches // (height * side**2), 1)
    return ((1, height * side, width * side),)
