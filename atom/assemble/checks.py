"""Check a checkpoint against the graph and the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atom import weights
from atom.checkpoint import DRAFT_PREFIX, Checkpoint, JoinedCheckpoint, Tokenizer
from atom.compiler import whole_graph
from atom.config import Config, ModelConfig
from atom.config.stored_names import stored_name
from atom.config.taps import layer_taps
from atom.errors import CheckpointError, ConfigError
from atom.frontend.mlp import mlp_of
from atom.graph import Graph, Recipe, W
from atom.weights.evaluate import Loaded


def check_weights(graph: Graph, checkpoint: Checkpoint, config: Config) -> None:
    """Check the checkpoint's tensors against the graph, unless weights are random."""
    if not config.load_dummy:
        graph = whole_graph(graph, config)
        weights.check(graph, checkpoint.tensors, left_out(config))
        weights.check_order(graph, checkpoint)


def models_of(config: Config) -> dict[str, ModelConfig]:
    """The model and its draft model, by the prefix of their tensors' names."""
    return {"": config.model, **({} if config.draft is None else {DRAFT_PREFIX: config.draft})}


def left_out(config: Config) -> list[str]:
    """The patterns of stored tensors that nothing reads."""
    ignored = [prefix + pattern for prefix, model in models_of(config).items() for pattern in model.ignore]
    return [*ignored, *mtp_patterns(config)]


def mtp_patterns(config: Config) -> Sequence[str]:
    """The patterns of tensors of multi-token prediction layers, stored after the last layer, that are left out.

    Of the first layer, if it drafts tokens, these are its embedding and head, which equal the model's own. What
    layers share is left out with the first.
    """
    found: list[str] = []
    method = config.serve.draft_method
    for prefix, model in models_of(config).items():
        layers = range(model.layers, model.layers + model.mtp_layers)
        num_used = method.num_own_layers if method is not None and model is config.model else 0
        roles = [(role, layer) for layer in layers[:num_used] for role in ("mtp_embedding", "mtp_head")]
        roles += [("layer", layer) for layer in layers[num_used:]]
        shared = [role for role, name in model.weights.items() if role.startswith("mtp_") and "{layer}" not in name]
        roles += [(role, layer) for layer in layers[:1] for role in shared if not num_used]
        names = [stored_name(model, role, layer) for role, layer in roles if role in model.weights]
        found += [f"{prefix}{name}.*" for name in dict.fromkeys(names)]
    return found


def check_values(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check what is read of loaded tensors as it is: scales, numbers of tokens and of experts, steering vectors."""
    check_kv_scales(tensors, config)
    check_vectors(tensors, config)
    check_draft_tokens(tensors, config)
    check_expert_tables(tensors, config)


def check_kv_scales(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check that scales of keys and values are numbers above 0."""
    scales = {
        prefix + stored_name(model, role, layer)
        for prefix, model in models_of(config).items()
        for role in ("k_scale", "v_scale")
        if role in model.weights
        for layer in range(model.layers + model.mtp_layers)
    }
    for recipe, tensor in tensors.items():
        if isinstance(recipe, W) and recipe.name in scales:
            assert isinstance(tensor, Tensor), "only experts are lists"
            if not 0 < (value := tensor.item()) < math.inf:
                raise CheckpointError(f"tensor {recipe.name} is {value:g}; a scale is a number above 0")


def check_vectors(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check that steering vectors are finite: 0 times another number would not leave rows what they are."""
    names = {vector.tensor for vector in layer_taps(config).vectors}
    for recipe, tensor in tensors.items():
        if isinstance(recipe, W) and recipe.name in names:
            assert isinstance(tensor, Tensor), "only experts are lists"
            if not tensor.isfinite().all():
                raise CheckpointError(f"tensor {recipe.name} has numbers that are not finite in {config.dtype}")


def check_draft_tokens(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check that a draft of EAGLE-3 maps its tokens to the model's."""
    stored = {recipe.name: tensor for recipe, tensor in tensors.items() if isinstance(recipe, W)}
    name = "" if config.draft is None else DRAFT_PREFIX + config.draft.weights.get("d2t", "")
    if (offsets := stored.get(name)) is None:
        return
    assert isinstance(offsets, Tensor), "only experts are lists"
    tokens = offsets + torch.arange(len(offsets), device=offsets.device)
    if not ((tokens >= 0) & (tokens < config.model.vocab)).all():
        raise CheckpointError(
            f"tensor {name} maps to tokens that the model does not have, of {config.model.vocab}; "
            "set serve.draft_model to a draft for this model"
        )


def check_expert_tables(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check that tables of experts by token list experts of their layer."""
    num_experts = {
        prefix + stored_name(model, "expert_table", layer): mlp_of(model, layer).experts
        for prefix, model in models_of(config).items()
        if "expert_table" in model.weights
        for layer in range(model.layers)
    }
    for recipe, tensor in tensors.items():
        if isinstance(recipe, W) and (experts := num_experts.get(recipe.name)) is not None:
            assert isinstance(tensor, Tensor), "only experts are lists"
            low, high = (int(end) for end in torch.aminmax(tensor))
            if not 0 <= low <= high < experts:
                wrong = low if low < 0 else high
                raise CheckpointError(f"tensor {recipe.name} lists expert {wrong}; the layer has 0 to {experts - 1}")


def check_same_tokens(tokenizer: Tokenizer | None, checkpoint: Checkpoint, config: Config) -> None:
    """Check that a whole model that drafts has the same tokens, if both checkpoints have a tokenizer."""
    method = config.serve.draft_method
    if tokenizer is None or not isinstance(checkpoint, JoinedCheckpoint) or not (method and method.needs_same_tokens):
        return
    other = checkpoint.other.tokenizer(trust_remote_code=config.trust_remote_code)
    if other is not None and (differing := tokenizer.find_difference(other)) is not None:
        raise ConfigError(
            f"serve.draft_model={config.serve.draft_model} has another vocabulary: token {differing} is not "
            "the model's; take a smaller model of the same family"
        )
