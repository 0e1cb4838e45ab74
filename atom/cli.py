"""The command `atom-run`: run a job.

Overrides go in, answers come out on stdout, everything else goes to stderr.

    atom-run prompts="What is 2+2?" job.chat=true        # one run
    atom-run -m level=0,1 prompts=@questions.txt         # a run for each choice
    atom-run --cfg job model=qwen3 -p model.attention    # shows, runs nothing

A user's mistake is one line and exit code 2, any other foreseen error one line and 1, Ctrl-C 130.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import atom
from atom.config import SET_BY_LOAD, Config, describe_fields, show
from atom.config.hydra import CONF, keys, one_line_errors, register, with_search_path
from atom.config.overrides import HIDDEN, SECRET, hide_secret, one_line, override, rewrite, write_recipe
from atom.devices import open_early
from atom.errors import AtomError, ConfigError
from atom.gc_utils import no_collection
from atom.jobs.start import JOBS, choose_job, load_job
from atom.jobs.sweep import sweep

IN_PROCESS = ("generate", "bench", "profile")  # jobs that run an engine in this process
HYDRA_SHOWS = ("resolve", "hydra_help", "shell_completion")  # flags of Hydra without a value

HELP = """\
atom-run: from a Hugging Face checkpoint to tokens, with every step in between to read and change.

usage: atom-run [group=choice] [field=value] ...   one run
       atom-run -m field=a,b ...                   a run for each choice
       atom-run --cfg job ...                      shows the configuration (--resolve: with the checkpoint's values)
       atom-run --version | --hydra-help | --info | --shell-completion install=bash

Groups
{groups}
  job.gpu is one of {gpus}, or a YAML file

Fields
{fields}
  A model file's fields: atom-run --cfg job -p model

Examples
  atom-run prompts="What is 2+2?" job.chat=true
  atom-run checkpoint=Qwen/Qwen3-0.6B prompts='["Once upon a time", "The capital of France is"]' sampling.temperature=0
  atom-run checkpoint=/models/llama prompts=@questions.txt job.output=json sampling.max_tokens=200
  atom-run job=explain job.stage=fuse_qkv checkpoint=/models/llama
  atom-run -m job=bench level=1,2 job.num_prompts=1,16 job.input_len=100-1024"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    return report(lambda: dispatch(list(sys.argv[1:] if argv is None else argv)))


def report(work: Callable[[], int]) -> int:
    """Run some work; its exit code. A foreseen error is one line on stderr."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except AtomError as error:
        return fail(f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except OSError as error:
        return fail("" if isinstance(error, BrokenPipeError) else str(error), 1)


def fail(message: str, code: int) -> int:
    log = logging.getLogger("atom")  # a server's
    if message and log.handlers:
        log.error(one_line(message))
    elif message:
        print(f"atom-run: {one_line(message)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the reader is gone: Python must not try to flush again at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def dispatch(argv: list[str]) -> int:
    """Run one job, or what Hydra's flags ask for."""
    if "--version" in argv:
        print(f"atom-run {atom.__version__}")
        return 0
    if "--help" in argv or "-h" in argv:
        files = sorted(CONF.glob("*/*.yaml"))
        groups = {file.parent.name: [each.stem for each in files if each.parent == file.parent] for file in files}
        gpus = groups.pop("gpu")  # not a Hydra group: job.gpu names one
        lines = [f"  {group}: {', '.join(names)}" for group, names in groups.items()]
        shown = [textwrap.fill(line, 120, subsequent_indent="    ") for line in lines]
        print(HELP.format(groups="\n".join(shown), gpus=", ".join(gpus), fields=describe_fields()))
        return 0
    args = parse_flags(argv)
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


def parse_flags(argv: list[str]) -> argparse.Namespace:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        flag = re.fullmatch(r"unrecognized arguments: --([\w-]+)(=.*| .*)?", message)
        key = find_key(flag[1].replace("-", "_")) if flag else None
        raise ConfigError(f"{message}{f', write {key}=…' if key else ''}; atom-run --help shows what there is")

    parser: argparse.ArgumentParser = get_args_parser()
    own = parser.add_argument_group(conflict_handler="resolve")
    own.add_argument("--config-dir", "-cd", action="append", default=[])  # Hydra's own takes one only
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)
    if args.config_name or args.config_path or args.experimental_rerun:
        raise ConfigError("--config-name, --config-path, --experimental-rerun: use recipe= or --config-dir instead")
    if sum(map(bool, (args.cfg, args.info, args.multirun, args.run, args.shell_completion))) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion at a time")
    return args


def find_key(flag: str) -> str | None:
    """The field that corresponds to a flag of another command."""
    if flag == "model":
        return "checkpoint"
    known = [key for key in keys(Config) if not key.startswith("model.") and key not in SET_BY_LOAD]
    same = [key for key in known if key.rpartition(".")[2] == flag]
    return min(same, key=lambda key: key.count("."), default=None)


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
        if config.device == "cuda" and config.job.kind in IN_PROCESS:
            open_early()
        job = importlib.import_module(JOBS[config.job.kind])
    if config.job.save_recipe:
        about = {name: getattr(config, name) for name in ("dtype", "device", "level")}
        about |= {"model": config.model.name, "job": config.job.kind, "atom-run": atom.__version__}
        if write_recipe(config.job.save_recipe, rewrite(overrides, config_dirs=dirs), about):
            told = f"{config.job.save_recipe} is without {SECRET}, as others may read it; {SECRET}=@FILE would stay"
            print(f"atom-run: {told}", file=sys.stderr)
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
    import hydra

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


if __name__ == "__main__":
    sys.exit(main())
