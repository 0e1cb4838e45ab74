"""Read a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

    adapter = read_adapter(Path("/adapters/sql"))
    adapter.factors["model.layers.0.self_attn.q_proj"].a.shape      # (r, inputs)
    adapter.experts["model.layers.0.experts.down"]                  # parts, of all experts or of one
    adapter.hash()
    adapter.digest                                                  # of both files

Experts have factors of each linear, `mlp.experts.3.up_proj`, or if transformers has them as one parameter, factors
of that: `mlp.experts.base_layer` and `mlp.experts`, of the parameters that `target_parameters` names.

Refused by name is what changes more than a linear's output: DoRA, biases, modules saved whole, embeddings.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from atom.checkpoint.base import StoredTensor, read_json
from atom.checkpoint.files import MAX_DESCRIPTION, map_file, read_file
from atom.checkpoint.folder import read_header
from atom.errors import CheckpointError, UnsupportedError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # ahead of the model's own names
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
OF_EXPERTS = re.compile(r"((.+\.\d+)\.\w+\.experts)(?:\.base_layer)?")  # the module and its layer
OF_EXPERT = re.compile(r"(.+\.\d+)\.\w+\.experts\.(\d+)\.(\w+)")  # the layer, the expert, its linear
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # parameters that transformers has of all experts
LINEARS = {  # of one expert: the part of which parameter it is
    "gate_proj": ("gate_up", 0), "w1": ("gate_up", 0), "up_proj": ("gate_up", 1), "w3": ("gate_up", 1),
    "down_proj": ("down", 0), "w2": ("down", 0),
}  # fmt: skip
FLOATS = ("fp32", "bf16", "fp16")
REFUSED = {  # fields of adapter_config.json that must be left out, and what they say
    "use_dora": "DoRA scales each column of the weight",
    "use_qalora": "QALoRA pools its inputs",
    "modules_to_save": "modules are saved whole",
    "lora_bias": "its linears have biases",
    "layer_replication": "layers are repeated",
    "trainable_token_indices": "rows of the embedding are replaced",
    "alora_invocation_tokens": "an activated LoRA begins after certain tokens",
    "corda_config": "CorDA takes parts off the weight",
    "arrow_config": "Arrow routes among adapters",
    "use_bdlora": "its factors are block-diagonal",
    "kasa_config": "KaSA scales each rank and changes the weight",
    "monteclora_config": "MonteCLoRA draws its factors",
}
TAKEN_OFF = "pissa", "olora", "corda", "lora_ga"  # values of init_lora_weights
OFF = "its first factors were taken off the weight, so it fits another model"


@dataclass
class Factor:
    """A stored matrix."""

    name: str  # of the tensor
    stored: StoredTensor
    data: memoryview


class Pair(NamedTuple):
    """The stored factors of a module."""

    a: Factor
    b: Factor

    @property
    def sizes(self) -> tuple[int, int]:
        """Its inputs and outputs."""
        return self.a.stored.shape[1], self.b.stored.shape[0]


@dataclass
class Factors:
    """The adapter of one module: scale times b a x is added to its output."""

    a: Factor  # [r, inputs]
    b: Factor  # [outputs, r]
    rank: int
    scale: float


@dataclass
class ExpertFactors:
    """A part of the adapter of the experts of a layer."""

    factors: Factors  # of all experts a [E r, inputs], by expert and rank, and b [outputs, r E], by rank and expert
    expert: int | None = None  # None: of all
    half: int = 0  # of the outputs of gate and up projections: 1 are those of up


@dataclass
class AdapterFiles:
    """A LoRA adapter whose files have been read."""

    path: str
    files: tuple[bytes, memoryview]  # the configuration and the tensors
    factors: dict[str, Factors] = field(default_factory=dict)  # by module, in the checkpoint's names
    experts: dict[str, list[ExpertFactors]] = field(default_factory=dict)  # by layer and parameter

    digest: bytes = b""  # SHA-256 of both files, once `hash` has read all of them

    def hash(self) -> None:
        whole = hashlib.sha256(self.files[0])
        whole.update(self.files[1])
        self.digest = whole.digest()


def read_adapter(folder: Path) -> AdapterFiles:
    """Read a folder. CheckpointError if it is not an adapter, UnsupportedError if it is not supported."""
    folder = folder.expanduser()
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder} has no {CONFIG}; give the folder that PEFT's save_pretrained has written")
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True")
    config = read_json(folder / CONFIG)
    refuse(config, folder)
    check_patterns(config, folder)
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
    files = read_file(folder / CONFIG, MAX_DESCRIPTION), map_file(folder / WEIGHTS)
    adapter = AdapterFiles(str(folder), files)
    stacked: dict[tuple[str, str], list[Pair]] = {}  # by layer and module
    for module, factors in found.items():
        pair = pair_of(factors, folder)
        if match := OF_EXPERTS.fullmatch(module):
            stacked.setdefault((match[2], match[1]), []).append(pair)
            continue
        whole_pair = factors_of(module, pair, config, folder, rank=pair.a.stored.shape[0])
        match = OF_EXPERT.fullmatch(module)
        if match is not None and match[3] in LINEARS:
            parameter, half = LINEARS[match[3]]
            parts = adapter.experts.setdefault(f"{match[1]}.experts.{parameter}", [])
            parts.append(ExpertFactors(whole_pair, int(match[2]), half))
        else:
            adapter.factors[module] = whole_pair
    for (layer, module), pairs in stacked.items():
        for name, pair in name_parameters(pairs, config, folder).items():
            parameter = f"{module}.{name}"
            rank = of_module(parameter, config, "rank_pattern", config.get("r"))
            parts = [ExpertFactors(factors_of(parameter, pair, config, folder, rank=rank))]
            adapter.experts[f"{layer}.experts.{name.removesuffix('_proj')}"] = parts
    return adapter


def refuse(config: Mapping[str, Any], folder: Path) -> None:
    """Raise UnsupportedError for an adapter that is no plain LoRA."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedError(f"{folder / CONFIG} has peft_type={kind}, which is not supported (supported: LORA)")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedError(f"{folder / CONFIG} has bias={bias}, which is not supported (supported: none)")
    for name, why in REFUSED.items():
        if config.get(name):
            raise UnsupportedError(f"{folder / CONFIG} has {name}: {why}, which is not served; merge the adapter")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(TAKEN_OFF):
        convert = "save it with PEFT's path_initial_model_for_weight_conversion"
        raise UnsupportedError(f"{folder / CONFIG} has init_lora_weights={start}: {OFF}; {convert}")


def check_patterns(config: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if ranks or alphas are not given by patterns of modules."""
    for name in ("rank_pattern", "alpha_pattern"):
        patterns, has = config.get(name) or {}, f"{folder / CONFIG} has {name}"
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{has}={patterns!r}, which is no object of patterns and numbers")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(f"{has} with {pattern!r}, which is no pattern: {error}") from None


def pair_of(factors: Mapping[str, Factor], folder: Path) -> Pair:
    """Both factors of a module."""
    if len(factors) < 2:
        (one,) = factors.values()
        raise CheckpointError(f"{folder}: tensor {one.name} stands without its other factor; save the adapter again")
    return Pair(factors["A"], factors["B"])


def name_parameters(pairs: Sequence[Pair], config: Mapping[str, Any], folder: Path) -> dict[str, Pair]:
    """The pairs of the parameters of experts by name. PEFT's own names say how deep it has nested them, not which is
    which; gate and up projections read what the down projection gives, which reads half of what they give."""
    first = pairs[0].a.name
    if len(pairs) == 2:
        for gate_up, down in (pairs, pairs[::-1]):
            if gate_up.sizes == (down.sizes[1], 2 * down.sizes[0]):
                return {GATE_UP: gate_up, DOWN: down}
        raise CheckpointError(
            f"{folder}: tensors {first} and {pairs[1].a.name} are not of a gate_up and a down projection"
        )
    targets = config.get("target_parameters")
    named = [name for name in (GATE_UP, DOWN) if any(str(each).endswith(name) for each in targets or ())]
    if len(named) != 1:
        raise CheckpointError(f"{folder}: tensor {first}: target_parameters={targets} does not say what it is of")
    return {named[0]: pairs[0]}


def factors_of(module: str, pair: Pair, config: Mapping[str, Any], folder: Path, rank: int) -> Factors:
    """The factors of a module and their scale, as PEFT computes it.

    rank: of one expert, if the factors are of all.
    """
    a, b = pair
    rows, columns = a.stored.shape[0], b.stored.shape[1]
    given = of_module(module, config, "rank_pattern", config.get("r"))
    is_rank = isinstance(rank, int) and rank > 0 and rank == given
    if not is_rank or rows != columns or rows % rank:
        have = f"have ranks {rows} and {columns}, not r={given}"
        raise CheckpointError(f"{folder}: tensors {a.name} and {b.name} {have}")
    alpha = of_module(module, config, "alpha_pattern", config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise CheckpointError(f"{folder / CONFIG} has lora_alpha={alpha!r}, which is not a number")
    return Factors(a, b, rank, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def of_module(module: str, config: Mapping[str, Any], patterns: str, default: Any) -> Any:
    """A module's own value: that of the first pattern that its name ends with, as PEFT has it."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
