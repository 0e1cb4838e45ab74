"""Tiny models with Pixtral's tower, made by `transformers`, and prompts with images.

model = pixtral.save("Mistral3", folder)
prompt = pixtral.make_prompt(model, pixtral.draw(2))
logits = pixtral.logits(model, prompt, output)      # [T + 1, V]: after the prompt, and after each token of the output
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import tiny
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

MODULE = "transformers.models.pixtral"
TOWER = {"model_type": "pixtral", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 36, "patch_size": 4, "hidden_act": "silu", "rope_theta": 100.0}  # fmt: skip
TEXT = {**tiny.SIZES, "rms_norm_eps": 1e-3, "vocab_size": 272}
MISTRAL = {"model_type": "mistral", "head_dim": 12, "sliding_window": None}
MISTRAL4 = {**tiny.MLA, **tiny.EXPERTS, "n_routed_experts": 8, "q_lora_rank": 20, "rms_norm_eps": 1e-6,
            "rope_parameters": {**tiny.YARN_MLA, "original_max_position_embeddings": 16,
                                "llama_4_scaling_beta": 0.4}}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # transformers' class, text_config, the whole's fields
    "Mistral3": ("Mistral3", MISTRAL, {"multimodal_projector_bias": True}),
    "Llava": ("Llava", MISTRAL, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "Ministral3": ("Mistral3", {"model_type": "ministral3", **tiny.VARIANTS["ministral3"][1]}, {}),
    "Mistral4": ("Mistral3", {"model_type": "mistral4", **MISTRAL4}, {}),
}
SPECIAL = {"<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4, "[IMG]": 10, "[IMG_BREAK]": 14, "[IMG_END]": 15}
IMAGE, BREAK, END = (SPECIAL[name] for name in ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
TEMPLATE = """\
<s>{% for message in messages %}[INST]{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == "image" %}[IMG]{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}[/INST]{% endfor %}"""
EDGE = 40
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "size": {"longest_edge": EDGE}}
SIZES = ((13, 30), (70, 41))  # height and width of images

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


class Prompt(NamedTuple):
    given: list[int]  # IMAGE stands for an image
    tokens: list[int]  # as transformers' processor writes images
    read: dict[str, Any]  # inputs of transformers' model, besides tokens


def save(name: str, folder: Path, *, is_original: bool = True, **tower: Any) -> Any:
    """Write the checkpoint of a model; the model, in float32.

    is_original: with the hub's names of tensors, in place of those of transformers' modules
    """
    torch.manual_seed(0)
    kind, text, fields = FORMS[name]
    made: Any = getattr(transformers, f"{kind}ForConditionalGeneration")
    given = {"text_config": {**TEXT, **text}, "vision_config": {**TOWER, **tower}}
    config = made.config_class(**given, image_token_index=IMAGE, tie_word_embeddings=False, **fields)
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, save_original_format=is_original)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, which are tokens 16 to 271, with the special tokens of images."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = SPECIAL | {byte: 16 + place for place, byte in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def draw(*sizes: tuple[int, int]) -> list[Pixels]:
    return [np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8) for height, width in sizes]


def make_prompt(model: Any, images: list[Pixels], seed: int = 0) -> Prompt:
    """Text, all images side by side, and text."""
    vision, merge = model.config.vision_config, getattr(model.config, "spatial_merge_size", 1)
    words = [20 + (token + seed) % 200 for token in tiny.prompt(20)]
    if not images:
        return Prompt(words, words, {})
    side = vision.patch_size * merge
    processor = PixtralImageProcessorPil(**PROCESSOR, patch_size={"height": side, "width": side})
    read = processor([PIL.Image.fromarray(pixels) for pixels in images], return_tensors="pt")
    shown = [token for index in range(len(images)) for token in expand(read["image_sizes"].tolist(), index, merge)]
    return Prompt([*words[:5], *[IMAGE] * len(images), *words[5:]], [*words[:5], *shown, *words[5:]], dict(read))


def expand(sizes: Any, index: int, merge: int) -> list[int]:
    """The ids of an image in a prompt, by transformers' processor."""
    pil = importlib.import_module(f"{MODULE}.image_processing_pil_pixtral")
    with pytest.MonkeyPatch.context() as patch:  # its twin needs torchvision
        patch.setitem(sys.modules, f"{MODULE}.image_processing_pixtral", pil)
        processing: Any = importlib.import_module(f"{MODULE}.processing_pixtral")
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    processor = SimpleNamespace(patch_size=TOWER["patch_size"], spatial_merge_size=merge, **names)
    text = processing.PixtralProcessor.replace_image_token(processor, {"image_sizes": sizes}, index)
    return [SPECIAL[f"[{each}]"] for each in text[1:-1].split("][")]


@torch.inference_mode()
def encode(model: Any, prompt: Prompt) -> torch.Tensor:
    """The rows [M, H] of all images."""
    made = model.model.get_image_features(**prompt.read, vision_feature_layer=-1)
    return torch.cat(list(made.pooler_output))


@torch.inference_mode()
def logits(model: Any, prompt: Prompt, output: list[int] = []) -> torch.Tensor:  # noqa: B006
    """[T, V] at every position of a prompt and an answer."""
    made: torch.Tensor = model(torch.tensor([[*prompt.tokens, *output]]), **prompt.read, use_cache=False).logits[0]
    return made
