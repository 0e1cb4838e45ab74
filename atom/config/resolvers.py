"""What model files compute of values in config.json: lists of layer types, and sizes.

    ${every:4,full_attention,linear_attention}      # three layers of the second type, then one of the first
    ${repeat:${every:2,sparse,dense,0},${hf:num_hidden_layers}}     # so many layers, of which the even ones are sparse
    ${where:${hf:full_attn_idxs,null},${hf:num_hidden_layers},full_attention,conv}
    ${spell:${hf:hybrid_override_pattern,null},M,mamba,'*',attention}
    ${paired:${hf:layer_types},mlp}      # the types of layers that are listed as two each, of which the second is mlp
    ${of_type:${hf:num_attention_heads_per_layer,null},${hf:layer_types,null},sliding_attention,${hf:num_attention_heads}}
    ${layers_of:${hf:mlp_layer_types,null},hash_moe}    # their numbers
    ${add:${hf:sliding_window_size,null},1}
    ${round_up:${scaled:${hf:intermediate_size},2,3},256}
    ${div:${hf:scale_depth},${sqrt:${hf:num_hidden_layers}}}
    ${minus:${hf:num_hidden_layers},${hf:num_kv_shared_layers,0}}
    ${finite:${hf:time_step_limit.1,null}}
    ${common:${hf:per_layer_config,null},head_dim,${hf:global_head_dim,512}}    # what layers have of their own

null, as a key that config.json has not, gives null. A value of another type is a ConfigError that names the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig

from atom.config.schema import MAX_LAYERS
from atom.config.spelling import spelled
from atom.errors import ConfigError


def every(number: Any, named: str, others: str, at: Any = None, *, _node_: Any) -> list[str] | None:
    """A pattern of this many layers, of which one is of another type.

    at: its number, from 0; null: the last one
    """
    if number is None:
        return None
    if not is_count(number):
        raise ConfigError(f"{key_of(_node_)}: {spelled(number)} is not a number of layers from 1 to {MAX_LAYERS}")
    at = number - 1 if at is None else at
    if isinstance(at, bool) or at not in range(number):
        raise ConfigError(f"{key_of(_node_)}: {spelled(at)} is no layer of a pattern of {number}, counted from 0")
    return [named if layer == at else others for layer in range(number)]


def repeat(pattern: Any, number: Any, ahead: Any = 0, *, _node_: Any) -> list[str] | None:
    """So many types of layers, of a pattern that repeats.

    ahead: layers of its first type that come first
    """
    if pattern is None or number is None:
        return None
    listed = list(pattern) if isinstance(pattern, list | ListConfig) else []
    if not listed or not is_count(number):
        raise ConfigError(f"{key_of(_node_)}: {spelled(pattern)} is not a pattern, of {spelled(number)} layers")
    if ahead != 0 and not is_count(ahead):
        raise ConfigError(f"{key_of(_node_)}: {spelled(ahead)} is no number of layers ahead of a pattern")
    return [listed[max(layer - ahead, 0) % len(listed)] for layer in range(number)]


def where(layers: Any, number: Any, named: str, others: str, first: int = 0, *, _node_: Any) -> list[str] | None:
    """The types of so many layers, of which the listed ones, maybe in a text as 3,4,5, have a type of their own.

    first: the number of the first layer
    """
    if layers is None or number is None:
        return None
    if isinstance(layers, str) and re.fullmatch(r"[0-9]+( *, *[0-9]+)*", layers):
        layers = [int(each) for each in layers.split(",")]
    listed = list(layers) if isinstance(layers, list | ListConfig) else None
    if listed is None or not is_count(number):
        raise ConfigError(f"{key_of(_node_)}: {spelled(layers)} is not a list of layers, of {spelled(number)}")
    for layer in listed:
        if layer not in range(first, first + number):
            raise ConfigError(f"{key_of(_node_)}: there is no layer {spelled(layer)}, the model has {number}")
    return [named if layer in listed else others for layer in range(first, first + number)]


def spell(text: Any, *pairs: Any, _node_: Any) -> list[str] | None:
    """The types of the layers that a text, or a list, names by a letter or number each: ${spell:M-M,M,mamba,-,mlp}."""
    if text is None:
        return None
    types = dict(zip(map(str, pairs[::2]), pairs[1::2], strict=True))
    letters = [str(each) for each in text] if isinstance(text, list | ListConfig) else list(str(text))
    for letter in letters:
        if letter not in types:
            raise ConfigError(f"{key_of(_node_)}: {letter} in {text} is no type of layers; letters: {' '.join(types)}")
    return [types[letter] for letter in letters]


def paired(types: Any, second: str, *, _node_: Any) -> list[str] | None:
    """The types of layers of which a list has two each, the second one always of this type."""
    if types is None:
        return None
    listed = list(types) if isinstance(types, list | ListConfig) else []
    if not listed or len(listed) % 2 or any(each != second for each in listed[1::2]):
        raise ConfigError(f"{key_of(_node_)}: every second one of [{', '.join(map(str, listed))}] has to be {second}")
    return listed[::2]


def of_type(listed: Any, types: Any, named: str, default: Any = None, *, _node_: Any) -> Any:
    """The value that all layers of a type have, of a list with one for each layer; the default without a list.

    A value that is no list is that of all layers.
    """
    if listed is None or not isinstance(listed, list | ListConfig):
        return default if listed is None else listed
    found = [each for each, kind in zip(listed, types or (), strict=False) if kind == named]
    if any(each != found[0] for each in found):
        raise ConfigError(f"{key_of(_node_)}: layers of type {named} differ in {spelled(listed)}; they have one value")
    return found[0] if found else default


def layers_of(types: Any, named: str, *, _node_: Any) -> list[int] | None:
    """The layers that a list has as of a type."""
    if types is None:
        return None
    if not isinstance(types, list | ListConfig):
        raise ConfigError(f"{key_of(_node_)}: {spelled(types)} is not a list of types of layers")
    return [layer for layer, kind in enumerate(types) if kind == named]


def count(listed: Any) -> int | None:
    """The number of entries of a list, or of letters."""
    return len(listed) if isinstance(listed, str | list | ListConfig) else None


def scaled(number: Any, by: Any, divisor: Any = 1, *, _node_: Any) -> int | None:
    """number * by / divisor, without its fraction; the number may be 0."""
    if number is None or by is None:
        return None
    check_numbers(*([number] if number else []), by, divisor, node=_node_)
    return int(number * by / divisor)


def add(number: Any, other: Any, *, _node_: Any) -> Any:
    """number + other."""
    if number is None or other is None:
        return None
    for each in (number, other):
        if each != 0:
            check_numbers(each, node=_node_)
    return number + other


def minus(number: Any, by: Any, *, _node_: Any) -> int | None:
    """A number less another, which may be 0."""
    if number is None or by is None:
        return None
    check_numbers(number, *([by] if by else []), node=_node_)
    return int(number - by)


def round_up(number: Any, multiple: Any, *, _node_: Any) -> int | None:
    """The first multiple from this number on."""
    if number is None or multiple is None:
        return None
    check_numbers(number, multiple, node=_node_)
    return int(-(-number // multiple) * multiple)


def mul(a: Any, b: Any, *, _node_: Any) -> int | float | None:
    """a * b"""
    if a is None or b is None:
        return None
    check_numbers(a, b, node=_node_)
    return a * b  # type: ignore[no-any-return]


def div(a: Any, b: Any, *, _node_: Any) -> float | None:
    """a / b"""
    if a is None or b is None:
        return None
    check_numbers(a, b, node=_node_)
    return a / b  # type: ignore[no-any-return]


def sqrt(number: Any, *, _node_: Any) -> float | None:
    """The square root."""
    if number is None:
        return None
    check_numbers(number, node=_node_)
    return math.sqrt(number)


def finite(number: Any) -> Any:
    """A limit, null for an infinite one."""
    return None if isinstance(number, float) and math.isinf(number) else number


def common(layers: Any, key: str, default: Any, *, _node_: Any) -> Any:
    """The value of a key that layers have, of which an object has one each; the default if they have none.

    It does not say which layers these are: the shapes of their tensors do.
    """
    listed = list(layers.values()) if isinstance(layers, Mapping | DictConfig) else []
    if layers is not None and not all(isinstance(each, Mapping | DictConfig) for each in (layers, *listed)):
        raise ConfigError(f"{key_of(_node_)}: {spelled(layers)} is no object with one for each layer")
    found = [each.get(key) for each in listed]
    if any(value != found[0] for value in found):
        values = ", ".join(dict.fromkeys(map(spelled, found)))
        raise ConfigError(f"{key_of(_node_)}: {key} differs between layers: {values}")
    return default if not found or found[0] is None else found[0]


def check_numbers(*numbers: Any, node: Any) -> None:
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1 << 53:
            raise ConfigError(f"{key_of(node)}: {spelled(number)} is not a number above 0")


def is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 < number <= MAX_LAYERS


def key_of(node: Any) -> str:
    """The key of the field whose value is computed."""
    return str(node._get_full_key(""))


RESOLVERS = (
    every,
    repeat,
    where,
    spell,
    paired,
    of_type,
    layers_of,
    count,
    scaled,
    add,
    minus,
    round_up,
    mul,
    div,
    sqrt,
    finite,
    common,
)
