"""Find the names of stored tensors by the roles of a model."""

from __future__ import annotations

import re
from collections.abc import Collection

from atom.checkpoint.modules import module_of
from atom.checkpoint.stacked import find_stacked
from atom.config.schema import ModelConfig


def numbered(pattern: str) -> str:
    """A regular expression of an escaped name, of any layer, stream and section."""
    for mark in ("{layer}", "{pair}", "{half}", "{stream}"):
        pattern = pattern.replace(re.escape(mark), "[0-9]+")
    return pattern.replace(re.escape("{section}"), "[^.]+")


def stored_name(model: ModelConfig, role: str, layer: int | None) -> str:
    """The stored name of a role in a layer; {pair} and {half} count layers by two, {layer} with {section} those of one.

    Loops over layers share their names, except that of `layer`, which has caches.
    """
    name = model.weights[role]
    if layer is not None and layer >= model.layers and model.mtp_layer is not None:
        name, layer = name_of_mtp(model, name), layer - model.layers
    if layer is not None and layer < model.layers and "{section}" in name:
        section, loop, number = model.run_of(layer)
        name = name.replace("{section}", model.sections[section].name)
        layer = number + (loop * model.sections[section].layers if role == "layer" else 0)
    elif layer is not None and role != "layer" and layer < model.layers:
        layer = model.layer_like(layer)
    if layer is not None and ("{shared}" in name or "{use}" in name):
        use, first = model.shared_use(layer)
        name = name.replace("{shared}", str(first)).replace("{use}", str(use))
    if layer is not None:
        name = name.replace("{pair}", str(layer // 2)).replace("{half}", str(layer % 2))
    return name.replace("{layer}", str(layer))


def name_of_mtp(model: ModelConfig, name: str) -> str:
    """A name with {layer} as it is in the layers after the body's."""
    return name if model.mtp_layer is None else name.replace(model.weights["layer"], model.mtp_layer)


def expert_names(model: ModelConfig, names: Collection[str]) -> set[str]:
    """The weights of experts that a checkpoint stores as one tensor, by the names of modules."""
    parts = find_stacked(names, stacked_parts(model)).values()
    stacked = find_modules(model, names, "experts_gate", "experts_up", "experts_down")
    return {part.replace("{expert}", "0") for each in parts for part in each} | {
        name.removesuffix(".weight") + ".weight" for name in stacked
    }


def find_modules(model: ModelConfig, names: Collection[str], *roles: str) -> set[str]:
    """The names that a role has in some layer."""
    stored = [model.weights[role] for role in roles if role in model.weights]
    stored += [name_of_mtp(model, name) for name in stored]
    pattern = re.compile(numbered("|".join(map(re.escape, stored))))
    return {name for name in names if pattern.fullmatch(name)}


def modules_of(model: ModelConfig) -> set[str]:
    """The modules that a model's roles have in its layers."""
    layers, streams = range(model.layers + model.mtp_layers), range(max(model.streams.num - 1, 1))
    names = {stored_name(model, role, layer) for role in model.weights for layer in layers}
    return {module_of(name.replace("{stream}", str(stream))) for name in names for stream in streams}


def find_optional(model: ModelConfig, names: Collection[str]) -> dict[str, str]:
    """The stored names of roles, without those that this draft of EAGLE-3 has not: an embedding and a map of tokens.

    names: of stored tensors; without any, a draft has what it cannot do without
    """
    eagle3 = model.eagle3
    if eagle3 is None or "d2t" not in model.weights:
        return model.weights
    embedding, tokens = f"{model.weights['embedding']}.weight", model.weights["d2t"]
    has = {
        "embedding": embedding in names if names else eagle3.target_hidden not in (None, model.hidden),
        "d2t": tokens in names or eagle3.vocab not in (None, model.vocab),
    }
    return {role: name for role, name in model.weights.items() if has.get(role, True)}


def stacked_parts(model: ModelConfig) -> dict[str, list[str]]:
    """The stored names of stacked tensors, with those of their parts, see `atom.checkpoint.stacked.unstack`."""
    stacked = {
        name.replace("{section}", section): [
            # the number on both sides is the stored one
            model.weights[role].replace("{pair}", "{layer}").replace("{section}", section) + dot + part
            for role, dot, part in (each.partition(".") for each in parts)
        ]
        for name, parts in model.stacked.items()
        for section in ([each.name for each in model.sections] if "{section}" in name else [""])
    }
    return stacked | {
        name_of_mtp(model, name): [name_of_mtp(model, part) for part in parts] for name, parts in stacked.items()
    }
