"""Families as the hub has them: config.json with its own fields, tensors under its own names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import AtomError

Tensors = dict[str, torch.Tensor]
INF = float("inf")
VLLM = "vllm/model_executor/models"


class HubForm(NamedTuple):
    """What a folder of the hub has where transformers writes something else."""

    source: str  # the loader that names and fields are taken from, and a checkpoint that has them
    variant: str = ""  # of tiny; "": of the form's name
    changes: Mapping[str, Any] = MappingProxyType({})  # of the variant's config
    fields: Mapping[str, Any] = MappingProxyType({})  # of config.json
    without: tuple[str, ...] = ()  # keys of config.json
    only: bool = False  # config.json has no other fields
    names: Mapping[str, str] = MappingProxyType({})  # expressions of names -> what stands in their place
    edit: Callable[[Tensors], Tensors] = dict  # of what names do not say
    in_bf16: tuple[str, ...] = ()  # ends of names of tensors that are stored in bf16
    zeros: tuple[str, ...] = ()  # ends of names of tensors that are not stored, and 0
    inner: str = ""  # key of config.json with the text's fields, of a model that also reads images
    overrides: tuple[str, ...] = ()


def with_images(tensors: Tensors) -> Tensors:
    """Also the tensors of what reads images."""
    names = (
        "model.visual.patch_embed.proj.weight",
        "model.vision_tower.norm.weight",
        "model.multi_modal_projector.a.bias",
        "model.embed_vision.embedding_projection.weight",
        "model.vision_embedder.patch_dense.weight",
        "model.audio_tower.output_proj.weight",
        "model.embed_audio.embedding_projection.weight",
        "model.vision_embed_tokens.glb_GN",
        "model.vision_projection.norm.weight",
    )
    return tensors | {name: torch.zeros(4) for name in names}


def with_generator(tensors: Tensors) -> Tensors:
    """Also tensors of the part that makes images."""
    names = ("layers.0.mlp_moe_gen.up_proj.weight", "layers.1.self_attn.add_q_proj.weight", "layers.1.self_attn.norm_added_k.weight",
             "layers.1.self_attn.k_norm_und_for_gen.weight", "layers.2.self_attn.to_add_out.weight", "norm_moe_gen.weight", "proj_in.weight",
             "time_embedder.linear_1.bias", "action_modality_embed", "action_proj_in.fc.weight", "model.visual.embeddings.weight")  # fmt: skip
    return tensors | {name: torch.zeros(4) for name in names}


def with_sound(tensors: Tensors) -> Tensors:
    """Also tensors of what reads images and sound, as Nemotron Omni has them."""
    names = (
        "mlp1.0.weight",
        "sound_encoder.encoder.norm.weight",
        "sound_projection.norm.weight",
        "vision_model.radio_model.a.weight",
    )
    return tensors | {name: torch.zeros(4) for name in names}


def as_dory(tensors: Tensors) -> Tensors:
    """Each attention and each mlp as a layer, as Dory's files have them."""
    made = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"backbone\.layers\.(\d+)\.(self_attn|mlp|lambda_[12])(.*)", name):
            number, part, rest = match.groups()
            own = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(part, "mixer")
            name = f"backbone.layers.{2 * int(number) + (part in ('mlp', 'lambda_2'))}.{own}{rest}"
        made[name] = tensor
    return made


def as_minimax_m3(tensors: Tensors) -> Tensors:
    """Gate and up apart, as are experts, under the names of MiniMax-M3's files."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        name = name.replace(".self_attn.indexer.", ".self_attn.index_")
        at, _, rest = name.partition(".mlp.")
        sparse = f"{at}.block_sparse_moe."
        if rest == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                made |= {
                    f"{sparse}experts.{expert}.{part}.weight": half.clone()
                    for part, half in zip(("w1", "w3"), both.chunk(2), strict=True)
                }
        elif rest == "experts.down_proj":
            made |= {f"{sparse}experts.{expert}.w2.weight": each.clone() for expert, each in enumerate(tensor)}
        elif rest.endswith("gate_up_proj.weight"):
            whole = f"{sparse}shared_experts" if rest.startswith("shared") else f"{at}.mlp"
            made |= {
                f"{whole}.{part}_proj.weight": half.clone()
                for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True)
            }
        elif rest.startswith("gate.e_score"):
            made[f"{sparse}e_score_correction_bias"] = tensor
        elif rest.startswith(("gate.", "shared")):
            made[sparse + rest] = tensor
        else:
            made[name] = tensor
    made |= {"model.mtp.layers.0.norm.weight": torch.zeros(48)}
    others = (
        "vision_tower.vision_model.pre_layrnorm.weight",
        "multi_modal_projector.linear_1.bias",
        "patch_merge_mlp.linear_2.bias",
    )
    return {f"language_model.{name}": tensor for name, tensor in made.items()} | {
        name: torch.zeros(4) for name in others
    }


def with_unused_keys(tensors: Tensors, layer: int = 4) -> Tensors:
    """Also keys and values of a layer that reads those of another."""
    at = f"model.language_model.layers.{layer}.self_attn."
    return tensors | {f"{at}{name}.weight": torch.zeros(16, 48) for name in ("k_proj", "v_proj", "k_norm")}


def with_draft(tensors: Tensors) -> Tensors:
    """Also the tensors of a layer that drafts."""
    return tensors | {"mtp.norm.weight": torch.zeros(48)}


def own_convolutions(tensors: Tensors) -> Tensors:
    """Convolutions by q, k and v, which transformers 5.24 writes as three equal parts, whatever their sizes are."""
    made = dict(tensors)
    for layer in range(3):
        at = f"model.layers.{layer}.linear_attn."
        whole = torch.cat([tensors[f"{at}{name}_conv1d.weight"] for name in "qkv"])
        parts = whole.split([len(tensors[f"{at}{name}_proj.weight"]) for name in "qkv"])
        made |= {f"{at}{name}_conv1d.weight": part.clone() for name, part in zip("qkv", parts, strict=True)}
    return made


def with_masks(tensors: Tensors) -> Tensors:
    """Also the causal masks of layers, which older files have."""
    layers = {match[1] for name in tensors if (match := re.match(r"(.*h\.\d+)\.", name))}
    return tensors | {
        f"{layer}.attn.{name}": torch.zeros(1, 1, 4, 4) for layer in layers for name in ("bias", "masked_bias")
    }


def with_head(tensors: Tensors) -> Tensors:
    """Also a tied head, as mamba-ssm saves it."""
    return tensors | {"lm_head.weight": tensors["backbone.embedding.weight"].clone()}


def stacked_experts(tensors: Tensors) -> Tensors:
    """gate_up_proj [E, 2 W, H] and down_proj [E, H, W] in place of three tensors for each expert."""
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    kept = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name):
            found.setdefault((match[1], match[2]), []).append(tensors[name])
        else:
            kept[name] = tensors[name]
    whole = {key: torch.stack(parts) for key, parts in found.items()}
    for at in {at for at, _ in whole}:
        kept[f"{at}.gate_up_proj"] = torch.cat([whole[at, "gate"], whole[at, "up"]], 1)
        kept[f"{at}.down_proj"] = whole[at, "down"]
    return kept


def with_dense_norm(tensors: Tensors) -> Tensors:
    """Also a norm of the dense layer, which nothing reads."""
    return tensors | {"model.layers.0.post_mlp_layernorm.weight": torch.zeros(48)}


def without_zero_experts(tensors: Tensors) -> Tensors:
    """Also the tensors of a layer that drafts, and none of experts that give their input."""
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"experts\.[678]\.", name)}
    return kept | {"model.mtp.layers.0.eh_proj.weight": torch.zeros(48, 96)}


def with_halved_shared(tensors: Tensors) -> Tensors:
    """Shared experts without a gate of their own, in place of what a gate of 0 halves."""
    return {name: tensor / 2 if "shared_experts.down_proj" in name else tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors, name: str, kv_groups: int = 1) -> Tensors:
    """One tensor of this name in place of those of q, k and v, in so many groups one after the other."""
    made = dict(tensors)
    for key in [each for each in tensors if ".self_attn.q_proj." in each]:
        parts = [made.pop(key.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        groups = zip(*(part.chunk(kv_groups) for part in parts), strict=True)
        made[key.replace("self_attn.q_proj", name)] = torch.cat([part for group in groups for part in group])
    return made


def with_towers_of_dots(tensors: Tensors) -> Tensors:
    """Also some of what reads images and sound, and of a layer that drafts."""
    names = (
        "vision_encoder.blocks.0.norm1.weight",
        "audio_encoder.audio_adapter.proj.0.weight",
        "model.layers.4.eh_proj.weight",
        "model.mtp.norm.weight",
    )
    return tensors | {name: torch.zeros(3) for name in names}


def in_pairs(tensors: Tensors) -> Tensors:
    """Rows that turn together, the last 8 of a head, one after the other."""
    heads = {
        "q_b_proj.weight": 4,
        "kv_a_proj_with_mqa.weight": 1,
        "wq_b.weight": 24,
        "wk.weight": 1,
        "k_norm.weight": 1,
        "k_norm.bias": 1,
    }
    made = dict(tensors)
    for name, tensor in tensors.items():
        if (num := heads.get(".".join(name.split(".")[-2:]))) is not None:
            rows = tensor.view(num, len(tensor) // num, -1).clone()
            rows[:, -8:] = rows[:, -8:].unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
            made[name] = rows.view_as(tensor)
    return made


def as_molmo(tensors: Tensors) -> Tensors:
    """q, k and v in one tensor, up and gate in another, and two embeddings."""
    made = fused(tensors, "self_attn.att_proj")
    for key in [each for each in made if each.endswith(".gate_proj.weight")]:
        up = made.pop(key.replace("gate_proj", "up_proj"))
        made[key.replace("gate_proj", "ff_proj")] = torch.cat([up, made.pop(key)])
    embedding = made.pop("model.transformer.embed_tokens.weight")
    return made | {
        "model.transformer.wte.embedding": embedding,
        "model.transformer.wte.new_embedding": torch.zeros(7, 48),
    }


def with_image_experts(tensors: Tensors) -> Tensors:
    """Routers transposed, each with another one for images, whose experts are numbered after the text's."""
    made = dict(tensors)
    for key, tensor in tensors.items():
        if key.endswith("mlp.gate.weight"):
            made |= {key: tensor.T.contiguous(), f"{key}_1": torch.zeros(48, 8)}
        elif key.endswith("e_score_correction_bias"):
            made[key] = torch.cat([tensor.view(1, 8), torch.ones(1, 8)])
        elif match := re.search(r"experts\.(\d)\.", key):
            made[key.replace(match[0], f"experts.{int(match[1]) + 8}.")] = tensor[:12, :12].clone()
    return made | {"model.resampler_model.mlp.bias": torch.zeros(4), "vision_model.ln.weight": torch.zeros(4)}


def with_mtp(tensors: Tensors) -> Tensors:
    """Also a tensor of the layer for multi-token prediction."""
    return tensors | {"model.mtp_layers.0.input_proj.weight": torch.zeros(48, 96)}


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN2_MOE = {"qkv_bias": False, "num_experts": 8, "shared_expert_intermediate_size": 48}  # of two shared experts
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 48 / 20,
    "attention_multiplier": 12**-0.5,
}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0], "short_mscale": 1.3, "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}  # fmt: skip


def experts_apart(tensors: Tensors) -> Tensors:
    """Three tensors for each expert in place of gate_up_proj [E, 2 W, H] and down_proj [E, H, W]."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                at = f"{name.removesuffix('gate_up_proj')}{expert}."
                made |= {f"{at}gate_proj.weight": gate.clone(), f"{at}up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            made |= {name.replace("down_proj", f"{n}.down_proj.weight"): each.clone() for n, each in enumerate(tensor)}
        else:
            made[name] = tensor
    return made


FORMS = {
    "beam": HubForm(
        "vllm/models/beam/nvidia/model.py, transformers_utils/configs/beam.py; reflection/Beam-1.0-501B-A23B",
        changes={"routed_scaling_factor": 2.5, "norm_topk_prob": False, "final_logit_softcapping": None},
        without=("attention_bias",),
    ),
    "lfm2": HubForm(
        f"{VLLM}/lfm2.py; LiquidAI/LFM2-350M",
        changes={"block_ffn_dim_multiplier": 1.3},
        fields={"full_attn_idxs": [1], "block_ff_dim": 80, "tie_embedding": True, "rope_theta": 1000000.0, "block_norm_eps": 1e-5,
                "conv_dim": 48, "conv_dim_out": 48, "block_dim": 48, "num_heads": 4, "use_pos_enc": True, "block_use_swiglu": True},
        without=("layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters"),
    ),
    "lfm2_moe": HubForm(
        f"{VLLM}/lfm2_moe.py; LiquidAI/LFM2-8B-A1B",
        fields={"tie_embedding": True, "rope_theta": 1000000.0},
        without=("tie_word_embeddings", "rope_parameters"),
    ),
    "lfm2_vl": HubForm(
        f"{VLLM}/lfm2_vl.py; LiquidAI/LFM2-VL-450M",
        variant="lfm2",
        fields={"architectures": ["Lfm2VlForConditionalGeneration"]},
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "zaya": HubForm(
        f"{VLLM}/zaya.py; Zyphra/ZAYA1-8B",
        fields={"rope_parameters": {"rope_type": "default", "hybrid": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                                    "hybrid_sliding": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}},
        changes={"rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                                     "hybrid_sliding": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}},
    ),
    "gemma3n": HubForm(
        f"{VLLM}/gemma3n.py, gemma3n_mm.py; google/gemma-3n-E2B-it",
        changes={"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                                     "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}},
        fields={"architectures": ["Gemma3nForConditionalGeneration"], "rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": None},
        without=("rope_parameters",),
        names={r"^model\.": "model.language_model."},
        edit=lambda tensors: with_unused_keys(with_images(tensors), 3),
    ),
    "paligemma": HubForm(
        f"{VLLM}/paligemma.py; google/paligemma-3b-pt-224",
        variant="gemma",
        fields={"architectures": ["PaliGemmaForConditionalGeneration"]},
        without=("max_position_embeddings", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "use_bidirectional_attention"),
        changes={"head_dim": 256, "num_hidden_layers": 2},
        names={r"^model\.": "language_model.model."},
        edit=with_images,
    ),
    "paligemma2": HubForm(
        f"{VLLM}/paligemma.py; google/paligemma2-3b-pt-224",
        variant="gemma2",
        fields={"architectures": ["PaliGemmaForConditionalGeneration"], "use_bidirectional_attention": True},
        names={r"^model\.": "language_model.model."},
        edit=with_images,
    ),
    "gemma4": HubForm(
        f"{VLLM}/gemma4.py, gemma4_mm.py; google/gemma-4-31B-it",
        fields={"architectures": ["Gemma4ForConditionalGeneration"], "global_head_dim": 24, "num_global_key_value_heads": 1,
                "use_bidirectional_attention": "vision"},
        without=("per_layer_config",),
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "gemma4_shared": HubForm(
        f"{VLLM}/gemma4.py; google/gemma-4-E2B-it",
        fields={"architectures": ["Gemma4ForConditionalGeneration"], "global_head_dim": 24, "num_global_key_value_heads": None},
        without=("per_layer_config",),
        names={r"^model\.": "model.language_model."},
        edit=lambda tensors: with_unused_keys(with_images(tensors)),
    ),
    "gemma4_experts": HubForm(
        f"{VLLM}/gemma4.py; google/gemma-4-26B-A4B-it",
        fields={"architectures": ["Gemma4ForConditionalGeneration"], "global_head_dim": 24, "num_global_key_value_heads": 2},
        without=("per_layer_config",),
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "gemma4_experts_apart": HubForm(  # as a quantized file has them, one by one
        f"{VLLM}/gemma4.py: Gemma4ForCausalLM.load_weights",
        variant="gemma4_experts",
        fields={"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified_text"},
        names={r"^model\.": "model.language_model."},
        edit=experts_apart,
    ),
    "qwen3_next": HubForm(
        f"{VLLM}/qwen3_next.py; Qwen/Qwen3-Next-80B-A3B-Instruct",
        changes={"layer_types": None, "num_hidden_layers": 4, "full_attention_interval": 2},
        fields={"full_attention_interval": 2, "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_scaling": None},
        without=("layer_types", "rope_parameters"),
        edit=with_draft,
    ),
    "qwen3_5": HubForm(
        f"{VLLM}/qwen3_5.py; Qwen/Qwen3.5-27B",
        changes={"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        fields={"architectures": ["Qwen3_5ForConditionalGeneration"], "full_attention_interval": 3},
        without=("layer_types",),
        in_bf16=("A_log", "dt_bias"),
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "qwen3_5_moe": HubForm(
        f"{VLLM}/qwen3_5.py; Qwen/Qwen3.5-35B-A3B",
        changes={"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        fields={"architectures": ["Qwen3_5MoeForConditionalGeneration"], "full_attention_interval": 3},
        without=("layer_types",),
        in_bf16=("A_log", "dt_bias"),
        names={r"^model\.": "model.language_model."},
        edit=lambda tensors: with_images(with_draft(stacked_experts(tensors))),
    ),
    "qwen4_exp": HubForm(
        "vllm/models/qwen4_exp/nvidia/model.py; Qwen/Qwen3.8-Flash-Next",
        changes={"ple_layer_ids": [1, 3], "split_ngram_parts": 60, "indexer_head_dim": 18, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
        fields={"architectures": ["Qwen4ExpForConditionalGeneration"], "layer_types": ["linear_attention", "full_attention"] * 2, "eos_token_id": [7, 3]},
        in_bf16=("A_log", "dt_bias"),
        names={r"^model\.": "model.language_model."},
        edit=lambda tensors: with_images(with_draft(stacked_experts(tensors))),
    ),
    "olmo_hybrid": HubForm(
        f"{VLLM}/olmo_hybrid.py; allenai/Olmo-Hybrid-7B",
        changes={"layer_types": None, "num_hidden_layers": 4, "linear_key_head_dim": None, "linear_value_head_dim": None,
                 "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        without=("layer_types", "linear_key_head_dim", "linear_value_head_dim"),
        edit=own_convolutions,
    ),
    "kimi_linear": HubForm(
        f"{VLLM}/kimi_linear.py, layers/kda.py; moonshotai/Kimi-Linear-48B-A3B-Instruct",
        fields={"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": tiny.KDA["linear_head_dim"], "num_heads": tiny.KDA["linear_num_heads"],
                                       "short_conv_kernel_size": 4},
                "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None,
                "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_nextn_predict_layers": 0, "q_lora_rank": None, "head_dim": 12},
        without=("layer_types", "mlp_layer_types", "rope_parameters", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
        names={r"layers\.0\.block_sparse_moe\.": "layers.0.mlp."},  # the dense layer
    ),
    "bailing_moe_v3": HubForm(
        f"{VLLM}/bailing_moe_v3.py; inclusionAI/Ling-3.0-flash",
        fields={"architectures": ["BailingMoeV3ForCausalLM"], "max_position_embeddings": 256, "num_experts_per_tok": 3, "n_group": 4, "norm_topk_prob": True,
                "moe_shared_expert_intermediate_size": 24, "gated_attention_proj_granularity_type": "head_wise", "no_kda_lora": True, "use_bias": False,
                "use_qkv_bias": False, "use_qk_norm": True, "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                "moe_router_enable_expert_bias": True, "rope_interleave": True, "partial_rotary_factor": 0.5, "rope_scaling": None, "head_dim": 10},
        without=("layer_types", "mlp_layer_types", "model_max_length", "num_experts_per_token", "num_expert_group", "moe_renormalize", "rope_parameters",
                 "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim"),
        names={r"layers\.([02])\.attention\.dense": r"layers.\1.attention.o_proj"},
    ),
    "afmoe": HubForm(
        f"{VLLM}/afmoe.py; arcee-ai/Trinity-Mini",
        changes={"layer_types": None, "global_attn_every_n_layers": 2},
        fields={"rope_theta": 10000.0, "rope_scaling": None, "route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
                "num_limited_groups": 1, "use_grouped_mm": True, "load_balance_coeff": 0.001},
        without=("rope_parameters", "layer_types", "attention_bias"),
    ),
    "laguna": HubForm(
        f"{VLLM}/laguna.py; poolside/laguna-XS.2",
        changes={"gating": "per-element", "mlp_layer_types": ["sparse", "sparse", "dense"], "shared_expert_intermediate_size": 28},
        fields={"moe_router_score_func": "sigmoid", "norm_topk_prob": True, "qkv_bias": False},
        names={r"experts\.e_score": "gate.e_score", r"shared_expert\.": "shared_experts."},  # as transformers has them in memory
        edit=stacked_experts,
    ),
    "llama4": HubForm(
        f"{VLLM}/llama4.py; meta-llama/Llama-4-Scout-17B-16E-Instruct",
        fields={"architectures": ["Llama4ForConditionalGeneration"], "no_rope_layers": [], "attn_temperature_tuning": 4, "for_llm_compressor": False,
                "rope_theta": 10000.0, "rope_scaling": {key: value for key, value in tiny.LLAMA3.items() if key != "rope_theta"}},
        without=("layer_types", "moe_layers", "rope_parameters"),
        names={"^": "language_model."},
        edit=with_images,
    ),
    "mimo_v2_flash": HubForm(
        f"{VLLM}/mimo_v2.py; XiaomiMiMo/MiMo-V2-Flash",
        changes={"rms_norm_eps": 1e-3, "num_hidden_layers": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
                 "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
        fields={"layernorm_epsilon": 1e-3, "hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 0, 1], "rope_theta": 5000000, "swa_rope_theta": 10000,
                "partial_rotary_factor": 0.334, "sliding_window_size": 8, "sliding_window": 8, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
                "swa_head_dim": 18, "swa_v_head_dim": 11, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "scoring_func": "sigmoid",
                "topk_method": "noaux_tc", "n_shared_experts": None, "routed_scaling_factor": None},
        without=("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"),
        edit=lambda tensors: tensors | {"model.mtp.layers.0.eh_proj.weight": torch.zeros(4)},
    ),
    "gpt2": HubForm(
        f"{VLLM}/gpt2.py; openai-community/gpt2",
        names={r"^transformer\.": ""},
        edit=with_masks,
    ),
    "gpt_neo": HubForm(
        "transformers/models/gpt_neo/modeling_gpt_neo.py; EleutherAI/gpt-neo-1.3B",
        changes={"intermediate_size": None},
        edit=lambda tensors: tensors | {f"transformer.h.{layer}.attn.attention.bias": torch.ones(1, 1, 4, 4) for layer in range(3)},
    ),
    "bloom": HubForm(
        f"{VLLM}/bloom.py; bigscience/bloom-560m",
        fields={"n_embed": 48, "n_layer": 3, "num_attention_heads": 4, "seq_length": 256, "offset_alibi": 100, "unk_token_id": 0, "pretraining_tp": 1},
        without=("n_head", "hidden_size"),
        names={r"^transformer\.": ""},
    ),
    "opt": HubForm(f"{VLLM}/opt.py; facebook/opt-1.3b", names={r"^model\.decoder\.": "decoder."}),
    "falcon": HubForm(
        f"{VLLM}/falcon.py; tiiuae/falcon-7b",
        changes={"num_kv_heads": 4},
        fields={"architectures": ["RWForCausalLM"], "n_layer": 3, "n_head": 4, "apply_residual_connection_post_layernorm": False},
        without=("num_hidden_layers", "num_attention_heads", "num_kv_heads", "ffn_hidden_size", "activation", "max_position_embeddings", "rope_parameters"),
    ),
    "gptj": HubForm(f"{VLLM}/gpt_j.py; EleutherAI/gpt-j-6b", fields={"rotary": True, "scale_attn_weights": True}, edit=with_masks),
    "nemotron_h": HubForm(
        f"{VLLM}/nemotron_h.py; nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        fields={"hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5, "time_step_limit": [0.0, INF], "norm_eps": 1e-5, "mamba_proj_bias": False,
                "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"},
        without=("layers_block_type", "layer_types"),
    ),
    "nemotron_h_experts": HubForm(
        f"{VLLM}/nemotron_h.py; nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        fields={"hybrid_override_pattern": "ME*E-", "num_hidden_layers": 5, "time_step_limit": [0.0, INF], "norm_eps": 1e-5},
        without=("layers_block_type", "layer_types"),
        in_bf16=("A_log", "dt_bias", "mixer.D", "e_score_correction_bias"),
    ),
    "granitemoehybrid": HubForm(
        f"{VLLM}/granitemoehybrid.py; ibm-granite/granite-4.0-h-small",
        fields={"layer_types": ["mamba", "attention", "mamba"], "rope_theta": 10000, "rope_scaling": None, "position_embedding_type": "nope",
                "normalization_function": "rmsnorm", "init_method": "mup", "layers_block_type": ["mamba", "attention", "mamba"]},
        without=("rope_parameters", "time_step_limit"),
    ),
    "bamba": HubForm(
        f"{VLLM}/bamba.py; ibm-ai-platform/Bamba-9B-v2",
        fields={"attn_layer_indices": [1], "attn_rotary_emb": 6, "rope_theta": 10000.0},
        without=("rope_parameters", "time_step_limit", "layers_block_type"),
    ),
    "falcon_h1": HubForm(
        f"{VLLM}/falcon_h1.py; tiiuae/Falcon-H1-0.5B-Instruct",
        changes={"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}},
        fields={"attn_layer_indices": None, "rope_theta": 100000000000.0, "mlp_expansion_factor": 8, "mamba_use_mlp": True, "num_logits_to_keep": 1},
        without=("rope_parameters", "time_step_limit"),
    ),
    "jamba": HubForm(
        f"{VLLM}/jamba.py; ai21labs/AI21-Jamba-Mini-1.6",
        fields={"mamba_inner_layernorms": True, "use_mamba_kernels": True, "num_logits_to_keep": 1},
        without=("rope_parameters", "layers_block_type", "layers_num_experts"),
    ),
    "mamba": HubForm(
        f"{VLLM}/mamba.py; state-spaces/mamba-130m-hf",
        changes={"vocab_size": 104},
        fields={"d_inner": 80, "d_model": 42, "n_layer": 3, "fused_add_norm": True, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {},
                "pad_vocab_size_multiple": 8},
        without=("tie_word_embeddings",),
        names={"embeddings": "embedding"},
    ),
    "mamba_ssm": HubForm(
        "mamba_ssm/models/config_mamba.py, mixer_seq_simple.py; state-spaces/mamba-130m, as safetensors",
        variant="mamba",
        changes={"hidden_size": 48, "intermediate_size": 96, "state_size": 16, "tie_word_embeddings": True, "vocab_size": 104},
        fields={"d_model": 48, "n_layer": 3, "vocab_size": 101, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
                "pad_vocab_size_multiple": 8},
        only=True,
        names={"embeddings": "embedding"},
        edit=with_head,
        overrides=("model=mamba",),
    ),
    "mamba2_ssm": HubForm(
        "mamba_ssm/models/config_mamba.py, modules/mamba2.py; state-spaces/mamba2-130m, as safetensors",
        variant="mamba2",
        changes={"hidden_size": 48, "num_heads": 6, "head_dim": 16, "state_size": 24, "n_groups": 1, "tie_word_embeddings": True, "vocab_size": 112},
        fields={"d_model": 48, "d_intermediate": 0, "n_layer": 3, "vocab_size": 101, "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 24},
                "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
                "pad_vocab_size_multiple": 16, "tie_embeddings": True},
        only=True,
        names={"embeddings": "embedding"},
        edit=with_head,
        overrides=("model=mamba2",),
    ),
    "mamba2": HubForm(
        f"{VLLM}/mamba2.py; mistralai/Mamba-Codestral-7B-v0.1",
        changes={"time_step_limit": (0.01, 0.2)},
        fields={"norm_before_gate": True, "rms_norm": True, "time_step_limit": [0.01, 0.2]},
        without=("tie_word_embeddings", "intermediate_size"),
    ),
    "zamba2": HubForm(
        f"{VLLM}/zamba2.py; Zyphra/Zamba2-1.2B-instruct-v2",
        fields={
            "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
            "hybrid_layer_ids": [1, 2, 3],
            "rope_theta": 10000,
            "time_step_limit": None,
            "use_mem_rope": True,
            "mamba_headdim": 16,
            "attention_head_dim": 24,
            "attention_hidden_size": 96,
            "kv_channels": 12,
            "num_query_groups": 4,
            "ft_lora": False,
        },
        without=("rope_parameters", "layer_types", "tie_word_embeddings"),
    ),
    "falcon_mamba": HubForm(
        f"{VLLM}/mamba.py; tiiuae/falcon-mamba-7b",
        changes={"tie_word_embeddings": False},
        fields={"mixer_rms_eps": 1e-3, "use_mambapy": False},
        without=("use_falcon_mambapy", "use_associative_scan"),
    ),
    "minimax_text_01": HubForm(
        f"{VLLM}/minimax_text_01.py; MiniMaxAI/MiniMax-Text-01",
        fields={"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "attn_type_list": [0, 1, 0], "postnorm": True,
                "layernorm_full_attention_alpha": 1.5, "layernorm_full_attention_beta": 0.8, "layernorm_linear_attention_alpha": 1.3,
                "layernorm_linear_attention_beta": 0.7, "layernorm_mlp_alpha": 1.2, "layernorm_mlp_beta": 0.6, "rope_theta": 1000000.0,
                "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "rotary_dim": 14},
        without=("layer_types", "rope_parameters", "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
                 "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor", "block_size"),
    ),
    "minimax_m3": HubForm(
        "vllm/models/minimax_m3/nvidia/model.py, common/indexer.py; MiniMaxAI/MiniMax-M3",
        fields={"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "hidden_act": "swigluoai", "use_qk_norm": True, "qk_norm_type": "per_head",
                "use_gemma_norm": True, "attention_output_gate": False, "scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1,
                "moe_layer_freq": [0, 1, 1], "rope_theta": 50000.0, "partial_rotary_factor": 0.5, "num_mtp_modules": 7, "num_nextn_predict_layers": 1,
                "sparse_attention_config": {
                    "use_sparse_attention": True, "sparse_index_dim": 12, "sparse_num_index_heads": 2, "sparse_topk_blocks": 3,
                    "sparse_block_size": 4, "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
                    "sparse_disable_index_value": [0, 1, 1], "sparse_attention_freq": [0, 1, 1]}},
        without=("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks", "layer_types", "mlp_layer_types",
                 "rope_parameters"),
        edit=as_minimax_m3,
    ),
    "axk1": HubForm(
        f"{VLLM}/AXK1.py; skt/A.X-K1",
        fields={"first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "none", "num_nextn_predict_layers": 0},
        without=("mlp_layer_types",),
        zeros=("mlp.gate.e_score_correction_bias",),
        edit=with_dense_norm,
    ),
    "deepseek_v32": HubForm(
        f"{VLLM}/deepseek_v2.py; deepseek-ai/DeepSeek-V3.2",
        fields={"first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1, "rope_theta": 10000,
                "rope_scaling": None, "num_nextn_predict_layers": 0},
        without=("mlp_layer_types", "layer_types", "rope_parameters", "head_dim"),
    ),
    "glm_5": HubForm(
        f"{VLLM}/deepseek_v2.py; zai-org/GLM-5",
        variant="glm_moe_dsa",
        changes={"indexer_types": None},
        fields={"first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True,
                "rope_interleave": True, "num_nextn_predict_layers": 0},
        without=("mlp_layer_types", "layer_types", "indexer_types"),
    ),
    "glm_5_2": HubForm(
        f"{VLLM}/deepseek_v2.py; zai-org/GLM-5.2",
        variant="glm_moe_dsa",
        changes={"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 3, "num_hidden_layers": 6},  # FFFSSF
        fields={"index_topk_pattern": None, "index_share_for_mtp_iteration": True, "moe_router_dtype": "float32", "num_nextn_predict_layers": 0},
        without=("layer_types", "indexer_types"),
    ),
    "glm_5_pattern": HubForm(
        "transformers/models/glm_moe_dsa/modular_glm_moe_dsa.py: GlmMoeDsaConfig.__post_init__",
        variant="glm_moe_dsa",
        changes={"indexer_types": None, "index_topk_pattern": "FSSF"},
        fields={"index_topk_freq": 4},
        without=("layer_types", "indexer_types"),
    ),
    "axk2": HubForm(
        "transformers/conversion_mapping.py; skt/A.X-K2-Light",
        fields={"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": None, "topk_group": None, "num_nextn_predict_layers": 0},
        changes={"n_group": None, "topk_group": None},
        without=("mlp_layer_types", "layer_types", "head_dim"),
    ),
    "cohere2_moe": HubForm(
        f"{VLLM}/cohere2_moe.py; CohereLabs/command-a-plus",
        fields={"first_k_dense_replace": 1, "rope_theta": 10000.0},
        without=("mlp_layer_types", "rope_parameters"),
    ),
    "dbrx": HubForm(
        f"{VLLM}/dbrx.py; databricks/dbrx-instruct",
        changes={"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 5e5},
                 "ffn_config": {"ffn_hidden_size": 28, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": None}},
        fields={"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
                "ffn_config": {"ffn_hidden_size": 28, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "moe_num_experts": 6, "moe_top_k": 3,
                               "moe_normalize_expert_weights": None}},
        without=("rope_parameters", "num_key_value_heads"),
    ),
    "ernie4_5_vl_moe": HubForm(
        f"{VLLM}/ernie45_vl_moe.py, ernie45_vl.py; baidu/ERNIE-4.5-VL-28B-A3B-PT",
        variant="ernie4_5_moe",
        fields={"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "model_type": "ernie4_5_moe_vl", "vision_config": {"depth": 1},
                "moe_num_experts": [8, 8], "moe_intermediate_size": [24, 12], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
                "rope_theta": 500000, "freq_allocation": 20, "rope_3d": True},
        without=("rope_parameters",),
        edit=with_image_experts,
    ),
    "longcat_flash": HubForm(
        f"{VLLM}/longcat_flash.py; meituan-longcat/LongCat-Flash-Chat",
        fields={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "router_bias": False, "norm_topk_prob": False,
                "rope_theta": 10000000.0, "num_layers": 2},
        without=("rope_parameters", "head_dim", "qk_head_dim", "num_key_value_heads"),
        edit=without_zero_experts,
    ),
    "hy_v3": HubForm(
        f"{VLLM}/hy_v3.py; tencent/Hy3-preview",
        fields={"first_k_dense_replace": 1, "expert_hidden_dim": 24, "rope_theta": 11158840.0},
        without=("mlp_layer_types", "moe_intermediate_size", "rope_parameters"),
    ),
    "dots3_note": HubForm(
        "vllm/models/dots3_note/nvidia/model.py; dots-studio/dots3-note-prev",
        changes={"rope_theta": 300.0, "swa_rope_theta": 20.0},
        fields={"architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note", "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"], "use_dsa": True,
                "apply_mla_qkv_lora_rescale": True, "attention_gate_type": "headwise", "swa_attention_gate_type": "headwise", "scoring_func": "sigmoid",
                "topk_method": "noaux_tc", "first_k_dense_replace": 1, "moe_shared_expert_intermediate_size": 28, "sliding_window_size": 9,
                "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 14, "swa_head_dim": 22,
                "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 8, "swa_rope_theta": 20.0, "rope_theta": 300.0,
                "vision_config": {"depth": 1}, "audio_config": {}},
        without=("per_layer_config", "rope_parameters", "mlp_layer_types", "shared_experts_intermediate_size", "sliding_window", "n_group", "topk_group"),
        edit=with_towers_of_dots,
    ),
    "hy_v4": HubForm(
        "vllm/models/hy_v4/nvidia/attention.py; tencent/Hy4-preview",
        changes={"indexer_types": None, "num_hidden_layers": 6},  # full, full, shared, shared, shared, full
        fields={"layer_types": ["deepseek_sparse_attention"] * 6, "num_key_value_heads": 2, "enable_ihc": True, "gated_mla": True,
                "gating_type": "elementwise", "learnable_sink": True, "enable_lm_head_fp32": True, "num_nextn_predict_layers": 1},
        without=("rope_interleave", "indexer_types", "head_dim", "qk_head_dim", "mlp_layer_types"),
        names={r"hc_pre\.(hc_\w+_layer)": r"\1.hc_pre", r"model\.hc_pre\.hc_head": "model.hc_head", r"(mlp.*)\.linear_gate": r"\1.gate_proj"},
        edit=in_pairs,
    ),
    "deepseek_v4": HubForm(
        "vllm/models/deepseek_v4/amd/model.py; deepseek-ai/DeepSeek-V4-Flash",
        changes={"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
                 "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}},
        fields={"num_hash_layers": 1, "compress_ratios": [4, 128, 0, 0], "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
                "qk_rope_head_dim": 8, "expert_dtype": "fp4",
                "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}},
        without=("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"),
        names={r"^model\.embed_tokens\.": "embed.", r"^model\.hc_head\.hc_": "hc_head_", r"^model\.": "", r"\.attn\.norm\.": ".attn.kv_norm."},
    ),
    "granite_4_dense": HubForm(
        f"{VLLM}/granitemoehybrid.py; ibm-granite/granite-4.0-1b",
        variant="granitemoehybrid_stacked",
        changes={"layer_types": ["full_attention"] * 3},
        fields={"layer_types": ["attention"] * 3, "rope_theta": 10000.0},
        without=("rope_parameters", "layers_block_type"),
    ),
    "orion": HubForm(
        f"{VLLM}/orion.py; OrionStarAI/Orion-14B-Chat",
        variant="stablelm",
        changes={"use_parallel_residual": False, "use_qkv_bias": False, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        fields={"architectures": ["OrionForCausalLM"], "model_type": "orion", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": False},
        without=("rope_parameters", "layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "qk_layernorm"),
    ),
    "deepseek": HubForm(
        f"{VLLM}/deepseek_v2.py; deepseek-ai/deepseek-moe-16b-base",
        variant="qwen2_moe",
        changes={**QWEN2_MOE, "mlp_only_layers": [0]},
        fields={"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
                "moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
        without=("num_experts", "mlp_only_layers", "shared_expert_intermediate_size", "qkv_bias"),
        names={r"shared_expert\.": "shared_experts."},
        edit=with_halved_shared,
        zeros=("shared_expert_gate.weight",),
    ),
    "bailing_moe": HubForm(
        f"{VLLM}/bailing_moe.py; inclusionAI/Ling-lite",
        variant="qwen2_moe",
        changes={**QWEN2_MOE, "norm_topk_prob": True},
        fields={"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_shared_experts": 2, "use_qkv_bias": False, "use_bias": False,
                "norm_head": False, "head_dim": 12, "first_k_dense_replace": 0},
        without=("shared_expert_intermediate_size", "qkv_bias", "mlp_only_layers"),
        names={r"shared_expert\.": "shared_experts.", "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense"},
        edit=lambda tensors: with_halved_shared(fused(tensors, "attention.query_key_value")),
        zeros=("shared_expert_gate.weight",),
    ),
    "param2moe": HubForm(
        f"{VLLM}/param2moe.py; bharatgenai/Param2-17B-A2.4B-Thinking",
        variant="bailing_moe_v2",
        fields={"architectures": ["Param2MoEForCausalLM"], "model_type": "param2moe", "use_qk_norm": True, "moe_shared_expert_intermediate_size": 24,
                "score_function": "sigmoid", "num_experts": 8, "num_shared_experts": 1},
        without=("n_shared_experts", "n_routed_experts"),
    ),
    "pangu_embedded": HubForm(
        f"{VLLM}/openpangu.py; FreedomIntelligence/openPangu-Embedded-7B",
        variant="llama",
        changes={"attention_bias": True},
        fields={"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded", "bias": True},
        without=("attention_bias", "mlp_bias"),
    ),
    "mimo": HubForm(
        f"{VLLM}/mimo.py; XiaomiMiMo/MiMo-7B-RL",
        variant="qwen2",
        fields={"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1},
        edit=with_mtp,
    ),
    "telechat3": HubForm(
        f"{VLLM}/registry.py; Tele-AI/TeleChat3-36B-Thinking",
        variant="llama",
        fields={"architectures": ["TeleChat3ForCausalLM"], "model_type": "telechat3"},
    ),
    "iquestcoder": HubForm(
        f"{VLLM}/registry.py; IQuestLab/IQuest-Coder-V1-40B-Instruct",
        variant="llama",
        changes={"head_dim": 20},
        fields={"architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder", "clip_qkv": None, "use_sliding_window": False},
    ),
    "xverse": HubForm(
        f"{VLLM}/registry.py, among those no longer supported; xverse/XVERSE-7B",
        variant="llama",
        fields={"architectures": ["XverseForCausalLM"], "model_type": "xverse"},
    ),
    "minicpm": HubForm(
        f"{VLLM}/minicpm.py; openbmb/MiniCPM-2B-sft-bf16",
        variant="granite",
        changes={**GRANITE, "tie_word_embeddings": True},
        fields={"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20},
        without=tuple(GRANITE),
    ),
    "internlm2": HubForm(
        f"{VLLM}/internlm2.py; internlm/internlm2_5-7b-chat",
        variant="llama",
        fields={"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
        without=("attention_bias", "mlp_bias", "head_dim"),
        names={"embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
               "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "self_attn.o_proj": "attention.wo", "lm_head": "output"},
        edit=lambda tensors: fused(tensors, "attention.wqkv", kv_groups=2),
    ),
    "chatglm": HubForm(
        f"{VLLM}/chatglm.py; zai-org/glm-4-9b-chat",
        variant="glm",
        changes={"rope_parameters": {**ROPE, "rope_theta": 20000.0, "partial_rotary_factor": 0.5}},
        fields={"architectures": ["ChatGLMModel"], "model_type": "chatglm", "hidden_size": 48, "num_layers": 3, "num_attention_heads": 4, "multi_query_attention": True,
                "multi_query_group_num": 2, "kv_channels": 16, "ffn_hidden_size": 80, "padded_vocab_size": 101, "vocab_size": 101, "seq_length": 256,
                "layernorm_epsilon": 1.5625e-07, "rmsnorm": True, "add_bias_linear": False, "add_qkv_bias": True, "rope_ratio": 2, "post_layer_norm": True,
                "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": False, "original_rope": True},
        only=True,
        names={r"model\.layers": "transformer.encoder.layers", r"model\.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
               r"model\.embed_tokens": "transformer.embedding.word_embeddings", "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
               "mlp.down_proj": "mlp.dense_4h_to_h"},
        edit=lambda tensors: fused(tensors, "self_attention.query_key_value"),
    ),
    "baichuan": HubForm(
        f"{VLLM}/baichuan.py; baichuan-inc/Baichuan-7B, as safetensors",
        variant="llama",
        changes={"num_key_value_heads": 4},
        fields={"architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan"},
        without=("num_key_value_heads", "attention_bias", "mlp_bias", "head_dim"),
        edit=lambda tensors: fused(tensors, "self_attn.W_pack"),
        overrides=("model.assumes.vocab_size=101",),
    ),
    "cosmos3_edge": HubForm(
        f"{VLLM}/cosmos3_edge.py; nvidia/Cosmos3-Edge",
        variant="arcee",
        changes={"rope_parameters": {**ROPE, "rope_theta": 1e8, "mrope_section": [4, 6, 6]}},
        fields={"architectures": ["Cosmos3EdgeForConditionalGeneration"], "model_type": "cosmos3_edge_text"},
        names={r"model\.": "", "_proj.weight": ".weight", r"self_attn\.": "self_attn.to_", "to_o": "to_out", r"mlp\.(up|down)": r"mlp.\1_proj"},
        edit=with_generator,
    ),
    "dory": HubForm(
        f"{VLLM}/dory.py; nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16",
        fields={"attention_output_gate_logit_scale_init": None, "mlp_bias": False},
        edit=as_dory,
    ),
    "hrm_text": HubForm(
        f"{VLLM}/hrm_text.py; sapientinc/HRM-Text-1B",
        changes={"embedding_scale": None, "initializer_range": 0.1},
        fields={"num_hidden_layers": 2, "prefix_lm": True},
        without=("num_layers_per_stack", "embedding_scale"),
    ),
    "molmo2": HubForm(
        f"{VLLM}/molmo2.py; allenai/Molmo2-8B",
        variant="qwen3",
        fields={"architectures": ["Molmo2ForConditionalGeneration"], "model_type": "molmo2_text", "additional_vocab_size": 7, "qk_norm_type": "qwen3", "qkv_bias": False,
                "vit_config": {"hidden_size": 16}, "norm_after": False, "rope_scaling_layers": None},
        names={r"model\.norm": "model.transformer.ln_f", r"model\.layers": "model.transformer.blocks", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
               r"self_attn\.o_proj": "self_attn.attn_out", r"mlp\.down_proj": "mlp.ff_out", r"model\.embed": "model.transformer.embed"},
        edit=as_molmo,
    ),
    "kimi_vl": HubForm(
        f"{VLLM}/kimi_vl.py; moonshotai/Kimi-VL-A3B-Instruct",
        variant="kimi_k2",
        fields={"architectures": ["KimiVLForConditionalGeneration"], "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        names={"^": "language_model."},
        edit=with_images,
    ),
    "dots_ocr": HubForm(
        f"{VLLM}/dots_ocr.py; rednote-hilab/dots.ocr",
        variant="qwen2",
        fields={"architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr", "vision_config": {"embed_dim": 16}, "attention_bias": True},
        edit=with_images,
    ),
    "lighton_ocr": HubForm(
        f"{VLLM}/lightonocr.py; lightonai/LightOnOCR-1B-1025",
        variant="qwen3",
        fields={"architectures": ["LightOnOCRForConditionalGeneration"]},
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "fast_vlm": HubForm(
        "transformers/models/fast_vlm/modeling_fast_vlm.py; apple/FastVLM-7B, as transformers saves it",
        variant="qwen2",
        fields={"architectures": ["FastVlmForConditionalGeneration"]},
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "perception_lm": HubForm(
        "transformers/models/perception_lm/modeling_perception_lm.py; facebook/Perception-LM-1B",
        variant="llama_rope_llama3",
        fields={"architectures": ["PerceptionLMForConditionalGeneration"]},
        names={r"^model\.": "model.language_model."},
        edit=with_images,
    ),
    "phi3_v": HubForm(
        f"{VLLM}/phi3v.py; microsoft/Phi-3.5-vision-instruct",
        variant="phi3",
        fields={"architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "img_processor": {"name": "clip_vision_model"}, "embd_layer": {}},
        edit=with_images,
    ),
    "phi3_v_shared": HubForm(  # as the module of images names it
        f"{VLLM}/phi3v.py: Phi3VForCausalLM.hf_to_vllm_mapper",
        variant="phi3",
        fields={"architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "img_processor": {"name": "clip_vision_model"}, "embd_layer": {}},
        names={"model.embed_tokens": "model.vision_embed_tokens.wte"},
        edit=with_images,
    ),
    "qwen2_audio": HubForm(
        f"{VLLM}/qwen2_audio.py; Qwen/Qwen2-Audio-7B-Instruct",
        variant="qwen2",
        fields={"architectures": ["Qwen2AudioForConditionalGeneration"]},
        names={"^": "language_model."},
        edit=with_images,
    ),
    "voxtral": HubForm(
        f"{VLLM}/voxtral.py; mistralai/Voxtral-Mini-3B-2507",
        variant="llama",
        changes={"rope_parameters": {**ROPE, "rope_theta": 1e8}, "rms_norm_eps": 1e-5, "head_dim": 20},
        fields={"architectures": ["VoxtralForConditionalGeneration"]},
        without=("rope_parameters", "rms_norm_eps"),
        names={"^": "language_model."},
        edit=with_images,
    ),
    "nemotron_h_omni": HubForm(
        f"{VLLM}/nano_nemotron_vl.py; nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning",
        variant="nemotron_h_experts",
        fields={"architectures": ["NemotronH_Nano_VL_V2"]},
        inner="llm_config",
        names={"^": "language_model."},
        edit=with_sound,
    ),
    "sarvam_mla": HubForm(
        "python/sglang/srt/models/sarvam_moe.py; sarvamai/sarvam-105b",
        fields={"architectures": ["SarvamMLAForCausalLM"], "num_experts": 8, "num_shared_experts": 2, "score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        without=("n_routed_experts", "n_shared_experts"),
    ),
    "phimoe": HubForm(
        f"{VLLM}/phimoe.py; microsoft/Phi-3.5-MoE-instruct",
        changes={"rope_parameters": {**LONGROPE, "rope_type": "longrope", "rope_theta": 10000.0}},
        fields={"architectures": ["PhiMoEForCausalLM"], "rope_scaling": {**LONGROPE, "type": "longrope"}, "rope_theta": 10000.0,
                "original_max_position_embeddings": 256},
        without=("rope_parameters",),
    ),
}  # fmt: skip


def write_form(name: str, form: HubForm, folder: Path) -> Any:
    """Write a variant's checkpoint in the hub's form; transformers' model of it."""
    model = tiny.save_changed(form.variant or name, folder, **form.changes)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if not form.only and key not in form.without} | form.fields
    if (
        "architectures" in config
        and config["architectures"][0].endswith("ForConditionalGeneration")
        and "vision_config" not in config
    ):
        form = form._replace(inner="text_config")
    if form.inner:
        outer = {key: config[key] for key in ("architectures", "tie_word_embeddings")}
        config = {**outer, form.inner: config, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for pattern, replacement in form.names.items():
        tensors = {re.sub(pattern, replacement, key): tensor for key, tensor in tensors.items()}
    tensors = form.edit(tensors)
    for end in form.in_bf16:
        tensors |= {key: tensor.bfloat16() for key, tensor in tensors.items() if key.endswith(end)}
        for key, parameter in model.named_parameters():
            parameter.data = parameter.data.bfloat16().float() if key.endswith(end) else parameter.data
    for end in form.zeros:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(end)}
        for key, tensor in (*model.named_buffers(), *model.named_parameters()):
            tensor.data.zero_() if key.endswith(end) else None
    save_file(tensors, folder / "model.safetensors")
    return model.eval()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_in_the_hubs_form_gives_the_logits_of_transformers(name: str, tmp_path: Path):
    form = FORMS[name]
    model = write_form(name, form, tmp_path / name)
    assert_same_as_transformers(load([f"checkpoint={tmp_path / name}", "dtype=fp32", *form.overrides]), model)


UNDER_OTHER_NAMES = [
    "axk1",
    "axk2",
    "beam",
    "cohere2_moe",
    "deepseek_v4",
    "dory",
    "flint",
    "hrm_text",
    "hy_v3",
    "hy_v4",
    "kolibri1",
    "longcat_flash",
    "phimoe",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNDER_OTHER_NAMES)
def test_a_checkpoint_under_the_names_of_transformers_gives_its_logits(name: str, tmp_path: Path):
    model = tiny.save_changed(name, tmp_path / name, is_stacked=True)
    assert_same_as_transformers(load([f"checkpoint={tmp_path / name}", "dtype=fp32"]), model.eval())


REFUSED = {
    "blocks that are always chosen": (
        "minimax_m3", {"sparse_attention_config": {"sparse_init_block": 1}}, (), [], r"sparse_attention_config.sparse_init_block=1",
    ),
    "more blocks nearby than there are": (
        "minimax_m3", {"index_local_blocks": 4}, (), [], r"model.attention.index.local=4 is more than top_k=3, which count them too",
    ),
    "index heads that do not divide": (
        "minimax_m3", {"index_n_heads": 3}, (), [], r"model.attention.kv_heads=2 is not a multiple of index.heads=3",
    ),
    "index heads of fewer dims than turn": (
        "minimax_m3", {"index_head_dim": 6}, (), [], r"model.attention.index.dim=6 is less than the 8 dims that turn",
    ),
    "index heads of fewer dims than a share of a head's": (
        "deepseek_v4", {"index_head_dim": 4}, ("qk_rope_head_dim",), [], r"some.attention.index.dim=4 is less than the 8 dims that turn",
    ),
    "runs of latent attention": (
        "deepseek_v32", {}, (), ["model.attention.index.every=4"], r"model.attention.index.every=4: keys of runs are of layers without positions; set model.attention.rope.kind=none",
    ),
    "local blocks of latent attention": (
        "deepseek_v32", {}, (), ["model.attention.index.local=2"], r"model.attention.index.local=2 is for kind gqa, not for kind mla",
    ),
    "last dims of blocks that are chosen": (
        "minimax_m3", {}, (), ["model.attention.index.last=true"], r"model.attention.index.last=true is for kind mla, not for kind gqa",
    ),
    "runs of several index keys": (
        "qwen4_exp", {"indexer_kv_heads": 2}, (), [], r"indexer_kv_heads=2 in its config.json is not supported",
    ),
    "n-grams of a layer that is not there": (
        "qwen4_exp", {"ple_layer_ids": [0, 3]}, (), [], r"model.ngrams.layers=\[0, 3\] is no ascending list of layers from 1 to 4",
    ),
    "n-grams of heads that do not divide": (
        "qwen4_exp", {"ple_embed_dim": 18}, (), [], r"model.ngrams.dim=18 is no multiple of the 4 heads that choose rows",
    ),
    "n-grams that never end": (
        "qwen4_exp", {"eos_token_id": None}, (), [], r"model.ngrams.end has no value",
    ),
    "a table of n-grams of another size": (
        "qwen4_exp", {"ngram_vocab_size_base": 40}, (), [], r"tensor model.layers.0.ple.ple_embedding.ngram_embedding.shard_\d.weight is",
    ),
    "gated streams without a rank": (
        "qwen4_exp", {}, (), ["model.streams.rank=null"], r"model.streams.rank=null: kind gated needs a number",
    ),
    "gated streams of normed blocks": (
        "qwen4_exp", {}, (), ["model.norm.before=true"], r"model.streams.kind=gated: streams have the only norm \(rms\)",
    ),
    "experts of an unknown type": (
        "deepseek_v4", {"mlp_layer_types": ["hash_moe", "dense", "moe"]}, (), [], r"dense in .* is no type of layers; letters: hash_moe moe",
    ),
    "an index without blocks": (
        "minimax_m3", {}, (), ["model.attention.index.block=null"], r"model.attention.index.block has no value; an indexer needs it",
    ),
    "an index of layers with a window": (
        "minimax_m3", {}, (), ["model.attention.window=7"], r"model.attention.window=7 is not supported with an index",
    ),
    "an index of layers of unknown kinds": (
        "minimax_m3", {}, (), ["model.attention.index.layers=[none,shared,full]"], r"model.attention.index.layers: shared is not full or none",
    ),
    "too many layers": (
        "nemotron_h", {"hybrid_override_pattern": "M-*-M", "num_hidden_layers": 9}, ("layers_block_type", "layer_types"), [],
        r"model.layer_types names only 5 layers, the model has 9",
    ),
    "more layers than stored": (
        "lfm2", {"num_hidden_layers": 5, "full_attn_idxs": [1]}, ("layer_types",), [],
        r"the checkpoint has no tensor model.layers.3.* \(and \d+ more\); is it whole",
    ),
    "an unknown type": (
        "granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba3"]}, (), [],
        r"model.layer_types: layer type mamba3 is not supported \(supported: ",
    ),
    "an unknown number of a type": (
        "minimax_text_01", {"attn_type_list": [0, 2, 0]}, ("layer_types",), [],
        r"model.layer_types: 2 in .*\[0, 2, 0\].* is no type of layers; letters: 0 1",
    ),
    "limits of time steps that the reference does not read": (
        "nemotron_h", {"time_step_limit": [0.0, 0.1]}, (), [],
        r"time_step_limit=\[0.0, 0.1\] in its config.json is not supported \(supported: \[0.0, inf\]\)",
    ),
    "attention among mamba-ssm's layers": (
        "mamba2", {"attn_layer_idx": [1]}, (), [],
        r"attn_layer_idx=\[1\] in its config.json is not supported \(supported: \[\]\)",
    ),
    "heads that the tensors do not have": (
        "qwen3_next", {"linear_num_value_heads": 4}, (), [],
        r"tensor model.layers.0.linear_attn.in_proj_qkvz.weight is \[124, 48\], the model expects \[96, 48\]",
    ),
    "two bases of one rope": (
        "dbrx", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, (), [],
        r"rope_parameters.rope_theta=10000.0 in its config.json is not supported \(supported: 500000.0\)",
    ),
    "weights that are divided by a norm": (
        "dbrx", {"ffn_config": {"ffn_hidden_size": 28, "moe_num_experts": 6, "moe_top_k": 3, "moe_normalize_expert_weights": 2.0}}, (), [],
        r"ffn_config.moe_normalize_expert_weights=2.0 in its config.json is not supported \(supported: 1\)",
    ),
    "heads that groups do not divide": (
        "bamba", {"mamba_n_groups": 4}, (), [],
        r"model.blocks.mamba.mamba2.heads=6 is not a multiple of groups=4",
    ),
    "a scale of what is not scaled": (
        "qwen3_5", {}, (), ["+model.scales.delta_q=2.0"],
        r"model.scales.delta_q=2.0: no linear of this model is scaled so; leave it out",
    ),
    "a scale of a block that is not there": (
        "lfm2", {}, (), ["+model.scales.mamba_z=2.0"],
        r"model.scales.mamba_z=2.0: no linear of this model is scaled so; leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case: str, tmp_path: Path):
    variant, fields, without, overrides, message = REFUSED[case]
    folder = tmp_path / variant
    write_form(variant, HubForm("", fields=fields, without=without), folder)
    with pytest.raises(AtomError, match=message) as raised:
        config = load([f"checkpoint={folder}", "dtype=fp32", *overrides])
        graph = semantic_graph(config)
        weights.check(graph, open_for(config, SilentProgress()).tensors, config.model.ignore)
    assert "\n" not in str(raised.value)
