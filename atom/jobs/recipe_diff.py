"""`job=recipe job.diff=true`: show how two recipes differ, and their figures.

difference = compare_recipes("laptop", "demo")
difference.fields       # {"serve.max_num_seqs": ("4", "256"), …}, as a command line takes them
print_difference(difference)
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from numbers import Real
from typing import Any, NamedTuple

from atom.config.load import load_settings
from atom.config.overrides import SECRET
from atom.config.recipes import read_recipe
from atom.config.schema import Config
from atom.config.schema_keys import keys
from atom.config.spelling import HIDDEN, is_secret, override, spelled

MEASURED, WHERE, UNMEASURED = "measured", "measured_on", "not measured"
MAX_WIDTH = 120  # columns of the table, also in a pipe
GAP = "  "
Pairs = dict[str, tuple[Any, Any]]


class Difference(NamedTuple):
    """What two recipes do not share, by name; None: one does not have it."""

    names: tuple[str, str]
    about: Pairs  # what they say of themselves
    fields: Pairs  # the values that their overrides give, and those of others by default
    measured: Pairs  # all figures, also equal ones
    machines: tuple[str, str]  # on which these were measured


def compare_recipes(one: str, other: str) -> Difference:
    """Compare two recipes; ConfigError, with the key, if one does not compose."""
    about, fields, figures, machines = [], [], [], []
    for name in (one, other):
        recipe = read_recipe(name)
        about.append(dict(flatten({key: value for key, value in recipe.about.items() if key != MEASURED})))
        fields.append(values_of(name, recipe.overrides))
        figures.append(figures_of(recipe.about.get(MEASURED)))
        machines.append(str(recipe.about.get(WHERE, recipe.about.get("hardware", "unknown"))).partition(";")[0])
    both = machines[0], machines[1]
    return Difference((one, other), pair(*about), pair(*fields), pair(*figures, equal=True), both)


def values_of(name: str, overrides: list[str]) -> dict[str, str]:
    """The value of every field, as a command line takes it; of `model`, which needs a checkpoint, what is set."""
    config = load_settings([override("recipe", name)])
    found = {key: value_of(config, key) for key in keys(Config) if not key.startswith(("model.", "overrides"))}
    texts = (text.lstrip("+").partition("=") for text in overrides)
    return found | {key: value.strip("'") for key, _, value in texts if key == "model" or key.startswith("model.")}


def value_of(config: Config, key: str) -> str:
    """The value at a key; null if it is in a block or an entry that is not there."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if key == SECRET and is_secret(value):
        return HIDDEN
    return spelled(value) if isinstance(value, bool | None) else str(value)


def figures_of(measured: Any) -> dict[str, Any]:
    """Figures by name; a text, or that there are none, as one of them."""
    if isinstance(measured, Mapping):
        return dict(measured)
    return {MEASURED: UNMEASURED if measured is None else str(measured)}


def flatten(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", str(value)


def pair(one: Mapping[str, Any], other: Mapping[str, Any], *, equal: bool = False) -> Pairs:
    """Both values by key, in order. equal: those that do not differ too"""
    both = {key: (one.get(key), other.get(key)) for key in (*one, *other)}
    return {key: values for key, values in both.items() if equal or values[0] != values[1]}


def print_difference(difference: Difference) -> None:
    """Print both recipes side by side; the second one's figures with their ratio to the first one's."""
    sections = [
        {key: (write(one), write(other)) for key, (one, other) in difference.about.items()},
        {key: (write(one), write(other)) for key, (one, other) in difference.fields.items()},
        {key: (write(one), write(other) + ratio(one, other)) for key, (one, other) in difference.measured.items()},
    ]
    width = min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH)
    label = max(len(key) for section in sections for key in section)
    longest = max(map(len, difference.names))
    longest = max([longest, *(len(text) for section in sections for texts in section.values() for text in texts)])
    column = min(longest, max((width - label - 2 * len(GAP)) // 2, 16))

    def show(key: str, texts: tuple[str, str]) -> None:
        folded = (textwrap.wrap(text, column, break_on_hyphens=False) for text in texts)
        for at, (one, other) in enumerate(zip_longest(*folded, fillvalue="")):
            print(GAP.join([(key if at == 0 else "").ljust(label), one.ljust(column), other]).rstrip())

    show("", difference.names)
    for section in sections:
        if section:
            print()
        for key, texts in section.items():
            show(key, texts)
    is_both = any(ratio(*values) for values in difference.measured.values())
    if is_both and difference.machines[0] != difference.machines[1]:
        print(f"\nThese were measured on different machines: {', '.join(difference.machines)}.")


def write(value: Any) -> str:
    return "-" if value is None else f"{value:,.6g}" if isinstance(value, Real) else str(value)


def ratio(one: Any, other: Any) -> str:
    """How many times the first figure the second one is; empty if there are not two."""
    both = isinstance(one, Real) and isinstance(other, Real) and float(one) > 0
    return f" (×{float(other) / float(one):.2f})" if both else ""
