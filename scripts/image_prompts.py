"""Draw prompts with random images, for engines that are measured or compared.

tokens, images = draw_prompt_with_images([(64, 64)], seed, engine.config.model, num_text=100)
sequences = engine._engine.prepare(tokens, params, RequestOptions(images=images))
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from atom.config import ModelConfig
from atom.images.types import Image, PlacedImage, placeholder

LAST_TOKEN = 500  # of texts, below the tokens that are no words


def draw_prompt_with_images(
    grids: Sequence[tuple[int, int]], seed: int, model: ModelConfig, num_text: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """The tokens of a prompt that ends in text, and where its images are. grids: height and width in patches"""
    assert model.vision is not None, "the model reads images"
    chance, tokens, placed = random.Random(seed), list[int](), list[PlacedImage]()
    for number, (height, width) in enumerate(grids):
        pixels = chance.randbytes(height * width * model.vision.patch_size)
        digest, num_rows = (seed + 1 << 40) + (number << 20), height * width // model.vision.merger.side**2
        tokens += [chance.randrange(LAST_TOKEN) for _ in range(num_text // (len(grids) + 1))]
        image, start = Image(digest, pixels, ((1, height, width),), num_rows), len(tokens)
        tokens += [placeholder(digest, row) for row in range(num_rows)]
        placed.append(PlacedImage(image, start, len(tokens)))
    num_left = num_text - num_text // (len(grids) + 1) * len(grids)
    return [*tokens, *(chance.randrange(LAST_TOKEN) for _ in range(num_left))], tuple(placed)
