"""Tiny models of LFM2-VL, with their tokenizer, and transformers' processor of them.

model, processor = lfm2_vl.save(folder)
read = lfm2_vl.read(processor, "ab<image>c", [pixels])      # input_ids, pixel_values, …
logits = lfm2_vl.logits(model, read)                        # [T, V] at every position
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tiny
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.image_processing_backends import TorchvisionBackend

MODULE = "transformers.models.lfm2_vl"
TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *TILES]
LETTERS = [*"abcdefghijklmnop ", "\n"]
IMAGE = 30  # id of the first special token
TEXT: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        **tiny.EXPERTS,
        "num_experts": 4,
        "num_dense_layers": 1,
    },
}
TOWER = {"model_type": "siglip2_vision_model", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 36, "patch_size": 4, "num_patches": 36, "layer_norm_eps": 1e-3,
         "vision_use_head": False}  # fmt: skip
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "encoder_patch_size": 4, "tile_size": 24,
             "min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 6}  # fmt: skip


def save(
    folder: Path, text: str = "lfm2", *, tower: Mapping[str, Any] = {}, is_original: bool = True, **fields: Any
) -> tuple[Any, Any]:
    """Write a checkpoint, with a tokenizer; transformers' model, in float32, and processor.

    is_original: with the hub's names of tensors, in place of those of transformers' modules
    """
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "text_config": {**tiny.SIZES, **TEXT[text]},
        "vision_config": {**TOWER, **tower},
        "projector_hidden_size": 56,
    }
    config = transformers.Lfm2VlConfig(**given, image_token_id=IMAGE, **fields)
    config._attn_implementation = "eager"
    model = transformers.Lfm2VlForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    if is_original:  # transformers 5 reads it and does not save it
        file = folder / "model.safetensors"
        stored = {each.replace("tower.", "tower.vision_model."): tensor for each, tensor in load_file(file).items()}
        save_file(stored, file, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({each: place for place, each in enumerate(LETTERS)}, []))
    backend.add_special_tokens([f"<unused_{place}>" for place in range(len(LETTERS), IMAGE)])
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    return model, processor_of(backend)


def processor_of(backend: tokenizers.Tokenizer) -> Any:
    """As the checkpoint's; its module asks for torchvision, which `read` does without."""
    stubs = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")}
    vars(stubs["torchvision.transforms.v2"])["functional"] = None
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        images: Any = importlib.import_module(f"{MODULE}.image_processing_lfm2_vl")
    processing = importlib.import_module(f"{MODULE}.processing_lfm2_vl")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    return processing.Lfm2VlProcessor(images.Lfm2VlImageProcessor(**PROCESSOR), tokenizer)


def draw(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), np.uint8)


def read(processor: Any, text: str, images: list[np.ndarray]) -> dict[str, Tensor]:
    """What transformers' model takes of a prompt, of which Pillow resizes images in place of torchvision."""
    given: Any = {"images": [PIL.Image.fromarray(each) for each in images]} if images else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchvisionBackend, "resize", resize)
        patch.setattr(TorchvisionBackend, "normalize", normalize)
        made = processor(**given, text=text, return_tensors="pt")
    return {name: each for name, each in made.items() if name not in ("attention_mask", "token_type_ids")}


def resize(_: Any, image: Tensor, size: Any, resample: int, **rest: Any) -> Tensor:
    """image u8[N, C, h, w] -> u8[N, C, height, width], by Pillow"""
    pictures = (PIL.Image.fromarray(each.permute(1, 2, 0).numpy()) for each in image)
    made = [np.asarray(each.resize((size.width, size.height), PIL.Image.Resampling(resample))) for each in pictures]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)


def normalize(_: Any, image: Tensor, mean: Any, std: Any, **rest: Any) -> Tensor:
    """image [..., C, h, w], (x - mean) / std of each channel"""
    shift, factor = (torch.as_tensor(each).view(-1, 1, 1) for each in (mean, std))
    return (image - shift) / factor


@torch.inference_mode()
def logits(model: Any, read: dict[str, Tensor]) -> Tensor:
    """[T, V] at every position."""
    return model(**read, use_cache=False).logits[0]  # type: ignore[no-any-return]
