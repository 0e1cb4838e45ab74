"""Frames of a video in a chat, from pixels to tokens, against transformers in float32."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import vision
from law import assert_greedy_tokens
from tokenizers import decoders, models, pre_tokenizers

from atom import LLMEngine, SamplingParams
from atom.config.load import load
from atom.errors import AtomError, RequestError

pytest.importorskip("PIL.Image")
SPECIAL = {
    "<|im_end|>": 4,
    "<|vision_start|>": 5,
    "<|vision_end|>": 6,
    "<|image_pad|>": vision.IMAGE,
    "<|video_pad|>": 8,
}
START, END, VIDEO = 5, 6, 8
TEMPLATE = """\
{% for message in messages %}{% for part in message.content %}
{%- if part.type == "video" %}<|vision_start|><|video_pad|><|vision_end|>{% elif part.type == "image" %}
{%- if true %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% else %}{{ part.text }}{% endif %}
{%- endfor %}<|im_end|>{% endfor %}"""
BANNED = {token: -100.0 for token in (vision.IMAGE, VIDEO)}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logit_bias=BANNED)
SIZE = {"shortest_edge": 3 * 256, "longest_edge": 4096}  # of all frames
OF_FRAME = {"shortest_edge": 256, "longest_edge": 4096}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, which are tokens 16 to 271."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(SPECIAL | {byte: 16 + at for at, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def save(folder: Path, name: str = "Qwen3VL") -> Any:
    model = vision.save(name, folder, vocab_size=272)
    save_tokenizer(folder)
    size = SIZE if name == "Qwen3VL" else OF_FRAME
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size, **vision.PROCESSOR}))
    return model


def draw(num_frames: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (num_frames, 16, 24, 3), np.uint8))


def read_frames(frames: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The inputs of transformers' model of frames that need not be resized."""
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", SimpleNamespace(functional=None))
    module: Any = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    mean, deviation = (torch.tensor(vision.PROCESSOR[name]) for name in ("image_mean", "image_std"))
    pixels = (torch.from_numpy(np.stack(frames)) / 255 - mean) / deviation
    patches, *grid = module.Qwen3VLVideoProcessor.patchify(None, pixels.permute(0, 3, 1, 2)[None], 4, 2, 2)
    return {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}


def test_a_chat_about_frames_is_answered_as_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, frames = save(tmp_path), draw(3)
    fields = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22, "images": True, "image_memory": 1 << 20}
    engine = LLMEngine(model=str(tmp_path), max_num_batched_tokens=9, **fields)
    part = {"type": "video", "video": frames, "fps": 4.0}
    (made,) = engine.chat([{"role": "user", "content": [{"type": "text", "text": "Is"}, part]}], GREEDY)
    text, row = engine.tokenizer.encode, [START, *[VIDEO] * 6, END]
    tokens = [*text("Is<0.1 seconds>"), *row, *text("<0.5 seconds>"), *row, 4]
    assert made["num_tokens_input"] == len(tokens)
    whole = torch.tensor([tokens + made["token_ids"]])
    with torch.inference_mode():
        read = read_frames(frames, monkeypatch)
        logits = model(whole, **read, mm_token_type_ids=(whole == VIDEO) * 2, use_cache=False).logits[0].clone()
        logits[:, list(BANNED)] = logits.min()
    assert_greedy_tokens(made["token_ids"], logits[len(tokens) - 1 : -1])
    prompt = [*text("Is"), START, VIDEO, END, 4]
    for video in ((frames, {"fps": 4.0}), [(np.stack(frames), {"fps": 4.0})]):
        asked = {"prompt_token_ids": prompt, "multi_modal_data": {"video": video}}
        (other,) = engine.generate(asked, GREEDY)
        assert other["token_ids"] == made["token_ids"]
    assert engine.metrics.num_encoded_images == 2, "each pair of frames once"
    wrong = [(frames[0], "a video is a list of images"), ((frames, {"speed": 2}), "a video has 'speed'")]
    for video, says in (*wrong, ((frames, {"fps": "4"}), "fps='4' of a video; give a number")):
        with pytest.raises(RequestError, match=says):
            engine.generate({"prompt_token_ids": prompt, "multi_modal_data": {"video": video}}, GREEDY)
    engine.close()


def positions_of(model: Any, num_before: int, grid: list[int], num_tokens: int, seconds: float) -> torch.Tensor:
    """i64[3, 1, T] of text, a video and text: its rows as transformers has them, then from the largest of all three.

    That is how the models' first code counts on, and vLLM; transformers 5.24 leaves out the positions in time.
    """
    rate = getattr(model.config.vision_config, "tokens_per_second", None)
    interval = 1.0 if rate is None else seconds * rate
    rows = model.model.get_vision_position_ids(num_before, torch.tensor(grid), 1, 2, interval)
    num_after = num_tokens - num_before - rows.shape[1]
    after = int(rows.max()) + 1 + torch.arange(num_after)
    return torch.cat([torch.arange(num_before).expand(3, -1), rows, after.expand(3, -1)], dim=1)[:, None]


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_rows_of_a_video_have_positions_in_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, frames, fps = save(tmp_path, name), draw(7), 1.6
    fields = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22, "images": True, "image_memory": 1 << 20}
    engine = LLMEngine(model=str(tmp_path), max_num_batched_tokens=9, **fields)  # chunks end inside images
    part = {"type": "video", "video": frames, "fps": fps}
    asked = [{"role": "user", "content": [{"type": "text", "text": "Is"}, part]}]
    (made,) = engine.chat(asked, GREEDY)
    before, read = [*engine.tokenizer.encode("Is"), START], read_frames(frames, monkeypatch)
    tokens = [*before, *[VIDEO] * 24, END, 4]
    assert made["num_tokens_input"] == len(tokens)
    whole = torch.tensor([tokens + made["token_ids"]])
    (grid,) = read["video_grid_thw"].tolist()
    positions = positions_of(model, len(before), grid, whole.shape[1], 2 / fps)
    assert positions.max() - positions[0, 0, len(tokens) - 1] == 16, "text counts on by 1"
    with torch.inference_mode():
        logits = model(whole, **read, position_ids=positions, use_cache=False).logits[0].clone()
        logits[:, list(BANNED)] = logits.min()
    assert_greedy_tokens(made["token_ids"], logits[len(tokens) - 1 : -1])
    (again,) = engine.chat(asked, GREEDY)
    assert again["token_ids"] == made["token_ids"] and engine.metrics.num_encoded_images == 4
    engine.close()


def test_what_the_body_has_no_positions_for_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2_5_VL")
    given = [f"checkpoint={tmp_path}", "device=cpu", "serve.images=true"]
    config = load(given)
    video = config.model.vision.video if config.model.vision is not None else None
    assert video is not None and (video.time, video.tokens_per_second, video.pixels_of) == ("seconds", 4.0, "frame")
    for override, says in (
        ("model.attention.rope.sections=null", "time=seconds: the body's ropes have no sections"),
        ("model.vision.video.time=index", r"tokens_per_second=4\.0 is of time=seconds; leave it out"),
        ("model.vision.video.text='a{rows}'", r"text=a\{rows\}: with time=seconds it is \{rows\}"),
    ):
        with pytest.raises(AtomError, match=says):
            load([*given, override])
    changed = {"size": OF_FRAME, "cap_pixels_per_frame": True}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(changed))
    with pytest.raises(AtomError, match="cap_pixels_per_frame=True of its video processor is not supported"):
        load(given)


def test_frames_are_as_large_as_images_if_nothing_says_their_size(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2VL")

    def limits() -> tuple[int, int]:
        vision = load([f"checkpoint={tmp_path}", "device=cpu", "serve.images=true"]).model.vision
        assert vision is not None and vision.video is not None
        return vision.video.min_pixels, vision.video.max_pixels

    assert limits() == (256, 4096)
    (tmp_path / "video_preprocessor_config.json").unlink()
    assert limits() == (100352, 602112), "of transformers' class"
    given = vision.PROCESSOR | {"min_pixels": 3136, "max_pixels": 12845056}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    assert limits() == (3136, 12845056), "transformers reads this file if there is none of videos"


@pytest.mark.parametrize("text", ["{seconds}", "{rows", "{rows}{rows}"])
def test_a_text_of_other_than_rows_is_refused(text: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(AtomError, match=r"model\.vision\.video\.text=\{.*: write \{rows\} once"):
        load([f"checkpoint={tmp_path}", "device=cpu", "serve.images=true", f'model.vision.video.text="{text}"'])
