"""Read a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

    adapter = read_adapter(Path("/adapters/sql"))
    adapter.factors["model.layers.0.self_attn.q_proj"].a.shape      # (r, inputs)
    adapter.digest                                                  # of both files

Refused by name is what changes more than a linear's product: DoRA, biases, modules saved whole, embeddings.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atom.checkpoint.base import StoredTensor, read_json
from atom.checkpoint.files import MAX_DESCRIPTION, map_file, read_file
from atom.checkpoint.folder import read_header
from atom.errors import CheckpointError, UnsupportedError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # ahead of the model's own names
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
FLOATS = ("fp32", "bf16", "fp16")
REFUSED = {  # fields of adapter_config.json that must be left out, and what they say
    "use_dora": "DoRA scales each column of the weight",
    "use_qalora": "QALoRA pools its inputs",
    "modules_to_save": "modules are saved whole",
    "lora_bias": "its products have biases",
    "layer_replication": "layers are repeated",
    "target_parameters": "parameters of experts are adapted",
    "trainable_token_indices": "rows of the embedding are replaced",
    "alora_invocation_tokens": "an activated LoRA begins behind certain tokens",
    "corda_config": "CorDA takes parts off the weight",
    "arrow_config": "Arrow routes among adapters",
    "use_bdlora": "its factors are block-diagonal",
    "kasa_config": "KaSA scales each rank and changes the weight",
    "monteclora_config": "MonteCLoRA draws its factors",
}


@dataclass
class Factor:
    """A stored matrix."""

    name: str  # of the tensor
    stored: StoredTensor
    data: memoryview


@dataclass
class Factors:
    """The adapter of one module: scale times b a x is added to its product."""

    a: Factor  # [r, inputs]
    b: Factor  # [outputs, r]
    scale: float


@dataclass
class AdapterFiles:
    """A LoRA adapter whose files have been read."""

    path: str
    digest: bytes = b""  # SHA-256 of both files
    factors: dict[str, Factors] = field(default_factory=dict)  # by module, in the checkpoint's names


def read_adapter(folder: Path) -> AdapterFiles:
    """Read a folder. CheckpointError where it is none, UnsupportedError for what is not served."""
    folder = folder.expanduser()
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder} has no {CONFIG}; give the folder that PEFT's save_pretrained has written")
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True")
    config = read_json(folder / CONFIG)
    refuse(config, folder)
    whole = hashlib.sha256(read_file(folder / CONFIG, MAX_DESCRIPTION))
    whole.update(map_file(folder / WEIGHTS))
    found: dict[str, dict[str, Factor]] = {}
    for name, (stored, data, _, _) in read_header(folder / WEIGHTS).items():
        match = FACTOR.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise UnsupportedError(f"{folder}: tensor {name} is not a factor of a linear's LoRA adapter")
        if len(stored.shape) != 2 or stored.dtype not in FLOATS:
            raise CheckpointError(f"{folder}: tensor {name} is {stored.dtype}{list(stored.shape)}, no matrix of floats")
        found.setdefault(match[1], {})[match[2]] = Factor(name, stored, data)
    if not found:
        raise CheckpointError(f"{folder / WEIGHTS} has no tensors; save the adapter again")
    factors = {module: factors_of(module, pair, config, folder) for module, pair in found.items()}
    return AdapterFiles(str(folder), whole.digest(), factors)


def refuse(config: Mapping[str, Any], folder: Path) -> None:
    """Raise UnsupportedError for an adapter that is no plain LoRA."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedError(f"{folder / CONFIG} has peft_type={kind}; there is: LORA")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedError(f"{folder / CONFIG} has bias={bias}; there is: none")
    for name, why in REFUSED.items():
        if config.get(name):
            raise UnsupportedError(f"{folder / CONFIG} has {name}: {why}, which is not served; merge the adapter")


def factors_of(module: str, pair: Mapping[str, Factor], config: Mapping[str, Any], folder: Path) -> Factors:
    """The factors of a module and their scale, as PEFT computes it."""
    one = next(iter(pair.values()))
    if len(pair) < 2:
        raise CheckpointError(f"{folder}: tensor {one.name} stands without its other factor; save the adapter again")
    a, b = pair["A"], pair["B"]
    rank, inner = a.stored.shape[0], b.stored.shape[1]
    stated = of_module(module, config, "rank_pattern", config.get("r"))
    if not rank == inner == stated:
        raise CheckpointError(f"{folder}: tensors {a.name} and {b.name} have ranks {rank} and {inner}, not r={stated}")
    alpha = of_module(module, config, "alpha_pattern", config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise CheckpointError(f"{folder / CONFIG} has lora_alpha={alpha!r}, which is not a number")
    return Factors(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def of_module(module: str, config: Mapping[str, Any], patterns: str, default: Any) -> Any:
    """A module's own value: that of the first pattern that its name ends with, as PEFT has it."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
