"""Write vLLM's configuration as overrides of atom's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atom.config.spelling import override
from atom.errors import UnsupportedError
from atom.weights.arrived import DTYPE_NAMES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ATTENTION_PASS = "atom.plugin.vllm.hand_over_attention:hand_over_attention@lower_attention"
OVERRIDES = "atom"  # the key of `additional_config` that has overrides for atom


def overrides_of(vllm_config: VllmConfig) -> list[str]:
    """The overrides that make atom write the model that vLLM wants. UnsupportedError for what atom has no word for."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.hf_overrides:
        instead = f"set the model's own field in --additional-config, as in {{'{OVERRIDES}': ['model.attention.…']}}"
        raise UnsupportedError(f"--hf-overrides is not seen by atom: {instead}")
    given = {
        "checkpoint": model.model,
        "revision": None if Path(model.model).exists() else model.revision,
        "dtype": DTYPE_NAMES[model.dtype],
        "device": vllm_config.device_config.device_type,
        "job": "explain",  # nothing is served, and no rank is started
        "serve.max_model_len": model.max_model_len,
        "serve.kv_cache_dtype": "fp8" if vllm_config.cache_config.cache_dtype.startswith("fp8") else "auto",
        "parallel.tensor": parallel.tensor_parallel_size,
        "passes.sink_into_head": False,  # hidden states of all tokens are vLLM's
        "passes.extra": [ATTENTION_PASS],
    }
    if parallel.enable_expert_parallel and model.is_moe:
        given["parallel.experts"] = parallel.tensor_parallel_size
    is_plain = getattr(model.hf_config, "quantization_config", None) is None
    if model.quantization is not None and is_plain:
        if model.quantization != "fp8":
            raise UnsupportedError(f"--quantization={model.quantization} of a plain checkpoint: atom packs only fp8")
        given["quant"] = "fp8"
    own = (vllm_config.additional_config or {}).get(OVERRIDES, [])
    return [*(override(name, value) for name, value in given.items()), *own]
