"""Hold a draft against a checkpoint: which tensors fit, which do not.

    fit = hold(Draft("mine", {"defaults": ["llama", "_self_"]}), checkpoint="/models/x", stored=read_stored(…))
    fit.missing, fit.misshapen, fit.unread, fit.error

The draft is loaded as any model file is, and its text before all passes says which tensors it needs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from atom.compiler.artifact import semantic_graph
from atom.config import ModelConfig
from atom.config.load import load
from atom.config.spelling import override
from atom.errors import AtomError
from atom.graph.parts import stored_tensors
from atom.jobs.port.stored import Stored, pattern_of

MAX_LAYERS = 10  # that are written: enough for each type of layer, few enough for a text in a second
Shape = tuple[int, ...]


@dataclass
class Draft:
    """A model file that is being written."""

    name: str
    spec: dict[str, Any]
    guesses: list[str] = field(default_factory=list)  # what was chosen by shape or likeness only

    def text(self) -> str:
        """The file as YAML, without comments."""
        lists = {key: self.spec[key] for key in ("weights", "stacked", "assumes") if key in self.spec}
        lines = {key: value for key, value in self.spec.items() if key not in lists}
        options: dict[str, Any] = {"sort_keys": False, "width": 1000, "allow_unicode": True}
        text: str = yaml.safe_dump(lines, default_flow_style=None, **options)
        return text + (yaml.safe_dump(lists, default_flow_style=False, **options) if lists else "")


@dataclass
class Fit:
    """What came of a draft."""

    model: ModelConfig | None  # None: the draft cannot be loaded
    error: str | None  # why
    needed: dict[str, Shape]  # the tensors that its text reads, by name with {layer} and {expert}
    missing: list[str]
    misshapen: dict[str, tuple[Shape, Shape]]  # stored and needed
    unread: list[str]  # stored, and neither needed nor ignored

    @property
    def faults(self) -> int:
        """The number of names that do not fit; of a draft that cannot be loaded, more than of any that can."""
        count = len(self.missing) + len(self.misshapen) + len(self.unread)
        return count if self.error is None else 10_000 + count


def hold(draft: Draft, checkpoint: str, stored: Mapping[str, Stored], revision: str | None, dirs: Sequence[str]) -> Fit:
    """Load a draft for a checkpoint, and compare the tensors of its text with those that are stored."""
    try:
        model, needed = read_needed(draft, checkpoint, revision, dirs)
    except AtomError as error:
        return Fit(None, str(error), {}, [], {}, list(stored))
    names = set(needed)
    read = set(names)
    for name, parts in model.stacked.items():
        stored_parts = {model.weights[role] + dot + part for role, dot, part in (each.partition(".") for each in parts)}
        stored_parts = {pattern_of(each)[0] for each in stored_parts}
        if pattern_of(name)[0] in stored and stored_parts & names:
            read.add(pattern_of(name)[0])
            names -= stored_parts
    ignored = [pattern_of(each)[0] for each in model.ignore]
    unread = [name for name in stored if name not in read and not any(fnmatch(name, pattern) for pattern in ignored)]
    missing = [name for name in needed if name in names and name not in stored] if stored else []
    misshapen = {
        name: (each.shape, needed[name])
        for name, each in stored.items()
        if name in names and each.shape is not None and not has_shape(each, needed[name])
    }
    return Fit(model, None, needed, missing, misshapen, unread if stored else [])


def read_needed(
    draft: Draft, checkpoint: str, revision: str | None, dirs: Sequence[str]
) -> tuple[ModelConfig, dict[str, Shape]]:
    """The draft's model for a checkpoint, and the tensors that its text reads. AtomError if it cannot be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        write(draft.text(), Path(folder, "model", f"{draft.name}.yaml"))
        values = {"checkpoint": checkpoint, "revision": revision, "model": draft.name, "device": "cpu", "dtype": "fp32"}
        overrides = [override(key, value) for key, value in values.items() if value is not None]
        try:
            config = load(overrides, config_dirs=[folder, *dirs])
            if config.model.layers > MAX_LAYERS:
                config = load([*overrides, override("model.layers", MAX_LAYERS)], config_dirs=[folder, *dirs])
        except AtomError as error:
            error.args = (str(error).replace(f"{folder}/model/", ""),)
            raise
    needed: dict[str, Shape] = {}
    for recipe in semantic_graph(config).recipes():
        for leaf in stored_tensors(recipe):
            needed.setdefault(pattern_of(leaf.name)[0], tuple(int(dim) for dim in leaf.type.shape))
    return config.model, needed


def write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def has_shape(stored: Stored, needed: Shape) -> bool:
    """Whether a stored tensor has this shape, itself or as it is packed."""
    return squeezed(needed) in [squeezed(shape) for shape in (stored.shape, stored.blocks) if shape is not None]


def squeezed(shape: Shape) -> Shape:
    """A shape without dims of 1, by which a scale or a convolution may differ."""
    return tuple(dim for dim in shape if dim != 1)
