"""Pixtral's tower in both of its forms, from pixels and tokens to logits, against transformers in float32."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from law import assert_same_logits

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import interpret, ops, verify
from atom.images.encoder_inputs import encoder_inputs
from atom.images.layout import lay_out
from atom.images.processor import fit_size, prepare, processor_of
from atom.images.prompts import place_images

PIXTRAL = "transformers.models.pixtral"
PIL = pytest.importorskip("PIL.Image")
TOWER = {"model_type": "pixtral", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 36, "patch_size": 4, "hidden_act": "silu", "rope_theta": 100.0}  # fmt: skip
TEXT = {**tiny.SIZES, "model_type": "mistral", "head_dim": 12, "rms_norm_eps": 1e-3, "sliding_window": None}
FORMS: dict[str, dict[str, Any]] = {
    "Mistral3": {"multimodal_projector_bias": True},
    "Llava": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
}
IMAGE, LINE_END, IMAGE_END = 10, 12, 13
ENDS = {"[IMG_BREAK]": LINE_END, "[IMG_END]": IMAGE_END}
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "size": {"longest_edge": 40}}
SIZES = ((13, 30), (70, 41))  # height and width of images


def save(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    made: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    config = made.config_class(text_config=TEXT, vision_config=TOWER, image_token_index=IMAGE, **FORMS[name])
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, save_original_format=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def load_with_images(folder: Path, *overrides: str) -> Config:
    return load([f"checkpoint={folder}", "dtype=fp32", "device=cpu", "serve.images=true", *overrides])


def expand(sizes: Any, index: int, merge: int) -> list[int]:
    """The ids of an image in a prompt, by transformers' processor."""
    pil = importlib.import_module(f"{PIXTRAL}.image_processing_pil_pixtral")
    with pytest.MonkeyPatch.context() as patch:  # its twin needs torchvision
        patch.setitem(sys.modules, f"{PIXTRAL}.image_processing_pixtral", pil)
        processing: Any = importlib.import_module(f"{PIXTRAL}.processing_pixtral")
    names = {"image_token": "I", "image_break_token": "B", "image_end_token": "E"}
    processor = SimpleNamespace(patch_size=TOWER["patch_size"], spatial_merge_size=merge, **names)
    text = processing.PixtralProcessor.replace_image_token(processor, {"image_sizes": sizes}, index)
    return [{"I": IMAGE, "B": LINE_END, "E": IMAGE_END}[each] for each in text]


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMS)
def test_pixels_and_tokens_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    model, config = save(name, tmp_path), load_with_images(tmp_path)
    tower = config.model.vision
    assert tower is not None
    processor, side = processor_of(tower), tower.patch * tower.merger.side
    drawn = [np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8) for height, width in SIZES]
    theirs = PixtralImageProcessorPil(**PROCESSOR, patch_size={"height": side, "width": side})
    read = theirs([PIL.fromarray(pixels) for pixels in drawn], return_tensors="pt")
    first, second = (expand(read["image_sizes"].tolist(), index, tower.merger.side) for index in range(2))
    words = [20 + token % 80 for token in tiny.prompt(20)]
    expected = [*words[:5], *first, *second, *words[5:]]

    images = [prepare(pixels, processor) for pixels in drawn]
    laid_out = functools.partial(lay_out, text=tower.text, encode=lambda text: [ENDS[text]] if text else [])
    tokens, placed = place_images([*words[:5], IMAGE, IMAGE, *words[5:]], images, processor.token, laid_out)
    assert [IMAGE if token < 0 else token for token in tokens] == expected
    assert place_images(expected, images, processor.token, laid_out) == (tokens, placed)
    assert [each.stop - each.start for each in placed] == [len(first), len(second)]

    graph, checkpoint = semantic_graph(config), open_for(config, SilentProgress())
    verify(graph, ops.SEMANTIC)
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    own = weights.load(graph.recipes(), checkpoint, SilentProgress()).__getitem__
    inputs, order = encoder_inputs(images, tower)
    named = {node.name: torch.from_numpy(inputs[node.name].copy()) for node in graph.programs["vision"].inputs}
    rows = interpret(graph, "vision", named, own)
    assert order.tolist() == list(range(len(rows)))
    made = model.model.get_image_features(
        read["pixel_values"], image_sizes=read["image_sizes"], vision_feature_layer=-1
    )
    assert_same_logits(rows, torch.cat(list(made.pooler_output)))
    is_row = torch.tensor(tokens) < 0
    body = {
        "tokens": torch.tensor(tokens).clamp(min=0),
        "positions": torch.arange(len(tokens)),
        "rows": torch.where(is_row, is_row.cumsum(0) - 1, -1).int(),
        "encoded": rows,
    }
    hidden = interpret(graph, "body", body, own)
    logits = model(torch.tensor([expected]), **read, use_cache=False).logits[0]
    assert_same_logits(interpret(graph, "head", {"hidden": hidden}, own), logits)


@pytest.mark.parametrize(("height", "width"), [(1, 5), (20, 300), (333, 517), (40, 41), (39, 8)])
def test_sizes_are_those_of_transformers(height: int, width: int, tmp_path: Path) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    save("Mistral3", tmp_path)
    tower = load_with_images(tmp_path).model.vision
    assert tower is not None
    expected = get_resize_output_image_size(np.zeros((height, width, 3)), 40, 8)
    processor = processor_of(tower)
    assert fit_size(height, width, processor, processor.max_pixels) == expected
    rows, columns = fit_size(height, width, processor, 128)
    assert 64 <= rows * columns <= 128 and rows % 8 == columns % 8 == 0


@pytest.mark.parametrize(("field", "value"), [("vision_feature_layer", -2), ("model_type", "clip_vision_model")])
def test_another_tower_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    save("Llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config["vision_config"] if field == "model_type" else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AtomError, match=r"vision_feature_layer=-2 is not supported|has no encoder of them"):
        load_with_images(tmp_path)
