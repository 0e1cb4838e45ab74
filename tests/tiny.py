"""Tiny random checkpoints that `transformers` makes: the numeric reference, in float32.

folder = tiny.save("qwen3", tmp_path)
model = tiny.reference(folder)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from law import assert_greedy_tokens
from transformers import AutoModelForCausalLM

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}

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
}  # fmt: skip


def config(name: str) -> transformers.PreTrainedConfig:
    class_name, changes = VARIANTS[name]
    return getattr(transformers, class_name)(**{**SIZES, **changes})


def save(name: str, folder: Path) -> Path:
    """Write the variant's checkpoint to folder/name, once."""
    target = folder / name
    if not target.exists():
        torch.manual_seed(sum(map(ord, name)))
        model = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32)
        for (
            parameter
        ) in model.parameters():  # larger than they start: attention must matter, and so must norms and biases
            parameter.data += torch.randn_like(parameter) * 0.2
        model.save_pretrained(target)
    return target


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def prompt(length: int, seed: int = 0, vocab_size: int = 101) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The reference's logits at every position, float32[T, V]."""
    return model(torch.tensor([tokens])).logits[0].float()


def assert_greedy(answer: dict[str, Any], prompt: list[int], model: Any) -> None:
    """The answer is the reference's own, under the law of numbers."""
    tokens = answer["token_ids"]
    assert_greedy_tokens(tokens, logits(model, prompt + tokens)[len(prompt) - 1 : -1])
