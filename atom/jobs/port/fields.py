"""Read the fields of a config.json for the fields of a draft.

    FieldWriter(draft, described, known, hf, stored).place_fields()

A key that another shipped file reads for a field is taken for it, then one by the size of a tensor or by its name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from atom.config.spelling import spelled
from atom.jobs.port.edit import Editor, is_read, substitute
from atom.jobs.port.fit import Shape
from atom.jobs.port.hints import read_by_transformers
from atom.jobs.port.stored import module_of
from atom.jobs.port.tiny import are_names_of_one

ALIKE = 0.6  # of two names, from which they are taken for one
OF_LATENTS = [f"attention.{name}" for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")]
OF_EXPERTS = ("mlp.shared", "mlp.router")  # beginnings of fields of an mlp of experts
SIZES = {"hidden": ("embedding", 1), "vocab": ("embedding", 0)}  # field -> role and dim of its weight


class FieldWriter(Editor):
    def place_fields(self) -> None:
        """Read keys of config.json that the file does not read, as other files do, or by what they are called."""
        others = self.place_keys()
        self.place_width(others)
        self.place_partial()
        self.place_further_fields({each.key for each in self.described.reads()} | set(others.values()))

    def place_keys(self) -> dict[str, str]:
        """Read other keys for those that the file reads and config.json does not have: these, with the others."""
        others: dict[str, str] = {}
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
        return others

    def place_further_fields(self, read: Collection[str]) -> None:
        """Set fields that the file leaves at a constant by keys that only other files read, for that field only.

        read: keys that the draft reads already
        """
        for at, keys in self.known.keys.items():
            if at.startswith(("blocks", "gguf", "weights", "eagle3", "assumes")) or is_read(self.get(at)):
                continue
            if at in OF_LATENTS and self.get("attention.kind") != "mla":
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
