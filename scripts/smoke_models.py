"""Write tiny checkpoints of random weights, in any format that atom reads, without transformers.

    write_checkpoint(qwen3(hidden_size=1024), folder)
    write_checkpoint(deepseek_v3(), folder, "serve.method=mtp")     # the layer that predicts further tokens too
    merged = write_adapter(base, folder / "a", folder / "merged")   # a LoRA adapter, and the checkpoint with it merged

The names, shapes and dtypes of tensors are those that the model's text reads. Values that are packed are random bits;
their scales make them as large as plain weights.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom.compiler import compile_graph
from atom.config import ModelConfig
from atom.config.load import load
from atom.frontend.ngrams import head_rows
from atom.graph import TORCH_DTYPES, Type
from atom.graph.parts import parts_of
from atom.graph.recipes import leaves

GAIN = 1.5  # of a weight's numbers, times what keeps the size of its outputs
LORA_RANK, LORA_ALPHA = 8, 16
SIZES = "ngram_heads_vocab_sizes"  # ends the name of a tensor of sizes of heads
COMMON: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 2048, "vocab_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MLA = {"num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
       "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 512, "num_experts_per_tok": 2, "norm_topk_prob": True}
# of models that only the float32 of a CPU is compared with, which takes as long as their linears
SMALL = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 16}


def qwen3(**changes: Any) -> dict[str, Any]:
    return COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | changes


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    named = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    return COMMON | EXPERTS | named | changes


def gpt_oss(**changes: Any) -> dict[str, Any]:
    """Two layers: one with a window, one without; all with sinks and biases."""
    named = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "head_dim": 64,
             "num_experts_per_tok": 2, "intermediate_size": 512, "attention_bias": True, "swiglu_limit": 7.0,
             "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    return COMMON | named | changes


def deepseek_v3(**changes: Any) -> dict[str, Any]:
    named = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8,
             "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
             "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1}  # fmt: skip
    return COMMON | MLA | EXPERTS | named | changes


def deepseek_v32(**changes: Any) -> dict[str, Any]:
    """Latent attention to what an indexer chooses; of many heads, so that scores do not tie at 0."""
    named = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "num_nextn_predict_layers": 0,
             "num_attention_heads": 64, "num_key_value_heads": 64, "index_n_heads": 64, "index_head_dim": 128,
             "index_topk": 64}  # fmt: skip
    return deepseek_v3() | named | changes


def hy_v4(**changes: Any) -> dict[str, Any]:
    """Three layers with sinks over gated residual streams, of which the last attends to what the second chose."""
    named = {"model_type": "hy_v4", "architectures": ["HYV4ForCausalLM"], "num_hidden_layers": 3, "hc_mult": 3,
             "indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["dense", "sparse", "sparse"],
             "num_key_value_heads": 16, "swiglu_limit": 7.0}  # fmt: skip
    return deepseek_v32() | SMALL | named | changes


def dots3_note(**changes: Any) -> dict[str, Any]:
    """Two layers with latents: one chooses tokens, the other has a window and sizes of its own."""
    window = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 256, "q_lora_rank": 128,
              "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 192}  # fmt: skip
    ropes = {"indexed_attention": {"rope_type": "default", "rope_theta": 8e7},
             "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0}}  # fmt: skip
    named = {"model_type": "dots3_note_text", "architectures": ["Dots3NoteForCausalLM"], "head_dim": 192,
             "layer_types": ["indexed_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
             "per_layer_config": {"1": window}, "rope_parameters": ropes, "sliding_window": 64,
             "num_key_value_heads": 16, "shared_experts_intermediate_size": 128}  # fmt: skip
    base = {key: value for key, value in deepseek_v32().items() if key != "rope_theta"}
    return base | SMALL | named | changes


def qwen4_exp(**changes: Any) -> dict[str, Any]:
    """Two layers, of a gated delta rule and of attention to runs that an indexer chooses by the mean of their keys.

    The first one reads n-grams of the last tokens; four gated residual streams.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]}
    named = {"model_type": "qwen4_exp_text", "architectures": ["Qwen4ExpForCausalLM"], "rope_parameters": rope,
             "layer_types": ["linear_attention", "indexed_attention"], "linear_num_key_heads": 4,
             "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 8,
             "shared_expert_intermediate_size": 128, "hc_count": 4, "hc_lowrank": 64, "output_gate_type": "sigmoid",
             "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 64,
             "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ple_embed_dim": 256, "ple_conv_kernel_size": 3,
             "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 1000, "split_ngram_parts": 4,
             "make_ngram_vocab_size_divisible_by": 128, "eos_token_id": 7}  # fmt: skip
    return {key: value for key, value in COMMON.items() if key != "rope_theta"} | EXPERTS | SMALL | named | changes


def kimi_k3(**changes: Any) -> dict[str, Any]:
    """Two layers, of KDA and of gated latents without positions; blocks attend over sums of what earlier ones gave."""
    linear = {"num_heads": 8, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
              "use_full_rank_gate": True, "kda_layers": [1], "full_attn_layers": [2]}  # fmt: skip
    text = COMMON | MLA | EXPERTS | SMALL | {
        "model_type": "kimi_linear", "mla_use_nope": True, "mla_use_output_gate": True, "linear_attn_config": linear,
        "attn_res_block_size": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8,
        "num_experts_per_token": 2, "num_shared_experts": 1, "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True, "hidden_act": "situ", "activation_situ_beta": 0.8,
        "activation_situ_linear_beta": 1.5, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
        "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
            "text_config": text | changes, "vision_config": {"model_type": "kimi_k3_vision", "patch_size": 14},
            "tie_word_embeddings": False}  # fmt: skip


def minimax_m3(**changes: Any) -> dict[str, Any]:
    """A layer of full attention, and one that attends to blocks that an indexer chooses."""
    named = {"model_type": "minimax_m3_vl_text", "architectures": ["MiniMaxM3VLForCausalLM"], "num_local_experts": 8,
             "num_experts_per_tok": 2, "intermediate_size": 512, "dense_intermediate_size": 1024,
             "shared_intermediate_size": 512, "rotary_dim": 64, "index_n_heads": 2, "index_head_dim": 128,
             "index_block_size": 32, "index_topk_blocks": 3, "routed_scaling_factor": 1.0,
             "layer_types": ["full_attention", "minimax_m3_sparse"],
             "mlp_layer_types": ["dense", "sparse"]}  # fmt: skip
    return COMMON | named | changes


def deepseek_v4(**changes: Any) -> dict[str, Any]:
    """Three layers: runs of 4 that an indexer chooses of, all runs of 32, and a window; four residual streams."""
    named = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 3,
             "num_key_value_heads": 1, "head_dim": 128, "partial_rotary_factor": 0.5, "q_lora_rank": 256,
             "o_groups": 4, "o_lora_rank": 64, "sliding_window": 32, "index_n_heads": 64, "index_head_dim": 64,
             "index_topk": 16, "n_routed_experts": 8, "n_shared_experts": 1, "hc_mult": 4, "hc_sinkhorn_iters": 20,
             "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
             "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
             "mlp_layer_types": ["moe"] * 3}  # fmt: skip
    return COMMON | EXPERTS | named | changes


def gemma4(**changes: Any) -> dict[str, Any]:
    """Four layers, with windows and without in turn: the last two read the KV of the others; inputs by layer."""
    named = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
             "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
             "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 128, "hidden_activation": "gelu_pytorch_tanh",
             "final_logit_softcapping": 30.0,
             "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                                    "rope_theta": 1000000.0},
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}  # fmt: skip
    return {key: value for key, value in COMMON.items() if key != "rope_theta"} | named | changes


def lfm2(**changes: Any) -> dict[str, Any]:
    """Two layers: a short convolution, and attention."""
    named = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "conv_L_cache": 3, "norm_eps": 1e-6,
             "head_dim": 64, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}  # fmt: skip
    return COMMON | named | changes


def qwen3_5(**changes: Any) -> dict[str, Any]:
    """Two layers: a gated delta rule, and gated attention."""
    named = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 4,
             "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
             "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    return COMMON | named | changes


def qwen3_vl(**changes: Any) -> dict[str, Any]:
    """Two layers, and two of a tower with heads of 72 dims, the first of which gives rows to a layer of the text."""
    named = {"model_type": "qwen3_vl_text", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                               "mrope_section": [24, 20, 20]}}  # fmt: skip
    tower = {"model_type": "qwen3_vl", "depth": 2, "hidden_size": 288, "num_heads": 4, "intermediate_size": 512,
             "out_hidden_size": 1024, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
             "in_channels": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
             "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02}  # fmt: skip
    text = {key: value for key, value in COMMON.items() if key != "rope_theta"} | named | changes
    return {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text,
            "vision_config": tower, "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502,
            "vision_end_token_id": 503, "tie_word_embeddings": False}  # fmt: skip


def gemma3(**changes: Any) -> dict[str, Any]:
    """Two layers, one with a window: the 64 tokens of an image see each other in both."""
    tower = {"model_type": "siglip_vision_model", "hidden_size": 288, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 512, "image_size": 224, "patch_size": 14, "layer_norm_eps": 1e-6}  # fmt: skip
    named = {"model_type": "gemma3_text", "sliding_window": 128, "query_pre_attn_scalar": 128,
             "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    return {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": tower,
            "text_config": COMMON | named | changes, "mm_tokens_per_image": 64, "image_token_index": 500,
            "boi_token_index": 501, "eoi_token_index": 502, "tie_word_embeddings": False}  # fmt: skip


def internvl(**changes: Any) -> dict[str, Any]:
    """Two layers, and two of a tower with a class token, norms of q and k over all heads, and LayerScale."""
    tower = {"model_type": "internvl_vision", "hidden_size": 288, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 512, "image_size": [224, 224], "patch_size": [14, 14], "use_qk_norm": True,
             "norm_type": "rms_norm", "hidden_act": "gelu", "layer_norm_eps": 1e-6}  # fmt: skip
    return {"model_type": "internvl", "architectures": ["InternVLForConditionalGeneration"], "vision_config": tower,
            "text_config": qwen3(**changes), "image_token_id": 500, "downsample_ratio": 0.5,
            "tie_word_embeddings": False}  # fmt: skip


def nemotron_h(**changes: Any) -> dict[str, Any]:
    """Three layers: Mamba-2, an mlp, and attention."""
    named = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 3,
             "layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 16,
             "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2, "mlp_hidden_act": "relu2"}  # fmt: skip
    return COMMON | named | changes


def mamba(**changes: Any) -> dict[str, Any]:
    """Two layers of Mamba, without attention."""
    return COMMON | {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 16} | changes


def minimax(**changes: Any) -> dict[str, Any]:
    """Two layers with experts: lightning attention, and attention."""
    named = {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"], "head_dim": 64, "num_local_experts": 4,
             "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    return COMMON | named | changes


def write_checkpoint(config: dict[str, Any], folder: Path, *overrides: str, loudness: float = 1.0) -> Path:
    """Write config.json and random weights to a new folder. loudness: of what layers add to the embedding

    Drafts of the layer that predicts further tokens are mostly right if loudness is small.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load([f"checkpoint={folder}", "device=cpu", "level=0", *overrides])
    graph = compile_graph(loaded)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, leaf in graph.stored().items():
        if leaf.type.fmt is None:
            tensors[name] = draw(name, leaf.type, generator)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensors[name] *= loudness
        else:
            tensors |= draw_parts(leaf, generator)
    for name in [name for name in tensors if name.endswith(SIZES)]:
        tensors |= hash_ngrams(name.removesuffix(SIZES), loaded.model, tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def hash_ngrams(at: str, model: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What n-grams are hashed by: the rows of each head, which are primes, where they start, and odd multipliers."""
    (layer,) = (int(part) for part in at.split(".") if part.isdigit())
    sizes = torch.tensor(head_rows(model.ngrams, layer))
    num = len(tensors[f"{at}layer_multipliers"])
    made = {
        SIZES: sizes,
        "ngram_heads_offsets": sizes.cumsum(0) - sizes,
        "layer_multipliers": 2 * torch.arange(num) + 7,
    }
    return {f"{at}{name}": tensor for name, tensor in made.items()}


def draw(name: str, type: Type, generator: torch.Generator) -> Tensor:
    """A plain tensor."""
    shape, dtype = tuple(map(int, type.shape)), TORCH_DTYPES[type.dtype]
    if name.endswith("eh_proj.weight"):  # what predicts further tokens begins with the embedding
        joined = torch.eye(*shape) + 0.02 * torch.randn(shape, generator=generator)
        return joined.to(dtype)
    made = torch.randn(shape, generator=generator)
    if len(shape) > 1 and "embed_tokens" not in name:
        made *= GAIN / math.sqrt(shape[-1])
    elif "norm" in name or name.endswith("layer_scalar"):
        made = 1 + 0.1 * made
    elif len(shape) == 1 and not name.endswith("sinks"):
        made *= 0.1
    return made.to(dtype)


def draw_parts(leaf: Any, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The stored parts of a packed weight, by name."""
    size = GAIN / math.sqrt(int(leaf.type.shape[-1]))
    for role, recipe in parts_of(leaf).items():
        for part in leaves(recipe):
            shape, dtype = tuple(map(int, part.type.shape)), TORCH_DTYPES[part.type.dtype]
            if role == "scales" and dtype == torch.uint8:  # exponents: numbers of e2m1 are some 3 large
                middle = 127 + round(math.log2(size / 3))
                made = torch.randint(middle - 1, middle + 2, shape, generator=generator)
            elif role == "scales":  # differences of two numbers of 4 bits are some 6.5 large
                made = (0.5 + torch.rand(shape, generator=generator)) * size / 6.5
            elif dtype == torch.uint8:
                made = torch.randint(0, 256, shape, generator=generator)
            else:
                made = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
            yield part.name, made.to(dtype)


def write_adapter(base: Path, adapter: Path, merged: Path, seed: int) -> None:
    """Write a random LoRA adapter of all linears of layers, as PEFT does, and a checkpoint with it merged."""
    generator = torch.Generator().manual_seed(seed)
    tensors, factors = load_file(base / "model.safetensors"), dict[str, Tensor]()
    for name, weight in tensors.items():
        tensors[name] = weight.float()
        if name.endswith("_proj.weight"):
            a, b = (
                torch.randn(shape, generator=generator) / math.sqrt(shape[1])
                for shape in ((LORA_RANK, weight.shape[1]), (weight.shape[0], LORA_RANK))
            )
            for factor, made in (("A", a), ("B", b)):
                factors[f"base_model.model.{name.removesuffix('.weight')}.lora_{factor}.weight"] = made
            tensors[name] += LORA_ALPHA / LORA_RANK * b @ a
    for folder in (adapter, merged):
        folder.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in factors})
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": targets, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(base / "config.json", merged)
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})


def add_tokenizer(folder: Path) -> None:
    """Add a tokenizer whose tokens are the 256 bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({byte: token for token, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
