"""Run a sweep: Hydra's sweeper picks overrides, its launcher runs the jobs.

    sweep(["level=0,1", "prompts=hi"], [])                                          # two jobs, one after the other
    sweep(["hydra/sweeper=optuna", "job=bench", "job.objective=output_throughput", …], [])
    sweep(["hydra/launcher=submitit_slurm", "job=bench", "level=1,2"], [])

Each job is a process of its own. If the choices are known, every configuration is loaded before the first job runs.
What jobs write is shown while they run one after the other; if a launcher runs them elsewhere, at the end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

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
from atom.config.hydra import register
from atom.config.hydra_errors import no_choice, one_line_errors
from atom.config.model_files import SEARCHPATH, make_search_path, search_path_of
from atom.config.overrides import parse, plain, rewrite
from atom.config.schema_keys import plain_fields
from atom.config.spelling import override
from atom.errors import AtomError, ConfigError, one_line
from atom.jobs.kind import keys_of
from atom.jobs.start import check_objective, choose_job, has_objectives, load_job
from atom.jobs.sweep.job import UNRELATED_OF, Result, Sweep, own_overrides, read_results, run_job
from atom.jobs.sweep.report import report_results
from atom.process.messages import say

FOLDERS = "multirun"  # where sweeps have their folders, by date and time
ASKED = "asked.json"  # of a sweep: what it was asked for
FOUND = "optimization_results.yaml"  # the file name of Hydra's sweepers
SCHEDULERS = ("submitit_slurm",)  # launchers that give each job GPUs of its own


class JobEndedError(AtomError):
    """A job that a sweeper compares has ended with a nonzero exit code, and has reported why."""


def sweep(overrides: Sequence[str], dirs: Sequence[str]) -> int:
    """Run the jobs of a sweep, and report their results; the exit code is that of the first job that failed."""
    texts = rewrite(overrides, config_dirs=dirs, multirun=True)
    check_fields(texts, dirs)
    sweeper, launcher = (chosen(texts, f"hydra/{kind}") for kind in ("sweeper", "launcher"))
    dirs = [str(Path(folder).absolute()) for folder in dirs]
    with one_line_errors(Config), open_hydra(search_path_of(texts, dirs)) as hydra:
        check_plugins({"hydra/sweeper": sweeper, "hydra/launcher": launcher}, hydra)
        if sweeper == "basic":
            check_choices(choices(texts, hydra), texts, dirs)
        else:
            check_fixed(texts, dirs, sweeper)
        started, is_resumed = datetime.now(), is_set(texts, "job.resume")
        folder = find_folder(texts, started, is_resumed)
        jobs = Sweep(
            folder / "jobs",
            dirs,
            Path.cwd(),
            started.isoformat(),
            is_resumed=is_resumed,
            is_shown=launcher == "basic",
            pins_gpus=launcher not in SCHEDULERS,
        )
        try:
            jobs.folder.mkdir(parents=True, exist_ok=True)
            (folder / ASKED).write_text(json.dumps(fixed_part(texts)))
        except OSError as error:
            raise ConfigError(f"hydra.sweep.dir={folder} cannot be written: {error.strerror}") from None
        say(f"what the sweep writes is in {folder}")
        own = [override("hydra.sweep.dir", str(folder)), "hydra.mode=MULTIRUN"]
        others = [text for text in texts if not text.startswith("hydra.sweep.dir=")]
        code = 0
        try:
            hydra.multirun("config", functools.partial(run_one, jobs, sweeper == "basic"), [*own, *others])
        except JobEndedError as error:
            code = error.exit_code
        except KeyboardInterrupt:
            say("the sweep was interrupted; the same line with job.resume=true goes on with it")
            raise
        except Exception as error:
            if sweeper == launcher == "basic" or isinstance(error, AtomError | HydraException | OmegaConfBaseException):
                raise
            plugins = f"hydra/sweeper={sweeper} with hydra/launcher={launcher}"
            raise AtomError(f"{plugins}: {type(error).__name__}: {one_line(error)}") from error
        finally:
            results = show_results(jobs, folder)
    if sweeper == "basic":
        code = next((result.code for result in results if result.code), 0)
    return code


def show_results(jobs: Sweep, folder: Path) -> list[Result]:
    """Show what the jobs of a sweep have come to, and what its sweeper has found; the results."""
    results = read_results(jobs)
    if not jobs.is_shown:
        show_outputs(results, jobs)
    report_results(results, folder)
    if failed := [f"job {result.number}" for result in results if result.code]:
        say(f"{len(failed)} of {len(results)} jobs failed: {', '.join(failed)}")
    if (found := folder / FOUND).is_file():
        print(found.read_text("utf-8"), end="")
    return results


def check_fields(texts: Sequence[str], dirs: Sequence[str]) -> None:
    """Raise ConfigError for what is of one run, and for what hides a field from Hydra."""
    if any(text.startswith("job.save_recipe=") for text in texts):
        raise ConfigError("job.save_recipe writes the recipe of one run: leave out -m")
    for path in [Path(folder, name) for folder in dirs for name in plain_fields(Config)]:
        if path.is_dir():
            raise ConfigError(f"{path} makes a config group of the field {path.name}: move it, or leave out -m")


def check_plugins(plugins: Mapping[str, str], hydra: Hydra) -> None:
    """Raise ConfigError for a sweeper or launcher that is not there, before the sweep has a folder."""
    for group, name in plugins.items():
        names = hydra.config_loader.get_group_options(group)
        if name not in names:
            raise no_choice(group, name, names)


def check_choices(jobs: Iterable[Sequence[str]], texts: Sequence[str], dirs: Sequence[str]) -> None:
    """Load the configuration of each job. ConfigError ends the sweep; a job with another error fails in its turn."""
    for job in jobs:
        try:
            load_job(choose_job([*job, *search_path_overrides(texts)], dirs), dirs, is_sweep=True)
        except ConfigError:
            raise
        except AtomError:  # of a checkpoint, or not supported here: the job itself reports it
            continue


def is_set(texts: Iterable[str], key: str) -> bool:
    """Whether an override sets a field to true."""
    values = [parse(text).value() for text in texts if text.startswith(f"{key}=")]
    return values[-1:] == [True]


def find_folder(texts: Sequence[str], started: datetime, is_resumed: bool) -> Path:
    """The sweep's folder: hydra.sweep.dir, else a new one; if it is resumed, that of the latest such sweep."""
    dirs = [text for text in texts if text.startswith("hydra.sweep.dir=")]
    if dirs:
        return Path(plain(parse(dirs[-1]))).absolute()
    asked = json.dumps(fixed_part(texts))
    earlier = sorted(path for path in Path(FOLDERS).glob(f"*/*/{ASKED}") if path.read_text() == asked)
    if is_resumed and earlier:
        return earlier[-1].parent.absolute()
    if is_resumed:
        say(f"{FOLDERS}/ has no such sweep to go on with, so a new one begins")
    return Path(FOLDERS, started.strftime("%Y-%m-%d/%H-%M-%S")).absolute()


def fixed_part(texts: Iterable[str]) -> dict[str, str | None]:
    """The identity of a sweep: its overrides by key, None if choices are swept, which may become more."""
    parsed = {each.get_key_element(): each for each in map(parse, texts)}
    given = sorted(parsed.keys() - {"hydra.sweep.dir", "cache", *(f"job.{name}" for name in UNRELATED_OF["job"])})
    return {key: None if parsed[key].is_sweep_override() else parsed[key].input_line for key in given}


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


def choices(texts: Sequence[str], hydra: Hydra) -> list[list[str]]:
    """The overrides of each job of Hydra's own sweeper. ConfigError if an override has no choices."""
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(list(texts))
    own = [each for each in parsed if not each.is_hydra_override()]
    for each in own:
        if each.is_discrete_sweep() and not any(True for _ in each.sweep_string_iterator()):
            names = hydra.config_loader.get_group_options(each.key_or_group)
            why = f"none of {', '.join(names)} is like that" if names else "there is nothing from its start to its end"
            if each.value_type is ValueType.GLOB_CHOICE_SWEEP and not names:
                why = f"glob finds files of a group, and {each.key_or_group} is none; write its values, as in a,b"
            raise ConfigError(f"{each.input_line} is not a choice: {why}")
    try:
        jobs: list[list[str]] = BasicSweeper.split_arguments(own, None)[0]
    except HydraException as error:
        raise ConfigError(str(error)) from None
    return jobs


def check_fixed(texts: Sequence[str], dirs: Sequence[str], sweeper: str) -> None:
    """Raise ConfigError if a sweeper that compares jobs would get no objective of them."""
    fixed = [text for text in texts if "=" in text and not parse(text).is_sweep_override()]
    parsed = map(parse, rewrite(choose_job(fixed, dirs), config_dirs=dirs))
    values = {each.key_or_group: each.value() for each in parsed if not each.is_hydra_override()}
    job, objective = values.get("job", "serve"), values.get("job.objective")
    if objective is not None:
        check_objective(str(objective), job)
    elif has_objectives(job) and "job.objective" not in keys_of(texts):
        hint = f"give job.objective=NAME, a number that job={job} reports; job.objective=? lists them"
        raise ConfigError(f"hydra/sweeper={sweeper} compares jobs by a number: {hint}")


def run_one(sweep: Sweep, is_basic: bool, _: DictConfig) -> float | None:
    """Run one job, in this process or where a launcher runs it; its objective. A launcher calls this.

    is_basic: Hydra's own sweeper, which runs all jobs; others receive the failure, and decide
    """
    register(Config)
    hydra = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    overrides += search_path_overrides(OmegaConf.to_container(hydra.overrides.hydra, resolve=False))
    say(heading(hydra.job.num, own_overrides(overrides)))
    result = run_job(sweep, hydra.job.num, overrides)
    if sweep.is_shown:
        show_ending(result, sweep)
    if result.code and not is_basic:
        error = JobEndedError(f"job {result.number} has ended with exit code {result.code}")
        error.exit_code = result.code
        raise error
    return result.objective


def heading(number: int, overrides: Iterable[str]) -> str:
    return f"job {number}: {' '.join(overrides)}"


def show_ending(result: Result, sweep: Sweep) -> None:
    """Say how a job has ended, and where what it wrote is."""
    about = [f"{result.seconds:.1f} s"]
    if result.is_resumed:
        about = ["done before"]
    if result.code:
        about = [f"failed with exit code {result.code}"]
    if result.objective is not None:
        about.append(f"{result.objective_name} {result.objective:g}")
    line = f"job {result.number}: {', '.join(about)}; log: {sweep.folder / result.log}"
    say(line)


def show_outputs(results: Sequence[Result], sweep: Sweep) -> None:
    """Show what jobs have written that nobody has seen yet, one after the other."""
    for result in results:
        say(heading(result.number, result.overrides))
        for suffix, stream in ((".err", sys.stderr), (".out", sys.stdout)) if not result.is_resumed else ():
            with (sweep.folder / result.log).with_suffix(suffix).open(encoding="utf-8", errors="replace") as file:
                shutil.copyfileobj(file, stream)
            stream.flush()
        show_ending(result, sweep)
