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
SIZE = {"shortest_edge": 3 * 256, "longest_edge": 4096}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, which are tokens 16 to 271."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(SPECIAL | {byte: 16 + at for at, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def save(folder: Path) -> Any:
    model = vision.save("Qwen3VL", folder, vocab_size=272)
    save_tokenizer(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": SIZE, **vision.PROCESSOR}))
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


@pytest.mark.parametrize("text", ["{seconds}", "{rows", "{rows}{rows}"])
def test_a_text_of_other_than_rows_is_refused(text: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(AtomError, match=r"model\.vision\.video\.text=\{.*: write \{rows\} once"):
        load([f"checkpoint={tmp_path}", "device=cpu", "serve.images=true", f'model.vision.video.text="{text}"'])
