"""Order the shipped model files by how near they are to a checkpoint.

    rank(known, hf, stored)[0].name             # "qwen2": the file to begin with

Tensors count by name, or by what follows the layer in it; then the fields of config.json that only some files read.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from atom.jobs.port.known import Described, Known, own_weights
from atom.jobs.port.stored import Stored, module_of, tail_of


class Rank(NamedTuple):
    score: float
    num_tensors: int  # stored names that some role of the file has
    described: Described

    @property
    def name(self) -> str:
        return self.described.name


def rank(known: Known, hf: Mapping[str, Any], stored: Mapping[str, Stored]) -> list[Rank]:
    """The files in order, the nearest first."""
    common = {read.key for each in known.files if each.name == "decoder" for read in each.reads()}
    modules = {module_of(name) for name in stored}
    tails = {tail_of(name) for name in modules}
    ranked = []
    for described in known.files:
        used = described.used()
        names = {module_of(name) for name in used.values()}
        names |= {module_of(name) for name in described.spec.get("stacked", {})}
        exact = modules & names
        by_tail = {name for name in modules - names if tail_of(name) in {tail_of(each) for each in names}}
        placed = (len(exact) + 0.6 * len(by_tail)) / (len(modules) or 1)
        own = {module_of(name) for role, name in own_weights(described.file).items() if role in used}
        absent = len([name for name in own if tail_of(name) not in tails]) / (len(own) + 3) if modules else 0.0
        ranked.append(
            Rank(
                placed + 0.3 * fields_score(described, hf, common) - 0.3 * absent + 0.1 * likeness(described, hf),
                len(exact) + len(by_tail),
                described,
            )
        )
    return sorted(ranked, key=lambda each: (-each.score, each.name))


def fields_score(described: Described, hf: Mapping[str, Any], common: set[str]) -> float:
    """How many fields of config.json that few files read are there, less those that have to be and are not."""
    reads = list(described.reads())
    own = {read.key.partition(".")[0] for read in reads} - {key.partition(".")[0] for key in common}
    required = {read.key.partition(".")[0] for read in reads if read.is_required}
    there = len([key for key in own if hf.get(key) is not None])
    return there / (len(own) + 2) - 0.5 * len(required - hf.keys()) / (len(required) + 1)


def likeness(described: Described, hf: Mapping[str, Any]) -> float:
    """How alike the names of the file and of the model are, from 0 to 1."""
    return difflib.SequenceMatcher(None, described.name, str(hf.get("model_type"))).ratio()
