"""Run a sweep: Hydra's sweeper picks overrides, its launcher runs the jobs.

    sweep(["level=0,1", "prompts=hi"], [], run)                                     # two jobs, one after the other
    sweep(["hydra/sweeper=optuna", "job=bench", "job.objective=output_throughput", …], [], run)
    sweep(["hydra/launcher=submitit_slurm", "job=bench", "level=1,2"], [], run)

Where the choices are known, every configuration is loaded before the first job runs. Files of plugins are kept, and so
is the output of jobs that run elsewhere: it is shown at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from atom.config import Config
from atom.config.hydra import SEARCHPATH, make_search_path, one_line_errors, register, search_path_of
from atom.config.overrides import hide_secret, parse, plain, rewrite
from atom.config.schema import plain_fields
from atom.config.spelling import override
from atom.errors import AtomError, ConfigError, one_line
from atom.jobs.start import check_objective, choose_job, has_objectives, keys_of, load_job

# overrides and config dirs -> the exit code and the job's objective
Run = Callable[[Sequence[str], Sequence[str]], tuple[int, float | None]]
RESULTS = "optimization_results.yaml"  # the file name of Hydra's sweepers


class JobEndedError(AtomError):
    """A job run by a plugin has ended with a nonzero exit code, and has reported why."""


def sweep(overrides: Sequence[str], dirs: Sequence[str], run: Run) -> int:
    """Run the jobs of a sweep; its exit code."""
    texts = rewrite(overrides, config_dirs=dirs, multirun=True)
    if any(text.startswith("job.save_recipe=") for text in texts):
        raise ConfigError("job.save_recipe writes the recipe of one run: leave out -m")
    for path in [Path(folder, name) for folder in dirs for name in plain_fields(Config)]:
        if path.is_dir():
            raise ConfigError(f"{path} makes a config group of the field {path.name}: move it, or leave out -m")
    sweeper, launcher = (chosen(texts, f"hydra/{kind}") for kind in ("sweeper", "launcher"))
    is_plain = sweeper == launcher == "basic"
    dirs = [str(Path(folder).absolute()) for folder in dirs]
    with one_line_errors(Config), open_hydra(search_path_of(texts, dirs)) as hydra, contextlib.ExitStack() as stack:
        if sweeper == "basic":
            for job in choices(texts, hydra):
                load_job(choose_job([*job, *search_path_overrides(texts)], dirs), dirs, is_sweep=True)
        else:
            check_fixed(texts, dirs, sweeper)
        folder = stack.enter_context(open_folder(texts, is_plain))
        task = functools.partial(run_job, run, dirs, folder, is_plain, identity(sys.stdout))
        own = [override("hydra.sweep.dir", str(folder)), "hydra.mode=MULTIRUN"]
        others = [text for text in texts if not text.startswith("hydra.sweep.dir=")]
        try:
            hydra.multirun("config", task, [*own, *others])
        except JobEndedError as error:
            return error.exit_code
        except SystemExit as end:
            return int(end.code or 0)
        except Exception as error:
            if is_plain or isinstance(error, AtomError | HydraException | OmegaConfBaseException):
                raise
            plugins = f"hydra/sweeper={sweeper} with hydra/launcher={launcher}"
            raise AtomError(f"{plugins}: {type(error).__name__}: {one_line(error)}") from error
        finally:
            show_outputs(folder)
    return 0


def chosen(texts: Sequence[str], group: str) -> str:
    return next((text.partition("=")[2] for text in reversed(texts) if text.startswith(f"{group}=")), "basic")


def search_path_overrides(texts: Any) -> list[str]:
    """The overrides of hydra.searchpath, with which each job is loaded too."""
    return [text for text in texts if text.startswith(SEARCHPATH)]


@contextlib.contextmanager
def open_hydra(paths: Sequence[str]) -> Iterator[Hydra]:
    """Open Hydra with conf/ and these paths as its search path."""
    register(Config)
    version.setbase("1.3")
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield Hydra.create_main_hydra2("atom-run", make_search_path(paths))
    finally:
        GlobalHydra.instance().hydra = outer


@contextlib.contextmanager
def open_folder(texts: Sequence[str], is_plain: bool) -> Iterator[Path]:
    """Open the sweep's folder: hydra.sweep.dir, else a temporary one, which is kept where plugins may write to it."""
    dirs = [text for text in texts if text.startswith("hydra.sweep.dir=")]
    folder = Path(plain(parse(dirs[-1])) if dirs else datetime.now().strftime("multirun/%Y-%m-%d/%H-%M-%S")).absolute()
    if is_plain and not dirs:
        with tempfile.TemporaryDirectory(prefix="atom-run-") as temporary:  # for Hydra's multirun.yaml
            yield Path(temporary)
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"atom-run: what the sweep writes is in {folder}", file=sys.stderr, flush=True)
    yield folder


def choices(texts: Sequence[str], hydra: Hydra) -> list[list[str]]:
    """The overrides of each job of Hydra's own sweeper. ConfigError where an override has no choices."""
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(list(texts))
    own = [each for each in parsed if not each.is_hydra_override()]
    for each in own:
        if each.is_discrete_sweep() and not any(True for _ in each.sweep_string_iterator()):
            names = hydra.config_loader.get_group_options(each.key_or_group)
            why = f"none of {', '.join(names)} is like that" if names else "there is nothing from its start to its end"
            if each.value_type is ValueType.GLOB_CHOICE_SWEEP and not names:
                why = f"glob finds files of a group, and {each.key_or_group} is none; write its values, as in a,b"
            raise ConfigError(f"{each.input_line} is no choice: {why}")
    try:
        jobs: list[list[str]] = BasicSweeper.split_arguments(own, None)[0]
    except HydraException as error:
        raise ConfigError(str(error)) from None
    return jobs


def check_fixed(texts: Sequence[str], dirs: Sequence[str], sweeper: str) -> None:
    """Raise ConfigError where a sweeper that compares jobs would get no objective of them."""
    fixed = [text for text in texts if "=" in text and not parse(text).is_sweep_override()]
    parsed = map(parse, rewrite(choose_job(fixed, dirs), config_dirs=dirs))
    values = {each.key_or_group: each.value() for each in parsed if not each.is_hydra_override()}
    job, objective = values.get("job", "serve"), values.get("job.objective")
    if objective is not None:
        check_objective(str(objective), job)
    elif has_objectives(job) and "job.objective" not in keys_of(texts):
        hint = f"give job.objective=NAME, a number that job={job} reports; job.objective=? lists them"
        raise ConfigError(f"hydra/sweeper={sweeper} compares jobs by a number: {hint}")


def run_job(
    run: Run, dirs: Sequence[str], folder: Path, is_plain: bool, seen: tuple[int, int] | None, _: DictConfig
) -> float | None:
    """Run one job of a sweep, in this process or where a launcher runs it; its objective.

    seen: the identity of the visible stdout; other output is kept in the sweep's folder.
    """
    register(Config)
    hydra = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    overrides += search_path_overrides(OmegaConf.to_container(hydra.overrides.hydra, resolve=False))
    with contextlib.ExitStack() as stack:
        if identity(sys.stdout) != seen:
            stack.enter_context(copied(redirect_stdout, sys.stdout, folder / f"{hydra.job.num}.out"))
            stack.enter_context(copied(redirect_stderr, sys.stderr, folder / f"{hydra.job.num}.err"))
        print(f"atom-run: job {hydra.job.num}: {' '.join(map(hide_secret, overrides))}", file=sys.stderr, flush=True)
        try:
            code, objective = run(overrides, dirs)
        except Exception:
            if is_plain:
                raise
            traceback.print_exc()  # a bug of ours, printed here since a plugin's error would not say where it was
            code, objective = 1, None
        if objective is not None:
            print(f"atom-run: job {hydra.job.num}: objective {objective}", file=sys.stderr, flush=True)
    if code and is_plain:
        raise SystemExit(code)  # ends the sweep
    if code:
        error = JobEndedError(f"job {hydra.job.num} has ended with exit code {code}")
        error.exit_code = code
        raise error
    return objective


def identity(stream: TextIO) -> tuple[int, int] | None:
    """The device and inode that a stream writes to; None where it has no file descriptor."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return status.st_dev, status.st_ino


class Copies:
    """A stream that writes to two streams."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self.first, self.second = first, second

    def write(self, text: str) -> int:
        self.second.write(text)
        return self.first.write(text)

    def flush(self) -> None:
        self.second.flush()
        self.first.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)


@contextlib.contextmanager
def copied(redirect: Any, stream: TextIO, path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file, redirect(Copies(stream, file)):
        yield


def show_outputs(folder: Path) -> None:
    """Show the output of jobs that ran elsewhere, one after the other, and the sweeper's results."""
    for path in sorted(folder.glob("[0-9]*.err"), key=lambda path: int(path.stem)):
        for each, stream in ((path, sys.stderr), (path.with_suffix(".out"), sys.stdout)):
            with each.open(encoding="utf-8") as file:
                shutil.copyfileobj(file, stream)
            stream.flush()
    if (results := folder / RESULTS).is_file():
        print(results.read_text("utf-8"), end="")
