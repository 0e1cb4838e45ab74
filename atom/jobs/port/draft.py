"""Write the draft of a model file, on top of a shipped one.

    draft, fit = write_draft(described, known, hf, stored, hold)

Names are placed by what other shipped files call a role, then by shape. Fields are placed by what other files read for
them, then by the sizes of tensors. What was placed by shape or likeness is a guess, and the draft says so.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from atom.config.spelling import spelled
from atom.jobs.port.fit import Draft, Fit, Shape, squeezed
from atom.jobs.port.hints import read_by_transformers
from atom.jobs.port.known import Described, Known
from atom.jobs.port.stored import Stored, module_of, pattern_of, tail_of
from atom.jobs.port.tiny import are_names_of_one

ROUNDS = 8  # each places all that it can; the next one sees what that made needed
ALIKE = 0.6  # of two names, from which they are taken for one if their shapes are the same
FUSED = (("q", "k", "v"), ("gate", "up"))  # roles that a checkpoint may store as one tensor, in this order
SHOWN_BY = {  # roles -> the field whose value their tensors show
    "router_correction": ("mlp.router.method", "noaux_tc"),
    "shared_share": ("mlp.shared_gate", True),
    "sinks": ("attention.sinks", True),
}
OF_EXPERTS = ("mlp.shared", "mlp.router")  # beginnings of fields of an mlp of experts
SIZES = {"hidden": ("embedding", 1), "vocab": ("embedding", 0)}  # field -> role and dim of its weight


def write_draft(
    described: Described,
    known: Known,
    hf: Mapping[str, Any],
    stored: Mapping[str, Stored],
    hold: Callable[[Draft], Fit],
) -> tuple[Draft, Fit]:
    """Write a draft that begins with this file, and hold it against the checkpoint until nothing more can be placed."""
    draft = begin(described, hf)
    writer = DraftWriter(draft, described, known, hf, stored)
    writer.place_fields()
    fit = hold(draft)
    for _ in range(ROUNDS):
        before = copy.deepcopy(draft.spec)
        writer.place(fit)
        if draft.spec == before:
            break
        fit = hold(draft)
    return draft, fit


def begin(described: Described, hf: Mapping[str, Any]) -> Draft:
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
    return Draft(name_of(hf, names), spec | others)


def name_of(hf: Mapping[str, Any], names: list[str]) -> str:
    """A name for the file: the model's type, or its architecture without its end."""
    named = hf.get("model_type") or re.sub(r"(For[A-Z]\w+|Model|LMHeadModel)$", "", names[0] if names else "mine")
    return re.sub(r"\W+", "_", str(named)).lower() or "mine"


@dataclass
class DraftWriter:
    draft: Draft
    described: Described
    known: Known
    hf: Mapping[str, Any]
    stored: Mapping[str, Stored]

    def place_fields(self) -> None:
        """Read keys of config.json that the file does not read, as other files do, or by what they are called."""
        others: dict[str, str] = {}  # key of the file -> key of config.json
        for at, key, is_required, text, _ in self.described.reads():
            if self.has(key) or "." in key:
                continue
            if known := next((each for each in self.known.keys.get(at, ()) if self.has(each)), None):
                others.setdefault(key, known)
            elif key not in others and (found := self.key_like(at, key, is_required)) is not None:
                others[key] = found
                self.guess(f"{found} of config.json is read as {key}")
            if key in others and f":{others[key]}" not in text:
                self.set_key(at, key, others[key])
        self.place_width(others)
        self.place_partial()
        read = {each.key for each in self.described.reads()} | set(others.values())
        for at, keys in self.known.keys.items():
            if at.startswith(("blocks", "gguf", "weights", "eagle3", "assumes")) or is_read(self.get(at)):
                continue
            free = [key for key in keys if key not in read and "." not in key and len(self.known.fields[key]) == 1]
            if not (keys_here := list(filter(self.has, free))):
                continue
            key = keys_here[0]
            if at.startswith("mlp."):
                done = at.startswith(OF_EXPERTS) and self.set_mlp(at[4:], f"${{hf:{key}}}", kinds=("moe",), is_new=True)
            else:
                own = self.get(at)
                unset = False if isinstance(self.hf[key], bool) and own is None else own
                self.set(at, f"${{hf:{key},{spelled(unset)}}}")
                done = True
            if done:
                self.guess(f"{key} is read for {at}, as conf/model/{self.known.fields[key][at][0]}.yaml does")

    def place_width(self, others: Mapping[str, str]) -> None:
        """Compute the width of the mlp, if config.json has none: the most rows of a linear, as a multiple of hidden."""
        hidden = others.get("hidden_size", "hidden_size")
        size = self.hf.get(hidden)
        key = next((each.key for each in self.described.reads() if each.at == "mlp.width" and each.is_required), None)
        if key is None or key in others or self.has(key) or type(size) is not int:
            return
        rows = [each.shape[0] for name, each in self.stored.items() if "{layer}" in name and each.shape is not None
                and len(each.shape) == 2 and each.shape[1] == size]  # fmt: skip
        if rows and max(rows) % size == 0:
            pattern = re.compile(rf"\$\{{hf:{key}\}}")
            width = f"${{scaled:${{hf:{hidden}}},{max(rows) // size}}}"
            self.draft.spec["mlp"] = substitute(self.get("mlp"), pattern, width)
            self.guess(f"the mlp is {max(rows) // size} times as wide as {hidden}, by the shapes of tensors")

    def place_partial(self) -> None:
        """Read the part of a head that is rotated, if the family's code does; most of transformers' ignores it."""
        rope, theirs = self.hf.get("rope_parameters") or {}, read_by_transformers(str(self.hf.get("model_type")))
        part, at = rope.get("partial_rotary_factor", 1.0), "attention.rope.partial"
        if part != 1.0 and (theirs is None or "partial_rotary_factor" in theirs):
            self.set(at, "${hf:rope_parameters.partial_rotary_factor,1.0}")
            self.guess(f"partial_rotary_factor={part} of config.json is applied")

    def has(self, key: str) -> bool:
        return self.hf.get(key.partition(".")[0]) is not None

    def set_key(self, at: str, key: str, other: str) -> None:
        """Read another key for a field, in the file's own line; of mlps, in every line that reads it."""
        block, pattern = at.partition(".")[0], re.compile(rf"(\$\{{(?:hf|same|stated):){re.escape(key)}(?=[,.}}])")
        own = self.get(block if block == "mlp" else at)
        self.set(block if block == "mlp" else at, substitute(own, pattern, rf"\g<1>{other}"))

    def key_like(self, at: str, key: str, is_required: bool) -> str | None:
        """A key of config.json with another name of the same size; if there has to be one, by size or likeness."""
        role, dim = SIZES.get(at, ("", 0))
        size = (self.shape_of(role) or (None, None))[dim] if role else None
        if at == "layers":
            size = max((len(each.layers) for each in self.stored.values()), default=None)
        numbers = {name: value for name, value in self.hf.items() if type(value) is int}
        named = [name for name in numbers if are_names_of_one(key, name)]
        same = [name for name, value in numbers.items() if value == size]
        if not (named or is_required):
            return None
        both = [name for name in named if name in same]
        pool = both or named or same or [name for name in numbers if name not in self.known.fields]
        alike = difflib.get_close_matches(key, pool, 1, 0.0 if named or same else ALIKE)
        return alike[0] if alike else None

    def shape_of(self, role: str) -> Shape | None:
        """The shape of the stored weight of a role, by the draft's name or one that other files know."""
        for pattern, each in self.stored.items():
            if self.name_of(role) == module_of(pattern) or role in self.known.roles(pattern):
                return each.shape
        return None

    def place(self, fit: Fit) -> None:
        """Give roles that are missing the names of tensors that nothing reads, and set fields that tensors show."""
        if fit.error is not None:
            return
        roles: dict[str, str] = {}
        for role, name in self.weights().items():
            roles.setdefault(pattern_of(name)[0], role)  # of mlp_norm and attention_after_norm the first
        absent = {roles[at]: name for name in fit.missing if (at := self.role_name(name, roles)) is not None}
        free = [name for name in fit.unread if not name.endswith(".bias")]
        self.place_fused(absent, free, fit)
        pairs = [
            (score, role, name)
            for role, needed in absent.items()
            for name in free
            if (score := self.likeness(role, needed, name, fit)) > 0
        ]
        for score, role, name in sorted(pairs, reverse=True):
            if role in absent and name in free:
                del absent[role]
                free.remove(name)
                self.set_name(role, name)
                if score < 1:
                    self.guess(f"{name} is taken for the role {role}")
        self.place_blocks(absent, free, fit)

    def role_name(self, needed: str, roles: Mapping[str, str]) -> str | None:
        """The stored name of a role that a needed tensor is of: the tensor's own, or its module's."""
        return next((each for each in (needed, module_of(needed)) if each in roles), None)

    def likeness(self, role: str, needed: str, name: str, fit: Fit) -> float:
        """How sure it is that a tensor is of a role: from 1 by name; 0 if it cannot be."""
        shape, has_layer = self.stored[name].shape, "{layer}" in name
        wanted = fit.needed[needed]
        if has_layer != ("{layer}" in needed) or ("{expert}" in name) != ("{expert}" in needed):
            return 0.0
        if shape is not None and squeezed(shape) != squeezed(wanted):
            return 0.0
        if tail_of(module_of(name)) == tail_of(module_of(needed)):
            return 3.0
        if role in self.known.roles(name):
            return 2.0
        ours, tail = tail_of(module_of(needed)), tail_of(module_of(name))
        alike = max(ratio(tail, ours), ratio(tail.rpartition(".")[2], role))
        if shape is None:
            return 0.9 * alike if alike >= ALIKE else 0.0
        return 0.1 + 0.8 * alike

    def place_fused(self, absent: dict[str, str], free: list[str], fit: Fit) -> None:
        """Give roles that are all missing the name of one tensor that has the rows of all of them."""
        for group in FUSED:
            if not all(role in absent for role in group):
                continue
            shapes = [fit.needed[absent[role]] for role in group]
            whole = sum(shape[0] for shape in shapes), *shapes[0][1:]
            for name in [each for each in free if self.stored[each].shape == whole]:
                for role in group:
                    self.set_name(role, name)
                    del absent[role]
                free.remove(name)
                self.guess(f"{name} is taken for {', '.join(group)}, one after the other")
                break

    def place_blocks(self, absent: Mapping[str, str], free: list[str], fit: Fit) -> None:
        """Set the fields of blocks that a tensor shows to be there, or not."""
        names = self.weights()
        modules = {name: role for role, name in names.items()}
        biases = {modules[at] for name in fit.unread if name.endswith(".bias") and (at := module_of(name)) in modules}
        none = {
            modules[at] for name in fit.missing
            if name.endswith(".bias") and (at := module_of(name)) in modules and f"{at}.weight" in self.stored
        }  # fmt: skip
        for has_bias, roles in ((True, biases), (False, none)):
            for role in sorted(roles):
                self.set_bias(role, has_bias)
        if "gate" in absent and {"up", "down"}.isdisjoint(absent):
            self.set_mlp("kind", "plain", kinds=("gated",))
        if "mlp_norm" in absent and "attention_norm" not in absent:
            self.set("residual", "parallel")
            self.guess("attention and mlp read one norm: residual is parallel")
        for name in free:
            for role in self.known.roles(name):
                if role in ("q_norm", "k_norm"):
                    shape = self.stored[name].shape
                    head = fit.model.attention.head_dim if fit.model is not None else None
                    self.set("attention.qk_norm", "per_head" if shape in (None, (head,)) else "whole")
                    self.set_name(role, name)
                elif role in SHOWN_BY:
                    at, value = SHOWN_BY[role]
                    if at.startswith("mlp."):
                        self.set_mlp(at[4:], value, kinds=("moe",))
                    else:
                        self.set(at, value)
                    self.set_name(role, name)
        if {"q_norm", "k_norm"} <= absent.keys():
            self.set("attention.qk_norm", "none")
        if "head" in absent and not self.has("tie_word_embeddings"):
            self.set("tied", True)

    def set_bias(self, role: str, has_bias: bool) -> None:
        """Set the field that says whether a role has a bias."""
        if role in ("q", "k", "v"):
            self.set_switch("attention.bias", has_bias)
        elif role == "o":
            self.set_switch("attention.o_bias", has_bias)
        elif role in ("gate", "up", "down"):
            self.set_mlp("bias", has_bias, kinds=("gated", "plain"))
        elif role == "head":
            self.set("head_bias", has_bias)
        elif role.endswith("norm") and role not in ("q_norm", "k_norm"):
            self.set("norm.bias", has_bias)
            self.set("norm.kind", "layer" if has_bias else "rms")

    def set_switch(self, at: str, is_on: bool) -> None:
        """Set a field that is true or false, by the key of config.json that other files read for it, if that agrees."""
        keys = [key for key in self.known.keys.get(at, ()) if self.hf.get(key) is is_on]
        self.set(at, f"${{hf:{keys[0]}}}" if keys else is_on)

    def set_mlp(self, at: str, value: Any, *, kinds: Collection[str], is_new: bool = False) -> bool:
        """Set a field of the mlps of these kinds, if is_new only of those that have none; whether one was set."""
        mlps, *path = copy.deepcopy(self.get("mlp") or []), *at.split(".")
        was_set = False
        for mlp in mlps:
            if mlp.get("kind") not in kinds:
                continue
            block = mlp
            for part in path[:-1]:
                block = block.setdefault(part, {})
            if not (is_new and path[-1] in block):
                block[path[-1]], was_set = value, True
        if was_set:
            self.draft.spec["mlp"] = mlps
        return was_set

    def weights(self) -> dict[str, str]:
        """Role -> name, as the draft has it."""
        names = {**self.described.weights, **self.draft.spec.get("weights", {})}
        return {role: name for role, name in names.items() if role != "layer"}

    def name_of(self, role: str) -> str | None:
        return self.weights().get(role)

    def set_name(self, role: str, pattern: str) -> None:
        """Give a role the name of a stored tensor: a module's, unless the role names tensors."""
        old = self.name_of(role) or ""
        names_tensor = old.endswith(".weight") or module_of(pattern) == pattern
        names = self.draft.spec.setdefault("weights", {})
        names[role] = pattern if names_tensor else module_of(pattern)
        if "{layer}" in pattern:
            names["layer"] = pattern.partition("{layer}")[0] + "{layer}"

    def get(self, at: str) -> Any:
        """A field's value as the draft has it, or the file that it begins with."""
        for spec in (self.draft.spec, self.described.spec):
            value: Any = spec
            for part in at.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def set(self, at: str, value: Any) -> None:
        """Set a field of the draft."""
        *path, last = at.split(".")
        block = self.draft.spec
        for part in path:
            block = block.setdefault(part, {})
        block[last] = value

    def guess(self, line: str) -> None:
        if line not in self.draft.guesses:
            self.draft.guesses.append(line)


def ratio(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def is_read(value: Any) -> bool:
    """Whether a field has a value of config.json."""
    return isinstance(value, str) and "${" in value


def substitute(value: Any, pattern: re.Pattern[str], replacement: str) -> Any:
    """A nested value with a pattern replaced in its texts."""
    match value:
        case str():
            return pattern.sub(replacement, value)
        case Mapping():
            return {key: substitute(each, pattern, replacement) for key, each in value.items()}
        case list():
            return [substitute(each, pattern, replacement) for each in value]
    return value
