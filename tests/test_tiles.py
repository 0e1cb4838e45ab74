"""Models whose images are cut into tiles, from pixels and texts to tokens, against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import msgspec
import PIL.Image
import pytest
import tiled
import torch
from image_engines import load_with_images, open_engine, place_text
from law import assert_greedy_tokens, assert_same_logits
from probe import logits_of

from atom import LLMEngine, SamplingParams, weights
from atom.assemble.images import largest_grids
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph, semantic_graph
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.errors import AtomError, RequestError
from atom.graph import Mesh, interpret_ranks, ops
from atom.images.encoder_inputs import encoder_inputs
from atom.images.patches import is_whole
from atom.images.reader import ImageReader
from atom.images.types import Image

__all__ = ["open_engine"]
PROMPT = "ab<image>c<image>\nde"
QUICK = ("Idefics3", "InternVL")  # as many tiles as a longer side takes; of the nearest ratio, with a class token
SIZES = ((13, 30), (70, 41))  # height and width
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logit_bias={tiled.IMAGE: -100.0})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """The folder of a tiny model, transformers' model and processor."""
    made: dict[str, tuple[Path, Any, Any]] = {}

    def get(name: str) -> tuple[Path, Any, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            made[name] = folder, *tiled.save(name, folder)
        return made[name]

    return get


@pytest.fixture
def open_model(models: Any, open_engine: Any) -> Callable[..., tuple[LLMEngine, Any, Any]]:
    """Engines that read images, and their references."""

    def open(name: str, **fields: Any) -> tuple[LLMEngine, Any, Any]:
        folder, model, processor = models(name)
        return open_engine(folder, **fields), model, processor

    return open


def assert_greedy(tokens: list[int], read: dict[str, torch.Tensor], model: Any) -> None:
    """Whether tokens are those that transformers finds likeliest after a prompt."""
    prompt = read["input_ids"]
    whole = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    logits = tiled.logits(model, {**read, "input_ids": whole})[prompt.shape[1] - 1 : -1].clone()
    logits[:, tiled.IMAGE] = logits.min()
    assert_greedy_tokens(tokens, logits)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in tiled.FAMILIES if each not in QUICK)]
)
def test_logits_at_every_position_and_greedy_tokens(name: str, open_model: Any) -> None:
    engine, model, processor = open_model(name, max_num_batched_tokens=9)  # chunks end inside images
    images = [tiled.draw(*size) for size in SIZES]
    read = tiled.read(processor, PROMPT, images)
    tokens, placed = place_text(engine, PROMPT, images)
    assert engine._images.show(tokens) == read["input_ids"][0].tolist()
    assert_same_logits(logits_of(engine, tokens, placed), tiled.logits(model, read))
    (answer,) = engine.generate({"prompt": PROMPT, "multi_modal_data": {"image": images}}, GREEDY)
    assert_greedy(answer["token_ids"], read, model)
    assert engine.metrics.num_encoded_images == 2, "once each, for all chunks of both"


@pytest.mark.parametrize("name", ["Idefics3", "InternVL qwen3", pytest.param("InternVL", marks=pytest.mark.slow)])
def test_the_tower_may_be_an_mmproj_file(name: str, models: Any, tmp_path: Path) -> None:
    (folder, model, processor), path, placed = models(name), tmp_path / "tiny.gguf", None
    gguf_files.convert(folder, path)
    gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")
    images = [tiled.draw(*size) for size in SIZES]
    for checkpoint in (folder, path):  # the file has no tokenizer
        engine = LLMEngine(model=str(checkpoint), dtype="fp32", level=1, kv_cache_memory=1 << 22, images=True)
        placed = placed or place_text(engine, PROMPT, images)
        logits = logits_of(engine, *placed)
        engine.close()
    assert_same_logits(logits, tiled.logits(model, tiled.read(processor, PROMPT, images)))
    ours, hub = (load_with_images(checkpoint).model.vision for checkpoint in (path, folder))
    assert ours is not None and hub is not None
    assert replace(ours, weights={}, std=[], mean=[]) == replace(hub, weights={}, std=[], mean=[])


def test_an_image_in_two_turns_is_encoded_once(open_model: Any) -> None:
    engine, model, processor = open_model("InternVL", block_size=4)
    image = tiled.draw(30, 47)
    first = {"prompt": "ab<image>c", "multi_modal_data": {"image": image}}
    (answer,) = engine.generate(first, GREEDY)
    second = "ab<image>cd<image>e"
    (again,) = engine.generate({"prompt": second, "multi_modal_data": {"image": [image, image]}}, GREEDY)
    assert_greedy(answer["token_ids"], tiled.read(processor, "ab<image>c", [image]), model)
    assert_greedy(again["token_ids"], tiled.read(processor, second, [image, image]), model)
    assert engine.metrics.num_encoded_images == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolVLM", "InternVL qwen3"])
def test_compiled_pieces_encode_the_same(name: str, open_model: Any) -> None:
    engine, model, processor = open_model(name, level=2)
    images = [tiled.draw(*size) for size in SIZES]
    (answer,) = engine.generate({"prompt": PROMPT, "multi_modal_data": {"image": images}}, GREEDY)
    assert_greedy(answer["token_ids"], tiled.read(processor, PROMPT, images), model)


@torch.inference_mode()
@pytest.mark.parametrize(("heads", "heads_a_rank"), [(2, 1), (3, 3)], ids=["divided", "whole"])
def test_two_ranks_encode_images_of_a_tower_with_a_class_token(
    heads: int, heads_a_rank: int, tmp_path: Path, monkeypatch: Any
) -> None:
    text, tower, *others = tiled.FAMILIES["InternVL qwen3"]
    monkeypatch.setitem(tiled.FAMILIES, "InternVL qwen3", (text, {**tower, "num_attention_heads": heads}, *others))
    model, processor = tiled.save("InternVL qwen3", tmp_path)
    config, mesh, pixels = load_with_images(tmp_path, "parallel.tensor=2", "level=0"), Mesh(2), tiled.draw(40, 20)
    graph, checkpoint = compile_graph(config), open_for(config, SilentProgress())
    tensors = [
        weights.load(graph.recipes(), checkpoint, SilentProgress(), coordinates=mesh.coordinates(rank)).__getitem__
        for rank in range(2)
    ]
    (attention, *_) = (node for node in graph.programs["vision"].nodes if node.target is ops.segment_attention)
    assert attention.meta["type"].shape[1] == heads_a_rank
    reader = ImageReader(config)
    assert config.model.vision is not None
    made, _ = encoder_inputs([reader.read_local(pixels)], config.model.vision)
    reader.close()
    inputs = {node.name: torch.from_numpy(made[node.name].copy()) for node in graph.programs["vision"].inputs}
    read = tiled.read(processor, "<image>", [pixels])
    expected = model.model.get_image_features(read["pixel_values"]).pooler_output.flatten(0, 1)
    for rows in interpret_ranks([graph], "vision", [inputs] * 2, tensors, mesh):
        assert_same_logits(rows, expected)


@pytest.mark.slow
def test_ranks_that_each_have_the_tower_answer_alike(open_model: Any) -> None:
    engine, model, processor = open_model("InternVL", tensor_parallel_size=2)
    images = [tiled.draw(*size) for size in SIZES]
    (answer,) = engine.generate({"prompt": PROMPT, "multi_modal_data": {"image": images}}, GREEDY)
    assert_greedy(answer["token_ids"], tiled.read(processor, PROMPT, images), model)


@pytest.mark.parametrize("name", ["Idefics3", "InternVL"])
def test_names_of_tensors_that_transformers_saves_are_read(name: str, tmp_path: Path) -> None:
    tiled.save(name, tmp_path, is_original=False)
    config = load_with_images(tmp_path)
    weights.check(semantic_graph(config), open_for(config, SilentProgress()).tensors, config.model.ignore)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vision_feature_layer", -2), ("vision_config.use_mean_pooling", False), ("vision_config.layer_norm_eps", 1e-5)],
)
def test_what_a_tower_does_not_do_is_refused(field: str, value: Any, models: Any, tmp_path: Path) -> None:
    folder, _, _ = models("InternVL qwen3")
    config = json.loads((folder / "config.json").read_text())
    outer, _, name = field.rpartition(".")
    (config[outer] if outer else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AtomError, match=rf"{field}=\S+ in its config.json is not supported"):
        load_with_images(tmp_path)


def normalized(image: Image, config: Config) -> torch.Tensor:
    """The pixels [tiles, C, side, side] of an image, less those beyond the last whole patch of each tile."""
    vision = config.model.vision
    assert vision is not None
    _, height, width = image.grids[0]
    merge, patch = vision.merger.side, vision.patch
    blocks = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(
        len(image.grids), height // merge, width // merge, merge, merge, vision.channels, patch, patch
    )
    pixels = blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(image.grids), -1, height * patch, width * patch)
    mean, deviation = (torch.tensor(each).view(-1, 1, 1) for each in (vision.mean, vision.std))
    return (pixels / 255 - mean) / deviation


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", tiled.FAMILIES)
@pytest.mark.parametrize("size", [(1, 1), (20, 3000), (3000, 20), (22, 22), (21, 23), (333, 517), (1, 5000)])
def test_pixels_and_ids_are_those_of_transformers(name: str, size: tuple[int, int], models: Any) -> None:
    folder, _, processor = models(name)
    config, pixels = load_with_images(folder), tiled.draw(*size)
    tokenizer, reader = open_for(config, SilentProgress(), weights=False).tokenizer(), ImageReader(config)
    assert tokenizer is not None
    expected = tiled.read(processor, "a<image>", [pixels])
    image = reader.read_local(pixels)
    ours, theirs = normalized(image, config), expected["pixel_values"].flatten(0, -4)
    assert len(ours) == len(theirs)
    assert (ours - theirs[..., : ours.shape[-2], : ours.shape[-1]]).abs().max() < 1e-5
    tokens, placed = reader.place(tokenizer.encode("a<image>"), [image], tokenizer)
    shown = reader.show(tokens)
    assert shown == expected["input_ids"][0].tolist()
    assert reader.place(shown, [image], tokenizer) == (tokens, placed), "an expanded prompt keeps its length"
    reader.close()


def test_fewer_tiles_are_cut_of_an_image_that_a_step_could_not_encode(models: Any) -> None:
    folder, _, _ = models("Idefics3")  # 16 patches a tile
    sizes = {80: (2, 2), 79: (1, 1), 16: (1, 1)}
    for max_patches, tiles in sizes.items():
        reader = ImageReader(load_with_images(folder, f"serve.max_patches={max_patches}"))
        image = reader.read_local(tiled.draw(50, 50))
        assert image.tiles == tiles and image.num_patches <= max_patches
        reader.close()


def test_a_file_is_cut_as_its_pixels_are(models: Any, tmp_path: Path) -> None:
    pixels, reader = tiled.draw(50, 31), ImageReader(load_with_images(models("Idefics3")[0]))
    PIL.Image.fromarray(pixels).save(tmp_path / "photo.png")
    image = reader.read_local(pixels)
    assert reader.read_local(tmp_path / "photo.png") == image and len(image.grids) == 5
    reader.close()
    processor = reader.processor
    for tiles in ((1, 1), (3, 2), (0, 4), (-2, -2)):
        assert not is_whole(msgspec.structs.replace(image, tiles=tiles), processor)


def test_memory_is_measured_with_as_many_tiles_as_a_step_encodes(models: Any) -> None:
    vision = load_with_images(models("InternVL")[0]).model.vision
    assert vision is not None
    assert largest_grids(vision, 100) == ((1, 4, 4),) * 6 and largest_grids(vision, 1) == ((1, 4, 4),)


def test_text_around_images_needs_a_tokenizer(models: Any) -> None:
    folder, _, _ = models("Idefics3")
    reader = ImageReader(load_with_images(folder))
    image = reader.read_local(tiled.draw(50, 50))
    with pytest.raises(RequestError, match="the checkpoint has no tokenizer, which images of this model need"):
        reader.place([1, tiled.IMAGE], [image], None)
    reader.close()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.vision.tiles.side=15", "side=15: 3 patches make no squares of 2"),
        ("model.vision.tiles.side=30", "side=30: 6 patches, the tower has learned 4"),
        ("model.vision.tiles.edge=66", "size={'longest_edge': 44} of its image processor is not supported"),
    ],
)
def test_tiles_that_the_tower_does_not_fit_are_refused(override: str, says: str, models: Any) -> None:
    folder, _, _ = models("Idefics3")
    with pytest.raises(AtomError, match=says):
        load_with_images(folder, override)
