"""LFM2-VL, from pixels and texts to tokens, against transformers in float32."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import lfm2_vl
import pytest
import torch
from image_engines import load_with_images, open_engine, place_text
from law import assert_greedy_tokens, assert_same_logits
from probe import logits_of

from atom import LLMEngine, SamplingParams
from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config import Config, TilesConfig
from atom.errors import UnsupportedError
from atom.images.processor import NO_LIMIT, Processor
from atom.images.reader import ImageReader
from atom.images.sizes import count_room, fit_size
from atom.images.tiles import count_by_ratio
from atom.images.types import Image

__all__ = ["open_engine"]
PROMPT = "ab<image>c<image>\nde"
SIZES = ((13, 20), (30, 41))  # height and width: an image that is not cut, and one that is
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logit_bias={lfm2_vl.IMAGE: -100.0})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a tiny model, and transformers' processor."""
    folder = tmp_path_factory.mktemp("model")
    return folder, lfm2_vl.save(folder)[1]


@pytest.fixture
def open_model(tmp_path: Path, open_engine: Any) -> Callable[..., tuple[LLMEngine, Any, Any]]:
    """An engine that reads images, transformers' model and processor."""

    def open(text: str = "lfm2", *, whole: dict[str, Any] = {}, **fields: Any) -> tuple[LLMEngine, Any, Any]:  # noqa: B006
        model, processor = lfm2_vl.save(tmp_path, text, **whole)
        return open_engine(tmp_path, **fields), model, processor

    return open


def assert_greedy(engine: LLMEngine, model: Any, processor: Any) -> None:
    """32 tokens are those that transformers finds likeliest, after two images, and without any."""
    images = [lfm2_vl.draw(*size) for size in SIZES]
    asked: list[Any] = [{"prompt": PROMPT, "multi_modal_data": {"image": images}}, "abcde"]
    reads = lfm2_vl.read(processor, PROMPT, images), lfm2_vl.read(processor, "abcde", [])
    for made, read in zip(engine.generate(asked, GREEDY), reads, strict=True):
        whole = torch.cat([read["input_ids"], torch.tensor([made["token_ids"]])], dim=1)
        logits = lfm2_vl.logits(model, {**read, "input_ids": whole})[read["input_ids"].shape[1] - 1 : -1].clone()
        logits[:, lfm2_vl.IMAGE] = logits.min()
        assert_greedy_tokens(made["token_ids"], logits)
    assert engine.metrics.num_encoded_images == 2, "once each, for all chunks of both"


@pytest.mark.parametrize("text", ["lfm2", pytest.param("lfm2_moe", marks=pytest.mark.slow)])
def test_logits_at_every_position_and_greedy_tokens(text: str, open_model: Any) -> None:
    engine, model, processor = open_model(text, max_num_batched_tokens=9)  # chunks end inside images
    images = [lfm2_vl.draw(*size) for size in SIZES]
    read = lfm2_vl.read(processor, PROMPT, images)
    placed = place_text(engine, PROMPT, images)
    assert engine._images.show(placed[0]) == read["input_ids"][0].tolist()
    assert_same_logits(logits_of(engine, *placed), lfm2_vl.logits(model, read))
    for _ in range(2):  # then after a cached prefix
        assert_greedy(engine, model, processor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole",
    [
        {"projector_use_layernorm": False, "projector_bias": False},
        {"is_original": False},
        {"tower": {"vision_use_head": True}},
    ],
    ids=["no norm", "as transformers names them", "a head that is not read"],
)
def test_other_projectors_and_names(whole: dict[str, Any], open_model: Any) -> None:
    assert_greedy(*open_model(whole=whole))


@pytest.mark.slow
def test_two_ranks_give_the_same(open_model: Any) -> None:
    assert_greedy(*open_model(whole={"tower": {"num_attention_heads": 2}}, tensor_parallel_size=2))


@pytest.mark.slow
def test_a_compiled_tower_gives_the_same(open_model: Any) -> None:
    assert_greedy(*open_model(level=2))


@pytest.mark.parametrize("text", ["lfm2", pytest.param("lfm2_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_norm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_tower_may_be_an_mmproj_file(text: str, has_norm: bool, tmp_path: Path, open_engine: Any) -> None:
    folder, path, images = tmp_path / "model", tmp_path / "tiny.gguf", [lfm2_vl.draw(*size) for size in SIZES]
    model, processor = lfm2_vl.save(folder, text, projector_use_layernorm=has_norm)
    gguf_files.convert(folder, path)
    gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")
    hub, engine = open_engine(folder), open_engine(path)
    placed = place_text(hub, PROMPT, images)  # the file has no tokenizer
    read = lfm2_vl.read(processor, PROMPT, images)
    assert_same_logits(logits_of(engine, *placed), lfm2_vl.logits(model, read))
    ours, theirs = engine.config.model.vision, hub.config.model.vision
    of_files = {"mean", "std", "weights", "patch_order", "min_pixels", "max_pixels", "tiles"}  # fixed, or rounded
    assert vars(ours).keys() == vars(theirs).keys()
    assert [name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name) and name not in of_files] == []
    released = TilesConfig(fit="ratio", side=512, min=2, max=10, over=2 * 256 * 8**2)
    assert (ours.min_pixels, ours.max_pixels, ours.tiles) == (64 * 8**2, 256 * 8**2, released)


def normalized(image: Image, config: Config) -> list[torch.Tensor]:
    """The patches [height * width, side * side * C] of each piece of an image, line by line."""
    vision, made, start = config.model.vision, [], 0
    assert vision is not None
    merge, patch = vision.merger.side, vision.patch
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(-1, 3, patch, patch)
    mean, deviation = (torch.tensor(each) for each in (vision.mean, vision.std))
    for _, height, width in image.grids:
        blocks = pixels[start : start + height * width].unflatten(0, (height // merge, width // merge, merge, merge))
        start += height * width
        by_pixel = blocks.permute(0, 2, 1, 3, 5, 6, 4)
        made.append(((by_pixel / 255 - mean) / deviation).reshape(height * width, -1))
    return made


@pytest.mark.parametrize("size", [(1, 1), (3, 26), (120, 20), (24, 24), (23, 21), (31, 37), (90, 130)])
def test_pixels_and_ids_are_those_of_transformers(size: tuple[int, int], saved: tuple[Path, Any]) -> None:
    folder, processor = saved
    config, pixels, tokenizer = load_with_images(folder), lfm2_vl.draw(*size), load_tokenizer(folder)
    assert tokenizer is not None
    expected, reader = lfm2_vl.read(processor, "a<image>", [pixels]), ImageReader(config)
    image = reader.read_local(pixels)
    assert [list(grid[1:]) for grid in image.grids] == expected["spatial_shapes"].tolist()
    for ours, theirs in zip(normalized(image, config), expected["pixel_values"], strict=True):
        assert (ours - theirs[: len(ours)]).abs().max() < 1e-5
    tokens, placed = reader.place(tokenizer.encode("a<image>"), [image], tokenizer)
    assert reader.show(tokens) == expected["input_ids"][0].tolist()
    assert reader.place(reader.show(tokens), [image], tokenizer) == (tokens, placed), "an expanded prompt stays"
    reader.close()


def test_sizes_and_tiles_are_those_of_transformers(saved: tuple[Path, Any]) -> None:
    """With the numbers of the released models."""
    theirs = type(saved[1].image_processor)()
    numbers = {name: getattr(theirs, name) for name in ("downsample_factor", "max_image_tokens", "encoder_patch_size")}
    tiles = TilesConfig(fit="ratio", side=512, min=2, max=10, over=2 * 512**2)
    processor = Processor(16, 1, 2, 256**2, 512**2, lfm2_vl.IMAGE, "bilinear", tiles=tiles)
    edges = (5, 16, 48, 300, 511, 512, 513, 800, 1000, 1499, 2000, 3001)
    for height, width in itertools.product(edges, edges):
        if max(height, width) > 200 * min(height, width):
            continue
        expected = theirs.smart_resize(height, width, min_image_tokens=64, **numbers)
        assert fit_size(height, width, processor) == expected[::-1]
        is_cut = theirs._is_image_too_large(height, width, max_pixels_tolerance=2.0, **numbers)
        assert bool(count_room(height, width, processor, NO_LIMIT)) == is_cut
        lines, columns = count_by_ratio(height, width, tiles, 10)
        assert theirs._get_grid_layout(height, width, 2, 10, 512)[:2] == (columns, lines)


def test_an_image_is_cut_into_as_many_tiles_as_a_step_encodes(saved: tuple[Path, Any]) -> None:
    for max_patches, tiles, num_grids in ((1000, (2, 3), 7), (200, (2, 2), 5), (120, (1, 2), 3), (90, (1, 1), 1)):
        reader = ImageReader(load_with_images(saved[0], f"serve.max_patches={max_patches}"))
        image = reader.read_local(lfm2_vl.draw(50, 70))
        assert (image.tiles, len(image.grids)) == (tiles, num_grids) and image.num_patches <= max_patches
        reader.close()


@pytest.mark.parametrize(("field", "value"), [("use_thumbnail", False), ("downsample_factor", 3)])
def test_a_processor_that_does_something_else_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    lfm2_vl.save(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**lfm2_vl.PROCESSOR, field: value}))
    with pytest.raises(UnsupportedError, match=f"{field}={value} of its image processor is not supported"):
        load_with_images(tmp_path)
