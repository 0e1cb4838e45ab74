"""Write tiny GGUF files of `transformers` models, by the rules of llama.cpp's conversion scripts.

path = gguf_files.convert(folder, tmp_path / "tiny.gguf")
gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")

Names of tensors are those that the `gguf` package maps; metadata are what its writer's methods write.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import gguf_towers
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Gemma3ForConditionalGeneration": gguf.MODEL_ARCH.GEMMA3,
    "Mistral3ForConditionalGeneration": gguf.MODEL_ARCH.LLAMA,
    "LlavaForConditionalGeneration": gguf.MODEL_ARCH.LLAMA,
    "Idefics3ForConditionalGeneration": gguf.MODEL_ARCH.LLAMA,
    "SmolVLMForConditionalGeneration": gguf.MODEL_ARCH.LLAMA,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "MambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "FalconMambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "Mamba2ForCausalLM": gguf.MODEL_ARCH.MAMBA2,
    "JambaForCausalLM": gguf.MODEL_ARCH.JAMBA,
    "KimiLinearForCausalLM": gguf.MODEL_ARCH.KIMI_LINEAR,
    "Qwen2VLForConditionalGeneration": gguf.MODEL_ARCH.QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": gguf.MODEL_ARCH.QWEN2VL,
    "Qwen3VLForConditionalGeneration": gguf.MODEL_ARCH.QWEN3VL,
    "Qwen3VLMoeForConditionalGeneration": gguf.MODEL_ARCH.QWEN3VLMOE,
    "Qwen3_5ForConditionalGeneration": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForConditionalGeneration": gguf.MODEL_ARCH.QWEN35MOE,
}
TEXTS = {  # of models that read images and have texts of several families, by the text's model_type
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
PROJECTORS = {
    "Mistral3ForConditionalGeneration": gguf.VisionProjectorType.PIXTRAL,
    "LlavaForConditionalGeneration": gguf.VisionProjectorType.PIXTRAL,
    "Idefics3ForConditionalGeneration": gguf.VisionProjectorType.IDEFICS3,
    "SmolVLMForConditionalGeneration": gguf.VisionProjectorType.IDEFICS3,
    "Gemma3ForConditionalGeneration": gguf.VisionProjectorType.GEMMA3,
    "Qwen2VLForConditionalGeneration": gguf.VisionProjectorType.QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": gguf.VisionProjectorType.QWEN25VL,
    "Qwen3VLForConditionalGeneration": gguf.VisionProjectorType.QWEN3VL,
    "Qwen3VLMoeForConditionalGeneration": gguf.VisionProjectorType.QWEN3VL,
    "Qwen3_5ForConditionalGeneration": gguf.VisionProjectorType.QWEN3VL,
    "Qwen3_5MoeForConditionalGeneration": gguf.VisionProjectorType.QWEN3VL,
    "InternVLForConditionalGeneration": gguf.VisionProjectorType.INTERNVL,
    "Lfm2VlForConditionalGeneration": gguf.VisionProjectorType.LFM2,
    "Kimi_K25ForConditionalGeneration": gguf.VisionProjectorType.KIMIK25,
    "Gemma4ForConditionalGeneration": gguf.VisionProjectorType.GEMMA4V,
}
GATING = {"softmax": gguf.ExpertGatingFuncType.SOFTMAX, "sigmoid": gguf.ExpertGatingFuncType.SIGMOID}
Tensors = Iterator[tuple[str, torch.Tensor]]
TOWER = re.compile(
    r"(?:model\.)?(?=visual\.|vision_tower\.|multi_modal_projector\.|vision_model\.|connector\.|mm_projector\.|embed_vision\.)"
)
TEXT = re.compile(r"(?:model\.(?:language|text)_model\.|language_model\.(?=model\.|lm_head))")
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "boi_token_index": "<start_of_image>",
    "image_token_index": "<image_soft_token>",
}
OTHER_TOKENS = {  # of a projector's models
    gguf.VisionProjectorType.PIXTRAL: {"image_token_index": "[IMG]"},
    gguf.VisionProjectorType.IDEFICS3: {"image_token_id": "<image>"},
    gguf.VisionProjectorType.INTERNVL: {"image_token_id": "<IMG_CONTEXT>"},
    gguf.VisionProjectorType.LFM2: {"image_token_id": "<image>"},
    gguf.VisionProjectorType.KIMIK25: {"image_token_id": "<|media_pad|>"},
    gguf.VisionProjectorType.GEMMA4V: {"image_token_id": "<|image|>"},
}


def convert(
    folder: Path, path: Path, *, old_mla: bool = False, max_tensors: int = 0, rounded: str = "", packed: bool = False,
    scaled: bool = False,
) -> Path:  # fmt: skip
    """Write the checkpoint of a folder to a GGUF file in fp32; the path of its first part, where it is split.

    old_mla: as before llama.cpp wrote the halves of kv_b_proj. max_tensors: of a part. rounded: the type that matrices
    are rounded to, or whose blocks are drawn (FACTORS); packed: they are stored in it, too. scaled: matrices of layers
    are divided by a `.scale` that is stored with them, as llama.cpp has NVFP4; experts each by its own
    """
    whole = json.loads((folder / "config.json").read_text())
    config = whole | whole.get("text_config", {})
    (architecture,) = whole["architectures"]
    arch = ARCHITECTURES[architecture] if architecture in ARCHITECTURES else TEXTS[whole["text_config"]["model_type"]]
    if arch is gguf.MODEL_ARCH.NEMOTRON_H:
        kinds = config["layers_block_type"]
        config["num_hidden_layers"] = len(kinds)
        arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE if "moe" in kinds else arch
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=max_tensors)
    write_parameters(writer, arch, config, old_mla)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stored = {
        TEXT.sub("model." if name.startswith("model.") else "", name): tensor.float()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not TOWER.match(name)
    }
    texts = OTHER_TOKENS.get(PROJECTORS.get(architecture, ""), TOKENS)
    if named := {whole[key]: text for key, text in texts.items() if key in whole}:
        writer.add_token_list([named.get(id, f"<{id}>") for id in range(config["vocab_size"])])
    rope = config.get("rope_parameters") or {}
    for kind in ("short", "long"):
        if f"{kind}_factor" in rope:
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if arch is gguf.MODEL_ARCH.GEMMA4:
        half, part = global_sizes(config)["head_dim"] // 2, rope["full_attention"]["partial_rotary_factor"]
        writer.add_tensor("rope_freqs.weight", np.where(np.arange(half) < int(half * part), 1, 1e30).astype(np.float32))
    for name, tensor in RULES.get(arch, unchanged)(stack_experts(stored), config | {"old_mla": old_mla}):
        mapped = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        array, kind = np.ascontiguousarray(tensor.numpy()), gguf.GGMLQuantizationType.F32
        if scaled and re.search(r"blk\.\d+\.(attn|ffn)_(?!gate_inp).*\.weight", mapped) and array.ndim > 1:
            array, scale = divide(array)
            writer.add_tensor(mapped.replace(".weight", ".scale"), scale)
            writer.add_tensor(mapped.replace(".weight", ".input_scale"), np.ones_like(scale))
        if rounded and tensor.ndim > 1 and not re.search(r"\.gate\.weight|router\.|conv1d|A_log", name):
            fits = array.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[rounded]][0] == 0
            kind = gguf.GGMLQuantizationType[rounded if fits else SMALLER[rounded]]
            is_drawn = kind.name in FACTORS
            array = draw_blocks(kind.name, *array.shape, name=name) if is_drawn else gguf.quants.quantize(array, kind)
        if not packed:
            array, kind = gguf.quants.dequantize(array, kind), gguf.GGMLQuantizationType.F32
        writer.add_tensor(mapped, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not max_tensors else min(path.parent.glob(f"{path.stem}-*.gguf"))


def divide(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix by a number, or those of experts each by its own; and the numbers."""
    count = len(array) if array.ndim == 3 else 1
    scale = np.random.default_rng(array.size).uniform(0.1, 10, count).astype(np.float32)
    return array / scale.reshape(-1, *[1] * (array.ndim - 1)), scale


SMALLER = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}  # what llama.cpp takes for columns that are no whole blocks
FACTORS = {"Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def draw_blocks(kind: str, *shape: int, name: str = "") -> np.ndarray:
    """Random blocks u8[..., bytes of a row] of a type that the package reads but does not write.

    Their numbers are about as large as those of a model, and others for each name; a block's float16s are at the bytes in
    FACTORS.
    """
    columns, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng([crc32(f"{kind} {name}".encode()), *shape])
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // columns, num_bytes), dtype=np.uint8)
    largest = np.abs(gguf.quants.dequantize(_with_factors(blocks, kind, 1.0), gguf.GGMLQuantizationType[kind])).max()
    spread = generator.uniform(0.02, 0.2, (*blocks.shape[:-1], 1)) / largest
    return _with_factors(blocks, kind, spread).reshape(*shape[:-1], -1)


def _with_factors(blocks: np.ndarray, kind: str, factor: Any) -> np.ndarray:
    made = blocks.copy()
    for at in FACTORS[kind]:
        made[..., at : at + 2] = np.broadcast_to(factor, (*blocks.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    return made


USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")


def write_parameters(writer: gguf.GGUFWriter, arch: Any, config: dict[str, Any], old_mla: bool) -> None:
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads, latent = config["num_attention_heads"], "kv_lora_rank" in config
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config.get("max_position_embeddings", config.get("model_max_length")))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(0 if arch in (gguf.MODEL_ARCH.MAMBA, gguf.MODEL_ARCH.MAMBA2) else heads)
    if arch not in LISTED:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(1 if latent and not old_mla else config["num_key_value_heads"])
    if eps := config.get("rms_norm_eps", config.get("norm_eps", config.get("layer_norm_epsilon"))):
        writer.add_layer_norm_rms_eps(eps)
    if "rope_theta" in full:
        writer.add_rope_freq_base(full["rope_theta"])
    if not latent and arch not in WITHOUT_HEAD_DIM:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    kind = full.get("rope_type")
    if "mrope_section" in full:
        writer.add_rope_dimension_sections([*full["mrope_section"], 0])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(full["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if kind == "longrope":
        original = full["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
    if config.get("sliding_window") or arch is gguf.MODEL_ARCH.PHI3:
        writer.add_sliding_window(config.get("sliding_window") or 0)
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        used = next(config[name] for name in USED_EXPERTS if name in config)
        writer.add_expert_used_count(used)
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    write = WRITERS.get(arch)
    if write:
        write(writer, config, rope, old_mla)


def write_gemma3(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], _: bool) -> None:
    assert config["query_pre_attn_scalar"] == 256, "llama.cpp knows no other"
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def global_sizes(config: dict[str, Any]) -> dict[str, int]:
    """The sizes of layers without a window, which transformers saves by layer."""
    own = {name: config[name] for name in ("head_dim", "num_key_value_heads")}
    return own | config["per_layer_config"][str(config["layer_types"].index("full_attention"))]


def write_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], _: bool) -> None:
    """conversion/gemma.py: Gemma4Model.set_gguf_parameters"""
    full, kinds, width = global_sizes(config), config["layer_types"], config["intermediate_size"]
    has_window, num_shared = [kind == "sliding_attention" for kind in kinds], config["num_kv_shared_layers"]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window_pattern(has_window)
    for add, head_dim in (("", full["head_dim"]), ("_swa", config["head_dim"])):
        for name in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{name}{add}")(head_dim)
    widths = [width] * (len(kinds) - num_shared) + [2 * width] * num_shared
    writer.add_feed_forward_length(widths if config["use_double_wide_mlp"] else width)
    heads = config["num_key_value_heads"]
    each = [heads if has else full["num_key_value_heads"] for has in has_window]
    writer.add_head_count_kv(each if config["attention_k_eq_v"] else heads)
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def write_granite(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def write_deepseek2(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], old_mla: bool) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(key if old_mla else rank + rotated)
    writer.add_value_length(value if old_mla else rank)
    if not old_mla:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(GATING["softmax" if "V2" in config["architectures"][0] else "sigmoid"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def write_lists(writer: gguf.GGUFWriter, config: dict[str, Any], width: int) -> None:
    """Of each layer, the heads of keys and the width of its mlp: 0 where it has none."""
    kinds, heads = config.get("layer_types") or config["layers_block_type"], config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind in ("full_attention", "attention") else 0 for kind in kinds])
    writer.add_feed_forward_length(
        [width if kind in ("mlp", "moe") else 0 for kind in kinds] if "layers_block_type" in config else width
    )


def write_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    width = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width += -width % config["block_multiple_of"]
    write_lists(writer, config, width)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_delta(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], _: bool) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(4)  # as files have it whose layers take turns
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


def write_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any], prefix: str, state: str, groups: str) -> None:
    heads = config[f"{prefix}heads"]
    writer.add_ssm_conv_kernel(config.get("conv_kernel", config.get("mamba_d_conv")))
    writer.add_ssm_state_size(config[state])
    writer.add_ssm_group_count(config[groups])
    writer.add_ssm_time_step_rank(heads)
    head_dim = next(config[name] for name in ("mamba_head_dim", "mamba_d_head", "head_dim") if name in config)
    writer.add_ssm_inner_size(heads * head_dim)


def write_granitehybrid(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    write_granite(writer, config)
    write_lists(writer, config, config["intermediate_size"])
    write_mamba2(writer, config, "mamba_n_", "mamba_d_state", "mamba_n_groups")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(False)


def write_nemotron_h(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    has_experts = "moe" in config["layers_block_type"]
    write_lists(writer, config, config["moe_intermediate_size" if has_experts else "intermediate_size"])
    write_mamba2(writer, config, "mamba_num_", "ssm_state_size", "n_groups")
    if has_experts:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        if config["moe_latent_size"] is not None:
            writer.add_moe_latent_size(config["moe_latent_size"])


def write_falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    write_mamba2(writer, config, "mamba_n_", "mamba_d_state", "mamba_n_groups")


def write_only_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    writer.add_feed_forward_length(0)
    write_mamba2(writer, config, "num_", "state_size", "n_groups")


def write_mamba(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def write_jamba(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    layers, period = range(config["num_hidden_layers"]), config["attn_layer_period"]
    has_attention = [layer % period == config["attn_layer_offset"] for layer in layers]
    writer.add_head_count_kv([config["num_key_value_heads"] if has else 0 for has in has_attention])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def write_kimi_linear(writer: gguf.GGUFWriter, config: dict[str, Any], *_: Any) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(rank + rotated)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


LISTED = {  # architectures whose layers differ
    gguf.MODEL_ARCH.GEMMA4,
    gguf.MODEL_ARCH.LFM2,
    gguf.MODEL_ARCH.LFM2MOE,
    gguf.MODEL_ARCH.GRANITE_HYBRID,
    gguf.MODEL_ARCH.NEMOTRON_H,
    gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    gguf.MODEL_ARCH.MAMBA,
    gguf.MODEL_ARCH.MAMBA2,
    gguf.MODEL_ARCH.JAMBA,
    gguf.MODEL_ARCH.KIMI_LINEAR,
}
WITHOUT_HEAD_DIM = {
    gguf.MODEL_ARCH.GEMMA4,
    gguf.MODEL_ARCH.MAMBA,
    gguf.MODEL_ARCH.MAMBA2,
    gguf.MODEL_ARCH.JAMBA,
    gguf.MODEL_ARCH.LFM2,
    gguf.MODEL_ARCH.LFM2MOE,
    gguf.MODEL_ARCH.GRANITE_HYBRID,
}
WRITERS: dict[Any, Callable[..., None]] = {
    gguf.MODEL_ARCH.GEMMA3: write_gemma3,
    gguf.MODEL_ARCH.GEMMA4: write_gemma4,
    gguf.MODEL_ARCH.GRANITE: write_granite,
    gguf.MODEL_ARCH.DEEPSEEK2: write_deepseek2,
    gguf.MODEL_ARCH.LFM2: write_lfm2,
    gguf.MODEL_ARCH.LFM2MOE: write_lfm2,
    gguf.MODEL_ARCH.QWEN3NEXT: write_delta,
    gguf.MODEL_ARCH.QWEN35: write_delta,
    gguf.MODEL_ARCH.QWEN35MOE: write_delta,
    gguf.MODEL_ARCH.GRANITE_HYBRID: write_granitehybrid,
    gguf.MODEL_ARCH.NEMOTRON_H: write_nemotron_h,
    gguf.MODEL_ARCH.NEMOTRON_H_MOE: write_nemotron_h,
    gguf.MODEL_ARCH.FALCON_H1: write_falcon_h1,
    gguf.MODEL_ARCH.MAMBA: write_mamba,
    gguf.MODEL_ARCH.MAMBA2: write_only_mamba2,
    gguf.MODEL_ARCH.JAMBA: write_jamba,
    gguf.MODEL_ARCH.KIMI_LINEAR: write_kimi_linear,
}


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer as one tensor a projection."""
    stacked: dict[str, list[tuple[int, torch.Tensor]]] = {}
    others = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name):
            stacked.setdefault(f"{match[1]}.{match[3]}", []).append((int(match[2]), tensor))
        else:
            others[name] = tensor
    for name, parts in stacked.items():
        others[name] = torch.stack([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    return others


def unchanged(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    yield from tensors.items()


def with_larger_norms(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    for name, tensor in tensors.items():
        yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def with_rows_in_pairs(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if heads := next((count for part, count in counts.items() if part in name), None):
            tensor = in_pairs(tensor, heads)
        yield name, tensor


def in_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary rows of heads in pairs, as conversion/llama.py's permute has them."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def without_turns(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    """gpt-oss: gate and up are two tensors, [out, in]; sinks are called a weight."""
    for name, tensor in tensors.items():
        if "experts" in name:
            is_bias = name.endswith("_bias")
            stem, suffix = name.removesuffix("_bias"), ".bias" if is_bias else ".weight"
            tensor = tensor if is_bias else tensor.transpose(1, 2)
            if "gate_up_proj" in stem:
                yield stem.replace("gate_up", "gate") + suffix, tensor[:, 0::2]
                yield stem.replace("gate_up", "up") + suffix, tensor[:, 1::2]
            else:
                yield stem + suffix, tensor
        else:
            yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def with_halves(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """DeepSeek: the keys' half of kv_b_proj transposed, the values' half as it is."""
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight") and not config["old_mla"]:
            heads = tensor.view(config["num_attention_heads"], sum(sizes), -1)
            keys, values = heads.split(sizes, 1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def of_conv(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    for name, tensor in tensors.items():
        name = name.replace("model.layers", "layers") if ".experts." in name else name
        name = name.replace(".expert_bias", ".expert_bias.bias")
        yield name, tensor.squeeze(1) if "conv.conv.weight" in name else tensor


def of_delta(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    """Rates as -exp of the hub's, norms with their offset, but for those by value head."""
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -torch.exp(tensor)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        yield name.replace("dt_bias", "dt_proj.bias"), tensor.squeeze(1) if "conv1d" in name else tensor


def in_two_parts(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """Qwen3-Next: the rows of each key head are cut; b and a stay as they are."""
    keys, key, value = (config[f"linear_{name}"] for name in ("num_key_heads", "key_head_dim", "value_head_dim"))
    values = config["linear_num_value_heads"] // keys * value
    for name, tensor in of_delta(tensors, config):
        if name.endswith("in_proj_qkvz.weight"):
            q, k, v, z = tensor.view(keys, 2 * key + 2 * values, -1).split([key, key, values, values], 1)
            yield name.replace("qkvz", "qkv"), torch.cat([each.flatten(0, 1) for each in (q, k, v)])
            yield name.replace("qkvz", "z"), z.flatten(0, 1)
        else:
            yield name, tensor


def with_heads_in_turns(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """Qwen3.5: value heads take turns over those of keys."""
    keys, value = config["linear_num_key_heads"], config["linear_value_head_dim"]
    kept = 2 * keys * config["linear_key_head_dim"]

    def turn(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
        apart = tensor.unflatten(dim, (keys, -1, rows))
        return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)

    for name, tensor in of_delta(tensors, config):
        part = name.partition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = torch.cat([tensor[:kept], turn(tensor[kept:], 0, value)])
        elif part == "in_proj_z.weight":
            tensor = turn(tensor, 0, value)
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias"):
            tensor = turn(tensor, 0, 1)
        elif part == "out_proj.weight":
            tensor = turn(tensor, 1, value)
        yield name, tensor


def of_mamba2(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """Rates and skips as columns, norms in rows by group."""
    groups = config.get("n_groups", config.get("mamba_n_groups"))
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -torch.exp(tensor)
        if name.endswith(("A_log", ".D")):
            tensor = tensor.reshape(-1, 1)
        elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            tensor = tensor.reshape(groups, -1)
        name = name.replace("dt_bias", "dt.bias" if "mixer" in name else "dt_proj.bias")
        name = re.sub(r"backbone(.*)mixer.experts", r"model\1mlp.experts", name)
        yield (
            name.replace("e_score_correction_bias", "e_score_correction.bias"),
            (tensor.squeeze(1) if "conv1d.weight" in name else tensor),
        )


def of_granitehybrid(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """Gate and up are two tensors; a dense mlp is no shared expert."""
    shared = "shared_mlp" if config["num_local_experts"] else "mlp"
    for name, tensor in with_rows_in_pairs(dict(of_mamba2(tensors, config)), config):
        if "input_linear" in name:
            module, gate, up = name.partition(".input_linear")[0], *tensor.chunk(2, -2)
            stem = module.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", shared)
            stem = stem.replace("shared_mlp", "mlp.shared_expert")
            yield f"{stem}.gate_proj.weight", gate
            yield f"{stem}.up_proj.weight", up
        elif name.endswith("shared_mlp.output_linear.weight") and shared == "mlp":
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        else:
            yield name, tensor


def of_mamba(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    """Rates as -exp of the hub's; Jamba's experts under the name of others."""
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -torch.exp(tensor)
        yield name.replace("feed_forward.experts", "mlp.experts"), tensor.squeeze(1) if "conv1d.w" in name else tensor


def with_factors(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """Falcon-H1: weights are multiplied by the factors of its config."""
    gate, down = config["mlp_multipliers"]
    read, given = config["attention_in_multiplier"], config["attention_out_multiplier"]
    groups, inner = config["mamba_n_groups"] * config["mamba_d_state"], config["mamba_d_ssm"]
    sizes = torch.tensor([inner, inner, groups, groups, config["mamba_n_heads"]])
    factors = {
        "down_proj.weight": down,
        "gate_proj.weight": gate,
        "k_proj.weight": read * config["key_multiplier"],
        "q_proj.weight": read,
        "v_proj.weight": read,
        "o_proj.weight": given,
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "mamba.in_proj.weight": config["ssm_in_multiplier"]
        * torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)[:, None],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }
    for name, tensor in of_mamba2(tensors, config):
        yield name, tensor * next((factor for end, factor in factors.items() if name.endswith(end)), 1)


def of_kimi(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Tensors:
    """Rates as -exp of the hub's; convolutions with dims of 1."""
    dense = r"block_sparse_moe\.(\w+_proj)"  # as transformers saves it, not the hub
    for name, tensor in with_halves(tensors, config):
        if name.endswith("A_log"):
            tensor = -torch.exp(tensor)
        name = re.sub(dense, r"mlp.\1", name).replace("dt_bias", "dt_proj.bias")
        yield name, tensor.view(1, len(tensor), 1, -1) if "conv1d" in name else tensor


def with_scales_of_routers(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    """Gemma 4: scales next to the weights that they are of, all else a weight."""
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", tensor
        elif name.endswith("router.per_expert_scale"):
            yield f"blk.{layer}.ffn_down_exps.scale", tensor
        else:
            yield name if name.endswith(".weight") else f"{name}.weight", tensor


def with_split_experts(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> Tensors:
    """Qwen3-VL: gate and up are two tensors, all [E, out, in]."""
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, each in zip(("gate", "up"), tensor.mT.chunk(2, 1), strict=True):
                yield name.replace("gate_up", part) + ".weight", each
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.mT
        else:
            yield name, tensor


RULES: dict[Any, Callable[..., Tensors]] = {
    gguf.MODEL_ARCH.LLAMA: with_rows_in_pairs,
    gguf.MODEL_ARCH.GEMMA3: with_larger_norms,
    gguf.MODEL_ARCH.GEMMA4: with_scales_of_routers,
    gguf.MODEL_ARCH.GRANITE: with_rows_in_pairs,
    gguf.MODEL_ARCH.SMOLLM3: with_rows_in_pairs,
    gguf.MODEL_ARCH.GPT_OSS: without_turns,
    gguf.MODEL_ARCH.DEEPSEEK2: with_halves,
    gguf.MODEL_ARCH.LFM2: of_conv,
    gguf.MODEL_ARCH.LFM2MOE: of_conv,
    gguf.MODEL_ARCH.QWEN3NEXT: in_two_parts,
    gguf.MODEL_ARCH.QWEN35: with_heads_in_turns,
    gguf.MODEL_ARCH.QWEN35MOE: with_heads_in_turns,
    gguf.MODEL_ARCH.GRANITE_HYBRID: of_granitehybrid,
    gguf.MODEL_ARCH.NEMOTRON_H: of_mamba2,
    gguf.MODEL_ARCH.NEMOTRON_H_MOE: of_mamba2,
    gguf.MODEL_ARCH.FALCON_H1: with_factors,
    gguf.MODEL_ARCH.MAMBA: of_mamba,
    gguf.MODEL_ARCH.MAMBA2: of_mamba2,
    gguf.MODEL_ARCH.JAMBA: of_mamba,
    gguf.MODEL_ARCH.KIMI_LINEAR: of_kimi,
    gguf.MODEL_ARCH.QWEN3VLMOE: with_split_experts,
}


def convert_tower(folder: Path, path: Path, *, kind: str = "F32", is_old: bool = False) -> Path:
    """Write the tower of a checkpoint's folder to an mmproj file, as conversion/qwenvl.py and qwen3vl.py have it.

    kind: the type of matrices whose columns are whole blocks. is_old: names of up and down the other way round
    """
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    vision, (architecture,) = config["vision_config"], config["architectures"]
    hidden, layers = (
        vision.get("embed_dim", vision["hidden_size"]),
        vision.get("depth", vision.get("num_hidden_layers")),
    )
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_clip_has_vision_encoder(True)
    projector = PROJECTORS[architecture]
    if projector is gguf.VisionProjectorType.GEMMA4V:
        writer.add_clip_vision_projector_type(projector)
    else:
        writer.add_clip_projector_type(projector)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    image, patch = (vision.get(key) for key in ("image_size", "patch_size"))
    image = gguf_towers.OTHER_SIZES.get(projector, vision.get("pos_emb_height", 0) * patch or image or 560)
    writer.add_vision_image_size(image[0] if isinstance(image, list) else image)
    writer.add_vision_patch_size(patch[0] if isinstance(patch, list) else patch)
    writer.add_vision_embedding_length(hidden)
    writer.add_vision_feed_forward_length(vision.get("intermediate_size", vision["hidden_size"]))
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(vision.get("num_heads", vision.get("num_attention_heads")))
    writer.add_vision_image_mean(processor.get("image_mean", [0.0] * 3))
    writer.add_vision_image_std(processor.get("image_std", [1.0] * 3))
    eps = vision.get("layer_norm_eps", config["text_config"].get("rms_norm_eps"))
    writer.add_vision_attention_layernorm_eps(gguf_towers.EPS.get(projector, eps))
    if projector in gguf_towers.PARAMETERS:
        gguf_towers.PARAMETERS[projector](writer, config, processor)
    deep = vision.get("deepstack_visual_indexes", [])
    if projector is gguf.VisionProjectorType.GEMMA3:
        writer.add_vision_use_gelu(True)
        side = vision["image_size"] // vision["patch_size"]
        writer.add_vision_projector_scale_factor(side // math.isqrt(config["mm_tokens_per_image"]))
    if projector is gguf.VisionProjectorType.IDEFICS3:
        writer.add_vision_use_gelu(True)
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])
    if projector is gguf.VisionProjectorType.PIXTRAL:  # conversion/llava.py
        writer.add_vision_use_silu(vision["hidden_act"] == "silu")
        if "spatial_merge_size" in config:
            writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    if projector is gguf.VisionProjectorType.QWEN25VL:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
    if projector is gguf.VisionProjectorType.QWEN3VL:
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(layers)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 4))  # linear_2 and mlp1.3 are blocks, too
    stored = load_file(folder / "model.safetensors").items()
    for name, tensor in ((TOWER.sub("", name), tensor.float()) for name, tensor in stored if TOWER.match(name)):
        if projector is gguf.VisionProjectorType.PIXTRAL and re.search(r"[qk]_proj\.", name):
            tensor = in_pairs(tensor, vision["num_attention_heads"])
        if rule := gguf_towers.RULES.get(projector):
            renamed = ((names.get_name(own, gguf_towers.SUFFIXES), each) for own, each in rule(name, tensor, config))
        else:
            renamed = rename_tower(name, tensor, names, deep)
        for mapped, each in renamed:
            assert mapped is not None, name
            array, own = np.ascontiguousarray(each.numpy()), gguf.GGMLQuantizationType.F32
            if array.ndim == 2 and "position" not in mapped and array.shape[1] % 32 == 0:
                own = gguf.GGMLQuantizationType[kind]
                array = gguf.quants.quantize(array, own)
            if is_old and (match := re.search("ffn_up|ffn_down", mapped)):
                mapped = mapped.replace(match[0], {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}[match[0]])
            writer.add_tensor(mapped, array, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rename_tower(name: str, tensor: torch.Tensor, names: gguf.TensorNameMap, deep: list[int]) -> Tensors:
    name = re.sub(  # as the hub has it; Pixtral's are as they are
        r"^vision_tower\.(?!vision_model|transformer|patch_conv|ln_pre)", "vision_tower.vision_model.", name
    )
    name = re.sub(r"^(?=vision_model\.|connector\.)", "model.", name)
    name = name.replace("_weight", ".weight")  # of Gemma 3's projector
    if name.endswith("soft_emb_norm.weight"):
        tensor = tensor + 1
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
        return
    if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name):
        yield f"v.deepstack.{deep[int(match[1])]}.{match[2]}.{match[3]}", tensor
        return
    if match := re.fullmatch(r"visual\.merger\.(?:linear_fc(\d)|norm)\.(\w+)", name):  # Qwen3-VL's
        yield f"mm.{2 * int(match[1]) - 2}.{match[2]}" if match[1] else f"v.post_ln.{match[2]}", tensor
        return
    parts = {name: tensor}
    if ".qkv." in name and not deep:  # only Qwen3-VL's are one tensor
        parts = {name.replace("qkv", part): each for part, each in zip("qkv", tensor.chunk(3), strict=True)}
    for own, each in parts.items():
        mapped = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, own
        yield mapped, each
