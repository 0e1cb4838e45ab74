"""What the shipped model files read: tensors, and fields of config.json.

    known = read_known(model_files())
    known.roles("linear_attn.A_log")                    # {"delta_decay": ["qwen3_5", "qwen3_next", …]}
    known.fields["use_parallel_residual"]               # {"residual": ["gpt_neox"]}

So a hint names the files that have what a new checkpoint has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atom.config.folders import CONF
from atom.config.model_files import ModelFile, with_inherited
from atom.jobs.port.stored import module_of, tail_of

KEY = re.compile(r"\$\{(?:hf|same|stated):([\w.]+)(,)?")
COMPUTED = re.compile(r"\$\{(?!hf:|same:|stated:)")
GENERIC = ("weight", "bias", "norm", "proj", "in_proj", "out_proj")  # ends of names that tell nothing of a role
PARTS = {  # beginnings of roles -> what the kinds of blocks begin with that have them
    "delta_": "gated_delta", "mamba_": "mamba", "conv": "short_conv", "lightning_": "lightning",
    "router": "moe", "experts_": "moe", "shared_": "moe", "latent_": "moe",
    "q_a": "mla", "q_b": "mla", "kv_a": "mla", "kv_b": "mla",
}  # fmt: skip
NOT_READ = ("defaults", "architectures", "model_types", "usual", "embedded", "tool_calls", "reasoning")


class Read(NamedTuple):
    """A field of a model that has a value of config.json."""

    at: str  # the field
    key: str  # of config.json
    is_required: bool  # the key has no default
    text: str  # the field's value as written
    is_plain: bool  # the field has the key's value, and nothing is computed of it


@dataclass
class Described:
    """A model file with what it inherits."""

    file: ModelFile
    spec: dict[str, Any]  # values as written, ${hf:…} included

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def weights(self) -> dict[str, str]:
        """Role -> stored name, without the one that names no tensor."""
        return {role: name for role, name in self.spec.get("weights", {}).items() if role != "layer"}

    def reads(self) -> Iterator[Read]:
        """The fields with a value of config.json."""
        return reads_of(self.spec)

    def used(self) -> dict[str, str]:
        """The roles that its blocks have, of those that it names."""
        kinds, whole = self.kinds(), self.weights
        return {
            role: name
            for role, name in whole.items()
            if (part := part_of(role)) is None or any(kind.startswith(part) for kind in kinds)
        }

    def kinds(self) -> list[str]:
        """The kinds of its further blocks, and what is special of its attention and mlp."""
        blocks = [kind for block in self.spec.get("blocks", {}).values() for kind in block]
        attention = [str(self.spec.get("attention", {}).get("kind"))]
        return [*blocks, *attention, *(str(mlp.get("kind")) for mlp in self.spec.get("mlp") or [])]


def part_of(role: str) -> str | None:
    """What the kinds begin with of the blocks that have a role; None for a role of any."""
    return next((kind for start, kind in PARTS.items() if role.startswith(start)), None)


@dataclass
class Known:
    files: list[Described]
    names: frozenset[str]  # of all files, those included that describe no model
    by_tail: dict[str, dict[str, list[str]]]  # tail of a module's name -> role -> files
    lines: dict[tuple[str, str], str]  # key of config.json and field -> a line that computes the one of the other
    fields: dict[str, dict[str, list[str]]]  # key of config.json -> field of the model -> files
    keys: dict[str, list[str]]  # field of the model -> keys of config.json whose values some file takes as they are

    def roles(self, pattern: str) -> Mapping[str, list[str]]:
        """The roles whose name ends like this one in some file, with these files; {} if none does."""
        tail = tail_of(module_of(pattern))
        if exact := self.by_tail.get(tail) or self.by_tail.get(tail_of(pattern)):
            return exact
        end = tail.rpartition(".")[2]
        if end in GENERIC:
            return {}
        merged: dict[str, list[str]] = {}
        for known, roles in self.by_tail.items():
            if known.rpartition(".")[2] == end:
                for role, files in roles.items():
                    merged.setdefault(role, []).extend(file for file in files if file not in merged.get(role, ()))
        return merged


def read_known(files: Sequence[ModelFile]) -> Known:
    """What files of models read, those of drafts left out."""
    described = [Described(file, merged(file, files)) for file in files if "eagle3" not in file.spec]
    described = [each for each in described if each.spec.get("weights")]
    shipped = (path.stem for path in (CONF / "model").glob("*.yaml"))
    known = Known(described, frozenset((*shipped, *(file.name for file in files))), {}, {}, {}, {})
    for each in described:
        for role, name in own_weights(each.file).items():
            tail = tail_of(module_of(name))
            known.by_tail.setdefault(tail, {}).setdefault(role, []).append(each.name)
        for read in reads_of(each.file.spec):
            names = known.fields.setdefault(read.key, {}).setdefault(read.at, [])
            if each.name not in names:
                names.append(each.name)
            known.lines.setdefault((read.key, read.at), read.text)
            if read.is_plain and read.key not in known.keys.setdefault(read.at, []):
                known.keys[read.at].append(read.key)
    return known


def own_weights(file: ModelFile) -> dict[str, str]:
    """Role -> stored name, of a file's own lines."""
    return {role: name for role, name in (file.spec.get("weights") or {}).items() if role != "layer"}


def reads_of(spec: Mapping[str, Any]) -> Iterator[Read]:
    """The fields of a file's lines with a value of config.json."""
    for at, text in leaves_of({key: value for key, value in spec.items() if key not in NOT_READ}):
        if not isinstance(text, str):
            continue
        for match in KEY.finditer(text):
            if match[1] != "gguf_architecture":
                is_required = match[2] is None and "${if:" not in text
                yield Read(at, match[1], is_required, text, text.startswith("${") and not COMPUTED.search(text))


def merged(file: ModelFile, files: Sequence[ModelFile]) -> dict[str, Any]:
    """The values of a file over those that it inherits, as written."""
    spec: dict[str, Any] = {}
    for each in reversed(list(with_inherited(file.name, files))):
        spec = over(spec, each.spec)
    return spec


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; where both have a value, the second's."""
    both = {key: over(below[key], above[key]) for key in above if is_mapping(below.get(key)) and is_mapping(above[key])}
    return {**below, **above, **both}


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def leaves_of(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings and lists, with their dotted keys; entries of lists have no number."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves_of(each, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list):
        for each in value:
            yield from leaves_of(each, at)
    else:
        yield at, value
