"""Read and write recipes: YAML files that set fields and choose files of conf/.

read_recipe("smollm2_greedy").overrides         # of a name in recipes/, a file, or org/repo:file.yaml on the hub
format_recipe(["seed=1"], {"model": "qwen3"})   # the YAML of a recipe with a list of overrides

A recipe is what Hydra calls an experiment: `defaults:` with choices, as in `override /parallel: tp8`, and fields. What
programs write has a list of `overrides:` instead. Both may have `about:`, for people and `job=recipe`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from atom.checkpoint import fetch_file
from atom.config.bounded_yaml import parse_yaml
from atom.config.folders import project_folder
from atom.config.schema import Config
from atom.config.schema_keys import keys
from atom.config.spelling import did_you_mean, override
from atom.errors import ConfigError, one_line

HUB_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?:(?P<path>[\w./-]+\.ya?ml)")
MAX_BYTES = 1 << 20  # of a recipe
CHOICE = re.compile(r"override /?(?P<group>[\w/]+)")
# what a recipe from the hub may say: how a model runs, and nothing that runs code, or reads and writes files here
SHARED = re.compile(
    r"(job|model|quant|parallel|serve)=\w+"
    r"|((checkpoint|revision|dtype|device|level|seed|tune|load_dummy)"
    r"|(model|quant|sampling)\..+|parallel\.(tensor|data|experts|pipeline|replicas)|"
    r"serve\.(?!http|torch_profiler_dir|kv_cache_dir|models)\w+"
    r"|job\.(chat|num_prompts|input_len|output_len|num_warmups|num_iters|num_steps))=.*",
    re.DOTALL,
)


class Recipe(NamedTuple):
    name: str  # as it is given with recipe=
    about: dict[str, Any]
    overrides: list[str]


def read_recipe(name: str, config_dirs: Sequence[str] = ()) -> Recipe:
    """Read a recipe: a file, a name in recipes/ (of a config dir or of the project), or org/repo:file.yaml."""
    if not isinstance(name, str):
        several = " ".join(f"+recipe={each}" for each in name) if isinstance(name, list) else "recipe=NAME"
        raise ConfigError(f"recipe={name}: it is one name; write {several}")
    if re.match(r"\w+://", name):
        why = "nothing says whose a page is, and it can change"
        raise ConfigError(f"recipe={name}: {why}; download and read it, or name a file on the hub: org/repo:file.yaml")
    path, hub = find_recipe(name, config_dirs), HUB_FILE.fullmatch(name)
    is_shared = path is None and hub is not None
    if path is None and hub is not None:
        path = fetch_file(hub["repo"], hub["path"], revision=hub["revision"])
    if path is None:
        names = sorted(file.stem for file in list_recipes(config_dirs))
        hint = f"{did_you_mean(name, names)}; recipes: {', '.join(names)}{name_unread(name, config_dirs)}"
        raise ConfigError(f"recipe={name}: there is no such file and no such recipe{hint}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"recipe {path}: it has more than {MAX_BYTES:,} bytes, as no recipe has")
        content = parse_yaml(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path}: {one_line(error)}") from None
    about, overrides = parse_recipe(content, path)
    if is_shared:
        check_shared(overrides, name)
    return Recipe(name, about, overrides)


def find_recipe(name: str, config_dirs: Sequence[str] = ()) -> Path | None:
    """The file of a recipe on this machine."""
    named = [file for file in list_recipes(config_dirs) if file.stem == name]
    return next((path for path in (Path(name).expanduser(), *named) if path.is_file()), None)


def list_recipes(config_dirs: Sequence[str] = ()) -> list[Path]:
    """The files in recipes/, those of config dirs before the project's."""
    return [file for folder in recipe_folders(config_dirs) for file in sorted(folder.glob("*.yaml"))]


def recipe_folders(config_dirs: Sequence[str]) -> list[Path]:
    return [*(Path(folder) / "recipes" for folder in config_dirs), project_folder("recipes")]


def name_unread(name: str, config_dirs: Sequence[str]) -> str:
    """Say what to do about files that are not read; empty if all are.

    It is a folder recipe/ of a config dir, which is named like a group of conf/, or a file that ends in .yml.
    """
    stem = name.removesuffix(".yml")
    for file in [folder / f"{stem}.yml" for folder in recipe_folders(config_dirs)]:
        if file.is_file():
            return f"; {file} is not read: call it {stem}.yaml"
    found = next((folder for each in config_dirs if (folder := Path(each) / "recipe").is_dir()), None)
    if found is not None:
        return f"; {found} is not read: call it recipes"
    return "; files of recipes end in .yaml" if name.endswith(".yml") else ""


def parse_recipe(content: Any, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Parse a recipe: its description and its overrides. ConfigError if it is no recipe."""
    if not isinstance(content, dict) or not content.keys() - {"about"}:
        raise ConfigError(f"recipe {path}: it takes about:, and defaults: and fields, or overrides: with key=value")
    about = content.pop("about", None) or {}
    if not isinstance(about, dict):
        raise ConfigError(f"recipe {path}: about: takes names and values")
    if "overrides" not in content:
        overrides = [*read_choices(content.pop("defaults", None) or [], path), *read_fields(content)]
    elif content.keys() == {"overrides"}:
        overrides = content["overrides"]
    else:
        others = ", ".join(sorted(content.keys() - {"overrides"}))
        raise ConfigError(f"recipe {path}: it takes overrides: or fields; write {others} as an override too")
    if not isinstance(overrides, list) or not overrides or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(f"recipe {path}: overrides: takes a list of key=value")
    if any(re.match(r"\+*recipe=", text) for text in overrides):
        raise ConfigError(f"recipe {path}: a recipe cannot name another one")
    return about, overrides


def read_choices(defaults: Any, path: Path) -> Iterator[str]:
    """The overrides of an experiment's defaults list."""
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        if entry == "_self_":
            continue
        ((key, choice),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((str(entry), None),)
        match = CHOICE.fullmatch(str(key))
        if not match or not isinstance(choice, str):
            raise ConfigError(f"recipe {path}: defaults: takes choices, as in 'override /parallel: tp8', not {entry}")
        yield f"{match['group']}={choice}"


def read_fields(block: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """The overrides of nested fields; a field's value may be a mapping."""
    for name, value in block.items():
        key = f"{at}{name}"
        if isinstance(value, dict) and value and key not in leaf_keys():
            yield from read_fields(value, f"{key}.")
        else:
            yield override(key, value).replace("\\${", "${")  # in a file of Hydra's it is an interpolation


@functools.cache
def leaf_keys() -> frozenset[str]:
    return frozenset(keys(Config))


def check_shared(overrides: Iterable[str], name: str) -> None:
    """Raise ConfigError if a recipe from the hub sets more than how a model runs."""
    for text in overrides:
        key = text.partition("=")[0]
        if not SHARED.fullmatch(text):
            why = "others may only say how a model runs"
            raise ConfigError(f"recipe={name} sets {key}, and {why}; save it, read it, and give recipe=FILE")
        if "${" in text:
            raise ConfigError(f"recipe={name}: {key} reads a value of this machine; save it, read it, give recipe=FILE")


def format_recipe(overrides: Iterable[str], about: Mapping[str, Any]) -> str:
    """The YAML of a recipe."""
    recipe = {"about": dict(about), "overrides": list(overrides)}
    text: str = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=1000)
    if yaml.safe_load(text) != recipe:  # PyYAML writes some line breaks of Unicode that it reads as spaces
        text = yaml.safe_dump(recipe, sort_keys=False, width=1000)
    return text
