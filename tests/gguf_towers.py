"""What llama.cpp's conversion scripts write of towers that `gguf_files.convert_tower` leaves to it.

gguf_towers.PARAMETERS[projector](writer, config, processor)
for name, tensor in gguf_towers.RULES[projector](name, tensor, config): ...    # names that the `gguf` package maps

Written from conversion/intern_vision.py, lfm2.py, kimi_vl.py and gemma.py of llama.cpp at 32e9e044 and 061b8c5f; what
reads these files is tools/mtmd/clip.cpp and models/ at 0024aa74. Names of tensors are those of gguf 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import torch

Tensors = Iterator[tuple[str, torch.Tensor]]
Projector = gguf.VisionProjectorType
SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
OTHER_SIZES = {Projector.LFM2: 256, Projector.GEMMA4V: 224}  # image_size in files that mean none
EPS = {Projector.KIMIK25: 1e-5, Projector.GEMMA4V: 1e-6}  # in all files


def write_internvl(writer: gguf.GGUFWriter, config: dict[str, Any], processor: dict[str, Any]) -> None:
    """The numbers of tiles are min_dynamic_patch and max_dynamic_patch of a config.json of OpenGVLab."""
    assert config["vision_config"]["hidden_act"] == "gelu"
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(int(1.0 / config["downsample_ratio"]))
    writer.add_vision_preproc_min_tiles(processor["min_patches"])
    writer.add_vision_preproc_max_tiles(processor["max_patches"])


def write_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], _: dict[str, Any]) -> None:
    writer.add_vision_projector_scale_factor(config["downsample_factor"])
    writer.add_vision_use_gelu(True)


def write_kimik25(writer: gguf.GGUFWriter, config: dict[str, Any], processor: dict[str, Any]) -> None:
    """Its positions' keys are without the prefix of the others, as the script has them."""
    vision, pixels = config["vision_config"], config["vision_config"]["patch_size"] ** 2
    for name in ("height", "width", "time"):
        writer.add_uint32(f"vision.pos_emb_{name}", vision[f"pos_emb_{name}"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(vision["merge_kernel_size"][0])
    writer.add_vision_min_pixels(8 * pixels)
    writer.add_vision_max_pixels(processor.get("max_patches", 16384) * pixels)


def write_nothing(*_: Any) -> None:
    """Gemma 4: neither the activation nor the side of a square."""


PARAMETERS: dict[str, Callable[..., None]] = {
    Projector.INTERNVL: write_internvl,
    Projector.LFM2: write_lfm2,
    Projector.KIMIK25: write_kimik25,
    Projector.GEMMA4V: write_nothing,
}
LINEARS = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}


def of_internvl(name: str, tensor: torch.Tensor, _: dict[str, Any]) -> Tensors:
    """In the form of transformers, which the script takes of Intern-S1."""
    module, _, rest = name.partition(".")
    if module == "multi_modal_projector":
        which, _, kind = rest.partition(".")
        yield f"{LINEARS[which]}.{kind}", tensor
    else:
        is_vector = ".lambda_" in name or name.endswith("position_embeddings")
        yield f"model.{name}{'.weight' if is_vector else ''}", tensor


def of_lfm2(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    if name.endswith("patch_embedding.weight"):
        tensor = by_channel(tensor, config["vision_config"]["patch_size"])
    yield name, tensor


def by_channel(tensor: torch.Tensor, side: int) -> torch.Tensor:
    """[H, side * side * 3] -> [H, 3, side, side]"""
    return tensor.view(len(tensor), side, side, 3).permute(0, 3, 1, 2)


def of_kimik25(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    """Rotary pairs of q and k by axis: the hub's of a head take turns, one that turns by column, one by row."""
    if ".wqkv." in name:
        heads = config["vision_config"]["num_attention_heads"]
        q, k, v = tensor.chunk(3)
        split = [each.view(heads, -1, 2, 2, *each.shape[1:]).transpose(1, 2).reshape(each.shape) for each in (q, k)]
        tensor = torch.cat([*split, v])
    yield name.replace(".proj.0.", ".proj.linear_1.").replace(".proj.2.", ".proj.linear_2."), tensor


def of_gemma4(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    name = f"model.{name}".replace("model.vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight") + (".weight" if name.endswith("_table") else "")
    if name.endswith("input_proj.weight"):
        tensor = by_channel(tensor, config["vision_config"]["patch_size"])
    yield name, tensor if tensor.ndim else tensor.unsqueeze(0)


RULES: dict[str, Callable[..., Tensors]] = {
    Projector.INTERNVL: of_internvl,
    Projector.LFM2: of_lfm2,
    Projector.KIMIK25: of_kimik25,
    Projector.GEMMA4V: of_gemma4,
}
