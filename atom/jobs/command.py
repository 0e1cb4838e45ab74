"""Run a command line: a job, a sweep, or one of Hydra's own commands."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence

import hydra

from atom.config import Config
from atom.config.folders import CONF
from atom.config.hydra import register, with_search_path
from atom.config.hydra_errors import one_line_errors
from atom.config.load import show
from atom.config.overrides import SECRET, hide_secret, rewrite
from atom.config.spelling import HIDDEN, override
from atom.errors import ConfigError
from atom.jobs import module_of
from atom.jobs.kind import implied_job, named_job
from atom.jobs.run import run
from atom.jobs.start import choose_job, load_job
from atom.jobs.sweep.sweep import sweep

HYDRA_SHOWS = ("resolve", "hydra_help", "shell_completion")  # flags of Hydra without a value


def run_flags(args: argparse.Namespace) -> int:
    """Run one job, a sweep, or what Hydra's flags ask for."""
    dirs = args.config_dir
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve is for --cfg: write --cfg job --resolve")
    if args.shell_completion or args.hydra_help or args.cfg in ("hydra", "all"):
        return run_hydra(args, hide_secrets(args.overrides, dirs) if args.cfg else args.overrides)
    if args.multirun and (named_job(args.overrides) or implied_job(args.overrides)) == "plan":
        return run_measured(args.overrides, dirs)
    if args.multirun:
        return sweep(args.overrides, dirs)
    if args.info:
        return run_hydra(args, hide_secrets(rewrite(args.overrides, config_dirs=dirs), dirs))
    if args.cfg:
        texts = choose_job(args.overrides, dirs)
        print(show(texts, config_dirs=dirs, package=args.package, is_resolved=args.resolve), end="")
        return 0
    return run(args.overrides, dirs)


def run_measured(overrides: Sequence[str], dirs: Sequence[str]) -> int:
    """Run job=plan, and measure the first of its options; these are its choices, so no field may have several."""
    config = load_job(choose_job(overrides, dirs), dirs)
    code: int = module_of("plan").run(config, measures=True)
    return code


def hide_secrets(overrides: Sequence[str], dirs: Sequence[str]) -> list[str]:
    """Hide API keys in the overrides that Hydra shows, those of the environment too."""
    hidden = [hide_secret(text) for text in overrides]
    is_hidden = show(overrides, config_dirs=dirs, package=SECRET) == f"{HIDDEN}\n"
    return [*hidden, override(SECRET, HIDDEN)] if is_hidden and hidden == list(overrides) else hidden


def run_hydra(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one of Hydra's own commands."""
    register(Config)
    argv, said = sys.argv, io.StringIO()
    flags = [f"--{name}={value}" for name in ("cfg", "info", "package") if (value := getattr(args, name))]
    flags += [f"--{name.replace('_', '-')}" for name in HYDRA_SHOWS if getattr(args, name)]
    sys.argv = ["atom-run", *with_search_path(overrides, args.config_dir), *flags]
    try:
        with one_line_errors(Config), contextlib.redirect_stderr(said):
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda _: None)()
    except SystemExit as end:
        if end.code:
            raise ConfigError(said.getvalue()) from None
    finally:
        sys.argv = argv
    return 0
