"""Give the roles of a draft the names of stored tensors.

    RoleWriter(draft, described, known, hf, stored).place(fit)

A name that another shipped file has for a role is taken for it, then one of the same shape by how alike names are.
What tensors show, as a bias or a norm of queries, is set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from atom.jobs.port.edit import Editor
from atom.jobs.port.fit import Fit, squeezed
from atom.jobs.port.stored import module_of, pattern_of, tail_of

ALIKE = 0.6  # of two names, from which they are taken for one if shapes are not known
FUSED = (("q", "k", "v"), ("gate", "up"))  # roles that a checkpoint may store as one tensor, in this order
SHOWN_BY = {  # roles -> the field whose value their tensors show
    "router_correction": ("mlp.router.method", "noaux_tc"),
    "shared_share": ("mlp.shared_gate", True),
    "sinks": ("attention.sinks", True),
}
AROUND = {  # names of norms around blocks, besides the one ahead of attention
    "attention_after_norm": r"post_(self_)?(attention|attn)_(layer)?norm",
    "mlp_norm": r"pre_(mlp|ffn|feedforward)_(layer)?norm",
    "mlp_after_norm": r"post_(mlp|ffn|feedforward)_(layer)?norm",
}


class RoleWriter(Editor):
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
        self.place_after_norms(free)
        if "mlp_norm" in absent and "attention_norm" not in absent:
            self.set("residual", "parallel")
            self.guess("attention and mlp read one norm: residual is parallel")
        for name in free:
            for role in self.known.roles(name):
                if role in ("q_norm", "k_norm") and re.search(r"(attn|attention)\.\w+\.weight$", name):
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

    def place_after_norms(self, free: list[str]) -> None:
        """Take four norms of a layer for those before and after attention and mlp, by what they are called."""
        found = {
            role: name
            for role, pattern in AROUND.items()
            for name in [*free, f"{self.name_of('mlp_norm')}.weight"]
            if re.fullmatch(rf"{pattern}(\.weight)?", tail_of(name)) and name in self.stored
        }
        if found.keys() == AROUND.keys():
            self.set("norm.after", True)
            for role, name in found.items():
                self.set_name(role, name)
                self.guess(f"{name} is taken for the role {role}")

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


def ratio(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1."""
    return difflib.SequenceMatcher(None, one, other).ratio()
