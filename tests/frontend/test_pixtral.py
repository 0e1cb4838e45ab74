"""Pixtral's tower in both of its forms, from pixels and tokens to logits, against transformers in float32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pixtral
import pytest
import torch
from image_engines import load_with_images
from law import assert_same_logits
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config import Config, VisionConfig
from atom.config.checkpoint import open_for
from atom.errors import AtomError
from atom.graph import interpret, ops, verify
from atom.images.encoder_inputs import encoder_inputs
from atom.images.layout import lay_out
from atom.images.patches import prepare
from atom.images.processor import Processor, processor_of
from atom.images.prompts import place_images, show_placeholders
from atom.images.sizes import fit_size


def tower_of(config: Config) -> tuple[VisionConfig, Processor]:
    tower = config.model.vision
    assert tower is not None
    return tower, processor_of(tower)


@pytest.mark.sampled(3)
@torch.inference_mode()
@pytest.mark.parametrize("is_original", [True, False], ids=["as on the hub", "as transformers names them"])
@pytest.mark.parametrize("name", pixtral.FORMS)
def test_pixels_and_tokens_give_the_logits_of_transformers(name: str, is_original: bool, tmp_path: Path) -> None:
    model, config = pixtral.save(name, tmp_path, is_original=is_original), load_with_images(tmp_path)
    tower, processor = tower_of(config)
    drawn = pixtral.draw(*pixtral.SIZES)
    prompt = pixtral.make_prompt(model, drawn)

    images = [prepare(pixels, processor) for pixels in drawn]
    laid_out = functools.partial(lay_out, text=tower.text, encode=lambda text: [pixtral.SPECIAL[text]] if text else [])
    tokens, placed = place_images(prompt.given, images, processor.token, laid_out)
    assert show_placeholders(tokens, pixtral.IMAGE) == prompt.tokens
    assert place_images(prompt.tokens, images, processor.token, laid_out) == (tokens, placed)
    first, second = placed
    assert (first.start, first.stop, second.stop) == (5, second.start, len(tokens) - len(prompt.given) + 7)

    graph, checkpoint = semantic_graph(config), open_for(config, SilentProgress())
    verify(graph, ops.SEMANTIC)
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    own = weights.load(graph.recipes(), checkpoint, SilentProgress()).__getitem__
    inputs, order = encoder_inputs(images, tower)
    named = {node.name: torch.from_numpy(inputs[node.name].copy()) for node in graph.programs["vision"].inputs}
    rows = interpret(graph, "vision", named, own)
    assert order.tolist() == list(range(len(rows)))
    assert_same_logits(rows, pixtral.encode(model, prompt))
    is_row = torch.tensor(tokens) < 0
    body = {
        "tokens": torch.tensor(tokens).clamp(min=0),
        "positions": torch.arange(len(tokens)),
        "rows": torch.where(is_row, is_row.cumsum(0) - 1, -1).int(),
        "encoded": rows,
    }
    hidden = interpret(graph, "body", body, own)
    assert_same_logits(interpret(graph, "head", {"hidden": hidden}, own), pixtral.logits(model, prompt))


def test_sizes_are_those_of_transformers(tmp_path: Path) -> None:
    pixtral.save("Mistral3", tmp_path)
    _, processor = tower_of(load_with_images(tmp_path))
    for height, width in ((1, 5), (20, 300), (333, 517), (40, 41), (39, 8)):
        expected = get_resize_output_image_size(np.zeros((height, width, 3)), pixtral.EDGE, 8)
        assert fit_size(height, width, processor, processor.max_pixels) == expected
        rows, columns = fit_size(height, width, processor, 128)
        assert 64 <= rows * columns <= 128 and rows % 8 == columns % 8 == 0


@pytest.mark.parametrize(("field", "value"), [("vision_feature_layer", -2), ("model_type", "clip_vision_model")])
def test_another_tower_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    pixtral.save("Llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config["vision_config"] if field == "model_type" else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        AtomError,
        match=r"vision_feature_layer=-2 in its config.json is not supported|has no encoder of model_type=clip_vision_model",
    ):
        load_with_images(tmp_path)
