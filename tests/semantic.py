"""Hold a semantic text, run by the reference interpreter, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny
import torch
from law import assert_same_logits
from parting import naming_line

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.graph import Graph, interpret, ops, verify


@torch.inference_mode()
def assert_same_as_transformers(
    config: Config, model: Any, rewrite: Callable[[Graph], Graph] = lambda own: own
) -> None:
    """rewrite: passes that leave it a semantic text"""
    graph = rewrite(semantic_graph(config))
    verify(graph, ops.SEMANTIC)
    checkpoint = open_for(config, SilentProgress())
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    tensors = weights.load(graph.recipes(), checkpoint, SilentProgress())
    tokens = torch.tensor(tiny.prompt(70))
    hidden = interpret(graph, "body", {"tokens": tokens, "positions": torch.arange(70)}, tensors.__getitem__)
    logits = interpret(graph, "head", {"hidden": hidden}, tensors.__getitem__)
    with naming_line(load([*config.overrides, "level=0"]), model, tokens.tolist()):
        assert_same_logits(logits, tiny.logits(model, tokens.tolist()))
