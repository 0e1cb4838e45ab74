"""Save a run's recipe, with what it ran on and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import atom
from atom.cache import key_of
from atom.config import Config
from atom.config.overrides import write_recipe
from atom.measurement.hardware import describe_cpus, describe_machine, find_commit, package_versions

FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "tokens_per_second", "first_token_seconds")


def save_recipe(config: Config, overrides: Sequence[str], numbers: Mapping[str, float] | None = None) -> bool:
    """Write the recipe of these overrides to job.save_recipe. Whether API keys were among them, which are left out.

    numbers: of the job, once it has ended; those of FIGURES are written
    """
    about: dict[str, Any] = {
        "model": config.model.name,
        "job": config.job.kind,
        **{name: getattr(config, name) for name in ("dtype", "device", "level")},
        "hardware": describe_cpus() if config.device == "cpu" else describe_machine(),
        "versions": {"atom-run": atom.__version__, **package_versions()},
    }
    if commit := find_commit():  # else the version of atom-run says what ran
        about["commit"] = commit
    if key := artifact_key(config):
        about["artifact"] = key
    if numbers:
        about["measured"] = {name: round(numbers[name], 3) for name in FIGURES if name in numbers}
    assert config.job.save_recipe is not None, "only then there is a file"
    return write_recipe(config.job.save_recipe, overrides, about)


def artifact_key(config: Config) -> str | None:
    """The key of the artifact that the run starts from; None below level 2, which has none, and of a saved graph."""
    from atom.compiler.artifact import launch_ingredients, level_of  # imports torch, which only a saved recipe needs
    from atom.kernels import find_target

    if config.job.graph is not None or level_of(config) < 2:
        return None
    return key_of(launch_ingredients(config, find_target(config.device)))
