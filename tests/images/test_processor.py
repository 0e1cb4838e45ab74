"""Sizes and patches of images, against transformers' processor; placeholders in prompts."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from atom.errors import RequestError
from atom.images.patches import is_whole, prepare
from atom.images.processor import Processor
from atom.images.prompts import place_images
from atom.images.sizes import fit_size
from atom.images.types import Image, placeholder

PIL = pytest.importorskip("PIL.Image")
QWEN2 = Processor(patch=14, frames=2, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280, token=9)
QWEN3 = Processor(patch=16, frames=2, merge=2, min_pixels=65536, max_pixels=16777216, token=9)
GLM = Processor(patch=14, frames=2, merge=2, min_pixels=6272, max_pixels=28 * 28 * 1280, token=9, min_edge=28)
MOONVIT = Processor(patch=14, frames=1, merge=2, min_pixels=1, max_pixels=700 * 196, token=9, max_edge=840, pad=True)
SIZES = [(1, 1), (20, 3000), (3000, 20), (64, 48), (333, 517), (28, 28), (1024, 1024), (42, 70), (1500, 1700)]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def draw(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("family", "processor"), [("qwen2_vl", QWEN2), ("qwen2_vl", QWEN3), ("glm4v", GLM)], ids=["qwen2", "qwen3", "glm"]
)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_patches_are_those_of_transformers(height: int, width: int, family: str, processor: Processor) -> None:
    module: Any = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    made = module.Glm4vImageProcessorPil if family == "glm4v" else module.Qwen2VLImageProcessorPil
    counted = processor.frames if family == "glm4v" else 1  # frames whose pixels its limits count
    theirs = made(
        patch_size=processor.patch,
        temporal_patch_size=processor.frames,
        merge_size=processor.merge,
        size={"shortest_edge": processor.min_pixels * counted, "longest_edge": processor.max_pixels * counted},
        image_mean=MEAN,
        image_std=STD,
    )
    pixels = draw(height, width)
    expected = theirs(PIL.fromarray(pixels), return_tensors="np")
    image = prepare(pixels, processor)
    assert [list(grid) for grid in image.grids] == expected["image_grid_thw"].tolist()
    assert image.num_rows == image.num_patches // 4
    patches = np.frombuffer(image.pixels, np.uint8).reshape(image.num_patches, -1)
    assert patches.shape == expected["pixel_values"].shape
    by_channel = patches.reshape(len(patches), 3, -1) / np.float32(255)
    normal = (by_channel - np.array(MEAN, np.float32)[:, None]) / np.array(STD, np.float32)[:, None]
    assert np.abs(normal.reshape(patches.shape) - expected["pixel_values"]).max() < 1e-5


@pytest.mark.parametrize(("height", "width"), [*SIZES, (13, 13), (27, 900), (392, 420), (500, 501)])
def test_an_image_is_filled_up_as_by_transformers(height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sizes; resized by Pillow, as the hub's code does, since transformers 5.24 has no processor that does so."""
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", SimpleNamespace(functional=None))
    module: Any = importlib.import_module("transformers.models.kimi_k25.image_processing_kimi_k25")
    (rows, columns), (full_rows, full_columns) = module.navit_resize(height, width, 14, 2, 700, 60)
    expected = np.zeros((full_rows, full_columns, 3), np.uint8)
    pixels = draw(height, width)
    expected[:rows, :columns] = PIL.fromarray(pixels).resize((columns, rows), PIL.Resampling.BICUBIC)
    image = prepare(pixels, MOONVIT)
    assert image.grids == ((1, full_rows // 14, full_columns // 14),)
    squares = np.frombuffer(image.pixels, np.uint8).reshape(full_rows // 28, full_columns // 28, 2, 2, 3, 14, 14)
    assert (squares.transpose(0, 2, 5, 1, 3, 6, 4).reshape(expected.shape) == expected).all()
    limited = prepare(pixels, MOONVIT, max_pixels=300 * 196)
    assert min(image.num_patches, 201) <= limited.num_patches <= 300, "not much smaller than it has to be"


def test_a_smaller_limit_of_pixels_is_kept_and_no_image_is_without_a_row() -> None:
    image = prepare(draw(700, 700), QWEN3, max_pixels=200_000)
    assert image.num_patches * 256 <= 200_000 < prepare(draw(700, 700), QWEN3).num_patches * 256
    assert prepare(draw(70, 700), QWEN3._replace(min_pixels=1), max_pixels=1).num_rows >= 1


def test_sides_that_differ_too_much_are_refused() -> None:
    assert fit_size(10, 2000, QWEN3, QWEN3.max_pixels)
    with pytest.raises(RequestError, match="an image of 2001 x 10 pixels: no side may be over 200 times the other"):
        fit_size(10, 2001, QWEN3, QWEN3.max_pixels)
    with pytest.raises(RequestError, match="an image of 5000 x 1 pixels"):  # as it was given, not enlarged
        fit_size(1, 5000, GLM)


def test_equal_images_have_equal_digests_and_others_do_not() -> None:
    pixels = draw(64, 96)
    digests = {prepare(each, QWEN3).digest for each in (pixels, pixels.copy())}
    others = {prepare(each, QWEN3).digest for each in (pixels[::-1], pixels[:, ::-1], pixels.transpose(1, 0, 2))}
    assert len(digests) == 1 and len(digests | others) == 4
    assert prepare(pixels, QWEN2).digest not in digests
    flat = np.zeros((256, 512, 3), np.uint8)
    assert prepare(flat, QWEN3).digest != prepare(flat.transpose(1, 0, 2), QWEN3).digest, "equal pixels, other grids"


def test_patches_that_do_not_agree_with_rows_are_not_taken() -> None:
    image = prepare(draw(64, 96), QWEN3)
    assert is_whole(image, QWEN3)
    changes: list[dict[str, Any]] = [{"num_rows": image.num_rows + 1}, {"pixels": image.pixels[1:]}, {"grids": ()}]
    changes += [{"grids": (grid,)} for grid in ((1, 3, 8), (1, -4, -6), (2, 2, 6))]
    for change in changes:
        assert not is_whole(msgspec.structs.replace(image, **change), QWEN3), change


def made(digest: int, num_rows: int) -> Image:
    return Image(digest, b"", ((1, 2, 2 * num_rows),), num_rows)


def test_placeholders_replace_image_tokens_in_order() -> None:
    first, second = made(100, 3), made(200, 1)
    tokens, placed = place_images([1, 9, 2, 9], [first, second], 9)
    assert tokens == [1, *(placeholder(100, row) for row in range(3)), 2, placeholder(200, 0)]
    assert [(each.start, each.stop) for each in placed] == [(1, 4), (5, 6)]
    assert all(token < 0 for token in tokens[1:4]) and len(set(tokens)) == len(tokens)
    assert place_images([1, 2], [], 9) == ([1, 2], ())


def test_a_prompt_that_is_expanded_already_keeps_its_length() -> None:
    image = made(100, 3)
    assert place_images([1, 9, 9, 9, 2], [image], 9) == place_images([1, 9, 2], [image], 9)
    tokens, placed = place_images([9, 9, 9, 9], [made(100, 1)] * 4, 9)
    assert len(tokens) == len(placed) == 4, "four images of a row each"


def test_two_image_tokens_next_to_each_other_are_two_images() -> None:
    images = [made(100, 2), made(200, 2)]
    assert place_images([1, 9, 9], images, 9) == place_images([1, 9, 9, 9, 9], images, 9)


def test_an_image_whose_tokens_are_not_in_a_row_is_named() -> None:
    with pytest.raises(RequestError, match="image 0 takes 3 tokens; the prompt has others for it"):
        place_images([9, 1, 9, 9, 9], [made(100, 3), made(200, 1)], 9)


@pytest.mark.parametrize(("tokens", "num_images"), [([1, 2], 1), ([9], 0), ([9, 1, 9], 1), ([9], 2)])
def test_each_image_has_a_token(tokens: list[int], num_images: int) -> None:
    message = rf"the prompt has {tokens.count(9)} image tokens \(id 9\) and {num_images} images; give one for each"
    with pytest.raises(RequestError, match=message):
        place_images(tokens, [made(100, 3)] * num_images, 9)


def test_neighboring_image_tokens_are_one_image_each():
    images = [Image(number, b"", ((1, 4, 6),), 6) for number in range(0, 160, 10)]
    tokens, placed = place_images([1, *[9] * 16, 2], images, 9)
    assert len(tokens) == 98 and [each.image.digest for each in placed] == [*range(0, 160, 10)]
    assert [each.start for each in placed] == [*range(1, 97, 6)]
