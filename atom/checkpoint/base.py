"""The interface of a checkpoint, and the JSON files that describe it.

checkpoint = open_checkpoint("/models/tiny")
checkpoint.config["hidden_size"]                         # config.json, with rope in one form
checkpoint.tensors["model.norm.weight"]                  # StoredTensor("bf16", (64,))
checkpoint.read("model.norm.weight")                     # memoryview of its 128 bytes
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from atom.checkpoint.files import MAX_DESCRIPTION, read_file
from atom.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from atom.checkpoint.tokenizer import Tokenizer

ROPE_KEYS = (  # keys of config.json that move into rope_parameters
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)

ROPE_TYPES = {
    "su": "longrope",  # an old name
    "mrope": "default",  # for text only, three equal positions are one
    "dynamic": "default",  # up to max_position_embeddings, beyond which no sequence goes
}


@dataclass(frozen=True)
class StoredTensor:
    dtype: str  # of the bytes that read() yields: bf16, fp16, fp32, i64, fp8_e4m3, ...
    shape: tuple[int, ...]
    blocks: tuple[int, ...] | None = None  # [O, B, bytes of a block], where read_blocks() yields a packed tensor's


class GGUFFacts(NamedTuple):
    """Facts that GGUF files leave out."""

    interleaved: Mapping[str, int] = MappingProxyType({})  # projection -> heads stored with rotary rows in pairs
    norm_offset: float = 0.0  # what GGUF adds to the weights of norms of the hub
    split: Mapping[str, str] = MappingProxyType({})  # tokenizer.ggml.pre -> regular expression of its pre-tokenizer
    ignore_merges: Collection[str] = ()  # those that look words up whole, and begin texts with BOS
    by_axis: Mapping[str, int] = MappingProxyType({})  # projection -> heads stored with pairs of columns ahead of rows'


NO_FACTS = GGUFFacts()
CHUNK = 64 << 10  # bytes that are compared at once: they stay in a core's cache


class FileRange(NamedTuple):
    """The range of a file that has a tensor's bytes, to be read without the map of the file."""

    path: Path
    start: int  # byte
    size: int  # bytes


class Checkpoint(ABC):
    location: str  # its name in errors
    config: dict[str, Any]  # config.json; rope only as `rope_parameters`
    generation_config: dict[str, Any]  # {} without one
    tensors: Mapping[str, StoredTensor]  # by hub name; empty if only the config is there
    reading: str = ""  # what the tensors depend on besides the files

    def name_of(self, name: str) -> str | None:
        """The name that a tensor of transformers' whole model has here; None if it is none of the text's."""
        return name

    def names(self) -> Collection[str]:
        """The names of its tensors; without its weights too, if an index or the hub says them."""
        return self.tensors.keys()

    @abstractmethod
    def read(self, name: str) -> memoryview:
        """The row-major bytes of the whole tensor, read-only. Several threads may read at once."""

    def read_blocks(self, name: str) -> memoryview:
        """The bytes of a tensor that has blocks, packed as the file has them."""
        raise CheckpointError(f"{self.location} has no blocks of {name}")

    def read_part(self, name: str, index: int, count: int) -> memoryview:
        """The bytes of one of `count` equal parts of a tensor's bytes."""
        whole = self.read(name)
        size = len(whole) // count
        return whole[index * size : (index + 1) * size]

    def is_same(self, one: str, other: str) -> bool:
        """Whether two names have tensors of one type, shape and content."""
        if self.tensors.get(one) != self.tensors.get(other):
            return False
        data, others = self.read(one), self.read(other)
        return all(bytes(data[at : at + CHUNK]) == bytes(others[at : at + CHUNK]) for at in range(0, len(data), CHUNK))

    def with_tensors(self) -> Checkpoint | None:
        """This checkpoint with its tensors, if only its description was opened; None if they are not on this disk."""
        return self

    def locate(self, name: str) -> FileRange | None:
        """The file range of the bytes that read() gives; None if the file has them in another form."""
        return None

    def files(self) -> Collection[Path]:
        """The files that hold its tensors."""
        located = (self.locate(name) for name in self.tensors)
        return sorted({place.path for place in located if place is not None})

    @abstractmethod
    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        """A new tokenizer, or None if the checkpoint has none."""

    def token_id(self, text: str) -> int | None:
        """The id of a token that a GGUF file lists; None if it does not, or the checkpoint is of another kind."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close the files. Bytes already read stay valid."""


def read_json(path: Path, limit: int = MAX_DESCRIPTION) -> dict[str, Any]:
    """Read the object in a JSON file. CheckpointError if the file is missing, too large, or has anything else."""
    data = read_file(path, limit)
    try:
        value = json.loads(data, object_hook=as_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return value


def as_number(item: dict[str, Any]) -> Any:
    """The number that transformers writes as an object, since JSON has no word for it: {"__float__": "Infinity"}."""
    text = item.get("__float__")
    return float(text) if isinstance(text, str) and len(item) == 1 else item


def normalize_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Normalize a config's rotary embedding to one form, `rope_parameters`, as transformers 5 writes it for one rope.

    `rope_theta`, `rope_scaling` (with `type` or `rope_type`), `partial_rotary_factor` and, if the type of rope has
    it, `original_max_position_embeddings` move into it, with the precedence of transformers.modeling_rope_utils.

    If layer types differ, the parameters of full_attention are at the top, the others are objects next to them:
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0, "sliding_attention": {"rope_type": "default", ...}}.
    So are those of main, if ropes have names of their own.
    null is a layer type without rope, rope_type "none" at the top. UnsupportedError if there is no full_attention and
    the objects are not those of layer_types.
    """
    parameters, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for each in (parameters, scaling):
        if not isinstance(each, dict):
            raise CheckpointError(f"rope_parameters in config.json is {each!r}, not an object")
    types = {key: value for key, value in {**parameters, **scaling}.items() if is_layer_type(config, key, value)}
    own, scaled = ({key: value for key, value in each.items() if key not in types} for each in (parameters, scaling))
    if first := next((name for name in ("full_attention", "main") if name in types), None):
        full = types.pop(first)
        is_none = full is None and not scaled
        rope = {"rope_type": "none"} if is_none else normalize_one_rope({**(full or {}), **scaled}, config)
    elif types and not (scaled or own).keys() & {"rope_type", "type"} and not types.keys() <= layer_types_of(config):
        raise UnsupportedError(f"rope_parameters in config.json has {', '.join(types)} and no full_attention")
    else:
        rope = normalize_one_rope(scaled or own, config, original=config.get("original_max_position_embeddings"))
    local_theta = config.get("rope_local_base_freq")
    if local_theta is not None and types.setdefault("sliding_attention", {}) is not None:
        types["sliding_attention"] = {"rope_theta": local_theta, **types["sliding_attention"]}
    rope |= {key: None if value is None else normalize_one_rope(value, config) for key, value in types.items()}
    return {key: value for key, value in config.items() if key not in ROPE_KEYS} | {"rope_parameters": rope}


def is_layer_type(config: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether this entry of rope_parameters is the rope of a layer type, and not a parameter of a single rope."""
    is_known = key.endswith("_attention") or key in layer_types_of(config)
    return isinstance(value, dict) or (value is None and is_known)


def layer_types_of(config: Mapping[str, Any]) -> set[str]:
    """The types of layers that a config lists."""
    types = config.get("layer_types")
    return {each for each in types if isinstance(each, str)} if isinstance(types, list) else set()


def stretched(rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """The base of the frequencies if a fixed `alpha` stretches it, as in Hunyuan."""
    try:
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return float(rope.get("rope_theta", 10000.0) * rope["alpha"] ** (dim / (dim - 2)))
    except (TypeError, KeyError, ArithmeticError, ValueError) as error:
        fault = f"alpha={rope['alpha']!r} in rope_parameters of config.json stretches no base"
        raise CheckpointError(f"{fault} ({type(error).__name__}: {error}); download it again") from None


def normalize_one_rope(
    parameters: Mapping[str, Any], config: Mapping[str, Any], *, original: int | None = None
) -> dict[str, Any]:
    """original: the context that the model was trained on, before the parameters' own value."""
    rope = {key: value for key, value in parameters.items() if key != "type"}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    rope["rope_type"] = ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    if kind == "dynamic" and rope.get("alpha"):
        rope["rope_theta"] = stretched(rope, config)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        if original is not None:
            rope["original_max_position_embeddings"] = original
        elif "max_position_embeddings" in config:
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return rope
