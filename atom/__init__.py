"""atom: compile a Hugging Face checkpoint to a readable graph, and serve it.

    from atom import LLMEngine, SamplingParams

    engine = LLMEngine(model="/models/qwen3")
    print(engine.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0]["text"])

Names are imported when they are asked for: `import atom` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom.async_llm import AsyncLLMEngine
    from atom.entrypoints.llm import LLM
    from atom.errors import (
        ArtifactError,
        AtomError,
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        PassError,
        RequestError,
        UnsupportedError,
        WeightsIncompleteError,
    )
    from atom.llm import LLMEngine
    from atom.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ArtifactError",
    "AsyncLLMEngine",
    "AtomError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "LLMEngine",
    "PassError",
    "RequestError",
    "SamplingParams",
    "UnsupportedError",
    "WeightsIncompleteError",
]

# the others live in atom.errors
HOMES = {
    "AsyncLLMEngine": "atom.async_llm",
    "LLM": "atom.entrypoints.llm",
    "LLMEngine": "atom.llm",
    "SamplingParams": "atom.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'atom' has no attribute '{name}'")
    return getattr(importlib.import_module(HOMES.get(name, "atom.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
