"""Read a GGUF file as a checkpoint.

Its metadata become a config, its tensors have their hub names, and quantized ones are read as fp32.

checkpoint = GGUFCheckpoint(Path("tiny.gguf"), GGUFFacts(interleaved={"q_proj": 9, "k_proj": 3}))
checkpoint.config["gguf_architecture"], checkpoint.config["hidden_size"]
checkpoint.read("model.layers.0.mlp.up_proj.weight")

A file that was split is read whole, whichever of its parts is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atom.checkpoint.base import Checkpoint, GGUFFacts, StoredTensor
from atom.checkpoint.gguf_config import FACTORS, make_config, make_generation_config, num_layers, whole_number
from atom.checkpoint.gguf_orders import Order, block_order, find_orders, in_order
from atom.checkpoint.gguf_reader import PLAIN, GGUFTensor, dequantize, floats, read_gguf
from atom.checkpoint.gguf_tokenizer import build_tokenizer
from atom.checkpoint.gguf_types import SIZES, Type
from atom.checkpoint.modules import generalize
from atom.checkpoint.tokenizer import Tokenizer
from atom.checkpoint.typed_config import KEY
from atom.dtypes import GGUF_FORMATS
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
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_latent_down": "mlp.latent_down_proj",
    "ffn_latent_up": "mlp.latent_up_proj",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "token_embd_norm": "model.embedding_norm",  # LFM2's norm after the last layer
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "attn_gate": "mixer.gate_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_conv1d_q": "mixer.q_conv1d",
    "ssm_conv1d_k": "mixer.k_conv1d",
    "ssm_conv1d_v": "mixer.v_conv1d",
    "ssm_f_a": "mixer.f_a_proj",
    "ssm_f_b": "mixer.f_b_proj",
    "ssm_g_a": "mixer.g_a_proj",
    "ssm_g_b": "mixer.g_b_proj",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_dt_norm": "mixer.dt_layernorm",
    "ssm_b_norm": "mixer.b_layernorm",
    "ssm_c_norm": "mixer.c_layernorm",
    "ssm_alpha": "mixer.a_proj",
    "ssm_beta": "mixer.b_proj",
    "ssm_ba": "mixer.ba_proj",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
}
BARE = {  # names that have another suffix on the hub, or none
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # Falcon-H1's has no suffix in the file
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "mlp.gate.scale",
    "ffn_down_exps.scale": "mlp.experts.down_proj.scale",
}
RATES = "mixer.A_log"  # of a decay, which a file has as -exp of it
NO_OFFSET = "mixer.norm.weight"  # one that norm_offset leaves as it is; of groups, it has a row for each
SCALES = (".scale", ".input_scale")  # next to a weight
ROUTER_SCALE, EXPERTS_SCALE = "ffn_gate_inp.scale", "ffn_down_exps.scale"
BESIDE_POST_NORM = {"ffn_norm": "pre_feedforward_layernorm"}  # in a layer with a post_attention_norm
PART = re.compile(r"(?P<base>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path, facts: GGUFFacts, *, location: str | None = None) -> None:
        """facts: what the file leaves out; of its tokenizer, see gguf_tokenizer.py.
        location: its name in errors.
        """
        self.location = location or str(path)
        self._facts = facts
        self.reading = f"{sorted(facts.interleaved.items())} {facts.norm_offset}"
        self._paths, self._metadata, tensors = read_parts(path)
        check_types(path, tensors)
        factors = {name: tensors.pop(stored) for name, stored in FACTORS.items() if stored in tensors}
        tensors = without_drafts(path, self._metadata, with_scales(path, tensors))
        self._stored = hub_names(tensors)
        if len(self._stored) != len(tensors):
            raise CheckpointError(f"{path} has two tensors of one name on the hub")
        self._orders = find_orders(path, self._metadata, self._stored, facts)
        self.tensors = {
            name: StoredTensor(*numbers_of(name, tensor), blocks_shape(tensor, self._orders.get(name)))
            for name, tensor in self._stored.items()
        }
        self._halves = find_halves(self._stored)
        for whole, halves in self._halves.items():
            heads, rank, nope = self.tensors.pop(halves[0]).shape
            self.tensors[whole] = StoredTensor("fp32", (heads * (nope + self.tensors.pop(halves[1]).shape[1]), rank))
        divisors = {name: np.frombuffer(tensor.data, np.float32).tolist() for name, tensor in factors.items()}
        self.config = make_config(path, self._metadata, self.tensors, divisors)
        types = {name: self._stored[name].type for name in self.tensors if name in self._stored}
        packed = {name: GGUF_FORMATS[kind.name] if self.tensors[name].blocks else None for name, kind in types.items()}
        if formats := find_formats(packed):
            self.config[KEY] = {"quant_method": "gguf", "formats": formats}
        self.generation_config = make_generation_config(path, self._metadata)

    def files(self) -> list[Path]:
        return self._paths

    def read(self, name: str) -> memoryview:
        if name in self._halves:
            return self._join_halves(*self._halves[name])
        if name not in self._stored:
            raise CheckpointError(f"{self.location} has no tensor {name}")
        tensor = self._stored[name]
        order, is_rate = self._orders.get(name), name.endswith(RATES)
        offset = self._facts.norm_offset if name.endswith("norm.weight") and not name.endswith(NO_OFFSET) else 0
        if order is None and not offset and not is_rate:
            return tensor.data if tensor.is_plain else dequantize(tensor).data.cast("B")
        if offset or is_rate:
            numbers = np.log(-floats(tensor)) if is_rate else floats(tensor) - np.float32(offset)
        else:
            numbers = dequantize(tensor).reshape(tensor.shape)
        return np.ascontiguousarray(in_order(numbers, order)).reshape(-1).data.cast("B")

    def read_blocks(self, name: str) -> memoryview:
        tensor = self._stored[name]
        if name not in self._orders:
            return tensor.data
        blocks = np.frombuffer(tensor.data, np.uint8).reshape(self.tensors[name].blocks)
        return in_order(blocks, block_order(self._orders[name], tensor)).reshape(-1).data.cast("B")

    def _join_halves(self, keys: str, values: str) -> memoryview:
        """The rows of keys [H, rank, nope] and of values [H, V, rank], head by head, as the hub has them."""
        joined = np.concatenate([floats(self._stored[keys]).swapaxes(1, 2), floats(self._stored[values])], axis=1)
        return np.ascontiguousarray(joined).reshape(-1).data.cast("B")

    def read_part(self, name: str, index: int, count: int) -> memoryview:
        tensor = self._stored.get(name)
        size = len(tensor.data) // count if tensor else 0
        if tensor is None or tensor.is_plain or name in self._orders or size % SIZES[tensor.type][1]:
            return super().read_part(name, index, count)
        blocks = tensor.data[index * size : (index + 1) * size]  # only of this part: there may be hundreds of parts
        scale, experts = tensor.scale, 1 if tensor.scale is None else len(tensor.scale)
        if experts % count and count % experts:
            return super().read_part(name, index, count)
        if scale is not None:
            scale = scale[index * experts // count : -(-(index + 1) * experts // count)]
        part = tensor._replace(shape=(-1,), data=blocks, scale=scale)
        return dequantize(part).data.cast("B")

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        facts = self._facts
        return build_tokenizer(self._metadata, self.location, split=facts.split, ignore_merges=facts.ignore_merges)

    def token_id(self, text: str) -> int | None:
        tokens = self._metadata.get("tokenizer.ggml.tokens", [])
        return tokens.index(text) if isinstance(tokens, list) and text in tokens else None

    def close(self) -> None:
        self._stored = {}  # the file stays mapped until the last view of it is gone


def check_types(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """Dequantize one block of every type, so that an unsupported type fails before any weight is loaded."""
    for kind, name in {tensor.type: name for name, tensor in tensors.items()}.items():
        size = SIZES[kind][1]
        try:
            dequantize(GGUFTensor(kind, (), memoryview(bytes(size))))
        except NotImplementedError:
            raise UnsupportedError(f"{path}: tensor {name} has the type {kind.name}, which is not read") from None
    for name in FACTORS.values():
        if name in tensors and tensors[name].type is not Type.F32:
            raise UnsupportedError(f"{path}: tensor {name} has the type {tensors[name].type.name}, not F32")


def with_scales(path: Path, tensors: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """The tensors without `NAME.scale` and `NAME.input_scale`, which those with a scale hold.

    llama.cpp multiplies by the scale what it multiplies with `NAME.weight`: a number, or one for each expert. The scale
    of an input is of activations in 4 bits, which stay in the model's dtype here. If a router's scale has a number for
    each column, as in Gemma 4, it is a norm's weight, and those of its layer's experts are of the router too.
    """
    weights = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    scales = {name for name in tensors if name.endswith(SCALES) and name.rpartition(".")[0] in weights}
    for name in [name for name in scales if name.endswith(ROUTER_SCALE)]:
        if tensors[name].shape == tensors[name.replace(".scale", ".weight")].shape[-1:]:
            scales -= {name, name.replace(ROUTER_SCALE, EXPERTS_SCALE)}
    scaled = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name in sorted(name for name in scales if name.endswith(".scale")):
        weight, scale = f"{name.rpartition('.')[0]}.weight", tensors[name]
        counts = (1, tensors[weight].shape[0]) if len(tensors[weight].shape) == 3 else (1,)
        if scale.type is not Type.F32 or math.prod(scale.shape) not in counts:
            described = f"{scale.type.name}{list(scale.shape)}, not F32{[counts[-1]]}"
            raise UnsupportedError(f"{path}: tensor {name} is {described}")
        scaled[weight] = tensors[weight]._replace(scale=np.frombuffer(scale.data, np.float32))
    return scaled


def numbers_of(name: str, tensor: GGUFTensor) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a tensor's numbers as they are read."""
    shape = (math.prod(tensor.shape),) if name.endswith(NO_OFFSET) else tensor.shape
    return (PLAIN[tensor.type] if tensor.is_plain and not name.endswith(RATES) else "fp32"), shape


def blocks_shape(tensor: GGUFTensor, order: Order | None = None) -> tuple[int, ...] | None:
    """The shape [..., O, B, bytes of a block] of a matrix, or one for each expert, of a type that may be kept packed,
    None for others, and for one with an order in which blocks would part."""
    if tensor.type.name not in GGUF_FORMATS or len(tensor.shape) not in (2, 3) or tensor.scale is not None:
        return None
    if order is not None and block_order(order, tensor) is None:
        return None
    size, num_bytes = SIZES[tensor.type]
    return (*tensor.shape[:-1], tensor.shape[-1] // size, num_bytes)


def find_formats(packed: Mapping[str, str | None]) -> dict[str, str]:
    """The formats of modules by their names, or by a pattern if all layers have one.

    packed: by name, the format of a tensor, None for a plain one. A model may call the experts of a layer by one name,
    as the file does, or each by its own.
    """
    both = "experts.gate_up_proj.weight"  # one tensor of two modules
    names = {name: [name.replace(both, f"experts.{part}_proj.weight") for part in ("gate", "up")] for name in packed}
    packed = {each: fmt for name, fmt in packed.items() for each in (names[name] if both in name else [name])}
    of_layers: dict[str, set[str | None]] = {}
    for name, fmt in packed.items():
        of_layers.setdefault(generalize(name), set()).add(fmt)
    formats = {}
    for name, fmt in packed.items():
        if fmt is not None:
            module, is_one = name.removesuffix(".weight"), len(of_layers[generalize(name)]) == 1
            pattern = generalize(module) if is_one and ".layers." in name else re.escape(module)
            pattern = pattern.replace(r"\.experts\.", r"\.experts\.([0-9]+\.)?")
            formats[module if pattern == re.escape(module) else f"re:{pattern}$"] = fmt
    return formats


def without_drafts(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """The tensors without those of the layers after the body's, which predict further tokens."""
    count = num_layers(path, metadata)
    layers = {name: re.match(r"blk\.(\d+)\.", name) for name in tensors}
    return {name: tensors[name] for name, match in layers.items() if not (match and count and int(match[1]) >= count)}


def read_parts(path: Path) -> tuple[list[Path], dict[str, Any], dict[str, GGUFTensor]]:
    """Read a file, or all parts of a split one: its paths, the first part's metadata, the tensors of all."""
    metadata, tensors = read_gguf(path)
    count = whole_number(path, "split.count", metadata.get("split.count", 0))
    if count < 2:
        return [path], metadata, tensors
    match = PART.fullmatch(path.name)
    if match is None or int(match["parts"]) != count:
        raise CheckpointError(f"{path} is one of {count} parts; give it back its name, NAME-00001-of-{count:05}.gguf")
    paths = part_paths(path)
    if missing := [part.name for part in paths if not part.is_file()]:
        raise CheckpointError(f"{path} is one of {count} parts, and {missing[0]} is not next to it; download it too")
    parts = [(metadata, tensors) if part == path else read_gguf(part) for part in paths]
    whole: dict[str, GGUFTensor] = {}
    for part, (_, own) in zip(paths, parts, strict=True):
        if twice := own.keys() & whole.keys():
            raise CheckpointError(f"{part} has the tensor {min(twice)}, which a part before it has too")
        whole |= own
    metadata = parts[0][0]
    num_tensors = whole_number(path, "split.tensors.count", metadata.get("split.tensors.count", len(whole)))
    if num_tensors != len(whole):
        raise CheckpointError(f"the parts of {path} have {len(whole)} tensors, not {num_tensors}; download them again")
    return paths, metadata, whole


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of a split file, by the name of one; only this path if the name is no part's."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["parts"])
    return [path.with_name(f"{match['base']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def hub_names(tensors: Mapping[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """The tensors by their usual names on the hub; one without such a name keeps its own, for an error to name it."""
    found = (re.fullmatch(r"blk\.(\d+)\.post_attention_norm\.weight", name) for name in tensors)
    with_post_norm = {match[1] for match in found if match}
    return {hub_name(name, with_post_norm): tensor for name, tensor in tensors.items()}


def hub_name(name: str, with_post_norm: Collection[str]) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+?)(\.weight|\.bias|)", name)
    if not match:
        return name
    layer, stem, last = match.groups()
    names = NAMES | BESIDE_POST_NORM if layer in with_post_norm else NAMES
    usual = BARE.get(stem + last) or (names[stem] + last if stem in names else None)
    if usual is None:
        return name
    return f"model.layers.{layer}.{usual}" if layer else usual


def find_halves(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """The keys' and the values' half of each kv_b_proj of latent attention that is stored as two tensors."""
    keys = [name for name in names if name.endswith("k_b_proj.weight")]
    return {
        name.replace("k_b_proj", "kv_b_proj"): (name, values)
        for name in keys
        if (values := name.replace("k_b_proj", "v_b_proj")) in names
    }
