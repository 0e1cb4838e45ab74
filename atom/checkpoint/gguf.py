"""Read a GGUF file as a checkpoint.

Its metadata become a config, its tensors have their hub names, and quantized ones are read as fp32.

checkpoint = GGUFCheckpoint(Path("tiny.gguf"), GGUFFacts(interleaved={"q_proj": 9, "k_proj": 3}))
checkpoint.config["gguf_architecture"], checkpoint.config["hidden_size"]
checkpoint.read("model.layers.0.mlp.up_proj.weight")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from atom.checkpoint import quantization
from atom.checkpoint.base import Checkpoint, GGUFFacts, StoredTensor
from atom.checkpoint.gguf_reader import PLAIN, Array, GGUFTensor, Type, dequantize, read_gguf
from atom.checkpoint.gguf_tokenizer import build_tokenizer
from atom.checkpoint.tokenizer import Tokenizer
from atom.dtypes import FORMATS
from atom.errors import CheckpointError, UnsupportedError

NAMES = {  # name in the file: the usual name on the hub, within a layer for tensors of layers
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SIZES = {  # integers below `{architecture}.`: their names in config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.sliding_window": "sliding_window",
}
NORMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "layer_norm_eps"}
SCALING = {  # keys below `{architecture}.rope.scaling.`: their names in rope_parameters
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NEUTRAL_AT_1 = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")  # of the same; not supported otherwise
FACTORS = "rope_freqs.weight"  # a divisor for each rotary frequency


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path, facts: GGUFFacts) -> None:
        """facts: what the file leaves out; of its tokenizer, see gguf_tokenizer.py"""
        self.location = str(path)
        self._facts = facts
        self._metadata, tensors = read_gguf(path)
        parts = whole_number(path, "split.count", self._metadata.get("split.count", 0))
        if parts > 1:
            raise UnsupportedError(f"{path} is one of {parts} parts; merge them with llama-gguf-split --merge")
        check_types(path, tensors)
        factors = tensors.pop(FACTORS, None)
        self._stored = {hub_name(name): tensor for name, tensor in tensors.items()}
        if len(self._stored) != len(tensors):
            raise CheckpointError(f"{path} has two tensors of one name on the hub")
        self._heads = {name: heads for name in self._stored if (heads := self._find_heads(name, facts.interleaved))}
        self.tensors = {
            name: StoredTensor(PLAIN.get(tensor.type, "fp32"), tensor.shape, blocks_shape(tensor))
            for name, tensor in self._stored.items()
        }
        divisors = np.frombuffer(factors.data, np.float32).tolist() if factors else None
        self.config = make_config(path, self._metadata, self.tensors, divisors)
        if formats := find_formats(self._stored):
            self.config[quantization.KEY] = {"quant_method": "gguf", "formats": formats}
        keys = [
            key for key in (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")) if key in self._metadata
        ]
        ends = sorted({whole_number(path, key, self._metadata[key]) for key in keys})
        self.generation_config = {"eos_token_id": ends} if ends else {}

    def files(self) -> list[Path]:
        return [Path(self.location)]

    def read(self, name: str) -> memoryview:
        if name not in self._stored:
            raise CheckpointError(f"{self.location} has no tensor {name}")
        tensor = self._stored[name]
        if name in self._heads:
            return self._in_order(name, dequantize(tensor))
        return tensor.data if tensor.type in PLAIN else dequantize(tensor).data.cast("B")

    def read_blocks(self, name: str) -> memoryview:
        data = self._stored[name].data
        return self._in_order(name, np.frombuffer(data, np.uint8)) if name in self._heads else data

    def _in_order(self, name: str, numbers: Array) -> memoryview:
        """The bytes of a tensor with rotary rows in pairs, of rows in the hub's order."""
        pairs = numbers.reshape(self._heads[name], -1, 2, numbers.size // self._stored[name].shape[0])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1).data.cast("B")  # _find_heads has checked this

    def read_part(self, name: str, index: int, count: int) -> memoryview:
        tensor = self._stored.get(name)
        size = len(tensor.data) // count if tensor else 0
        if (
            tensor is None
            or tensor.type in PLAIN
            or name in self._heads
            or size % gguf.GGML_QUANT_SIZES[tensor.type][1]
        ):
            return super().read_part(name, index, count)
        blocks = tensor.data[index * size : (index + 1) * size]  # of this part alone: there may be hundreds of parts
        return dequantize(tensor._replace(data=blocks)).data.cast("B")

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        facts = self._facts
        return build_tokenizer(self._metadata, self.location, split=facts.split, ignore_merges=facts.ignore_merges)

    def close(self) -> None:
        self._stored = {}  # the file stays mapped until the last view of it is gone

    def _find_heads(self, name: str, interleaved: Mapping[str, int]) -> int | None:
        heads = next((interleaved[part] for part in name.split(".") if part in interleaved), None)
        rows = self._stored[name].shape[0]
        if heads and rows % (2 * heads):
            raise CheckpointError(f"{self.location}: the {rows} rows of {name} are no pairs in {heads} heads")
        return heads


def check_types(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """Dequantize one block of every type, so that an unsupported type fails before any weight is loaded."""
    for kind, name in {tensor.type: name for name, tensor in tensors.items()}.items():
        size = gguf.GGML_QUANT_SIZES[kind][1]
        try:
            dequantize(GGUFTensor(kind, (), memoryview(bytes(size))))
        except NotImplementedError:
            raise UnsupportedError(f"{path}: tensor {name} has the type {kind.name}, which is not read") from None
    if FACTORS in tensors and tensors[FACTORS].type is not Type.F32:
        raise UnsupportedError(f"{path}: tensor {FACTORS} has the type {tensors[FACTORS].type.name}, not F32")


def blocks_shape(tensor: GGUFTensor) -> tuple[int, ...] | None:
    """The shape [O, B, bytes of a block] of a matrix of a type that may be kept packed, None for others."""
    if tensor.type.name.lower() not in FORMATS or len(tensor.shape) != 2:
        return None
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    return (tensor.shape[0], tensor.shape[1] // size, num_bytes)


def find_formats(tensors: Mapping[str, GGUFTensor]) -> dict[str, str]:
    """The formats of modules by their names, or by a pattern where all layers have one."""
    found = {name: tensor.type.name.lower() if blocks_shape(tensor) else None for name, tensor in tensors.items()}
    of_layers: dict[str, set[str | None]] = {}
    for name, fmt in found.items():
        of_layers.setdefault(quantization.generalize(name), set()).add(fmt)
    formats = {}
    for name, fmt in found.items():
        if fmt is not None:
            module, is_one = name.removesuffix(".weight"), len(of_layers[quantization.generalize(name)]) == 1
            formats[f"re:{quantization.generalize(module)}$" if is_one and ".layers." in name else module] = fmt
    return formats


def hub_name(name: str) -> str:
    """The usual name on the hub; a tensor without one keeps its own, for an error to name it."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(\.weight|\.bias)", name)
    if not match or match[2] not in NAMES:
        return name
    layer, stem, last = match.groups()
    return f"model.layers.{layer}.{NAMES[stem]}{last}" if layer else NAMES[stem] + last


def make_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], divisors: list[float] | None
) -> dict[str, Any]:
    """Make the config.json of the same model, as far as the metadata goes; never `architectures`."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str | None):
        raise CheckpointError(f"{path}: general.architecture is {str(architecture)[:100]!r}, not a name")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {"gguf_architecture": architecture}
    config |= {name: whole_number(path, key, own[key]) for key, name in SIZES.items() if key in own}
    config |= {name: number(path, key, own[key]) for key, name in NORMS.items() if key in own}
    for name in ("bos_token_id", "eos_token_id"):
        if (key := f"tokenizer.ggml.{name}") in metadata:
            config[name] = whole_number(path, key, metadata[key])
    if config.get("sliding_window") == 0:
        del config["sliding_window"]
    if "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if "model.embed_tokens.weight" in tensors:
        config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in tensors
    config["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in tensors
    config["rope_parameters"] = make_rope(path, own, config, divisors)
    return config


def make_rope(
    path: Path, own: Mapping[str, Any], config: Mapping[str, Any], divisors: list[float] | None
) -> dict[str, Any]:
    """Make `rope_parameters` from the keys below `{architecture}.`; a table of divisors is rope_type "factors"."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope.freq_base" in own:
        rope["rope_theta"] = number(path, "rope.freq_base", own["rope.freq_base"])
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if head_dim and "rope.dimension_count" in own:
        rotated = whole_number(path, "rope.dimension_count", own["rope.dimension_count"])
        rope |= {"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}

    scaling = {key.removeprefix("rope.scaling."): own[key] for key in own if key.startswith("rope.scaling.")}
    kind = str(scaling.pop("type", "linear"))  # llama.cpp's default
    scaling.pop("finetuned", None)
    scaling.setdefault("factor", own.get("rope.scale_linear", 1.0))
    scaling = {key: number(path, f"rope.scaling.{key}", value) for key, value in scaling.items()}
    if kind == "none" or (kind == "linear" and scaling["factor"] in (0, 1)):
        return rope if divisors is None else rope | {"rope_type": "factors", "factors": divisors}
    odd = [key for key, value in scaling.items() if key not in SCALING and not (key in NEUTRAL_AT_1 and value == 1)]
    odd += [FACTORS] if divisors is not None else []
    if kind not in ("linear", "yarn") or odd:
        raise UnsupportedError(f"{path}: rope.scaling.type {' with '.join([repr(kind), *odd])} is not supported")
    return rope | {"rope_type": kind} | {name: scaling[key] for key, name in SCALING.items() if key in scaling}


def whole_number(path: Path, key: str, value: Any) -> int:
    """A size; where the file has one for each layer, they must be equal."""
    values = value.tolist() if isinstance(value, np.ndarray) else [value]
    if any(each != values[0] for each in values):
        raise UnsupportedError(f"{path}: {key} differs from layer to layer")
    if not values or type(values[0]) is not int or values[0] < 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, not a whole number")
    return int(values[0])


def number(path: Path, key: str, value: Any) -> int | float:
    if type(value) not in (int, float):
        raise CheckpointError(f"{path}: {key} is {value!r}, not a number")
    return value  # type: ignore[no-any-return]
