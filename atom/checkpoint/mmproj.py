"""Read what encodes images from the mmproj file next to a GGUF model.

    tower = MmprojCheckpoint(Path("/models/mmproj-qwen2-vl.gguf"), GGUFFacts())
    tower.config["vision_config"]["hidden_size"], tower.tensors["v.blk.0.attn_q.weight"]

Tensors have the file's names, in one form: q, k and v apart, rotary rows in halves, frames of a patch in one tensor,
mergers of DeepStack from 0 on. Names and keys: https://github.com/ggml-org/llama.cpp/blob/master/tools/mtmd/clip-impl.h.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atom.checkpoint.base import NO_FACTS, Checkpoint, GGUFFacts, StoredTensor
from atom.checkpoint.gguf_config import number, whole_number
from atom.checkpoint.gguf_orders import find_orders, in_order
from atom.checkpoint.gguf_reader import PLAIN, GGUFTensor, dequantize, floats, read_gguf
from atom.checkpoint.gguf_types import Type
from atom.checkpoint.joined import JoinedCheckpoint
from atom.checkpoint.tokenizer import Tokenizer
from atom.errors import CheckpointError

SIZES = {  # integers below `clip.vision.`: their names in vision_config, of which a tower reads one
    "embedding_length": "hidden_size embed_dim",
    "block_count": "depth num_hidden_layers",
    "attention.head_count": "num_heads num_attention_heads",
    "projection_dim": "out_hidden_size",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "window_size": "window_size",
}
LIMITS = {"preproc_min_tiles": "min_patches", "preproc_max_tiles": "max_patches", "image_min_pixels": "min_pixels",
          "image_max_pixels": "max_pixels"}  # integers, too: their names in image_processor  # fmt: skip
HIDDEN = "clip.vision.embedding_length"
PATCH, NEXT_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
POSITIONS, UP, DOWN = "v.position_embd.weight", "v.blk.0.ffn_up.weight", "v.blk.0.ffn_down.weight"
LARGER = "mm.soft_emb_norm.weight"  # by 1 than the hub's
PATCH_MERGER, MERGER_NORM = "mm.patch_merger.weight", "mm.input_norm.weight"
FIRST, FIRST_BIAS = "mm.1.weight", "mm.1.bias"
BOUND = re.compile(r"\.(input|output)_(min|max)$")  # of what a linear reads or gives
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


class MmprojCheckpoint(Checkpoint):
    """A tower, with `vision_config` and `image_processor` as a folder's config has them; empty if it has no tower."""

    def __init__(self, path: Path, facts: GGUFFacts = NO_FACTS) -> None:
        """CheckpointError for a damaged file. facts: of which orders of rows are read, by the names of this file"""
        self.location, self._path = str(path), path
        metadata, stored = read_gguf(path)
        self._stored: dict[str, GGUFTensor] = {}
        self.config, self.generation_config = {}, {}
        if metadata.get("general.architecture") == "clip" and PATCH in stored:  # others may be of sound
            if len(shape := stored[PATCH].shape) != 4:
                raise CheckpointError(f"{path}: tensor {PATCH} is {list(shape)}, not a convolution of 4 dims")
            self._stored |= in_one_form(stored, whole_number(path, HIDDEN, metadata.get(HIDDEN)))
            self.config |= make_vision_config(path, metadata, stored, self._stored)
        self._orders = find_orders(path, metadata, self._stored, facts)
        self.tensors = {name: StoredTensor(dtype_of(each), each.shape) for name, each in self._stored.items()}

    def fits(self, text: Checkpoint) -> bool:
        """Whether it has a tower, whose rows have as many numbers as the text's hidden states."""
        rows = self.config.get("vision_config", {}).get("out_hidden_size")
        return bool(self.config) and rows in (None, text.config.get("hidden_size"))

    def files(self) -> list[Path]:
        return [self._path]

    def read(self, name: str) -> memoryview:
        if name not in self._stored:
            raise CheckpointError(f"{self.location} has no tensor {name}")
        tensor, order = self._stored[name], self._orders.get(name)
        if order is None:
            return tensor.data if tensor.is_plain else dequantize(tensor).data.cast("B")
        numbers = in_order(dequantize(tensor).reshape(tensor.shape), order)
        return np.ascontiguousarray(numbers).reshape(-1).data.cast("B")

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return None

    def close(self) -> None:
        self._stored = {}


def with_tower(
    text: Checkpoint,
    given: str | None,
    found: Iterable[Path],
    towers: Collection[str] = (),
    facts: GGUFFacts = NO_FACTS,
) -> Checkpoint:
    """A GGUF file's checkpoint with the tower of an mmproj file: what describes it and, if towers are asked for, it.

    given: the file; None: the first of those found whose rows fit the text, of which there may be none
    """
    files = found if given is None else [Path(given).expanduser()]
    made = (MmprojCheckpoint(file, facts) for file in files)
    tower = next((each for each in made if each.fits(text)), None)
    if tower is None and given is None:
        return text
    if tower is None:
        raise CheckpointError(f"mmproj={given} has no tower whose rows fit the hidden states of {text.location}")
    text.config |= tower.config
    return JoinedCheckpoint(text, tower) if towers else text


def dtype_of(tensor: GGUFTensor) -> str:
    return PLAIN[tensor.type] if tensor.is_plain else "fp32"


def in_one_form(stored: Mapping[str, GGUFTensor], hidden: int) -> Iterator[tuple[str, GGUFTensor]]:
    """The tensors of the vision tower, as the module's docstring says.

    hidden: of a patch; old files have the names of up and down the other way round, which shows in their columns
    """
    is_swapped = UP in stored and DOWN in stored and stored[UP].shape[-1] != hidden == stored[DOWN].shape[-1]
    deep = sorted({int(match[1]) for name in stored if (match := re.match(r"v\.deepstack\.(\d+)\.", name))})
    for name, tensor in stored.items():
        if not name.startswith(("v.", "mm.")) or name.startswith("mm.a.") or name == NEXT_FRAME:
            continue
        if name == PATCH:
            yield name, join_frames([tensor, *([stored[NEXT_FRAME]] if NEXT_FRAME in stored else [])])
        elif ".attn_qkv." in name:
            parts = ((name.replace("attn_qkv", f"attn_{part}"), index) for index, part in enumerate("qkv"))
            yield from ((part, cut_rows(tensor, index)) for part, index in parts)
        elif match := re.fullmatch(r"v\.deepstack\.(\d+)\.(.*)", name):
            yield f"v.deepstack.{deep.index(int(match[1]))}.{match[2]}", tensor
        elif name == LARGER:
            numbers = floats(tensor) - np.float32(1)
            yield name, GGUFTensor(Type.F32, tensor.shape, numbers.data.cast("B"))
        elif BOUND.search(name) and tensor.shape == (1,):  # which the hub has without a dim
            yield name, tensor._replace(shape=())
        elif is_swapped and (match := re.search(r"ffn_up|ffn_down", name)):
            yield name.replace(match[0], SWAPPED[match[0]]), tensor
        else:
            yield name, tensor


def join_frames(frames: list[GGUFTensor]) -> GGUFTensor:
    """Convolutions [H, C, p, p], each of a frame, as one [H, C, frames, p, p]."""
    if frames[0].is_plain and len({each.type for each in frames}) == 1:
        numbers, kind = [dequantize(each).reshape(each.shape) for each in frames], frames[0].type
    else:
        numbers, kind = [floats(each) for each in frames], Type.F32
    joined = np.stack(numbers, axis=2)
    return GGUFTensor(kind, joined.shape, joined.reshape(-1).data.cast("B"))


def cut_rows(tensor: GGUFTensor, part: int) -> GGUFTensor:
    """A third of a tensor's rows."""
    rows, size = tensor.shape[0] // 3, len(tensor.data) // 3
    return tensor._replace(shape=(rows, *tensor.shape[1:]), data=tensor.data[part * size : (part + 1) * size])


def make_vision_config(
    path: Path, metadata: Mapping[str, Any], stored: Mapping[str, GGUFTensor], tensors: Mapping[str, GGUFTensor]
) -> dict[str, Any]:
    """What a folder's config.json and preprocessor_config.json say of a tower; `projector_type` is the file's.

    The width of an mlp is that of its tensors: the files of some models have another number.

    stored: tensors as the file has them; tensors: in one form
    """
    prefix = "clip.vision."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    vision: dict[str, Any] = {"projector_type": own.get("projector_type", metadata.get("clip.projector_type"))}
    for key in own.keys() & SIZES.keys():
        vision |= dict.fromkeys(SIZES[key].split(), whole_number(path, key, own[key]))
    layers = range(vision.get("depth", 0))
    vision |= {"in_channels": tensors[PATCH].shape[1], "temporal_patch_size": tensors[PATCH].shape[2]}
    if UP in tensors:
        vision["intermediate_size"] = tensors[UP].shape[0]
    if POSITIONS in tensors:
        *rows, length, _ = (1, 1, *tensors[POSITIONS].shape)  # a damaged file may have one dim
        vision |= dict.fromkeys(("num_position_embeddings", "num_patches", "position_embedding_size"), length)
        vision["pos_emb_height"] = rows[-1]
    if (eps := own.get("attention.layer_norm_epsilon")) is not None:
        eps = number(path, "attention.layer_norm_epsilon", eps)
        vision |= dict.fromkeys(("layer_norm_eps", "rms_norm_eps", "projector_ln_eps"), eps)
    if not metadata.get("clip.use_gelu"):  # gelu: which of its two kinds the model file says
        vision["hidden_act"] = "silu" if metadata.get("clip.use_silu") else "quick_gelu"
    vision |= {
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "use_clipped_linears": any(map(BOUND.search, tensors)),
        "standardize": "v.std_scale" in tensors,
    }
    deep = {int(match[1]) for name in stored if (match := re.match(r"v\.deepstack\.(\d+)\.", name))}
    vision["deepstack_visual_indexes"] = sorted(deep)
    if pattern := whole_number(path, "n_wa_pattern", own.get("n_wa_pattern", 0)):
        vision["fullatt_block_indexes"] = [layer for layer in layers if (layer + 1) % pattern == 0]
    processor: dict[str, Any] = {
        name: [float(str(each)) for each in own[name]]  # 0.48145466, not 0.4814546704292297
        for name in ("image_mean", "image_std")
        if isinstance(own.get(name), np.ndarray)
    }
    for key in own.keys() & LIMITS.keys():
        processor[LIMITS[key]] = whole_number(path, key, own[key])
    if (edge := whole_number(path, "preproc_image_size", own.get("preproc_image_size", 0))) and "image_size" in vision:
        processor |= {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": vision["image_size"]}}
    config: dict[str, Any] = {"vision_config": vision, "image_processor": processor}
    config["spatial_merge_size"] = vision.get("spatial_merge_size", 1)
    config |= {"patch_merger": PATCH_MERGER in tensors, "projector_use_layernorm": MERGER_NORM in tensors}
    config |= dict.fromkeys(("multimodal_projector_bias", "projector_bias"), FIRST_BIAS in tensors)
    if FIRST in tensors:
        config["projector_hidden_size"] = tensors[FIRST].shape[0]
    if side := whole_number(path, "projector.scale_factor", own.get("projector.scale_factor", 0)):
        config |= {"scale_factor": side, "downsample_factor": side, "downsample_ratio": 1 / side}
        vision |= {"merge_kernel_size": [side, side], "pooling_kernel_size": side}
        image, patch = (whole_number(path, key, own.get(key)) for key in ("image_size", "patch_size"))
        config["mm_tokens_per_image"] = (image // max(patch, 1) // side) ** 2
    return config
