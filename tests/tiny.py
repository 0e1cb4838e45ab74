"""Tiny random checkpoints that `transformers` makes: the numeric reference, in float32.

folder = tiny.save("qwen3", tmp_path)
model = tiny.reference(folder)
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from law import assert_fp16_as_near, assert_greedy_tokens
from transformers import AutoModelForCausalLM

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}

YARN_MLA = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.7}
MLA = {"kv_lora_rank": 18, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "num_key_value_heads": 4}
INDEX = {"index_n_heads": 24, "index_head_dim": 12, "index_topk": 9}  # of few heads many scores would be 0 and tie
MINIMAX_M3 = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
              "intermediate_size": 24, "dense_intermediate_size": 40, "shared_intermediate_size": 28, "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 3,
              "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
GEMMA4 = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 24, "sliding_window": 10, "hidden_size_per_layer_input": 0,
          "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 3.0}  # fmt: skip
GEMMA3N = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2, "num_kv_shared_layers": 1,
           "head_dim": 24, "sliding_window": 10, "intermediate_size": [80, 72, 80, 56], "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0],
           "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97, "altup_num_inputs": 3, "laurel_rank": 5,
           "final_logit_softcapping": 3.0}  # fmt: skip
DEEPSEEK_V4 = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 20, "o_groups": 4, "o_lora_rank": 12, "sliding_window": 9,
               "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"], "index_n_heads": 24, "index_head_dim": 12,
               "index_topk": 5, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
               "mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 6, "hc_mult": 3,
               "hc_sinkhorn_iters": 5, "swiglu_limit": 1.0, **EXPERTS}  # fmt: skip
ZAYA = {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 12, "router_hidden_size": 20, "lm_head_bias": True,
        "tie_word_embeddings": False}  # fmt: skip

QWEN4_EXP = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2, "head_dim": 16, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
             "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "hc_count": 3, "hc_lowrank": 10, "output_gate_type": "sigmoid",
             "indexer_n_heads": 24, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 12, "indexer_compress_ratio": 4,
             "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
             "ple_layer_ids": [1], "ple_embed_dim": 16, "ple_conv_kernel_size": 3, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 31,
             "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "eos_token_id": 7}  # fmt: skip

SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "intermediate_size": 80, "vocab_size": 101, "max_position_embeddings": 256,
                         "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}  # fmt: skip

# name -> (transformers' config class, what differs from SIZES)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama_odd_heads": ("LlamaConfig", {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 20}),
    "llama_three_groups": ("LlamaConfig", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "rms_norm_eps": 1e-3}),
    "llama_rope_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_rope_linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama_rope_yarn": ("LlamaConfig", {"rope_parameters": YARN, "head_dim": 32}),
    "llama_rope_yarn_mscale": ("LlamaConfig", {"rope_parameters": YARN_MSCALE, "head_dim": 32}),
    "llama_gelu_tanh": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama_relu2": ("LlamaConfig", {"hidden_act": "relu2"}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3Config", {"head_dim": 36, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_window": ("Qwen3Config", {"head_dim": 24, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2,
                                     "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen3_yarn": ("Qwen3Config", {"head_dim": 32, "rope_parameters": YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 16, "head_dim": 20}),
    "mistral_window_1": ("MistralConfig", {"sliding_window": 33, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
    "mixtral_odd": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 28, "tie_word_embeddings": True,
                                      "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mixtral_window_stacked": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 12, "num_experts_per_tok": 1}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_dense_list": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 7, "mlp_only_layers": [1], "head_dim": 10, "tie_word_embeddings": True}),
    "qwen3_moe_dense_step_stacked": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2, "norm_topk_prob": True,
                                                        "attention_bias": True}),
    "deepseek_v2": ("DeepseekV2Config", {**MLA, **EXPERTS, "n_routed_experts": 8, "topk_method": "greedy", "routed_scaling_factor": 1.0,
                                         "first_k_dense_replace": 1, "q_lora_rank": None}),
    "deepseek_v2_greedy_groups": ("DeepseekV2Config", {**MLA, **EXPERTS, "n_routed_experts": 8, "topk_method": "greedy", "n_group": 4, "topk_group": 1,
                                                       "q_lora_rank": None}),
    "deepseek_v2_groups": ("DeepseekV2Config", {**MLA, **EXPERTS, "n_routed_experts": 12, "topk_method": "group_limited_greedy", "n_group": 4,
                                                "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "q_lora_rank": 20,
                                                "rope_parameters": YARN_MLA, "first_k_dense_replace": 0}),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, **EXPERTS, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
                                         "q_lora_rank": 20, "rope_parameters": YARN_MLA, "first_k_dense_replace": 1}),
    "deepseek_v3_plain_q_odd": ("DeepseekV3Config", {**MLA, **EXPERTS, "n_routed_experts": 9, "n_group": 3, "topk_group": 1, "q_lora_rank": None,
                                                     "num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 7,
                                                     "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "kv_lora_rank": 11,
                                                     "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False,
                                                     "rope_interleave": False, "first_k_dense_replace": 2, "n_shared_experts": 2}),
    "deepseek_v3_stacked": ("DeepseekV3Config", {**MLA, **EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 12,
                                                 "routed_scaling_factor": 1.7, "first_k_dense_replace": 0}),
    "deepseek_v32": ("DeepseekV32Config", {**MLA, **EXPERTS, **INDEX, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
                                           "q_lora_rank": 20, "first_k_dense_replace": 1}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**MLA, **EXPERTS, **INDEX, "n_routed_experts": 6, "q_lora_rank": 20, "first_k_dense_replace": 1,
                                        "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}),
    "hy_v4": ("HYV4Config", {**MLA, **EXPERTS, **INDEX, "n_routed_experts": 6, "q_lora_rank": 20, "num_hidden_layers": 4,
                             "indexer_types": ["full", "full", "shared", "full"], "hc_mult": 3, "hc_eps": 0.02, "hc_magnitude": 1.5, "swiglu_limit": 0.5,
                             "rope_interleave": False}),  # transformers 5.24 turns halves of a head, whatever the checkpoint has
    "dots3_note": ("Dots3NoteTextConfig", {**MLA, **EXPERTS, **INDEX, "n_routed_experts": 6, "q_lora_rank": 20, "num_hidden_layers": 4, "head_dim": 20,
                                           "shared_experts_intermediate_size": 28, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 16,
                                           "swa_kv_lora_rank": 14, "swa_head_dim": 22, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 8, "sliding_window": 9,
                                           "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]}),
    "minimax_m3": ("MiniMaxM3VLTextConfig", MINIMAX_M3),
    "kimi_k2": ("DeepseekV3Config", {**MLA, **EXPERTS, "n_routed_experts": 24, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
                                     "num_experts_per_tok": 8, "routed_scaling_factor": 2.827, "rope_parameters": YARN_MLA,
                                     "first_k_dense_replace": 1}),
    "glm4_moe": ("Glm4MoeConfig", {**EXPERTS, "n_routed_experts": 8, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
                                   "routed_scaling_factor": 2.5}),
    "glm4_moe_plain": ("Glm4MoeConfig", {**EXPERTS, "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "head_dim": 20, "partial_rotary_factor": 0.3,
                                         "first_k_dense_replace": 0, "num_key_value_heads": 4, "n_shared_experts": 2}),
    "deepseek_v4": ("DeepseekV4Config", DEEPSEEK_V4),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 6, "num_experts_per_tok": 4, "head_dim": 16, "sliding_window": 9}),
    "gpt_oss_odd": ("GptOssConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 16, "swiglu_limit": 1.5,
                                     "num_attention_heads": 6, "num_key_value_heads": 1, "rope_parameters": YARN,
                                     "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24, "num_hidden_layers": 4,
                                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                                    "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 50000.0},
                                                        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}}),
    "gemma3_untied": ("Gemma3TextConfig", {"head_dim": 20, "sliding_window": 17, "final_logit_softcapping": 3.0,
                                           "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 1,
                                    "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
                                    "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 107,
                                    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 24}),  # all at once
    "gemma4_shared": ("Gemma4TextConfig", {**GEMMA4, "num_kv_shared_layers": 2, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
                                           "use_double_wide_mlp": True, "num_key_value_heads": 1, "hidden_size_per_layer_input": 6,
                                           "vocab_size_per_layer_input": 101}),
    "gemma4_experts": ("Gemma4TextConfig", {**GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                                            "moe_intermediate_size": 20}),
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3_window_tied": ("Phi3Config", {"sliding_window": 14, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "phi3_longrope_long": ("Phi3Config", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
                                                              "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0]},
                                          "original_max_position_embeddings": 16}),
    "phi3_longrope": ("Phi3Config", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
                                                         "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0]},
                                     "original_max_position_embeddings": 256, "max_position_embeddings": 256}),
    "olmo2": ("Olmo2Config", {}),
    "olmo2_tied": ("Olmo2Config", {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True, "attention_bias": True}),
    "olmo3": ("Olmo3Config", {"sliding_window": 11, "num_hidden_layers": 4}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 5.0}),
    "granite_biases": ("GraniteConfig", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 0.3, "tie_word_embeddings": True,
                                         "attention_multiplier": 0.1}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                                "final_logit_softcapping": 3.0}),
    "gemma2_untied": ("Gemma2Config", {"head_dim": 20, "sliding_window": 17, "tie_word_embeddings": False, "num_key_value_heads": 1,
                                       "layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": True}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm_odd": ("GlmConfig", {"head_dim": 20, "partial_rotary_factor": 0.3, "attention_bias": False, "tie_word_embeddings": True,
                              "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4_odd": ("Glm4Config", {"head_dim": 24, "partial_rotary_factor": 1.0, "attention_bias": False, "tie_word_embeddings": True,
                                "num_key_value_heads": 1, "rope_parameters": LINEAR}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "num_key_value_heads": 4}),
    "olmoe_odd": ("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28, "norm_topk_prob": True, "attention_bias": True,
                                  "tie_word_embeddings": True, "num_attention_heads": 6}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    "qwen2_moe_odd": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2, "qkv_bias": False,
                                         "norm_topk_prob": True, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 15}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 8, "intermediate_size": 24, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                        "attention_multiplier": 0.2, "logits_scaling": 5.0, "tie_word_embeddings": True}),
    "granitemoe_biases_stacked": ("GraniteMoeConfig", {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 20, "attention_bias": True,
                                                       "attention_multiplier": 0.1, "num_key_value_heads": 1}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5_biases": ("Ernie4_5Config", {"head_dim": 20, "use_bias": True, "tie_word_embeddings": False, "num_attention_heads": 3,
                                           "num_key_value_heads": 1}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "seed_oss_biases": ("SeedOssConfig", {"head_dim": 20, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True,
                                          "tie_word_embeddings": True, "num_attention_heads": 6}),
    "dots1": ("Dots1Config", {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "num_key_value_heads": 4, "first_k_dense_replace": 1,
                              "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None}),
    "dots1_window": ("Dots1Config", {**EXPERTS, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "sliding_window": 13,
                                     "max_window_layers": 1, "attention_bias": True, "tie_word_embeddings": True}),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "exaone4_window": ("Exaone4Config", {"sliding_window": 11, "head_dim": 20, "rope_parameters": LLAMA3,
                                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 18}),
    "starcoder2_plain": ("Starcoder2Config", {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1, "hidden_act": "relu",
                                              "norm_epsilon": 1e-3}),
    "nemotron": ("NemotronConfig", {}),
    "nemotron_biases": ("NemotronConfig", {"head_dim": 20, "partial_rotary_factor": 0.3, "attention_bias": True, "mlp_bias": True,
                                           "tie_word_embeddings": True, "norm_eps": 1e-3}),
    "arcee": ("ArceeConfig", {"head_dim": 32, "rope_parameters": YARN}),
    "arcee_biases": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {**EXPERTS, "n_routed_experts": 8, "head_dim": 18, "v_head_dim": 11, "sliding_window": 9, "num_attention_heads": 8,
                                            "attention_value_scale": 0.7, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 16, "rotary_dim": 8,
                                      "partial_rotary_factor": 0.5}),  # what transformers 5.17 reads in place of rotary_dim
    "minimax_m2_stacked": ("MiniMaxM2Config", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28, "head_dim": 20, "tie_word_embeddings": True,
                                               "num_attention_heads": 3, "num_key_value_heads": 1, "rotary_dim": 20}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "smollm3_window": ("SmolLM3Config", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 12, "tie_word_embeddings": False,
                                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "olmo": ("OlmoConfig", {"num_key_value_heads": 4}),
    "olmo_clipped": ("OlmoConfig", {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}),
    "apertus": ("ApertusConfig", {"rope_parameters": LLAMA3}),
    "apertus_biases": ("ApertusConfig", {"attention_bias": True, "tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1,
                                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": {**YARN_MSCALE, "original_max_position_embeddings": 16,
                                                                            "llama_4_scaling_beta": 0.4}}),
    "beam": ("BeamConfig", {**EXPERTS, "num_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 14, "sliding_window": 20, "final_logit_softcapping": 3.0,
                            "routed_scaling_factor": 1.0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "hunyuan_dense": ("HunYuanDenseV1Config", {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0,
                                                                                   "factor": 1.0}}),
}  # fmt: skip

# Model files that put blocks together which those above have; one test holds each against transformers.
COMBINED: dict[str, tuple[str, dict[str, Any]]] = {
    "aria": ("AriaTextConfig", {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 24}),
    "afmoe": ("AfmoeConfig", {**EXPERTS, "num_experts": 8, "head_dim": 16, "sliding_window": 9, "mup_enabled": True, "route_scale": 2.5,
                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "bailing_moe_v2": ("SarvamMoEConfig", {**EXPERTS, "n_routed_experts": 8, "head_dim": 16, "n_group": 2, "topk_group": 1}),
    "biogpt": ("BioGptConfig", {}),
    "bloom": ("BloomConfig", {}),
    "codegen": ("CodeGenConfig", {"rotary_dim": 4, "n_positions": 256, "n_head": 4, "hidden_size": 64}),
    "cohere2": ("Cohere2Config", {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "apertus1p5": ("Apertus1p5TextConfig", {"rope_parameters": LLAMA3, "vocab_size": 120, "output_vocab_size": 101}),
    "axk1": ("AXK1Config", {**MLA, **EXPERTS, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "q_lora_rank": 20}),
    "axk2": ("AXK2Config", {**MLA, **EXPERTS, **INDEX, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "q_lora_rank": 20,
                            "gated_norm_rank": 5, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "cohere2_moe": ("Cohere2MoeConfig", {"num_experts": 8, "num_shared_experts": 1, "expert_selection_fn": "sigmoid", "head_dim": 16, "sliding_window": 11,
                                         "prefix_dense_intermediate_size": 64, "first_k_dense_replace": 1, "sliding_window_pattern": 2}),
    "cohere_compass": ("CohereCompassTextConfig", {"sliding_window": 11, "logit_scale": 0.5, "rope_parameters": {
        "full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "cwm": ("CwmConfig", {"rope_parameters": LLAMA3, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": 13, "head_dim": 16}),
    "dbrx": ("DbrxConfig", {"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                            "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 5e5},
                            "ffn_config": {"ffn_hidden_size": 28, "moe_num_experts": 6, "moe_top_k": 3}}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "head_dim": 16}),
    "exaone": ("ExaoneConfig", {}),
    "exaone_moe": ("ExaoneMoeConfig", {**EXPERTS, "num_experts": 8, "sliding_window": 11, "head_dim": 16, "n_group": 2, "topk_group": 1,
                                       "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "falcon": ("FalconConfig", {}),
    "flint": ("FlintConfig", {**EXPERTS, "num_experts": 8, "head_dim": 16, "sliding_window": 9, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0],
                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**MLA, **EXPERTS, "n_routed_experts": 8, "q_lora_rank": 20, "n_group": 1, "topk_group": 1}),
    "gpt2": ("GPT2Config", {"n_positions": 256}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_positions": 256, "num_key_value_heads": 1}),
    "gpt_neo": ("GPTNeoConfig", {"num_heads": 4, "num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "window_size": 9}),
    "gptj": ("GPTJConfig", {"rotary_dim": 8, "n_positions": 256}),
    "granitemoeshared": ("GraniteMoeSharedConfig", {"num_local_experts": 6, "intermediate_size": 24, "shared_intermediate_size": 40, "residual_multiplier": 0.4,
                                                    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 5.0}),
    "granite_swa": ("GraniteSWAConfig", {"sliding_window": 9, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
                                         "logits_scaling": 5.0, "layer_rope_theta": [1000.0, 0, 1000.0],
                                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "granitemoe_swa": ("GraniteMoeSWAConfig", {"num_local_experts": 6, "intermediate_size": 24, "shared_intermediate_size": 40, "sliding_window": 9,
                                               "attention_multiplier": 0.2, "layer_rope_theta": [0, 2000, 0],
                                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "helium": ("HeliumConfig", {"head_dim": 12}),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 6, "moe_topk": [3, 3, 3]}),
    "hy_v3": ("HYV3Config", {**EXPERTS, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}),
    "hyperclovax": ("HyperCLOVAXConfig", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5}),
    "internlm3": ("InternLM3Config", {"head_dim": 16, "attention_bias": True, "mlp_bias": True,
                                      "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e4, "factor": 6.0}}),
    "jais2": ("Jais2Config", {}),
    "kolibri1": ("Kolibri1Config", {**EXPERTS, "num_experts": 8, "head_dim": 16, "shared_expert_intermediate_size": 20, "sliding_window": 9, "norm_topk_prob": True,
                                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "longcat_flash": ("LongcatFlashConfig", {**MLA, "head_dim": 8, "num_hidden_layers": 4, "q_lora_rank": 20, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3,
                                             "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "routed_scaling_factor": 2.0}),
    "dory": ("DoryConfig", {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 3, "head_dim": 16,
                            "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2, "initializer_range": 0.3, "ngpt_alpha_init": 0.2}),
    "hrm_text": ("HrmTextConfig", {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 3, "head_dim": 16, "embedding_scale": 7.0}),
    "laguna": ("LagunaConfig", {**EXPERTS, "num_experts": 8, "head_dim": 16, "sliding_window": 9, "shared_expert_intermediate_size": 20, "moe_routed_scaling_factor": 1.7,
                                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 8, 8]}),
    "llama4": ("Llama4TextConfig", {"num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 6, "intermediate_size": 24, "intermediate_size_mlp": 40,
                                    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5,
                                    "rope_parameters": LLAMA3}),
    "mellum": ("MellumConfig", {**EXPERTS, "num_experts": 8, "head_dim": 16, "sliding_window": 9,
                                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "minicpm3": ("MiniCPM3Config", {**MLA, "q_lora_rank": 20, "dim_model_base": 20}),
    "ministral": ("MinistralConfig", {"sliding_window": 9, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}),
    "mpt": ("MptConfig", {"max_seq_len": 256, "num_attention_heads": 6}),
    "opt": ("OPTConfig", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "persimmon": ("PersimmonConfig", {}),
    "sarvam_mla": ("SarvamMLAConfig", {**MLA, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2}),
    "solar_open": ("SolarOpenConfig", {**EXPERTS, "n_routed_experts": 8, "head_dim": 16, "routed_scaling_factor": 2.5}),
    "stablelm": ("StableLmConfig", {"hidden_size": 64, "use_parallel_residual": True, "use_qkv_bias": True}),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24}),
    "youtu": ("YoutuConfig", {**MLA, "q_lora_rank": 20}),
}  # fmt: skip

KDA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 10,
    "linear_num_heads": 3,
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
MAMBA_H = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "ssm_state_size": 10,
    "n_groups": 3,
    "chunk_size": 16,
    "head_dim": 20,
}
NEMOTRON_MOE = {"n_routed_experts": 6, "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 36, "num_experts_per_tok": 2,
                "routed_scaling_factor": 1.7}  # fmt: skip
FALCON_H1 = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.4,
    "mlp_multipliers": [0.9, 0.55],
    "ssm_multipliers": [0.6, 1.2, 0.7, 1.1, 0.5],
}
MINIMAX = {
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.3,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 0.6,
}
CONV = ["conv", "full_attention", "conv"]
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
}
DELTAS = ["linear_attention", "full_attention", "linear_attention"]

# Families whose layers have recurrent state; a name that ends in stacked is saved as transformers has the tensors.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", {"layer_types": CONV, "block_multiple_of": 24}),
    "lfm2_biases": ("Lfm2Config", {"layer_types": CONV[1:] * 2, "num_hidden_layers": 4, "conv_bias": True, "conv_L_cache": 4,
                                   "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False, "num_key_value_heads": 1}),
    "lfm3": ("Lfm3Config", {"head_dim": 16, "sliding_window": 9, "layer_types": ["conv", "sliding_attention", "full_attention"],
                            "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 50000.0},
                                                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}}),
    "lfm2_moe": ("Lfm2MoeConfig", {**EXPERTS, "layer_types": CONV, "num_experts": 6, "num_dense_layers": 1}),
    "lfm2_moe_stacked": ("Lfm2MoeConfig", {**EXPERTS, "layer_types": CONV, "num_experts": 5, "num_dense_layers": 0, "use_expert_bias": False,
                                           "norm_topk_prob": False, "routed_scaling_factor": 1.7, "conv_L_cache": 2}),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **DELTA, "num_experts": 6, "shared_expert_intermediate_size": 20, "layer_types": DELTAS}),
    "qwen3_next_stacked": ("Qwen3NextConfig", {**EXPERTS, **DELTA, "num_experts": 5, "shared_expert_intermediate_size": 28, "norm_topk_prob": False,
                                               "layer_types": DELTAS, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
                                               "mlp_only_layers": [0], "attention_bias": True, "tie_word_embeddings": True}),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**MAMBA, "layer_types": DELTAS, "num_local_experts": 5, "intermediate_size": 24, "shared_intermediate_size": 36,
                                                    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 5.0, "residual_multiplier": 0.4}),
    "granitemoehybrid_stacked": ("GraniteMoeHybridConfig", {**MAMBA, "layer_types": DELTAS, "num_local_experts": 0, "shared_intermediate_size": 36,
                                                            "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_n_groups": 1}),
    "nemotron_h": ("NemotronHConfig", {**MAMBA_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]}),
    "nemotron_h_experts": ("NemotronHConfig", {**MAMBA_H, **NEMOTRON_MOE, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]}),
    "nemotron_h_latent_stacked": ("NemotronHConfig", {**MAMBA_H, **NEMOTRON_MOE, "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"],
                                                      "moe_latent_size": 20, "n_group": 2, "topk_group": 1, "norm_topk_prob": False}),
    "nemotron_h_stacked": ("NemotronHConfig", {**MAMBA_H, "layers_block_type": ["mlp", "linear_attention", "full_attention"], "use_bias": True, "mlp_bias": True,
                                               "use_conv_bias": False, "n_groups": 1, "num_key_value_heads": 1}),
    "zamba2": ("Zamba2Config", {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
                                "num_mem_blocks": 2, "n_mamba_heads": 6, "mamba_d_state": 10, "mamba_ngroups": 3, "chunk_size": 16, "adapter_rank": 5,
                                "use_shared_attention_adapter": True, "use_mem_rope": True, "num_key_value_heads": 4}),
    "zamba2_biases": ("Zamba2Config", {"layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_mem_blocks": 1, "n_mamba_heads": 4,
                                       "mamba_d_state": 7, "chunk_size": 16, "adapter_rank": 6, "add_bias_linear": True, "num_key_value_heads": 4}),
    "mamba2": ("Mamba2Config", {"hidden_size": 45, "num_heads": 6, "head_dim": 15, "state_size": 10, "n_groups": 3, "chunk_size": 16}),
    "mamba2_biases": ("Mamba2Config", {"hidden_size": 42, "num_heads": 4, "head_dim": 21, "state_size": 7, "n_groups": 1, "chunk_size": 16, "use_bias": True,
                                       "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": True}),
    "mamba": ("MambaConfig", {"hidden_size": 42, "state_size": 7}),
    "mamba_biases": ("MambaConfig", {"expand": 3, "time_step_rank": 5, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": False}),
    "falcon_mamba": ("FalconMambaConfig", {"hidden_size": 50, "state_size": 6, "mixer_rms_eps": 1e-3}),
    "jamba": ("JambaConfig", {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6, "expert_layer_period": 3,
                              "expert_layer_offset": 0, "mamba_d_state": 7, "mamba_expand": 3, "mamba_dt_rank": 5}),
    "jamba_stacked": ("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 5, "expert_layer_period": 1, "expert_layer_offset": 0,
                                      "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3, "tie_word_embeddings": True}),
    "jamba_dense": ("JambaConfig", {"attn_layer_period": 3, "attn_layer_offset": 0, "num_experts": 1, "mamba_d_state": 6}),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 96, **FALCON_H1}),
    "falcon_h1_normed": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 96, **FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 20,
                                            "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "falcon_h1_norm_first": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 90, "mamba_d_head": "auto", "mamba_rms_norm": True, "num_hidden_layers": 2}),
    "zaya": ("ZayaConfig", {**ZAYA, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 9}),
    "minimax_text_01": ("MiniMaxConfig", {**MINIMAX, "layer_types": DELTAS, "num_local_experts": 6, "head_dim": 14}),
    "minimax_text_01_stacked": ("MiniMaxConfig", {"layer_types": DELTAS[1:] * 2, "num_hidden_layers": 4, "num_local_experts": 5, "num_attention_heads": 3, "head_dim": 10,
                                                  "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "kimi_linear": ("KimiLinearConfig", {**MLA, **EXPERTS, **KDA, "num_local_experts": 6, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "kimi_linear_stacked": ("KimiLinearConfig", {**MLA, **EXPERTS, **KDA, "num_local_experts": 8, "mlp_layer_types": ["sparse"] * 3, "q_lora_rank": 14,
                                                 "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "linear_conv_kernel_dim": 3}),
    "bailing_moe_v3": ("BailingHybridConfig", {**MLA, **EXPERTS, "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "head_dim": 10,
                                               "num_attention_heads": 3, "num_key_value_heads": 3, "layer_group_size": 2, "first_k_dense_replace": 1}),
    "bailing_moe_v3_stacked": ("BailingHybridConfig", {**MLA, **EXPERTS, "num_local_experts": 6, "n_group": 1, "topk_group": 1, "q_lora_rank": 14, "head_dim": 12,
                                                       "layer_group_size": 3, "first_k_dense_replace": 0, "short_conv_kernel_size": 3, "kda_safe_gate": False,
                                                       "norm_topk_prob": False, "n_shared_experts": 2}),
    "olmo_hybrid": ("OlmoHybridConfig", {**DELTA, "layer_types": DELTAS, "linear_key_head_dim": 12, "linear_value_head_dim": 4}),
    "olmo_hybrid_stacked": ("OlmoHybridConfig", {**DELTA, "layer_types": DELTAS[1:], "num_hidden_layers": 2, "linear_allow_neg_eigval": False, "linear_key_head_dim": 8,
                                                 "linear_value_head_dim": 8, "linear_num_value_heads": 2,
                                                 "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "layer_types": DELTAS}),
    "qwen4_exp": ("Qwen4ExpTextConfig", QWEN4_EXP),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**EXPERTS, **DELTA, "num_experts": 6, "shared_expert_intermediate_size": 20, "layer_types": DELTAS}),
}  # fmt: skip

ALL = ChainMap(VARIANTS, COMBINED, RECURRENT)

CONF = Path(__file__).parents[1] / "conf" / "model"
MODEL_FILES = [name for name in VARIANTS if (CONF / f"{name}.yaml").exists()]  # a variant of each family

PUBLISHED: dict[str, dict[str, Any]] = {  # what config.json says where transformers writes something else
    "kimi_k2": {"model_type": "kimi_k2"},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True},
}


def config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A variant's config, with other values; a test of one that the installed transformers lacks is skipped."""
    class_name, differing = ALL[name]
    if not hasattr(transformers, class_name):
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    return getattr(transformers, class_name)(**{**SIZES, **differing, **changes})


def num_heads(name: str) -> int:
    """Of queries, in most layers."""
    wanted = config(name)
    heads: int = wanted.to_dict().get("num_attention_heads") or wanted.num_attention_heads
    return heads


def num_ranks(name: str) -> int:
    """The smallest number of ranks above one that divides a variant's heads."""
    heads, kv_heads = num_heads(name), config(name).to_dict()["num_key_value_heads"]
    dividing = (ranks for ranks in range(2, heads + 1) if heads % ranks == 0)
    return next(ranks for ranks in dividing if kv_heads % ranks == 0 or ranks % kv_heads == 0)


def is_mixture(name: str) -> bool:
    return any("experts" in key for key in ALL[name][1])


def save(name: str, folder: Path) -> Path:
    """Write the variant's checkpoint to folder/name, once."""
    target = folder / name
    if not target.exists():
        torch.manual_seed(sum(map(ord, name)))
        model = randomized(config(name))
        model.save_pretrained(target, save_original_format="stacked" not in name)
        if name in PUBLISHED:
            written = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps({**written, **PUBLISHED[name]}))
    return target


def save_changed(name: str, target: Path, is_stacked: bool = False, **changes: Any) -> Any:
    """Write the checkpoint of a variant with other values in its config; its model.

    is_stacked: as transformers has the tensors, whatever the variant is called
    """
    torch.manual_seed(0)  # a router whose best experts nearly tie chooses otherwise by rounding
    model = randomized(config(name, **changes))
    model.save_pretrained(target, save_original_format="stacked" not in name and not is_stacked)
    return model


def randomized(config: transformers.PreTrainedConfig) -> Any:
    """A model of random weights, larger than they start: norms and biases must matter."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    corrections = [
        buffer
        for key, buffer in model.named_buffers()
        if key.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    ]
    for key, buffer in model.named_buffers():
        if key.endswith("balancing_biases"):  # whose last one is -1 whatever a file has: tokens choose that expert, too
            buffer.data.fill_(-1.0)
        if key.endswith("tid2eid"):  # of each token as many different experts
            buffer.data.copy_(torch.rand(len(buffer), config.num_local_experts).argsort(1)[:, : buffer.shape[1]])
    for tensor in (*model.parameters(), *corrections):
        tensor.data += torch.randn_like(tensor) * 0.2
    return model


def as_float(item: dict[str, Any]) -> Any:
    """A number that JSON has no word for, as transformers writes it."""
    return float(item["__float__"]) if "__float__" in item else item


def reference(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    written = json.loads((folder / "config.json").read_text(), object_hook=as_float)
    made = getattr(transformers, written["architectures"][0])
    config = made.config_class(**{key: value for key, value in (written | changes).items() if key != "model_type"})
    model = made.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    for module in model.modules() if "swiglu_limit" in written else ():
        if hasattr(module, "limit"):
            module.limit = written["swiglu_limit"]  # transformers 5.17 takes 7.0 whatever config.json has
    return model.eval()


def prompt(length: int, seed: int = 0, vocab_size: int = 101) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The reference's logits at every position, float32[T, V]."""
    return model(torch.tensor([tokens])).logits[0].float()


def assert_fp16(folder: Path, exact: Any, logits_of: Callable[[list[int]], torch.Tensor]) -> None:
    """What gives the logits of a prompt in fp16 is as near to float32 as transformers' own fp16, over 20 prompts."""
    half = reference(folder, torch.float16)
    prompts = [prompt(24, seed=seed) for seed in range(20)]
    ours, theirs, wanted = (
        torch.cat([score(tokens) for tokens in prompts])
        for score in (logits_of, lambda tokens: logits(half, tokens), lambda tokens: logits(exact, tokens))
    )
    assert_fp16_as_near(ours, theirs, wanted)


def assert_greedy(answer: dict[str, Any], prompt: list[int], model: Any) -> None:
    """The answer is the reference's own, under the law of numbers."""
    tokens = answer["token_ids"]
    assert_greedy_tokens(tokens, logits(model, prompt + tokens)[len(prompt) - 1 : -1])
