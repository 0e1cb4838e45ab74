"""Run a command line: a job, a sweep, or one of Hydra's own commands."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import hydra

import atom
from atom.config import Config
from atom.config.folders import CONF
from atom.config.hydra import one_line_errors, register, with_search_path
from atom.config.load import show
from atom.config.overrides import SECRET, hide_secret, rewrite, write_recipe
from atom.config.spelling import HIDDEN, override
from atom.devices import open_early
from atom.errors import ConfigError
from atom.gc_utils import no_collection
from atom.jobs import module_of
from atom.jobs.report import report
from atom.jobs.start import choose_job, load_job
from atom.jobs.sweep import sweep
from atom.runtime.remote_ranks import serve_rank

IN_PROCESS = ("generate", "bench", "profile")  # jobs that run an engine in this process
HYDRA_SHOWS = ("resolve", "hydra_help", "shell_completion")  # flags of Hydra without a value


def run_flags(args: argparse.Namespace) -> int:
    """Run one job, a sweep, or what Hydra's flags ask for."""
    dirs = args.config_dir
    if args.shell_completion or args.hydra_help or args.cfg in ("hydra", "all"):
        return run_hydra(args, hide_secrets(args.overrides, dirs) if args.cfg else args.overrides)
    if args.multirun:
        return sweep(args.overrides, dirs, run_of_sweep)
    if args.info:
        return run_hydra(args, hide_secrets(rewrite(args.overrides, config_dirs=dirs), dirs))
    if args.cfg:
        texts = choose_job(args.overrides, dirs)
        print(show(texts, config_dirs=dirs, package=args.package, is_resolved=args.resolve), end="")
        return 0
    return run(args.overrides, dirs)


def run(overrides: Sequence[str], dirs: Sequence[str] = ()) -> int:
    """Load the configuration and run its job."""
    return do_job(overrides, dirs, is_sweep=False)[0]


def run_of_sweep(overrides: Sequence[str], dirs: Sequence[str]) -> tuple[int, float | None]:
    """Run one job of a sweep; its exit code, and its objective if it has one."""
    ended: list[float | None] = []

    def work() -> int:
        code, objective = do_job(overrides, dirs, is_sweep=True)
        ended.append(objective)
        return code

    return report(work), next(iter(ended), None)


def do_job(overrides: Sequence[str], dirs: Sequence[str], *, is_sweep: bool) -> tuple[int, float | None]:
    overrides = choose_job(overrides, dirs)
    with no_collection():
        config = load_job(overrides, dirs, is_sweep=is_sweep)
        if config.parallel.rank > 0:
            return serve_rank(config), None
        if config.device == "cuda" and config.job.kind in IN_PROCESS:
            open_early()
        job = module_of(config.job.kind)
    if config.job.save_recipe:
        about = {name: getattr(config, name) for name in ("dtype", "device", "level")}
        about |= {"model": config.model.name, "job": config.job.kind, "atom-run": atom.__version__}
        if write_recipe(config.job.save_recipe, rewrite(overrides, config_dirs=dirs), about):
            line = f"{config.job.save_recipe} is without {SECRET}, as others may read it; {SECRET}=@FILE would stay"
            print(f"atom-run: {line}", file=sys.stderr)
    name = config.job.objective
    if name is None:
        return job.run(config), None
    numbers: dict[str, Any] = {}
    if code := job.run(config, numbers.update):
        return code, None
    if numbers.get(name) is None:
        raise ConfigError(f"job.objective={name} has no value in this run; choose another")
    return 0, numbers[name]


def hide_secrets(overrides: Sequence[str], dirs: Sequence[str]) -> list[str]:
    """Hide API keys in the overrides that Hydra shows, those of the environment too."""
    hidden = [hide_secret(text) for text in overrides]
    is_hidden = show(overrides, config_dirs=dirs, package=SECRET) == f"{HIDDEN}\n"
    return [*hidden, override(SECRET, HIDDEN)] if is_hidden and hidden == list(overrides) else hidden


def run_hydra(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one of Hydra's own commands."""
    register(Config)
    argv, said = sys.argv, io.StringIO()
    stated = [f"--{name}={value}" for name in ("cfg", "info", "package") if (value := getattr(args, name))]
    stated += [f"--{name.replace('_', '-')}" for name in HYDRA_SHOWS if getattr(args, name)]
    sys.argv = ["atom-run", *with_search_path(overrides, args.config_dir), *stated]
    try:
        with one_line_errors(Config), contextlib.redirect_stderr(said):
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda _: None)()
    except SystemExit as end:
        if end.code:
            raise ConfigError(said.getvalue()) from None
    finally:
        sys.argv = argv
    return 0
