"""Models that read images: rows of the tower and logits at every position, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from law import assert_same_logits
from torch import Tensor

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.graph import Graph, Recipe, interpret, ops, verify
from atom.images.encoder_inputs import encoder_inputs


def load_with_images(folder: Path, *overrides: str) -> Config:
    return load([f"checkpoint={folder}", "dtype=fp32", "device=cpu", "serve.images=true", *overrides])


def read(config: Config, graph: Graph) -> Callable[[Recipe], Any]:
    checkpoint = open_for(config, SilentProgress())
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    return weights.load(graph.recipes(), checkpoint, SilentProgress()).__getitem__


def interpret_vision(graph: Graph, config: Config, prompt: vision.Prompt, own: Callable[[Recipe], Any]) -> Tensor:
    """The rows of all images, in their order."""
    assert config.model.vision is not None
    inputs, order = encoder_inputs(prompt.images, config.model.vision)
    named = {node.name: torch.from_numpy(inputs[node.name].copy()) for node in graph.programs["vision"].inputs}
    made = interpret(graph, "vision", named, own)
    rows = torch.empty_like(made)
    rows[order] = made
    return rows


@torch.inference_mode()
def assert_same_as_transformers(config: Config, model: Any) -> None:
    graph, prompt = semantic_graph(config), vision.make_prompt(model)
    verify(graph, ops.SEMANTIC)
    own = read(config, graph)
    rows = interpret_vision(graph, config, prompt, own)
    assert_same_logits(rows, vision.encode(model, prompt))
    shuffled = torch.randperm(len(rows) + 2)[: len(rows)]  # the host places rows as it likes
    encoded = torch.full((len(rows) + 2, rows.shape[1]), float("nan"))
    encoded[shuffled] = rows
    placed = prompt.rows
    body = {
        "tokens": prompt.text,
        "positions": torch.arange(len(placed)),
        "rows": torch.where(placed >= 0, shuffled[placed.clamp(min=0)].int(), -1).int(),
        "encoded": encoded,
        "rope_positions": vision.rope_positions(model, prompt),
    }
    hidden = interpret(graph, "body", body, own)
    assert_same_logits(interpret(graph, "head", {"hidden": hidden}, own), vision.logits(model, prompt))


@pytest.mark.parametrize("name", vision.MODELS)
def test_rows_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = vision.save(name, tmp_path)
    assert_same_as_transformers(load_with_images(tmp_path), model)
