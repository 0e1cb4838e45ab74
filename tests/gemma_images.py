"""Tiny Gemma models that read images, with their tokenizer, and transformers' processor of them.

model, processor = gemma_images.save("Gemma3", folder)
read = gemma_images.read(processor, "ab<img>\nc", [pixels])     # input_ids, pixel_values, …
logits = gemma_images.logits(model, read)                       # [T, V] at every position
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tiny
import tokenizers
import torch
import transformers
from torch import Tensor

from atom.config import VisionConfig
from atom.images.types import Image

LETTERS = [*"abcdefghijklmnop ", "\n", "\n\n", "\n\n\n", "\n\n\n\n"]
NEWLINES = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
FIRST = 30  # id of the first special token
SPECIAL = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
BOI, EOI, IMAGE = range(FIRST, FIRST + 3)
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 36, "image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-3,
          "vision_use_head": False}  # fmt: skip
TEXT = {**tiny.SIZES, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
NUMBERS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
# fields of text_config, of vision_config, of the whole, of the image processor
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (TEXT, SIGLIP, {"mm_tokens_per_image": 9, "boi_token_index": BOI, "eoi_token_index": EOI,
                              "image_token_index": IMAGE}, {**NUMBERS, "size": {"height": 24, "width": 24}}),
}  # fmt: skip


def save(name: str, folder: Path, *, is_original: bool = True) -> tuple[Any, Any]:
    """Write a checkpoint, with a tokenizer; transformers' model, in float32, and processor."""
    torch.manual_seed(0)
    text, vision, whole, numbers = FAMILIES[name]
    made: Any = getattr(transformers, f"{name.split()[0]}ForConditionalGeneration")
    config = made.config_class(text_config=text, vision_config=vision, **whole)
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, save_original_format=is_original)
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({each: place for place, each in enumerate(LETTERS)}, NEWLINES))
    backend.add_special_tokens([f"<unused_{place}>" for place in range(len(LETTERS), FIRST)])
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    return model, processor_of(name, backend)


def processor_of(name: str, backend: tokenizers.Tokenizer) -> Any:
    """As the checkpoint's, but that Pillow resizes."""
    kind, numbers = name.split()[0], FAMILIES[name][-1]
    tokens = dict(zip(("boi_token", "eoi_token", "image_token"), SPECIAL, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=tokens)
    folder = f"transformers.models.{kind.lower()}"
    pil: Any = importlib.import_module(f"{folder}.image_processing_pil_{kind.lower()}")
    with pytest.MonkeyPatch.context() as patch:  # its twin needs torchvision
        patch.setitem(sys.modules, f"{folder}.image_processing_{kind.lower()}", pil)
        processing: Any = importlib.import_module(f"{folder}.processing_{kind.lower()}")
    images = getattr(pil, f"{kind}ImageProcessorPil")(**numbers)
    return processing.Gemma3Processor(images, tokenizer, image_seq_length=FAMILIES[name][2]["mm_tokens_per_image"])


def draw(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), np.uint8)


def read(processor: Any, text: str, images: list[np.ndarray]) -> dict[str, Tensor]:
    """What transformers' model takes of a prompt."""
    made = processor(images=[PIL.Image.fromarray(each) for each in images], text=text, return_tensors="pt")
    return {name: each for name, each in made.items() if name not in ("attention_mask", "num_crops")}


@torch.inference_mode()
def logits(model: Any, read: dict[str, Tensor]) -> Tensor:
    """[T, V] at every position."""
    return model(**read, use_cache=False).logits[0]  # type: ignore[no-any-return]


@torch.inference_mode()
def encode(model: Any, read: dict[str, Tensor]) -> Tensor:
    """The rows of the tower [M, H], of all images."""
    return model.model.get_image_features(read["pixel_values"]).pooler_output.flatten(0, 1)  # type: ignore[no-any-return]


def patches_of(read: dict[str, Tensor]) -> Tensor:
    """The pixels [P, C, p, p] of all images' patches, line by line."""
    side = SIGLIP["patch_size"]
    return read["pixel_values"].unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def normalized(image: Image, vision: VisionConfig) -> Tensor:
    """The pixels [P, C, p, p] of an image's patches, line by line."""
    ((_, height, width),), merge = image.grids, vision.merger.side
    blocks = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(
        height // merge, width // merge, merge, merge, vision.channels, vision.patch, vision.patch
    )
    mean, deviation = (torch.tensor(each).view(-1, 1, 1) for each in (vision.mean, vision.std))
    return (blocks.transpose(1, 2).flatten(0, 3) / 255 - mean) / deviation
