"""Check the draft model of speculative decoding against the model that it drafts for.

check_fits(config.model, draft)
"""

from __future__ import annotations

from atom.config.schema import Eagle3Config, ModelConfig
from atom.errors import ConfigError, UnsupportedError


def check_fits(model: ModelConfig, draft: ModelConfig) -> None:
    """Check that a draft of EAGLE-3 reads what the model has."""
    if (eagle3 := draft.eagle3) is None:
        return
    hidden = eagle3.target_hidden or draft.hidden
    if hidden != model.hidden:
        raise ConfigError(f"it drafts for a model with a hidden size of {hidden}, not {model.hidden}; take another one")
    outside = [layer for layer in find_aux_layers(eagle3, model.layers) if not 0 <= layer <= model.layers]
    if model.streams.kind != "one":
        raise UnsupportedError(f"it reads hidden states of one stream, the model has kind {model.streams.kind}")
    if outside:
        raise ConfigError(f"it reads the input of layer {outside[0]} of the model, which has {model.layers} layers")


def find_aux_layers(eagle3: Eagle3Config, num_layers: int) -> list[int]:
    """The layers of a model whose input a draft reads, ascending; num_layers stands for the output of the last one.

    A layer's input is the sum of residuals, ahead of its norm: eagle/model/modeling_llama_kv.py of SafeAILab/EAGLE,
    `aux_hidden_state_layers` of vLLM's models. SGLang counts layers by their output (`set_eagle3_layers_to_capture`).
    """
    if eagle3.input_of:
        return sorted(eagle3.input_of)
    if eagle3.output_of:
        return sorted(layer + 1 for layer in eagle3.output_of)
    return sorted((2, num_layers // 2, num_layers - 3))
