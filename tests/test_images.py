"""Images in prompts, from patches to tokens, against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import gguf_files
import numpy as np
import PIL.Image
import pytest
import torch
import vision
from image_engines import open_engine
from image_prompts import GREEDY, LARGE, SMALL, answer, assert_greedy, make, models, place
from law import assert_same_logits
from probe import logits_of
from safetensors.torch import load_file, save_file
from test_host_blocks import load_always

from atom import LLMEngine, SamplingParams
from atom.cli import main
from atom.config.load import load
from atom.entrypoints.llm import LLM
from atom.errors import ConfigError, RequestError
from atom.images.reader import ImageReader
from atom.runtime.types import RequestOptions

__all__ = ["models", "open_engine"]
VIDEO = 8  # the token of a row of a video
QUICK = ("Qwen3VL", "Qwen2_5_VL", "Qwen3_5")  # deepstack; windows; recurrent state. test_vision.py has all towers


@pytest.fixture
def open_model(models: Callable[..., tuple[Path, Any]], open_engine: Any) -> Callable[..., tuple[LLMEngine, Any]]:
    """Engines that read images, with a small KV pool, and their references."""

    def open(name: str = "Qwen3VL", *, again: bool = False, **fields: Any) -> tuple[LLMEngine, Any]:
        folder, model = models(name, again=again)
        return open_engine(folder, **fields), model

    return open


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in vision.MODELS if each not in QUICK)]
)
def test_logits_at_every_position_and_greedy_tokens(name: str, open_model: Any) -> None:
    engine, model = open_model(name, max_num_batched_tokens=9)  # chunks end inside images
    prompt = make(model, LARGE)
    tokens, images = place(prompt)
    assert_same_logits(logits_of(engine, tokens, images), vision.logits(model, prompt))
    (sequence,) = answer(engine, prompt)
    assert_greedy(sequence, prompt, model)
    assert engine.metrics.num_encoded_images == 2, "once each, for all chunks of both"


@pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3_5"])
def test_frames_of_a_video_are_images_with_texts_between(name: str, open_model: Any) -> None:
    """Patches of two frames each, as transformers has them of a video, whose tokens are others."""
    engine, model = open_model(name, max_num_batched_tokens=9)
    prompt = make(model, ((1, 4, 6), (1, 4, 6), (1, 4, 6)))
    tokens = torch.tensor([[VIDEO if token == vision.IMAGE else token for token in prompt.tokens]])
    with torch.inference_mode():
        made = model(
            tokens, pixel_values_videos=vision.pixels_of(model, prompt), video_grid_thw=torch.tensor([[3, 4, 6]]),
            mm_token_type_ids=(tokens == VIDEO) * 2, use_cache=False,
        )  # fmt: skip
    assert_same_logits(logits_of(engine, *place(prompt)), made.logits[0])


def test_batches_with_images_and_without(open_model: Any) -> None:
    engine, model = open_model(max_num_batched_tokens=40)
    prompts = [make(model, grids, seed) for seed, grids in enumerate((SMALL, (), LARGE, (), vision.GRIDS))]
    for sequence, prompt in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence, prompt, model)


def test_an_image_in_two_turns_is_encoded_once(open_model: Any) -> None:
    engine, model = open_model(block_size=4)
    prompt = make(model)
    (first,) = answer(engine, prompt)
    turn = prompt._replace(tokens=[*prompt.tokens, *first.output, *prompt.tokens[:3]])
    (second,) = answer(engine, turn)
    assert_greedy(second, turn, model)
    assert second.num_cached >= len(prompt.tokens)
    other = turn._replace(tokens=[20, *turn.tokens])  # no prefix, but the same image
    (third,) = answer(engine, other)
    assert_greedy(third, other, model)
    stats = engine.metrics
    assert (stats.num_encoded_images, stats.num_encoded_patches, stats.num_image_hits) == (1, 24, 1)


def test_other_pixels_are_another_prefix(open_model: Any) -> None:
    engine, model = open_model(block_size=4)
    prompts = [make(model, seed=0), make(model, seed=0)]
    prompts[1] = prompts[1]._replace(patches=255 - prompts[1].patches)
    for prompt in prompts:
        (sequence,) = answer(engine, prompt)
        assert_greedy(sequence, prompt, model)
    assert sequence.num_cached == 4, "of the 5 tokens before the image"


@pytest.mark.parametrize("num_rows", [6, 100])
def test_preempted_prompts_and_images_that_lost_their_rows(num_rows: int, open_model: Any) -> None:
    row_bytes = 4 * 48 * 3
    engine, model = open_model(
        num_kvcache_blocks=25,
        block_size=4,
        enable_prefix_caching=False,
        max_model_len=90,
        max_num_batched_tokens=16,
        image_memory=num_rows * row_bytes,
    )
    prompts = [make(model, SMALL, seed) for seed in range(3)]
    for sequence, prompt in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence, prompt, model)
    stats = engine.metrics
    assert stats.scheduler.num_preemptions > 0
    assert stats.num_encoded_images > 3 if num_rows == 6 else stats.num_encoded_images == 3


def test_answers_of_one_prompt_share_its_images(open_model: Any) -> None:
    engine, model = open_model(block_size=4, max_num_batched_tokens=16)
    prompt = make(model, LARGE)
    for sequence in answer(engine, prompt, params=replace(GREEDY, n=3, max_tokens=8)):
        assert_greedy(sequence, prompt, model)
    assert engine.metrics.num_encoded_images == 2


def test_an_adapter_is_applied_to_prompts_with_images(
    models: Callable[..., tuple[Path, Any]], open_model: Any, tmp_path: Path
) -> None:
    folder = adapters.save(models("Qwen3VL")[1].model.language_model, tmp_path / "sql", rank=4)
    rename_adapter(folder, "base_model.model.", "base_model.model.model.language_model.")
    engine, model = open_model(lora_modules={"sql": str(folder)}, max_lora_rank=4)
    prompt = make(model)
    tokens, images = place(prompt)
    params, inner = replace(GREEDY, max_tokens=8), engine._engine
    asked = [inner.prepare(tokens, params, RequestOptions(images=images, adapter=name))[0] for name in ("sql", None)]
    for sequence in asked:
        inner.submit([sequence])
    while inner.has_work:
        inner.step()
    adapted, plain = asked
    assert_greedy(plain, prompt, model)
    assert_greedy(adapted, prompt, adapters.merge(model, folder))
    assert adapted.output != plain.output and engine.metrics.num_encoded_images == 1


def rename_adapter(folder: Path, old: str, new: str) -> None:
    """Give the tensors of an adapter the names that they have in the whole model."""
    file = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): each for name, each in load_file(file).items()}, file)


def test_embeddings_of_images_are_refused(open_model: Any) -> None:
    engine, _ = open_model(pooler_config={"pooling_type": "LAST"})
    prompt = {"prompt_token_ids": [5, vision.IMAGE], "multi_modal_data": {"image": "photo.jpg"}}
    for ask in (lambda: engine.embed(prompt), lambda: engine.score([[5]], [prompt])):
        with pytest.raises(RequestError, match="multi_modal_data: embeddings, labels and scores are of text only"):
            ask()


def test_vllms_class_shows_the_image_token_for_placeholders(models: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = models("Qwen3VL")
    fields = {"dtype": "float32", "serve.images": True, "level": 1, "kv_cache_memory_bytes": 1 << 22}
    pixels = np.zeros((8, 16, 3), np.uint8)
    llm = LLM(str(folder), **fields, **{"model.vision.min_pixels": 64, "model.vision.max_pixels": 4096})
    asked = {"prompt_token_ids": [5, vision.IMAGE, 9], "multi_modal_data": {"image": pixels}}
    (output,) = llm.generate(asked, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    llm.llm_engine.close()
    assert output.prompt_token_ids == [5, vision.IMAGE, vision.IMAGE, 9], "two squares of 8 x 8 pixels"


@pytest.mark.slow
def test_compiled_pieces_encode_the_same(open_model: Any) -> None:
    engine, model = open_model(level=2)
    prompts = [make(model, LARGE), make(model, SMALL, 1)]
    for sequence, prompt in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence, prompt, model)


@pytest.mark.slow
def test_two_ranks_encode_the_same(open_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tower = vision.MODELS["Qwen3VLMoe"]
    monkeypatch.setitem(vision.MODELS, "Qwen3VLMoe", (text, {**tower, "hidden_size": 32, "num_heads": 4}))
    engine, model = open_model("Qwen3VLMoe", again=True, tensor_parallel_size=2)
    prompts = [make(model, LARGE), make(model, (), 1)]
    for sequence, prompt in zip(answer(engine, *prompts), prompts, strict=True):
        assert_greedy(sequence, prompt, model)


def test_reports_of_a_prompt_leave_out_placeholders(open_model: Any) -> None:
    engine, model = open_model()
    prompt = make(model)
    params = replace(GREEDY, prompt_logprobs=0, presence_penalty=0.5, max_tokens=2)
    (sequence,) = answer(engine, prompt, params=params)
    expected = vision.logits(model, prompt).log_softmax(-1)
    for at, (token, found) in enumerate(zip(prompt.tokens, sequence.prompt_logprobs, strict=True)):
        if at == 0 or token == vision.IMAGE:
            assert found is None
        else:
            assert found is not None and found.token == token
            assert found.logprob == pytest.approx(float(expected[at - 1, token]), abs=1e-3)


def test_images_that_are_not_served_are_refused(open_model: Any) -> None:
    engine, model = open_model(images=False)
    tokens, images = place(make(model))
    with pytest.raises(RequestError, match="this engine takes no images"):
        engine._engine.prepare(tokens, GREEDY, RequestOptions(images=images))
    with pytest.raises(RequestError, match="is not a token id"):
        engine._engine.prepare(tokens, GREEDY)


def test_a_server_reads_images_unless_it_is_told_otherwise(models: Any) -> None:
    folder, _ = models("Qwen3VL")

    def reads(*overrides: str) -> bool:
        return load([f"checkpoint={folder}", "device=cpu", *overrides]).reads_images

    assert reads() and not reads("serve.images=false") and not reads("parallel.pipeline=2")
    assert reads("job=compile") and not reads("job=generate") and reads("job=generate", "serve.images=true")
    assert reads("job=generate", "images=[photo.jpg]")
    with pytest.raises(ConfigError, match=r"serve\.images=true does not work with parallel\.pipeline=2"):
        reads("serve.images=true", "parallel.pipeline=2")


def test_a_pool_without_room_for_a_row_is_refused(open_model: Any) -> None:
    with pytest.raises(ConfigError, match=r"serve\.image_memory=100 holds no row of an image, which takes 576"):
        open_model(image_memory=100)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_follow_prompts_with_images(method: str, open_model: Any) -> None:
    drafted, model = open_model(method=method, block_size=4)
    plain, _ = open_model(block_size=4)
    prompts, params = [make(model, LARGE), make(model, SMALL, 1)], replace(GREEDY, logit_bias=None)
    for one, other in zip(*(answer(engine, *prompts, params=params) for engine in (drafted, plain)), strict=True):
        assert one.output == other.output
    assert drafted.metrics.scheduler.num_drafts > 0


def test_kv_in_files_outlives_its_images(open_model: Any, tmp_path: Path) -> None:
    fields = {"block_size": 4, "swap_space": 1 << 22, "kv_cache_dir": str(tmp_path / "kv")}
    first, model = open_model(**fields)
    prompt = make(model)
    answer(first, prompt)
    first.close()
    second, _ = open_model(**fields)
    (sequence,) = answer(load_always(second), prompt)
    assert_greedy(sequence, prompt, model)
    assert sequence.num_cached == (len(prompt.tokens) - 1) // 4 * 4 and second.metrics.num_encoded_images == 0


def test_images_are_encoded_again_after_a_sleep(open_model: Any) -> None:
    engine, model = open_model(enable_sleep_mode=True)
    prompt = make(model)
    for _ in range(2):
        (sequence,) = answer(engine, prompt)
        assert_greedy(sequence, prompt, model)
        engine.sleep(level=2)
        engine.wake_up()
    assert engine.metrics.num_encoded_images == 2


def test_a_large_image_is_reduced_to_what_a_step_encodes(models: Any) -> None:
    folder, _ = models("Qwen3VL")
    config = load([f"checkpoint={folder}", "device=cpu", "serve.images=true", "serve.max_patches=64"])
    reader = ImageReader(config)
    assert 48 <= reader.read_local(np.zeros((300, 400, 3), np.uint8)).num_patches <= 64
    reader.close()


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_command_answers_prompts_about_files(
    is_gguf: bool, models: Callable[..., tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = models("Qwen3VL")
    path = folder
    if is_gguf:
        path = gguf_files.convert(folder, tmp_path / "tiny.gguf")
        gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), np.uint8)
    for name, each in zip(("one image.png", "b.png"), pixels, strict=True):
        PIL.Image.fromarray(each).save(tmp_path / name)
    prompt, fields = [5, vision.IMAGE, vision.IMAGE + 50, vision.IMAGE, 9], {"dtype": "fp32", "level": 1}
    limits = ["model.vision.min_pixels=64", "model.vision.max_pixels=4096", "serve.kv_cache_memory=4194304"]
    given = ["sampling.temperature=0", "sampling.max_tokens=6", "sampling.ignore_eos=true", "job.output=json"]
    argv = [f"checkpoint={path}", f"prompts=[{prompt}]", f"images=[{tmp_path}/one image.png,{tmp_path}/b.png]"]
    assert main([*argv, "device=cpu", *(f"{name}={value}" for name, value in fields.items()), *limits, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    config = load([f"checkpoint={folder}", "device=cpu", "serve.images=true", "dtype=fp32", "level=1", *limits])
    engine = LLMEngine.from_config(config)
    asked = {"prompt_token_ids": prompt, "multi_modal_data": {"image": list(pixels)}}
    (expected,) = engine.generate(asked, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    engine.close()
    assert found["token_ids"] == expected["token_ids"]
    assert found["num_tokens_input"] == expected["num_tokens_input"] > len(prompt)
