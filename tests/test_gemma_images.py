"""Models whose images see all of themselves in the body, from pixels and texts to tokens, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemma_images as gemma
import gguf_files
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_engines import load_with_images, open_engine, place_text
from law import assert_greedy_tokens, assert_same_logits
from probe import logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom import LLMEngine, SamplingParams, weights
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph
from atom.config.checkpoint import open_for
from atom.errors import AtomError, RequestError
from atom.graph import BODY, Mesh, interpret_ranks
from atom.images.encoder_inputs import encoder_inputs
from atom.images.patches import prepare
from atom.images.processor import processor_of
from atom.images.reader import ImageReader
from atom.runtime.step.input import BatchShape
from atom.runtime.types import RequestOptions, Sequence

__all__ = ["open_engine"]
PROMPTS = {
    "Gemma3": "ab<start_of_image>\nc<start_of_image><start_of_image>\n\nde",
    "Gemma4": "ab<|image|>\nc<|image|><|image|>de",
}
PROMPT = PROMPTS["Gemma3"]
SIZES = ((13, 30), (70, 41), (24, 24))  # height and width
IS_IMAGE = dict.fromkeys((gemma.BOI, gemma.EOI, gemma.IMAGE), -100.0)  # no answer has them
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logit_bias=IS_IMAGE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """The folder of a tiny model, transformers' model and processor."""
    made: dict[str, tuple[Path, Any, Any]] = {}

    def get(name: str) -> tuple[Path, Any, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            made[name] = folder, *gemma.save(name, folder)
        return made[name]

    return get


@pytest.fixture
def open_model(models: Any, open_engine: Any) -> Callable[..., tuple[LLMEngine, Any, Any]]:
    """Engines that read images, and their references."""

    def open(name: str, **fields: Any) -> tuple[LLMEngine, Any, Any]:
        folder, model, processor = models(name)
        return open_engine(folder, **fields), model, processor

    return open


def prompt_of(name: str) -> str:
    return PROMPTS[name.split()[0]]


def draw(*sizes: tuple[int, int]) -> list[np.ndarray]:
    return [gemma.draw(*size) for size in sizes]


def answer(
    engine: LLMEngine, *prompts: tuple[str, list[np.ndarray]], params: SamplingParams = GREEDY
) -> list[Sequence]:
    """Answer prompts in one batch."""
    inner, asked = engine._engine, list[Sequence]()
    for text, images in prompts:
        tokens, placed = place_text(engine, text, images)
        asked += inner.prepare(tokens, params, RequestOptions(images=placed))
        inner.submit(asked[-params.n :])
    while inner.has_work:
        inner.step()
    return asked


def assert_greedy(tokens: list[int], text: str, images: list[np.ndarray], model: Any, processor: Any) -> None:
    """Whether tokens are those that transformers finds likeliest after a prompt."""
    read: dict[str, Tensor] = processor.tokenizer(text, return_tensors="pt", return_token_type_ids=False).data
    read = gemma.read(processor, text, images) if images else {"input_ids": read["input_ids"]}
    num = read["input_ids"].shape[1]
    whole = {**read, "input_ids": torch.cat([read["input_ids"], torch.tensor([tokens])], dim=1)}
    for name in whole.keys() & {"token_type_ids", "mm_token_type_ids"}:
        whole[name] = F.pad(read[name], (0, len(tokens)))
    logits = gemma.logits(model, whole)[num - 1 : -1].clone()
    logits[:, list(IS_IMAGE)] = logits.min()
    assert_greedy_tokens(tokens, logits)


@pytest.mark.parametrize("name", gemma.FAMILIES)
def test_logits_at_every_position_and_greedy_tokens(name: str, open_model: Any) -> None:
    size = 16 if name == "Gemma3" else 75
    engine, model, processor = open_model(name, max_num_batched_tokens=size)  # chunks end ahead of images
    images, prompt = draw(*SIZES), prompt_of(name)
    read = gemma.read(processor, prompt, images)
    tokens, placed = place_text(engine, prompt, images)
    assert engine._images.show(tokens) == read["input_ids"][0].tolist()
    assert_same_logits(logits_of(engine, tokens, placed), gemma.logits(model, read))
    (sequence,) = answer(engine, (prompt, images))
    assert_greedy(sequence.output, prompt, images, model, processor)
    assert engine.metrics.num_encoded_images == 3, "once each, for all chunks"


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", pytest.param("Gemma4 small", marks=pytest.mark.slow)])
def test_the_tower_may_be_an_mmproj_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tower, *others = gemma.FAMILIES[name]
    if name == "Gemma3":
        text = {**text, "query_pre_attn_scalar": 256}  # of all such files, as the eps
    else:
        tower = {**tower, "rms_norm_eps": 1e-6, "use_clipped_linears": True}
    monkeypatch.setitem(gemma.FAMILIES, name, (text, tower, *others))
    folder, path = tmp_path / "model", tmp_path / "tiny.gguf"
    model, processor = gemma.save(name, folder)
    gguf_files.convert(folder, path)
    gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")
    images, placed, prompt = draw(*SIZES), None, prompt_of(name)
    for checkpoint in (folder, path):  # the file has no tokenizer
        engine = LLMEngine(model=str(checkpoint), dtype="fp32", level=1, kv_cache_memory=1 << 22, images=True)
        placed = placed or place_text(engine, prompt, images)
        logits = logits_of(engine, *placed)
        engine.close()
    assert_same_logits(logits, gemma.logits(model, gemma.read(processor, prompt, images)))
    ours, hub = (load_with_images(checkpoint).model.vision for checkpoint in (path, folder))
    assert ours is not None and hub is not None
    same: dict[str, Any] = {"weights": {}, "std": [], "mean": [], "patch_order": "channel"}
    same |= {} if name == "Gemma3" else {"area": 280 * 3**2}  # of the released models
    assert replace(ours, **same) == replace(hub, **same)
    assert ours.area == (None if name == "Gemma3" else 280 * 3**2)


@pytest.mark.parametrize("name", gemma.FAMILIES)
@pytest.mark.parametrize("size", [(1, 1), (20, 3000), (3000, 20), (24, 24), (333, 517)])
def test_pixels_and_ids_are_those_of_transformers(name: str, size: tuple[int, int], models: Any) -> None:
    folder, _, processor = models(name)
    config, (pixels,) = load_with_images(folder), draw(size)
    tokenizer, reader = open_for(config, SilentProgress(), weights=False).tokenizer(), ImageReader(config)
    assert tokenizer is not None and config.model.vision is not None
    mark = "<start_of_image>" if name == "Gemma3" else "<|image|>"
    text = f"a\n\n{mark}\nb{mark}"
    expected, image = gemma.read(processor, text, [pixels] * 2), reader.read_local(pixels)
    patches = gemma.normalized(image, config.model.vision)
    assert (patches - gemma.patches_of(expected)[: len(patches)]).abs().max() < 1e-5
    tokens, placed = reader.place(tokenizer.encode(text), [image] * 2, tokenizer)
    shown = reader.show(tokens)
    assert shown == expected["input_ids"][0].tolist()
    again, _ = reader.place(shown, [image] * 2, tokenizer)
    assert again == tokens and len(placed) == 2, "an expanded prompt keeps its length"
    reader.close()


def test_batches_with_images_and_without(open_model: Any) -> None:
    engine, model, processor = open_model("Gemma3", max_num_batched_tokens=30, block_size=4)
    prompts = [(PROMPT, draw(*SIZES)), ("abcde", []), ("<start_of_image>a", draw((40, 9))), ("fgh", [])]
    for sequence, (text, images) in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence.output, text, images, model, processor)


def test_a_prefix_that_ends_within_an_image(open_model: Any) -> None:
    engine, model, processor = open_model("Gemma3", block_size=4)
    first, images = "ab<start_of_image>", draw(SIZES[0])
    (before,) = answer(engine, (first, images))
    assert len(before.prompt) == 15, "of which three blocks are kept: 8 of the image's 9 rows"
    (after,) = answer(engine, (first, images))
    assert (before.num_cached, after.num_cached) == (0, 12)
    assert_greedy(after.output, first, images, model, processor)
    turn = first + "ijk" + "<start_of_image>f"
    (third,) = answer(engine, (turn, images * 2))
    assert_greedy(third.output, turn, images * 2, model, processor)
    assert third.num_cached == 12 and engine.metrics.num_encoded_images == 1


def test_answers_of_one_prompt_begin_within_its_image(open_model: Any) -> None:
    engine, model, processor = open_model("Gemma3", block_size=4, enable_prefix_caching=False)
    text, images = "ab<start_of_image>", draw(SIZES[1])
    for sequence in answer(engine, (text, images), params=replace(GREEDY, n=3, max_tokens=8)):
        assert_greedy(sequence.output, text, images, model, processor)
    assert engine.metrics.scheduler.num_forked_tokens == 2 * 12


def test_preempted_prompts_compute_their_images_whole(open_model: Any) -> None:
    engine, model, processor = open_model(
        "Gemma3", num_kvcache_blocks=22, block_size=4, max_model_len=70, max_num_batched_tokens=16
    )
    prompts = [(text, draw(SIZES[0])) for text in ("a<start_of_image>b", "cd<start_of_image>", "<start_of_image>e")]
    for sequence, (text, images) in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence.output, text, images, model, processor)
    assert engine.metrics.scheduler.num_preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_follow_prompts_with_images(method: str, open_model: Any) -> None:
    (drafted, *_), (plain, *_) = open_model("Gemma3", method=method, block_size=4), open_model("Gemma3", block_size=4)
    prompts, params = [(PROMPT, draw(*SIZES)), ("ab<start_of_image>", draw(SIZES[0]))], replace(GREEDY, logit_bias=None)
    for one, other in zip(*(answer(engine, *prompts, params=params) for engine in (drafted, plain)), strict=True):
        assert one.output == other.output
    assert drafted.metrics.scheduler.num_drafts > 0


def test_a_text_sends_no_ends(open_model: Any) -> None:
    """So that it runs the same kernels as without a tower."""
    engine, _, _ = open_model("Gemma3")
    engine._engine.submit(engine._engine.prepare([1, 2, 3], GREEDY))
    runner, seen = engine._engine.runner, list[Any]()
    run = runner.model.images.extend
    runner.model.images.extend = lambda *args: seen.append(run(*args)) or seen[-1]
    while engine._engine.has_work:
        engine._engine.step()
    assert len(seen) == 32 and all(each.ends is None for each in seen)
    with torch.inference_mode():
        runner.graphs._rehearse_images(BatchShape(16, 1, 1))  # as a GPU's start does, to compile the others
    assert seen[-1].ends.tolist() == [-1] * 16


@pytest.mark.slow
@pytest.mark.parametrize("name", gemma.FAMILIES)
def test_compiled_pieces_answer_the_same(name: str, open_model: Any) -> None:
    engine, model, processor = open_model(name, level=2)
    images, prompt = draw(*SIZES), prompt_of(name)
    (sequence,) = answer(engine, (prompt, images))
    assert_greedy(sequence.output, prompt, images, model, processor)


@torch.inference_mode()
@pytest.mark.parametrize("name", gemma.FAMILIES)
def test_two_ranks_divide_the_heads_of_tower_and_body(name: str, models: Any) -> None:
    folder, model, processor = models(name)
    config, mesh = load_with_images(folder, "parallel.tensor=2", "level=0"), Mesh(2)
    graph, checkpoint = compile_graph(config), open_for(config, SilentProgress())
    assert ("ends" in {node.name for node in graph.programs[BODY].inputs}) == (name != "Gemma4 small")
    own = [
        weights.load(graph.recipes(), checkpoint, SilentProgress(), coordinates=mesh.coordinates(rank)).__getitem__
        for rank in range(2)
    ]
    reader = ImageReader(config)
    images, vision = [reader.read_local(each) for each in draw(*SIZES)], config.model.vision
    reader.close()
    assert vision is not None
    inputs, _ = encoder_inputs(images, vision)
    named = {node.name: torch.from_numpy(inputs[node.name].copy()) for node in graph.programs["vision"].inputs}
    expected = gemma.encode(model, gemma.read(processor, prompt_of(name), draw(*SIZES)))
    for rows in interpret_ranks([graph], "vision", [named] * 2, own, mesh):
        assert_same_logits(rows, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Gemma3", "Gemma4"])
def test_files_of_transformers_have_other_names(name: str, models: Any, tmp_path: Path) -> None:
    """The hub has vision_tower.vision_model for SigLIP's, as vLLM reads it (vllm/model_executor/models/gemma3_mm.py)."""
    folder, _, _ = models(name)
    gemma.save(name, tmp_path / "new", is_original=False)
    hub = {key.replace("vision_tower.", "vision_tower.vision_model."): each for key, each in tensors_of(folder).items()}
    (tmp_path / "hub").mkdir()
    for file in folder.iterdir():
        (tmp_path / "hub" / file.name).symlink_to(file)
    (tmp_path / "hub/model.safetensors").unlink()
    save_file(hub if name == "Gemma3" else tensors_of(folder), tmp_path / "hub/model.safetensors", {"format": "pt"})
    folders = folder, tmp_path / "new", tmp_path / "hub"
    first, *others = (open_for(load_with_images(each), SilentProgress()).tensors.keys() for each in folders)
    assert all(each == first for each in others) and any(name.startswith("vision_tower.encoder.") for name in first)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_side_longer_than_the_table_of_positions_is_refused(models: Any) -> None:
    folder, _, _ = models("Gemma4")
    vision, (pixels,) = load_with_images(folder).model.vision, draw((20, 3000))
    assert vision is not None and vision.table_length == 240
    assert max(prepare(pixels, processor_of(vision)).grids[0]) == 210
    with pytest.raises(RequestError, match="an image of 3000 x 20 pixels: a side has 210 patches, the model takes 209"):
        prepare(pixels, processor_of(replace(vision, table_length=209)))


def test_an_image_that_no_step_computes_at_once_is_refused(open_model: Any) -> None:
    engine, _, _ = open_model("Gemma3", max_num_batched_tokens=8)
    with pytest.raises(RequestError, match="an image takes 13 tokens, which see each other, more than a step's 8"):
        answer(engine, ("a<start_of_image>", draw(SIZES[0])))


@pytest.mark.parametrize(
    ("where", "key", "value", "says"),
    [
        ("preprocessor_config.json", "do_pan_and_scan", True, "do_pan_and_scan=True of its image processor is not"),
        ("preprocessor_config.json", "size", {"height": 28, "width": 28}, "size={'height': 28, 'width': 28} of its"),
    ],
)
def test_what_a_tower_does_not_fit_is_refused(
    where: str, key: str, value: Any, says: str, models: Any, tmp_path: Path
) -> None:
    folder, _, _ = models("Gemma3")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    changed = json.loads((folder / where).read_text()) | {key: value}
    (tmp_path / where).unlink()
    (tmp_path / where).write_text(json.dumps(changed))
    with pytest.raises(AtomError, match=says):
        load_with_images(tmp_path)
