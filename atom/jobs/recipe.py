"""`job=recipe`: list, check and compare recipes.

atom-run job=recipe                                                  # all in recipes/
atom-run job=recipe job.recipes=[mine.yaml,org/repo:fast.yaml]       # files, and files on the hub
atom-run job=recipe job.recipes=[laptop,mine.yaml] job.diff=true     # the fields that differ, and the figures
atom-run job=recipe job.output=json
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from atom.config import Config, QuantConfig
from atom.config.load import load_settings
from atom.config.recipes import list_recipes, read_recipe
from atom.config.schema import ParallelConfig
from atom.config.spelling import override
from atom.errors import AtomError, ConfigError
from atom.jobs.recipe_diff import UNMEASURED, WHERE, compare_recipes, print_difference, write
from atom.process.messages import say

COLUMNS = ("recipe", "what for", "model", "layout", "quant", "measured", "on")
SHORT = ("recipe", "layout", "quant")  # columns of the table; the others have lines of their own
MAX_WIDTH = 100  # columns, also in a pipe


def run(config: Config) -> int:
    """Print a table or, with job.output=json, an object a recipe; the exit code is 2 if one does not compose."""
    if config.job.diff:
        show_difference(config)
        return 0
    names, faults = config.job.recipes, []
    rows: list[dict[str, str]] = []
    for name in [path.stem for path in list_recipes()] if names is None else names:
        try:
            described = describe_recipe(name)
        except AtomError as error:
            faults.append(f"{name}: {error}")
            continue
        if config.job.output == "json":
            print(json.dumps(described))
        else:
            rows.append(described)
    if rows:
        print_table(rows)
    for fault in faults:
        say(fault)
    return ConfigError.exit_code if faults else 0


def show_difference(config: Config) -> None:
    """Print in what two recipes differ or, with job.output=json, an object with it."""
    names = config.job.recipes or ()
    if len(names) != 2:
        raise ConfigError("job.diff=true compares two recipes: write job.recipes=[A,B]")
    difference = compare_recipes(*names)
    if config.job.output == "json":
        print(json.dumps(difference._asdict()))
    else:
        print_difference(difference)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print the short columns side by side, and under each recipe the long ones, folded at the terminal's width."""
    width = min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH)
    sizes = [max(len(text) for text in (column, *(row[column] for row in rows))) for column in SHORT]
    for row in ({column: column for column in COLUMNS}, *rows):
        print("  ".join(row[column].ljust(size) for column, size in zip(SHORT, sizes, strict=True)).rstrip())
        for column in COLUMNS:
            if column not in SHORT and row[column] and row[column] != column:
                name = f"    {column + ':':10}"
                print(textwrap.fill(row[column], width, initial_indent=name, subsequent_indent=" " * len(name)))


def describe_recipe(name: str) -> dict[str, str]:
    """Describe what a recipe is for and what it sets. ConfigError, with the key, if it does not compose."""
    recipe = read_recipe(name)
    config = load_settings([override("recipe", name)])
    about = recipe.about
    values = (
        name,
        about.get("what", ""),
        about.get("model") or config.checkpoint or "",
        layout_of(config.parallel),
        quant_of(config.quant, config.serve.kv_cache_dtype),
        describe_figures(about.get("measured")),
        describe_place(about),
    )
    return dict(zip(COLUMNS, map(str, values), strict=True))


def layout_of(parallel: ParallelConfig) -> str:
    """The name of a layout, as `parallel=` takes it: tp8_ep, dp2_tp4_ep, tp16_ep8, dp2."""
    is_grouped = parallel.data > 1 or parallel.experts > 1
    groups = parallel.data if is_grouped else parallel.replicas
    parts = [f"dp{groups}"] if groups > 1 else []
    parts += [f"tp{parallel.tensor}"] if parallel.tensor > 1 or (not parts and parallel.pipeline == 1) else []
    parts += [f"pp{parallel.pipeline}"] if parallel.pipeline > 1 else []
    experts = "ep" if parallel.experts == parallel.tensor * parallel.data else f"ep{parallel.experts}"
    return "_".join([*parts, *([experts] if is_grouped else [])])


def quant_of(quant: QuantConfig, kv_cache_dtype: str) -> str:
    """How weights are packed, and the cache."""
    weights = {"auto": "as stored", "none": "none", None: "none"}.get(quant.fmt, quant.fmt)
    weights = "by module" if quant.formats else weights
    return f"{weights}, {kv_cache_dtype} KV" if kv_cache_dtype != "auto" else str(weights)


def describe_figures(measured: Any) -> str:
    """The measured figures of `about:`, names and numbers as job.save_recipe writes them, or a text."""
    if isinstance(measured, Mapping):
        return "; ".join(f"{name}: {write(value)}" for name, value in measured.items())
    return UNMEASURED if measured is None else str(measured)


def describe_place(about: Mapping[str, Any]) -> str:
    """Where figures were measured; of a saved recipe the hardware and the commit."""
    if WHERE in about or not isinstance(about.get("measured"), Mapping):
        return str(about.get(WHERE, ""))
    return ", ".join(str(about[name]) for name in ("hardware", "commit") if name in about)
