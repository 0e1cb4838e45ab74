"""Pixtral and Mistral 3 in the engine, from pixels and texts to answers, against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import PIL.Image
import pixtral
import pytest
from image_engines import open_engine
from law import assert_greedy_tokens, assert_same_logits
from probe import logits_of

from atom import LLMEngine, SamplingParams
from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.cli import main
from atom.config.load import load
from atom.errors import RequestError, UnsupportedError
from atom.images.reader import ImageReader

__all__ = ["open_engine"]
IS_IMAGE = {pixtral.IMAGE: -100.0}  # a token that transformers takes for an image: no answer has it
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logit_bias=IS_IMAGE)


@pytest.fixture
def open_model(tmp_path: Path, open_engine: Any) -> Callable[..., tuple[LLMEngine, Any]]:
    """An engine that reads images, and transformers' model."""

    def open(name: str, tower: dict[str, Any] = {}, **fields: Any) -> tuple[LLMEngine, Any]:  # noqa: B006
        model = pixtral.save(name, tmp_path, **tower)
        return open_engine(tmp_path, **fields), model

    return open


def assert_answers(engine: LLMEngine, model: Any, *prompts: tuple[pixtral.Prompt, list[pixtral.Pixels]]) -> None:
    """Answers in one batch are those of transformers."""
    asked = [
        {"prompt_token_ids": prompt.given, **({"multi_modal_data": {"image": images}} if images else {})}
        for prompt, images in prompts
    ]
    for made, (prompt, _) in zip(engine.generate(asked, GREEDY), prompts, strict=True):
        assert made["num_tokens_input"] == len(prompt.tokens) and len(made["token_ids"]) == GREEDY.max_tokens
        logits = pixtral.logits(model, prompt, made["token_ids"])[len(prompt.tokens) - 1 : -1].clone()
        logits[:, pixtral.IMAGE] = logits.min()
        assert_greedy_tokens(made["token_ids"], logits)


def assert_two_images(engine: LLMEngine, model: Any) -> None:
    """Two images in a prompt, and a prompt without any."""
    images = pixtral.draw(*pixtral.SIZES)
    prompts = (pixtral.make_prompt(model, images), images), (pixtral.make_prompt(model, [], 1), [])
    assert_answers(engine, model, *prompts)
    assert engine.metrics.num_encoded_images == 2


@pytest.mark.parametrize(
    "name", ["Mistral3", *(pytest.param(each, marks=pytest.mark.slow) for each in list(pixtral.FORMS)[1:])]
)
def test_greedy_tokens_are_those_of_transformers(name: str, open_model: Any) -> None:
    engine, model = open_model(
        name, max_num_batched_tokens=9, block_size=4
    )  # chunks end inside images, and their lines
    assert_two_images(engine, model)
    images = pixtral.draw(*pixtral.SIZES)
    prompt = pixtral.make_prompt(model, images)
    assert_answers(engine, model, (prompt, images))
    assert engine.metrics.num_encoded_images == 2, "the prefix is cached"
    assert_answers(engine, model, (pixtral.make_prompt(model, images, 7), images))
    assert (engine.metrics.num_encoded_images, engine.metrics.num_image_hits) == (2, 2), (
        "after other texts, the rows are"
    )


@pytest.mark.slow
def test_compiled_towers_give_the_same(open_model: Any) -> None:
    assert_two_images(*open_model("Mistral3", level=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral3", "Llava"])
def test_two_ranks_give_the_same(name: str, open_model: Any) -> None:
    assert_two_images(*open_model(name, {"num_attention_heads": 2}, tensor_parallel_size=2))


def test_a_chat_shows_lines_of_an_image(open_model: Any) -> None:
    engine, model = open_model("Mistral3")
    (pixels,) = pixtral.draw((20, 30))
    parts = [{"type": "image", "image": pixels}, {"type": "text", "text": "What?"}]
    (made,) = engine.chat([{"role": "user", "content": parts}], GREEDY)
    row = [pixtral.IMAGE] * 4
    tokens = [1, 3, *row, pixtral.BREAK, *row, pixtral.BREAK, *row, pixtral.END, *engine.tokenizer.encode("What?"), 4]
    prompt = pixtral.Prompt([], tokens, pixtral.make_prompt(model, [pixels]).read)
    assert made["num_tokens_input"] == len(tokens)
    logits = pixtral.logits(model, prompt, made["token_ids"])[len(tokens) - 1 : -1].clone()
    logits[:, pixtral.IMAGE] = logits.min()
    assert_greedy_tokens(made["token_ids"], logits)


@pytest.mark.parametrize("name", ["Mistral3", pytest.param("Llava", marks=pytest.mark.slow)])
def test_the_tower_may_be_an_mmproj_file(name: str, tmp_path: Path, open_engine: Any) -> None:
    folder, path = tmp_path / "model", tmp_path / "tiny.gguf"
    of_files = {"image_size": pixtral.EDGE, "rope_theta": 10000.0}  # the latter as all of them mean
    model, images = pixtral.save(name, folder, **of_files), pixtral.draw(*pixtral.SIZES)
    gguf_files.convert(folder, path)
    gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")
    prompt, hub = pixtral.make_prompt(model, images), open_engine(folder)
    placed = hub._images.place(prompt.given, list(map(hub._images.read_local, images)), hub.tokenizer)
    engine = open_engine(path)  # the file has no tokenizer
    assert engine.config.model.name == "mistral"
    assert_same_logits(logits_of(engine, *placed), pixtral.logits(model, prompt))
    ours, theirs = engine.config.model.vision, hub.config.model.vision
    same = {"weights": {}, "mean": [], "std": [], "merger": None}
    assert replace(ours, **same) == replace(theirs, **same)


def test_a_prompt_without_an_image_token_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixtral.save("Mistral3", tmp_path)
    PIL.Image.fromarray(pixtral.draw((20, 30))[0]).save(tmp_path / "photo.png")
    fields = ["level=1", "dtype=fp32", "device=cpu", "serve.kv_cache_memory=4194304", "job.output=json"]
    given = [f"checkpoint={tmp_path}", *fields, f"images=[{tmp_path}/photo.png]", "sampling.max_tokens=2"]
    num_tokens = []
    for more in (["prompts=['What?']"], ["prompts=['What?']", "job.chat=true"], ["prompts=['What?[IMG]']"]):
        assert main([*given, *more]) == 0
        num_tokens.append(json.loads(capsys.readouterr().out)["num_tokens_input"])
    message, asked, plain = num_tokens
    assert message == asked > plain


def test_tokens_of_lines_are_those_that_the_processor_names(tmp_path: Path) -> None:
    pixtral.save("Mistral3", tmp_path)
    tokenizer, image = load_tokenizer(tmp_path), pixtral.draw((16, 8))[0]

    def place(**processor: Any) -> list[int]:
        (tmp_path / "processor_config.json").write_text(json.dumps(processor))
        reader = ImageReader(load([f"checkpoint={tmp_path}", "device=cpu", "serve.images=true"]))
        tokens, _ = reader.place([pixtral.IMAGE], [reader.read_local(image)], tokenizer)
        reader.close()
        return reader.show(tokens)

    assert place() == [pixtral.IMAGE, pixtral.BREAK, pixtral.IMAGE, pixtral.END]
    assert place(image_break_token="[INST]") == [pixtral.IMAGE, 3, pixtral.IMAGE, pixtral.END]
    with pytest.raises(RequestError, match=r"the checkpoint's tokenizer has no token \[LAST\], which images of this"):
        place(image_end_token="[LAST]")
    with pytest.raises(UnsupportedError, match="patch_size=5 of its image processor is not supported"):
        place(patch_size=5)
