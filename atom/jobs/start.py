"""Choose the job of a command line, and check its fields.

    choose_job(["job.stage=fuse_qkv"])       # ["job=explain", "job.stage=fuse_qkv"]
    load_job(["job=cache", "prompts=hi"])    # ConfigError: prompts is a field of job=generate, and this is job=cache …

A recipe may have fields of other jobs than the one that runs, as a file of
conf/job may: its fields imply a job only if no typed field does, and are never refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from atom.config import Config
from atom.config.load import load, load_settings
from atom.config.overrides import rewrite
from atom.config.schema_keys import jobs_of
from atom.config.spelling import did_you_mean
from atom.errors import ConfigError
from atom.jobs import module_of
from atom.jobs.kind import implied_job, keys_of, named_job, own_fields

WITH_PAGE = ("explain", "bench", "profile", "compare", "plan")  # for job.output=html
# modules with `run(config)`
JOBS = (
    "serve", "batch", "generate", "chat", "explain", "compile", "cache", "bench", "profile", "recipe", "compare",
    "port", "eval", "plan",
)  # fmt: skip


def choose_job(overrides: Sequence[str], dirs: Sequence[str] = ()) -> list[str]:
    """Add the job to overrides that name none: the one that a field of theirs implies."""
    recipes = [text for text in overrides if text.lstrip("+").startswith("recipe=")]
    for texts in (overrides, rewrite(recipes, config_dirs=dirs)):
        if "job" in keys_of(texts):
            break
        if job := implied_job(texts):
            return [f"job={job}", *overrides]
    return list(overrides)


def load_job(overrides: Sequence[str], dirs: Sequence[str] = (), *, is_sweep: bool = False) -> Config:
    """Load overrides that name their job. ConfigError for a typed field of another job."""
    if "job=recipe" in overrides and "recipe" in keys_of(overrides):
        raise ConfigError("recipe= takes what a recipe sets; job=recipe job.recipes=[NAME] looks at it")
    if named_job(overrides) == "port":  # of a model that cannot be loaded yet
        if "job.save_recipe" in keys_of(overrides):
            raise ConfigError("job.save_recipe: job=port runs no model; leave it out")
        config = replace(
            load_settings(overrides, dirs), overrides=rewrite(overrides, config_dirs=dirs), config_dirs=list(dirs)
        )
    else:
        config = load(overrides, config_dirs=dirs)
    kind = config.job.kind
    if kind not in JOBS:
        raise ConfigError(f"job.kind={kind}: there is no such job; jobs: {', '.join(JOBS)}")
    for key, jobs in own_fields(keys_of(overrides)):
        if kind not in jobs.names:
            where = f"{key} is a field of job={', '.join(jobs.names)}, and this is job={kind}"
            raise ConfigError(f"{where}: leave it out, or write job={jobs.names[0]}")
    if is_sweep and kind in ("serve", "chat"):
        endless = f"job={kind} runs until it is stopped, so -m would never come to the next one"
        raise ConfigError(f"{endless}; leave out -m, or name another job")
    if config.job.output == "html":
        check_html(kind, is_sweep)
    if config.job.objective is not None and not is_sweep:
        raise ConfigError(f"job.objective={config.job.objective} is the number by which -m compares jobs: add -m")
    if config.job.resume and not is_sweep and config.job.output_file is None:
        raise ConfigError("job.resume=true continues a sweep, or answers in a file: add -m, or job.output_file=FILE")
    if config.job.objective is not None:
        check_objective(config.job.objective, kind)
    return config


def check_html(kind: str, is_sweep: bool) -> None:
    """Raise ConfigError if a job writes no page, or a terminal would show its text."""
    if kind not in WITH_PAGE:
        raise ConfigError(f"job.output=html: job={kind} has no page; {', '.join(WITH_PAGE)} have one")
    if is_sweep:
        raise ConfigError("job.output=html: a sweep writes a page of its own; leave it out")
    if sys.stdout.isatty():
        raise ConfigError("job.output=html writes a page to stdout: add > page.html")


def has_objectives(job: str) -> bool:
    """Whether a job has numbers that sweepers can compare."""
    jobs = jobs_of("job.objective")
    return jobs is not None and job in jobs.names


def check_objective(name: str, job: str) -> None:
    """Raise ConfigError if a job has no number of this name."""
    if has_objectives(job) and not is_objective(name, names := module_of(job).OBJECTIVES):
        which = f"job={job} reports no such number{did_you_mean(name, names)}; there are: {', '.join(names)}"
        raise ConfigError(f"job.objective={name}: {which}")


def is_objective(name: str, objectives: Iterable[str]) -> bool:
    """Whether a number is one of a job's OBJECTIVES, of which tasks.* stands for all that begin so."""
    return any(fnmatchcase(name, each) for each in objectives)
