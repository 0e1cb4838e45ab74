"""Tiny models that read images, made by `transformers`, and a prompt with images.

model = vision.save("Qwen3VL", folder)
prompt = vision.make_prompt(model)
rows = vision.encode(model, prompt)             # of the tower [M, H * parts]
logits = vision.logits(model, prompt)           # [T, V] at every position
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom.images.types import Image

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
EXPERTS = {"moe_intermediate_size": 20, "num_experts_per_tok": 2, "num_experts": 6}
QWEN3: dict[str, Any] = {"depth": 4, "hidden_size": 24, "num_heads": 3, "intermediate_size": 36, "out_hidden_size": 48,
                         "patch_size": 4, "num_position_embeddings": 25}  # fmt: skip
DEEP = {**QWEN3, "hidden_size": 32, "num_heads": 4, "deepstack_visual_indexes": [0, 2]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 24,
         "rope_parameters": {**MROPE, "mrope_section": [3, 2, 1], "partial_rotary_factor": 0.5}}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of text_config and of vision_config
    "Qwen3VL": ({"head_dim": 12, "rope_parameters": MROPE}, DEEP),
    "Qwen3VLMoe": ({**EXPERTS, "head_dim": 12, "rope_parameters": MROPE}, DEEP),
    "Qwen3_5": (DELTA, QWEN3),
    "Qwen3_5Moe": ({**DELTA, **EXPERTS, "shared_expert_intermediate_size": 20}, QWEN3),
}
QWEN2 = {"depth": 3, "num_heads": 3, "patch_size": 4}
WINDOWS = {
    "hidden_size": 24,
    "out_hidden_size": 48,
    "intermediate_size": 34,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
MODELS |= {
    "Qwen2VL": ({"rope_parameters": MROPE}, {**QWEN2, "embed_dim": 24, "hidden_size": 48, "mlp_ratio": 2}),
    "Qwen2_5_VL": ({"rope_parameters": MROPE}, {**QWEN2, **WINDOWS}),
}
GLM4 = {**QWEN3, "hidden_size": 32, "num_heads": 4, "image_size": 20}
MODELS |= {
    "Glm4v": ({"rope_parameters": {**MROPE, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}}, GLM4),
    "Glm4vMoe": ({**EXPERTS, "n_routed_experts": 6, "head_dim": 24, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}},
                 {**GLM4, "attention_bias": True}),
    "GlmOcr": ({"head_dim": 12, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}, GLM4),
    "Kimi_K25": ({**tiny.MLA, **EXPERTS, "model_type": "deepseek_v3", "num_experts": 8, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
                  "rope_parameters": tiny.YARN_MLA, "first_k_dense_replace": 1},
                 {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 36, "patch_size": 4,
                  "pos_emb_height": 5, "pos_emb_width": 5}),
}  # fmt: skip
HUB_NAMES = {  # that transformers 5.24 does not give back to a checkpoint of Kimi-K2.5; as vLLM's loader reads them
    "model.blocks.": "model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
IMAGE = 7  # the token of a placeholder
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 6, 10))  # frames, rows and columns of images in patches


class Prompt(NamedTuple):
    tokens: list[int]  # IMAGE stands for a row
    grids: tuple[tuple[int, int, int], ...]
    patches: Tensor  # u8[P, F]
    merge: int

    @property
    def counts(self) -> list[int]:
        """The rows of each image."""
        return [rows * columns // self.merge**2 for _, rows, columns in self.grids]

    @property
    def places(self) -> Tensor:
        """i64[P, 4]: row, column, height and width, patches of one row side by side."""
        side = self.merge
        return torch.tensor([
            [y + dy, x + dx, height, width]
            for _, height, width in self.grids
            for y in range(0, height, side)
            for x in range(0, width, side)
            for dy in range(side)
            for dx in range(side)
        ])  # fmt: skip

    @property
    def starts(self) -> Tensor:
        """i32[S + 1]: where each image begins."""
        sizes = torch.tensor([0, *(rows * columns for _, rows, columns in self.grids)])
        return sizes.cumsum(0).int()

    @property
    def images(self) -> list[Image]:
        sizes = [frames * rows * columns for frames, rows, columns in self.grids]
        parts = zip(self.patches.split(sizes), self.grids, self.counts, strict=True)
        return [Image(0, patches.numpy().tobytes(), (grid,), count) for patches, grid, count in parts]

    @property
    def rows(self) -> Tensor:
        """i32[T]: the row of each token."""
        is_image = torch.tensor(self.tokens) == IMAGE
        return torch.where(is_image, is_image.cumsum(0) - 1, -1).int()

    @property
    def text(self) -> Tensor:
        """i64[T], with 0 in place of images, as a body gets them."""
        tokens = torch.tensor(self.tokens)
        return tokens.where(tokens != IMAGE, 0)


def save(name: str, folder: Path, **text: Any) -> Any:
    """Write the checkpoint of a model, as the hub has it; the model, in float32."""
    torch.manual_seed(0)
    fields, vision = MODELS[name]
    made: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    config = made.config_class(
        text_config={**tiny.SIZES, **fields, **text}, vision_config=vision, image_token_id=IMAGE, video_token_id=8,
        **({"projection_hidden_size": vision["hidden_size"]} if name == "Kimi_K25" else {}),
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder, save_original_format=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    if name in ("Qwen3VLMoe", "Kimi_K25"):
        stored = load_file(folder / "model.safetensors")
        if name == "Qwen3VLMoe":  # the hub has experts as [E, in, out], which transformers 5 reads and does not save
            stored = {key: each.mT.contiguous() if ".experts." in key else each for key, each in stored.items()}
        for saved, hub in HUB_NAMES.items() if name == "Kimi_K25" else ():
            stored = {key.replace(saved, hub): each for key, each in stored.items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        model = made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model


def make_prompt(model: Any, grids: tuple[tuple[int, int, int], ...] = GRIDS) -> Prompt:
    """Images between runs of text."""
    vision = model.config.vision_config
    merge = vision.merge_kernel_size[0] if is_moonvit(model) else vision.spatial_merge_size
    size = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    counts = [rows * columns // merge**2 for _, rows, columns in grids]
    words = [token + 10 for token in tiny.prompt(30) if token < 80]
    tokens = words[:5] + [token for count in counts for token in (*[IMAGE] * count, *words[5:9])] + words[9:]
    patches = torch.randint(0, 256, (sum(rows * columns for _, rows, columns in grids), size), dtype=torch.uint8)
    return Prompt(tokens, grids, patches, merge)


def is_moonvit(model: Any) -> bool:
    """Whether patches come line by line, as [P, 3, side, side]."""
    return hasattr(model.config.vision_config, "merge_kernel_size")


def pixels_of(model: Any, prompt: Prompt) -> Tensor:
    """As a processor of transformers gives them, with the numbers of PROCESSOR."""
    mean, deviation = (torch.tensor(PROCESSOR[name]).view(3, 1) for name in ("image_mean", "image_std"))
    by_channel = prompt.patches.float().view(len(prompt.patches), 3, -1) / 255
    normal = (by_channel - mean) / deviation
    if not is_moonvit(model):
        return normal.flatten(1)
    image = torch.arange(len(prompt.grids)).repeat_interleave(prompt.starts.diff())
    lines = (image * 10_000 + prompt.places[:, 0] * 100 + prompt.places[:, 1]).argsort()
    return normal[lines].unflatten(2, (model.config.vision_config.patch_size, -1))


@torch.inference_mode()
def encode(model: Any, prompt: Prompt) -> Tensor:
    """The rows of transformers' tower, with those of deeper layers joined."""
    made = model.model.get_image_features(pixels_of(model, prompt), torch.tensor(prompt.grids))
    parts = [made.pooler_output, *(getattr(made, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(by_image)) for by_image in parts], dim=-1)


def rope_positions(model: Any, prompt: Prompt) -> Tensor:
    """i64[T, 3]"""
    if not hasattr(model.model, "get_rope_index"):
        return torch.arange(len(prompt.tokens)).unsqueeze(1).expand(-1, 3)
    tokens, grids = torch.tensor([prompt.tokens]), torch.tensor(prompt.grids)
    positions, _ = model.model.get_rope_index(tokens, (tokens == IMAGE).int(), image_grid_thw=grids)
    return positions[:, 0].t().contiguous()  # type: ignore[no-any-return]


@torch.inference_mode()
def logits(model: Any, prompt: Prompt) -> Tensor:
    """[T, V] at every position."""
    tokens = torch.tensor([prompt.tokens])
    types = {} if is_moonvit(model) else {"mm_token_type_ids": (tokens == IMAGE).int()}
    grids, pixels = torch.tensor(prompt.grids), pixels_of(model, prompt)
    made = model(tokens, pixel_values=pixels, image_grid_thw=grids, **types, use_cache=False)
    return made.logits[0]  # type: ignore[no-any-return]
