"""Tiny Gemma models that read images, with their tokenizer, and transformers' processor of them.

model, processor = gemma_images.save("Gemma3", folder)
read = gemma_images.read(processor, "ab<img>\nc", [pixels])     # input_ids, pixel_values, …
logits = gemma_images.logits(model, read)                       # [T, V] at every position
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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

KINDS = ("boi_token", "eoi_token", "image_token")  # of special tokens, in the order of their ids
LETTERS = [*"abcdefghijklmnop ", "\n", "\n\n", "\n\n\n", "\n\n\n\n"]
NEWLINES = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
FIRST = 30  # id of the first special token
SPECIAL = {"Gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
           "Gemma4": ["<|image>", "<image|>", "<|image|>"]}  # fmt: skip
BOI, EOI, IMAGE = range(FIRST, FIRST + 3)
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 36, "image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-3,
          "vision_use_head": False}  # fmt: skip
TEXT = {**tiny.SIZES, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
NUMBERS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
TOWER = {"hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 240,
         "pooling_kernel_size": 3, "rms_norm_eps": 1e-3}  # fmt: skip
TEXT4 = {**tiny.SIZES, **tiny.GEMMA4, "sliding_window": 5, "pad_token_id": 0}
IDS = {"boi_token_id": BOI, "eoi_token_id": EOI, "image_token_id": IMAGE, "video_token_id": 40, "audio_token_id": 41,
       "audio_config": None}  # fmt: skip
# fields of text_config, of vision_config, of the whole, of the image processor
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma4": ({**TEXT4, "use_bidirectional_attention": "vision"}, {**TOWER, "standardize": True}, IDS,
               {"max_soft_tokens": 70, "patch_size": 4}),
    "Gemma4 small": ({**TEXT4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6, "num_hidden_layers": 6,
                      "vocab_size_per_layer_input": 101, "layer_types": ["sliding_attention", "full_attention"] * 3},
                     {**TOWER, "use_clipped_linears": True}, IDS, {"max_soft_tokens": 70, "patch_size": 4}),
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
    for which, buffer in model.named_buffers():
        if which.endswith(("_min", "_max")):  # which clip some
            buffer.fill_((1 if which.endswith("max") else -1) * (0.5 + torch.rand(())))
        elif which.endswith(("std_bias", "std_scale")):
            buffer.copy_(1 + torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder, save_original_format=is_original)
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({each: place for place, each in enumerate(LETTERS)}, NEWLINES))
    backend.add_special_tokens([f"<unused_{place}>" for place in range(len(LETTERS), FIRST)])
    backend.add_special_tokens(SPECIAL[name.split()[0]])
    backend.save(str(folder / "tokenizer.json"))
    return model, processor_of(name, backend)


def processor_of(name: str, backend: tokenizers.Tokenizer) -> Any:
    """As the checkpoint's, but that Pillow resizes."""
    kind, numbers = name.split()[0], FAMILIES[name][-1]
    tokens = dict(zip(KINDS, SPECIAL[kind], strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=tokens)
    folder = f"transformers.models.{kind.lower()}"
    pil: Any = importlib.import_module(f"{folder}.image_processing_pil_{kind.lower()}")
    with pytest.MonkeyPatch.context() as patch:  # its twin needs torchvision
        patch.setitem(sys.modules, f"{folder}.image_processing_{kind.lower()}", pil)
        processing: Any = importlib.import_module(f"{folder}.processing_{kind.lower()}")
    images = getattr(pil, f"{kind}ImageProcessorPil")(**numbers)
    if kind == "Gemma3":
        return processing.Gemma3Processor(images, tokenizer, image_seq_length=FAMILIES[name][2]["mm_tokens_per_image"])
    return Gemma4Processor(
        images, tokenizer, functools.partial(processing.Gemma4Processor.replace_image_token, tokenizer)
    )


class Gemma4Processor(NamedTuple):
    """What transformers' does with images and texts; it takes no text without a processor of sound and one of video."""

    images: Any
    tokenizer: Any
    replace: Callable[[Any, int], str]

    def __call__(self, images: list[PIL.Image.Image], text: str, return_tensors: str) -> dict[str, Tensor]:
        made = self.images(images, return_tensors=return_tensors)
        head, *tails = text.split(self.tokenizer.image_token)
        text = head + "".join(self.replace(made, place) + tail for place, tail in enumerate(tails))
        tokens = self.tokenizer(text, return_tensors=return_tensors).input_ids
        del made["num_soft_tokens_per_image"]
        return {**made, "input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}


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
    inputs = {name: read[name] for name in ("pixel_values", "image_position_ids") if name in read}
    made = model.model.get_image_features(**inputs).pooler_output
    return torch.cat(list(made))


def patches_of(read: dict[str, Tensor]) -> Tensor:
    """The pixels [P, C, p, p] of all images' patches, line by line."""
    side = SIGLIP["patch_size"]
    if "image_position_ids" in read:
        is_there = (read["image_position_ids"] >= 0).all(-1)
        return read["pixel_values"][is_there].unflatten(-1, (side, side, 3)).permute(0, 3, 1, 2)
    return read["pixel_values"].unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def normalized(image: Image, vision: VisionConfig) -> Tensor:
    """The pixels [P, C, p, p] of an image's patches, line by line."""
    ((_, height, width),), merge = image.grids, vision.merger.side
    blocks = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(
        height // merge, width // merge, merge, merge, vision.channels, vision.patch, vision.patch
    )
    mean, deviation = (torch.tensor(each).view(-1, 1, 1) for each in (vision.mean, vision.std))
    pixels = blocks.transpose(1, 2).flatten(0, 3) / 255
    return pixels if vision.normalizes == "tower" else (pixels - mean) / deviation
