"""Tiny models of families that have images in sizes or tiles of their own, by one interface.

case = make_case("Gemma4", folder)                          # writes the checkpoint
(answer,) = engine.generate(case.asked, GREEDY)
logits = case.logits(answer["token_ids"])                   # [T, V] of transformers, of prompt and answer
logits = case.logits(dtype=torch.bfloat16)                  # of the prompt, computed in bf16
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gemma_images
import lfm2_vl
import numpy as np
import pixtral
import tiled
import torch
import torch.nn.functional as F
from torch import Tensor

from atom import LLMEngine
from atom.images.types import PlacedImage


class Case(NamedTuple):
    """A prompt with two images of a model, and what transformers computes of it."""

    asked: dict[str, Any]  # a prompt of `generate`
    model: Any  # of transformers, in float32
    read: dict[str, Tensor]  # its inputs
    special: list[int]  # tokens that transformers takes for images: no answer has them

    @torch.inference_mode()
    def logits(self, output: list[int] = [], dtype: torch.dtype = torch.float32) -> Tensor:  # noqa: B006
        """[T, V] at every position of the prompt and this output, computed in dtype."""
        model = self.model if dtype == torch.float32 else deepcopy(self.model).to(dtype)
        given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in self.read.items()}
        given["input_ids"] = torch.cat([self.read["input_ids"], torch.tensor([output], dtype=torch.int64)], dim=1)
        for name in given.keys() & {"token_type_ids", "mm_token_type_ids"}:
            given[name] = F.pad(given[name], (0, len(output)))
        made: Tensor = model(**given, use_cache=False).logits[0].float()
        return made

    def place(self, engine: LLMEngine) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """The prompt's tokens with placeholders, and its images."""
        assert engine._images is not None and engine.tokenizer is not None
        images = [engine._images.read_local(each) for each in self.asked["multi_modal_data"]["image"]]
        tokens = self.asked.get("prompt_token_ids") or engine.tokenizer.encode(self.asked["prompt"])
        return engine._images.place(tokens, images, engine.tokenizer)


def make_pixtral(name: str, folder: Path) -> Case:
    model, images = pixtral.save(name, folder), pixtral.draw(*pixtral.SIZES)
    prompt = pixtral.make_prompt(model, images)
    asked = {"prompt_token_ids": prompt.given, "multi_modal_data": {"image": images}}
    read = {**prompt.read, "input_ids": torch.tensor([prompt.tokens])}
    return Case(asked, model, {key: torch.as_tensor(each) for key, each in read.items()}, [pixtral.IMAGE])


def make_by(module: ModuleType, prompt: str, sizes: tuple[tuple[int, int], ...], special: list[int]) -> Any:
    """How to make a case with a module that saves a model, draws images and reads prompts. sizes: height and width"""

    def make(name: str, folder: Path) -> Case:
        model, processor = module.save(folder) if module is lfm2_vl else module.save(name, folder)
        images: list[np.ndarray] = [module.draw(*size) for size in sizes]
        asked = {"prompt": prompt, "multi_modal_data": {"image": images}}
        return Case(asked, model, module.read(processor, prompt, images), special)

    return make


IN_TILES = make_by(tiled, "ab<image>c<image>\nde", ((13, 30), (70, 41)), [tiled.IMAGE])
FAMILIES: dict[str, Callable[[str, Path], Case]] = {
    "Mistral3": make_pixtral,
    "Lfm2Vl": make_by(lfm2_vl, "ab<image>c<image>\nde", ((13, 20), (30, 41)), [lfm2_vl.IMAGE]),
    "Idefics3": IN_TILES,
    "SmolVLM": IN_TILES,
    "InternVL": IN_TILES,
    "Gemma3": make_by(gemma_images, "ab<start_of_image>\nc<start_of_image>de", ((13, 30), (24, 24)), [*range(30, 33)]),
    "Gemma4": make_by(gemma_images, "ab<|image|>\nc<|image|>de", ((13, 30), (70, 41)), [*range(30, 33)]),
}


def make_case(name: str, folder: Path) -> Case:
    """Write the checkpoint of a model of FAMILIES."""
    return FAMILIES[name](name, folder)
