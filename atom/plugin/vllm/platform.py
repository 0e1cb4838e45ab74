"""The vLLM platform for AMD's GPUs, with atom's defaults."""

from __future__ import annotations

from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms.rocm import RocmPlatform

from atom.plugin.vllm import architectures


class AtomPlatform(RocmPlatform):  # type: ignore[misc]
    """vLLM's own, but for what is compiled: a model of atom is compiled by atom, and captured whole."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        super().apply_config_platform_defaults(vllm_config)
        model, compilation = vllm_config.model_config, vllm_config.compilation_config
        if model is None or not set(model.architectures) & set(architectures()):
            return
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None and not model.enforce_eager:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
