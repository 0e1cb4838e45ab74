"""Run a job of a sweep in its own process, and keep the result.

    result = run_job(Sweep(folder, …), 3, ["job=bench", "level=1"])
    result.code, result.numbers["output_throughput"]

A launcher may call this in any process, on any machine that shares the sweep's folder. There the job leaves its result,
3-KEY.json, and what it wrote, 3-KEY.out and 3-KEY.err. The key is a hash of all that its numbers follow from: final
values of the configuration, files, versions, the machine. So `job.resume` finds what is done.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, TextIO

from filelock import FileLock, Timeout

from atom.cache import digest, key_of
from atom.config import Config
from atom.config.load import gpu_of
from atom.config.overrides import hide_secret
from atom.devices import count_devices
from atom.errors import AtomError
from atom.jobs.report import report
from atom.jobs.run import run
from atom.jobs.start import choose_job, load_job
from atom.measurement.hardware import describe_machine, package_versions
from atom.process.child_process import end, exit_status, start_python
from atom.process.messages import PREFIX

PACKAGE = Path(__file__).parents[2]
# values that no number of a job follows from
UNRELATED = ("overrides", "recipe", "cache", "advanced")
UNRELATED_OF = {
    "job": ("objective", "resume", "output", "output_file", "save_recipe"),
    "serve": ("http", "torch_profiler_dir"),
    "parallel": ("visible_devices",),
}
OF_SWEEP = ("job.objective", "job.resume")  # fields that are not of a job
KEY_DIGITS = 16  # hex, of a name of files
POLL_SECONDS = 0.2
SIGNALED = 128  # and the signal: the exit code of a job that one has ended, as a shell's


@dataclass(frozen=True)
class Sweep:
    """Settings of a sweep that all its jobs share."""

    folder: Path  # absolute, of results
    config_dirs: list[str]  # absolute
    cwd: Path
    started: str  # when; results of earlier sweeps may be in the folder too
    is_resumed: bool  # results that are in the folder count
    is_shown: bool  # what jobs write is shown while they run
    pins_gpus: bool  # jobs that run at the same time get GPUs of their own


@dataclass(frozen=True)
class Result:
    """A job that has ended."""

    key: str
    sweep: str  # when the sweep that it is of started
    number: int  # in that sweep
    overrides: list[str]  # its own_overrides
    hardware: str
    versions: dict[str, str]
    job: str | None = None  # None, as what follows: its configuration cannot be loaded
    output: str | None = None  # job.output
    device: str | None = None
    gpu: str | None = None  # that job=explain is about
    num_ranks: int = 1
    objective_name: str | None = None  # job.objective
    is_resumed: bool = False  # what follows is of an earlier sweep
    log: str = ""  # file of what it wrote to stderr
    code: int = 0  # of its exit
    error: str | None = None  # the last line that it wrote, if it failed
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)  # of the job's OBJECTIVES

    @property
    def objective(self) -> float | None:
        """The number that the sweep compares; None if none is asked for, or the job failed."""
        return None if self.objective_name is None else self.numbers.get(self.objective_name)


def run_job(sweep: Sweep, number: int, overrides: Sequence[str]) -> Result:
    """Run a job unless it is done; its result, which is then in the folder."""
    result, gpus = describe_job(sweep, number, overrides)
    path = sweep.folder / f"{number}-{result.key}.json"
    if sweep.is_resumed and (done := find_done(sweep.folder, result.key)):
        result = replace(result, is_resumed=True, log=done.log, seconds=done.seconds, numbers=done.numbers)
        write_result(path, result)
        return result
    numbers, log = path.with_suffix(".numbers"), path.with_suffix(".err")
    numbers.unlink(missing_ok=True)
    own = [text for text in overrides if not text.startswith("job.resume=")]  # it is the sweep that goes on
    task = {"overrides": own, "config_dirs": sweep.config_dirs, "numbers": str(numbers)}
    with pinned_gpus(sweep.folder / "gpus", gpus, result.num_ranks) as environment:
        started = time.perf_counter()
        code = run_process(task, path, sweep, environment)
        result = replace(result, code=code, seconds=time.perf_counter() - started, log=log.name)
    if numbers.is_file():
        result = replace(result, numbers=json.loads(numbers.read_text()))
        numbers.unlink()
    if code:
        result = replace(result, error=describe_signal(code) or last_line(log))
    write_result(path, result)
    return result


def describe_job(sweep: Sweep, number: int, overrides: Sequence[str]) -> tuple[Result, list[str]]:
    """Describe a job before it runs, and the GPUs that it may be given."""
    versions, hardware = find_versions(), describe_machine()
    result = Result("", sweep.started, number, own_overrides(overrides), hardware=hardware, versions=versions)
    try:
        config = load_job(choose_job(overrides, sweep.config_dirs), sweep.config_dirs, is_sweep=True)
    except AtomError:  # the job itself reports it
        return replace(result, key=name_of({"overrides": json.dumps(result.overrides), **versions})), []
    result = replace(
        result,
        key=name_of({**ingredients(config, sweep.cwd), **versions, "hardware": hardware}),
        job=config.job.kind,
        output=config.job.output,
        device=config.device,
        gpu=gpu_of(config),
        num_ranks=config.parallel.num_ranks,
        objective_name=config.job.objective,
    )
    return result, visible_gpus(config) if config.device == "cuda" and sweep.pins_gpus else []


def name_of(ingredients: dict[str, str]) -> str:
    """The key of a job as a part of the names of its files."""
    return key_of(ingredients)[:KEY_DIGITS]


def own_overrides(overrides: Sequence[str]) -> list[str]:
    """A job's overrides as they may be shown, without those of the sweep."""
    return [hide_secret(text) for text in overrides if text.partition("=")[0] not in OF_SWEEP]


def find_versions() -> dict[str, str]:
    """The versions that numbers follow from; of atom, a digest of its files."""
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".json"))
    sources = digest("".join(f"{path.relative_to(PACKAGE)}\n{path.read_text()}" for path in files))
    return {"atom": sources, **package_versions()}


def ingredients(config: Config, cwd: Path) -> dict[str, str]:
    """The final values that a job's numbers follow from, and the files that it reads: size and time of change."""
    values: dict[str, Any] = asdict(config)
    for name in UNRELATED:
        del values[name]
    for block, names in UNRELATED_OF.items():
        for name in names:
            del values[block][name]
    prompts = config.prompts[1:] if isinstance(config.prompts, str) and config.prompts.startswith("@") else None
    files = []
    read = [*(config.job.texts or ()), *(config.job.tasks or ())]  # of names there is no file
    for path in filter(None, (config.checkpoint, prompts, config.job.dataset_path, config.job.graph, *read)):
        at = cwd / Path(path).expanduser()
        for file in sorted(at.iterdir()) if at.is_dir() else [at]:
            if file.is_file():
                files.append((str(file), file.stat().st_size, file.stat().st_mtime_ns))
    return {"config": json.dumps(values, sort_keys=True, default=str), "files": json.dumps(files)}


def visible_gpus(config: Config) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    visible = config.parallel.visible_devices
    return visible.split(",") if visible else [str(number) for number in range(count_devices())]


@contextlib.contextmanager
def pinned_gpus(folder: Path, gpus: Sequence[str], num: int) -> Iterator[dict[str, Any]]:
    """Hold this many of these GPUs, or all of fewer, once no other job does; the environment that says so."""
    if not gpus:
        yield {}
        return
    folder.mkdir(exist_ok=True)
    while True:
        with ExitStack() as held:
            mine: list[str] = []
            for gpu in gpus:
                with contextlib.suppress(Timeout):
                    held.enter_context(FileLock(folder / f"{platform.node()}-{gpu}.lock", timeout=0))
                    mine.append(gpu)
                if len(mine) == min(num, len(gpus)):
                    yield {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
                    return
        time.sleep(POLL_SECONDS)


def run_process(task: dict[str, Any], path: Path, sweep: Sweep, environment: dict[str, Any]) -> int:
    """Run a job in a process of its own, which ends with this one; its exit code.

    What it writes goes to path.out and path.err, and where it is shown to stdout and stderr.
    """
    code = "from atom.jobs.sweep.job import work; work()"
    process = start_python(code, stderr=PIPE, cwd=sweep.cwd, **environment)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    shown = (sys.stdout, sys.stderr) if sweep.is_shown else (None, None)
    out, err = (
        threading.Thread(target=copy, args=(pipe, path.with_suffix(suffix), stream))
        for pipe, suffix, stream in zip((process.stdout, process.stderr), (".out", ".err"), shown, strict=True)
    )
    try:
        out.start()
        err.start()
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(f"{json.dumps(task)}\n".encode())
            process.stdin.flush()
        exit_status(process)
    finally:
        ended = end(process, out)
        err.join()
    return ended if ended >= 0 else SIGNALED - ended


def copy(pipe: IO[bytes], path: Path, shown: TextIO | None) -> None:
    """Copy what a process writes to a file and, as it comes, to a stream."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with path.open("wb") as file, pipe:
        while chunk := os.read(pipe.fileno(), 1 << 16):
            file.write(chunk)
            file.flush()
            try:
                if shown is not None:
                    shown.write(decoder.decode(chunk))
                    shown.flush()
            except OSError:  # the reader is gone; the file goes on
                shown = None


def work() -> None:
    """Run the job that a line on stdin describes, and exit with its code; the process of a job calls this."""
    task = json.loads(os.fdopen(os.dup(0), "rb", buffering=0).readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    with open(os.devnull) as sys.stdin:
        sys.exit(run_task(task))


def end_with_parent() -> None:
    """End this process and all that it has started when stdin ends, as it does with the parent."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.killpg(0, signal.SIGKILL)


def run_task(task: dict[str, Any]) -> int:
    """Run a job, and write its numbers; its exit code."""

    def write(numbers: Mapping[str, float]) -> None:
        Path(task["numbers"]).write_text(json.dumps(numbers))

    return report(lambda: run(task["overrides"], task["config_dirs"], is_sweep=True, report=write))


def find_done(folder: Path, key: str) -> Result | None:
    """The result of a job that is done."""
    found = filter(None, map(read_result, folder.glob(f"*-{key}.json")))
    return next((result for result in found if result.code == 0), None)


def read_result(path: Path) -> Result | None:
    """Read a result; None if it is missing or of another version."""
    try:
        return Result(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_results(sweep: Sweep) -> list[Result]:
    """The results of this sweep's jobs, by number."""
    found = filter(None, map(read_result, sweep.folder.glob("*.json")))
    return sorted((each for each in found if each.sweep == sweep.started), key=lambda result: result.number)


def write_result(path: Path, result: Result) -> None:
    """Write a result whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(result), indent=1))
    temporary.replace(path)


def describe_signal(code: int) -> str | None:
    """Describe the signal that has ended a job, if its exit code is that of a signal."""
    names = {SIGNALED + each.value: each.name for each in signal.Signals}
    return f"it was ended by {names[code]}" if code in names else None


def last_line(path: Path) -> str | None:
    """The last line of a log that is not blank, without the command's name."""
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()] if path.is_file() else []
    return lines[-1].removeprefix(PREFIX) if lines else None
