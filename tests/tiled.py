"""Tiny models whose images are cut into tiles, with their tokenizer, and transformers' processor of them.

model, processor = tiled.save("Idefics3", folder)
read = tiled.read(processor, "ab<image>c", [pixels])        # input_ids, pixel_values, …
logits = tiled.logits(model, read)                          # [T, V] at every position
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import tiny
import tokenizers
import torch
import transformers
from torch import Tensor

MODELS = "transformers.models"
LETTERS = [*"abcdefghijklmnop ", "\n", "\n\n"]
TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
NAMED = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>",
         "video_token": "<video>"}  # fmt: skip
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", *TILE_TOKENS, "<end_of_utterance>", "<img>",
           "</img>", "<video>"]  # fmt: skip
FIRST = 30  # id of the first special token
IMAGE = FIRST
SIGLIP = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 36,
          "image_size": 22, "patch_size": 5, "layer_norm_eps": 1e-3}  # fmt: skip
NUMBERS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
EDGE = {**NUMBERS, "size": {"longest_edge": 44}, "max_image_size": {"longest_edge": 22}, "resample": 1}
INTERN = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 36,
          "image_size": [18, 18], "patch_size": [4, 4], "layer_norm_eps": 1e-3, "attention_bias": True}  # fmt: skip
RATIO = {**NUMBERS, "size": {"height": 18, "width": 18}, "crop_to_patches": False, "min_patches": 1, "max_patches": 6}
LLAMA = {**tiny.SIZES, "model_type": "llama"}
# fields of text_config, of vision_config, of the whole, of the image processor
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Idefics3": (LLAMA, SIGLIP, {"scale_factor": 2}, EDGE),
    "SmolVLM": (LLAMA, {**SIGLIP, "image_size": 27}, {"scale_factor": 5}, {**EDGE, "max_image_size": {"longest_edge": 28}}),
    "InternVL": ({**tiny.SIZES, "model_type": "qwen2"}, INTERN, {"downsample_ratio": 0.5}, RATIO),
    "InternVL qwen3": ({**tiny.SIZES, "model_type": "qwen3", "head_dim": 16},
                       {**INTERN, "norm_type": "rms_norm", "use_qk_norm": True, "layer_norm_eps": 1e-6, "attention_bias": False},
                       {"downsample_ratio": 0.5}, {**RATIO, "min_patches": 3}),
}  # fmt: skip


def save(name: str, folder: Path, *, is_original: bool = True) -> tuple[Any, Any]:
    """Write a checkpoint, with a tokenizer; transformers' model, in float32, and processor."""
    torch.manual_seed(0)
    text, vision, whole, numbers = FAMILIES[name]
    made: Any = getattr(transformers, f"{name.split()[0]}ForConditionalGeneration")
    config = made.config_class(text_config=text, vision_config=vision, image_token_id=IMAGE, **whole)
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, save_original_format=is_original)
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({each: place for place, each in enumerate(LETTERS)}, [("\n", "\n")])
    )
    backend.add_special_tokens([f"<unused_{place}>" for place in range(len(LETTERS), FIRST)])
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    return model, processor_of(name, backend)


def processor_of(name: str, backend: tokenizers.Tokenizer) -> Any:
    """As the checkpoint's, but that Pillow resizes."""
    _, _, whole, numbers = FAMILIES[name]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=NAMED)
    if name.startswith("InternVL"):
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
        from transformers.models.internvl.processing_internvl import InternVLProcessor

        class WithoutVideos(InternVLProcessor):
            def check_argument_for_proper_class(self, *_: Any) -> None:
                """Take None for what reads videos, which needs torchvision."""

        return WithoutVideos(GotOcr2ImageProcessorPil(**numbers), tokenizer, image_seq_length=4)
    pil = importlib.import_module(f"{MODELS}.{name.lower()}.image_processing_pil_{name.lower()}")
    images = getattr(pil, f"{name}ImageProcessorPil")(**numbers)
    processing = importlib.import_module(f"{MODELS}.idefics3.processing_idefics3")  # SmolVLM's needs another package
    return processing.Idefics3Processor(images, tokenizer, image_seq_len=4 if whole["scale_factor"] == 2 else 1)


def draw(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), np.uint8)


def read(processor: Any, text: str, images: list[np.ndarray]) -> dict[str, Tensor]:
    """What transformers' model takes of a prompt."""
    made = processor(images=[PIL.Image.fromarray(each) for each in images], text=text, return_tensors="pt")
    return {name: each for name, each in made.items() if name not in ("attention_mask", "token_type_ids")}


@torch.inference_mode()
def logits(model: Any, read: dict[str, Tensor]) -> Tensor:
    """[T, V] at every position."""
    return model(**read, use_cache=False).logits[0]  # type: ignore[no-any-return]
