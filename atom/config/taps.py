"""The layers that passes.taps and passes.steer name.

    taps = layer_taps(load(["checkpoint=/models/qwen3", "passes.taps=[model.layers.12]"]))
    taps.layers                     # (12,): what these layers give is returned next to the hidden states
    taps.vectors                    # vectors that are added to what layers give, each by a scale of the request's

A layer has the name of its module in transformers, which is also that of its KV in the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from atom.checkpoint.steering import SteeringFiles, name_of_vector
from atom.config.schema import Config, ModelConfig
from atom.config.stored_names import stored_name
from atom.errors import ConfigError, UnsupportedError

WRAPPER = "language_model."  # of the text's modules in a model that reads images, whose tensors have no such part
ROOT = "model."  # of a model's modules


class SteeringVector(NamedTuple):
    layer: int
    number: int  # of its name among those of passes.steer
    tensor: str  # its name in the checkpoint
    is_of_streams: bool  # it has numbers of its own for each stream; else all take the same ones


class LayerTaps(NamedTuple):
    """What a body has besides the model's own calls."""

    layers: tuple[int, ...] = ()  # whose results are returned, in this order
    vectors: tuple[SteeringVector, ...] = ()
    num_scales: int = 0  # names of passes.steer: a token has a scale for each


NO_TAPS = LayerTaps()


def layer_taps(config: Config) -> LayerTaps:
    """Find the layers that a configuration taps and steers. ConfigError, CheckpointError of files of vectors."""
    passes = config.passes
    layers = tuple(find_layer(config.model, name, "passes.taps") for name in passes.taps)
    vectors = []
    for number, (name, path) in enumerate((passes.steer or {}).items()):
        tensors = SteeringFiles({name: path}, config.model.layer_shape).tensors
        if not tensors:
            raise ConfigError(f"passes.steer.{name}: {path} has no tensor; write one for each layer, by its name")
        for tensor, stored in tensors.items():
            layer = find_layer(config.model, tensor.removeprefix(name_of_vector(name, "")), f"passes.steer.{name}")
            is_of_streams = stored.shape == (math.prod(config.model.layer_shape),)
            vectors.append(SteeringVector(layer, number, tensor, is_of_streams))
    return LayerTaps(layers, tuple(vectors), len(passes.steer or {}))


def find_layer(model: ModelConfig, name: str, at: str) -> int:
    """The number of the layer of this name. ConfigError if the model has none. at: the field that names it

    Names in the checkpoint may lack transformers' first part, as DeepSeek-V4's do.
    """
    names = [stored_name(model, "layer", number) for number in range(model.layers)]
    known, plain = [each.removeprefix(ROOT) for each in names], name.replace(WRAPPER, "").removeprefix(ROOT)
    if plain not in known:
        raise ConfigError(f"{at}: {name} is no layer of this model (layers: {names[0]} to {names[-1]})")
    return known.index(plain)


def check_taps(config: Config, model: ModelConfig) -> None:
    """Check that layers can be tapped and steered; `layer_taps` checks which. model: with its final values"""
    passes, steer = config.passes, config.passes.steer or {}
    if not isinstance(steer, Mapping) or not all(isinstance(path, str) for path in steer.values()):
        raise ConfigError(
            f"passes.steer={steer} is not a mapping from names to files; write {{calm: calm.safetensors}}"
        )
    if not passes.taps and not steer:
        return
    field = "passes.taps" if passes.taps else "passes.steer"
    if twice := next((name for name in passes.taps if passes.taps.count(name) > 1), None):
        raise ConfigError(f"passes.taps names {twice} twice; name it once")
    if model.streams.kind == "attention_residuals":
        given = "blocks of this model read all sums of what earlier ones gave, of which none is what a layer gives"
        raise UnsupportedError(f"{field}: {given}; leave it out")
