"""What a checkpoint is, whatever it is stored in, and the JSON files that describe it.

checkpoint = open_checkpoint("/models/tiny")
checkpoint.config["hidden_size"]                         # config.json, with rope in one form
checkpoint.tensors["model.norm.weight"]                  # StoredTensor("bf16", (64,))
checkpoint.read("model.norm.weight")                     # memoryview of its 128 bytes
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.errors import CheckpointError

if TYPE_CHECKING:
    from atom.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class StoredTensor:
    dtype: str  # of the bytes that read() yields: bf16, fp16, fp32, i64, fp8_e4m3, ...
    shape: tuple[int, ...]


class Checkpoint(ABC):
    location: str  # as errors name it
    config: dict[str, Any]  # config.json; rope only as `rope_parameters`
    generation_config: dict[str, Any]  # {} where there is none
    tensors: Mapping[str, StoredTensor]  # by hub name; empty where only the config is there

    @abstractmethod
    def read(self, name: str) -> memoryview:
        """The row-major bytes of the whole tensor, not to be written to. Several threads may read at once."""

    @abstractmethod
    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        """A new tokenizer, or None where the checkpoint has none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Bytes already read stay valid."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. CheckpointError where the file is missing or holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return value


def normalize_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its rotary embedding in one form, `rope_parameters`, as transformers 5 writes it.

    `rope_theta`, `rope_scaling` (with `type` or `rope_type`) and `partial_rotary_factor` move into it, with the
    precedence of transformers.modeling_rope_utils. Parameters by layer type are left as they are.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters in config.json is {parameters!r}, not an object")
    if any(isinstance(value, dict) for value in parameters.values()):
        return config
    rope = {key: value for key, value in parameters.items() if key != "type"}
    rope["rope_type"] = parameters.get("rope_type", parameters.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        if "original_max_position_embeddings" in config:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        elif "max_position_embeddings" in config:
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    moved = ("rope_scaling", "rope_theta", "partial_rotary_factor")
    return {key: value for key, value in config.items() if key not in moved} | {"rope_parameters": rope}
