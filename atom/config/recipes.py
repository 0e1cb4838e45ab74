"""Read and write recipes: YAML files of overrides.

read_recipe("smollm2_greedy")                   # its overrides
format_recipe(["seed=1"], {"model": "qwen3"})   # its YAML
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from atom.config.folders import project_folder
from atom.config.spelling import did_you_mean
from atom.errors import ConfigError, one_line


def read_recipe(name: str, config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides of a recipe: a file, or a name in recipes/ (of a config dir or of the project)."""
    folders = [*(Path(folder) / "recipes" for folder in config_dirs), project_folder("recipes")]
    candidates = [Path(name).expanduser(), *(folder / f"{name}.yaml" for folder in folders)]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
        hint = f"{did_you_mean(name, names)}; recipes: {', '.join(names)}"
        raise ConfigError(f"recipe={name}: there is no such file and no such recipe{hint}")
    try:
        recipe = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path}: {one_line(error)}") from None
    overrides = recipe.get("overrides") if isinstance(recipe, dict) else None
    is_list = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
    if not overrides or not is_list or recipe.keys() - {"about", "overrides"}:
        raise ConfigError(f"recipe {path}: it takes two blocks, about: and overrides:, the latter a list of key=value")
    if any(re.match(r"\+*recipe=", text) for text in overrides):
        raise ConfigError(f"recipe {path}: a recipe cannot name another one")
    return list(overrides)


def format_recipe(overrides: Iterable[str], about: Mapping[str, Any]) -> str:
    """The YAML of a recipe."""
    recipe = {"about": dict(about), "overrides": list(overrides)}
    text: str = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=1000)
    if yaml.safe_load(text) != recipe:  # PyYAML writes some line breaks of Unicode that it reads as spaces
        text = yaml.safe_dump(recipe, sort_keys=False, width=1000)
    return text
