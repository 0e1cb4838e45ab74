"""The command: overrides in, a job's answers on stdout, everything else on stderr.

    atom-run prompts="What is 2+2?" job.chat=true        # one run
    atom-run -m level=0,1 prompts=@questions.txt         # a run for each choice
    atom-run --cfg job model=qwen3 -p model.attention    # shows, runs nothing

A mistake of the user is one line and exit code 2, any other error that we foresee one line and 1, Ctrl-C 130.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import atom
from atom.config import Config, describe_fields, load, show
from atom.config.hydra import CONF, one_line_errors, plain_fields, register
from atom.config.overrides import HIDDEN, SECRET, hide_secret, one_line, override, parse, rewrite, write_recipe
from atom.devices import open_early
from atom.errors import AtomError, ConfigError
from atom.gc_utils import no_collection

if TYPE_CHECKING:
    from omegaconf import DictConfig

# conf/job -> the module whose run(config) does it
JOBS = {
    "serve": "atom.jobs.serve",
    "generate": "atom.jobs.generate",
    "explain": "atom.jobs.explain",
    "compile": "atom.jobs.compile",
    "cache": "atom.jobs.cache",
    "bench": "atom.jobs.bench",
    "profile": "atom.jobs.profile",
}

IN_PROCESS = ("generate", "bench", "profile")  # jobs that run an engine in this process

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
    """The exit code of some work; an error that we foresee is one line on stderr."""
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
    except (OSError, ValueError):  # nobody takes the rest: Python must not try again when it exits
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def dispatch(argv: list[str]) -> int:
    """Hydra's own flags mean what they mean to Hydra; without any of them one job runs here."""
    if "--version" in argv:
        print(f"atom-run {atom.__version__}")
        return 0
    if "--help" in argv or "-h" in argv:
        files = sorted(CONF.glob("*/*.yaml"))
        groups = {file.parent.name: [each.stem for each in files if each.parent == file.parent] for file in files}
        gpus = groups.pop("gpu")  # no group of Hydra's: job.gpu names one
        lines = [f"  {group}: {', '.join(names)}" for group, names in groups.items()]
        shown = [textwrap.fill(line, 120, subsequent_indent="    ") for line in lines]
        print(HELP.format(groups="\n".join(shown), gpus=", ".join(gpus), fields=describe_fields()))
        return 0
    args = parse_flags(argv)
    flags = [text for text in argv if text not in args.overrides]
    dirs = [args.config_dir] if args.config_dir else []
    if args.shell_completion or args.hydra_help or args.cfg in ("hydra", "all"):
        return run_hydra(flags, hide_secrets(args.overrides, dirs) if args.cfg else args.overrides)
    if args.multirun:
        return sweep(flags, args.overrides, dirs)
    if args.info:
        return run_hydra(flags, hide_secrets(rewrite(args.overrides, config_dirs=dirs), dirs))
    if args.cfg:
        texts = choose_job(args.overrides, dirs)
        print(show(texts, config_dirs=dirs, package=args.package, is_resolved=args.resolve), end="")
        return 0
    return run(args.overrides, dirs)


def parse_flags(argv: list[str]) -> argparse.Namespace:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; atom-run --help shows what there is")

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)
    if args.config_name or args.config_path or args.experimental_rerun:
        raise ConfigError("--config-name, --config-path, --experimental-rerun: use recipe= or --config-dir instead")
    if sum(map(bool, (args.cfg, args.info, args.multirun, args.run, args.shell_completion))) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion at a time")
    return args


def run(overrides: Sequence[str], dirs: Sequence[str] = ()) -> int:
    """Load the configuration and do its job."""
    overrides = choose_job(overrides, dirs)
    with no_collection():
        config = load(overrides, config_dirs=dirs)
        if config.job.kind not in JOBS:
            raise ConfigError(f"job.kind={config.job.kind}: there is no such job; jobs: {', '.join(JOBS)}")
        if config.device == "cuda" and config.job.kind in IN_PROCESS:
            open_early()
        job: Callable[[Config], int] = importlib.import_module(JOBS[config.job.kind]).run
    if config.job.save_recipe:
        about = {name: getattr(config, name) for name in ("dtype", "device", "level")}
        about |= {"model": config.model.name, "job": config.job.kind, "atom-run": atom.__version__}
        if write_recipe(config.job.save_recipe, rewrite(overrides, config_dirs=dirs), about):
            told = f"{config.job.save_recipe} is without {SECRET}, as others may read it; {SECRET}=@FILE would stay"
            print(f"atom-run: {told}", file=sys.stderr)
    return job(config)


def choose_job(overrides: Sequence[str], dirs: Sequence[str]) -> list[str]:
    """The overrides; where they give prompts and no job, the job is to answer these."""
    keys = {text.partition("=")[0] for text in rewrite(overrides, config_dirs=dirs)}
    return [*(["job=generate"] if keys & {"prompts", "job.chat"} and "job" not in keys else []), *overrides]


def hide_secrets(overrides: Sequence[str], dirs: Sequence[str]) -> list[str]:
    """The overrides for Hydra to show; it would show keys too, those of the environment included."""
    hidden = [hide_secret(text) for text in overrides]
    is_hidden = show(overrides, config_dirs=dirs, package=SECRET) == f"{HIDDEN}\n"
    return [*hidden, override(SECRET, HIDDEN)] if is_hidden and hidden == list(overrides) else hidden


def sweep(flags: list[str], overrides: Sequence[str], dirs: Sequence[str]) -> int:
    """Hydra runs the jobs. Where the choices are known, every configuration is loaded before the first job runs."""
    texts = rewrite(overrides, config_dirs=dirs, multirun=True)
    if any(text.startswith("job.save_recipe=") for text in texts):
        raise ConfigError("job.save_recipe writes the recipe of one run: leave out -m")
    for path in [Path(folder, name) for folder in dirs for name in plain_fields(Config)]:
        if path.is_dir():
            raise ConfigError(f"{path} makes a config group of the field {path.name}: move it, or leave out -m")
    for job in choices(texts):
        load(job, config_dirs=dirs)
    with tempfile.TemporaryDirectory(prefix="atom-run-") as folder:  # for Hydra's multirun.yaml
        own = [override("hydra.sweep.dir", folder)]
        return run_hydra(flags, [*own, *texts], is_sweep=True)


def choices(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of each job of a sweep over choices; nothing where another sweeper picks the values."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.types import ValueType
    from hydra.errors import HydraException

    if not any(text.startswith("hydra/sweeper=") for text in overrides):
        own = [each for each in map(parse, overrides) if not each.is_hydra_override()]
        if any(each.value_type is ValueType.GLOB_CHOICE_SWEEP for each in own):
            return  # only Hydra knows which files there are
        try:
            yield from BasicSweeper.split_arguments(own, None)[0]
        except HydraException as error:
            raise ConfigError(str(error)) from None


def run_hydra(flags: Sequence[str], overrides: Sequence[str], *, is_sweep: bool = False) -> int:
    import hydra

    register(Config)
    argv, said = sys.argv, io.StringIO()
    sys.argv = ["atom-run", *overrides, *flags]
    try:
        with one_line_errors(Config), contextlib.nullcontext() if is_sweep else contextlib.redirect_stderr(said):
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(run_of_sweep)()
    except SystemExit as end:
        if end.code and not is_sweep:
            raise ConfigError(said.getvalue()) from None
        return int(end.code or 0)
    finally:
        sys.argv = argv
    return 0


def run_of_sweep(_: DictConfig) -> None:
    """One job of a sweep, in this process or wherever a launcher runs it."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra = HydraConfig.get()
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(overrides, list), "Hydra keeps a list of overrides"
    dirs = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    print(f"atom-run: job {hydra.job.num}: {' '.join(map(hide_secret, overrides))}", file=sys.stderr, flush=True)
    if code := report(lambda: run(overrides, dirs)):
        raise SystemExit(code)


if __name__ == "__main__":
    sys.exit(main())
