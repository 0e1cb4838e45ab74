"""Write the draft of a model file, on top of a shipped one.

    draft, fit = write_draft(described, known, hf, stored, hold)

What was placed by shape or likeness is a guess, and the draft says so.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from atom.jobs.port.fields import FieldWriter
from atom.jobs.port.fit import Draft, Fit
from atom.jobs.port.known import Described, Known
from atom.jobs.port.roles import RoleWriter
from atom.jobs.port.stored import Stored

ROUNDS = 8  # each places all that it can; the next one sees what that made needed


def write_draft(
    described: Described,
    known: Known,
    hf: Mapping[str, Any],
    stored: Mapping[str, Stored],
    hold: Callable[[Draft], Fit],
) -> tuple[Draft, Fit]:
    """Write a draft that begins with this file, and hold it against the checkpoint until nothing more can be placed."""
    draft = begin(described, known, hf)
    FieldWriter(draft, described, known, hf, stored).place_fields()
    roles, fit = RoleWriter(draft, described, known, hf, stored), hold(draft)
    for _ in range(ROUNDS):
        before = copy.deepcopy(draft.spec)
        roles.place(fit)
        if draft.spec == before:
            break
        fit = hold(draft)
    return draft, fit


def begin(described: Described, known: Known, hf: Mapping[str, Any]) -> Draft:
    """The lines that every draft has. Formats of tool calls, reasoning and GGUF are those of the other family."""
    names = [str(name) for name in hf.get("architectures") or []]
    spec: dict[str, Any] = {"defaults": [described.name, "_self_"]}
    if "gguf_architecture" in hf:
        spec["gguf"] = {"architecture": hf["gguf_architecture"]}
    elif names:
        spec["architectures"] = names
    others: dict[str, Any] = {key: None for key in ("tool_calls", "reasoning") if described.spec.get(key) is not None}
    if "gguf" not in spec and described.spec.get("gguf", {}).get("architecture") is not None:
        others["gguf"] = {"architecture": None}
    return Draft(name_of(hf, names, known.names), spec | others)


def name_of(hf: Mapping[str, Any], names: list[str], taken: Collection[str]) -> str:
    """A name for the file: the model's type, or its architecture without its end; another if a file has it.

    A shipped file would be read in place of the draft.
    """
    named = (
        hf.get("model_type")
        or hf.get("gguf_architecture")
        or re.sub(r"(For[A-Z]\w+|Model|LMHeadModel)$", "", names[0] if names else "mine")
    )
    name = re.sub(r"\W+", "_", str(named)).lower() or "mine"
    return f"my_{name}" if name in taken else name
