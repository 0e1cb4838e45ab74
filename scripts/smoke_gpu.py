"""Run each path once on this GPU and compare it with the CPU.

    python scripts/smoke_gpu.py
    python scripts/smoke_gpu.py --only fp8,latents --jobs 2

Prints a line for each path as it ends (name, ok, failed or skipped, seconds, error or reason) and one verdict. Exits
with 1 if a path failed. smoke_paths.py has the paths; a path that crashes or hangs ends no other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NAMES = (  # of smoke_paths.PATHS, which is imported by the processes of paths only; the longest first
    "fp8-block-experts", "chosen-tokens", "batch-invariant", "mxfp4-experts",
    "mxfp4-in-fp8", "int4-in-fp8", "latents", "mtp", "fp8", "int4-zeros",
    "lora", "images", "whole-images", "class-tokens", "latent-sinks", "mean-runs",
    "attention-residuals", "latent-windows", "pooled-runs", "chosen-blocks", "fp8-kv", "dense",
    "windows", "shared-kv", "delta-rule", "mamba-2", "selective-scan", "lightning", "short-convolution",
    "shared-prefix", "delta-rule-ngram", "delta-rule-mtp", "ngram", "suffix", "sleep", "level-3", "level-0", "grammar",
    "scaled-gemm",
)  # fmt: skip
SECONDS = 300.0  # after which a path is taken to hang
LOG_LINES = 25  # of a failed path's output that are shown


class Outcome(NamedTuple):
    name: str
    status: str  # ok, failed or skipped
    seconds: float
    about: str  # the error of the numbers, or the reason
    log: str = ""  # the end of what it printed, if it failed
    machine: str = ""  # the device and the versions that it ran with

    def line(self) -> str:
        return f"{self.name:<19} {self.status:<8} {self.seconds:6.1f} s  {self.about}"


Process = subprocess.Popen[bytes]
Command = Callable[[str, Path], Sequence[str]]  # of a path's name and the file for its result


def command_of(device: str, cache: str | None) -> Command:
    options = ["--device", device, *(["--cache", cache] if cache else [])]
    return lambda name, result: [sys.executable, __file__, "--only", name, *options, "--result", str(result)]


def run_paths(names: Sequence[str], command: Command, jobs: int, seconds: float) -> Iterator[Outcome]:
    """Run each path in a process of its own, so many at a time; their outcomes as they end."""
    jobs = min(jobs, len(names))
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    running = set[Process]()
    with ThreadPoolExecutor(jobs) as pool:
        started = [pool.submit(run_process, name, command, threads, seconds, running) for name in names]
        try:
            for future in as_completed(started):
                yield future.result()
        except BaseException:  # an interrupt: nothing is left running
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                end_group(process)
            raise


def run_process(name: str, command: Command, threads: int, seconds: float, running: set[Process]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        began, hung = time.monotonic(), False
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(name, result), stdout=output, stderr=output, env=env, cwd=ROOT, start_new_session=True
            )
            running.add(process)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                end_group(process)
                running.remove(process)
        elapsed, tail = time.monotonic() - began, "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        if hung:
            return Outcome(name, "failed", elapsed, f"has not ended in {seconds:g} s", tail)
        if not result.exists():
            return Outcome(name, "failed", elapsed, f"its process ended with {process.returncode}", tail)
        status, about, machine = json.loads(result.read_text())
        return Outcome(name, status, elapsed, about, tail if status == "failed" else "", machine)


def end_group(process: Process) -> None:
    """End a path's process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_path(name: str, device: str, cache: str | None) -> tuple[str, str]:
    """Run a path in this process: its status, and the error of its numbers or the reason."""
    sys.path[:0] = [str(ROOT)]
    from scripts.smoke_paths import PATHS, Session, Skipped

    with tempfile.TemporaryDirectory() as folder:
        try:
            with Session(device, cache, Path(folder)) as session:
                figure = PATHS[name](session)
                spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in session.seconds.items())
                return "ok", f"error {figure}; {spent}"
        except Skipped as skip:
            return "skipped", f"({skip})"
        except Exception as error:
            traceback.print_exc()
            reason = (str(error).splitlines() or [""])[0]
            is_verdict = isinstance(error, AssertionError) and reason
            return "failed", reason if is_verdict else f"{type(error).__name__}: {reason}"


def describe_machine(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, Triton {version('triton')}"


def verdict(outcomes: Sequence[Outcome], seconds: float) -> str:
    of = {status: sorted(each.name for each in outcomes if each.status == status) for status in ("failed", "skipped")}
    machine = next((each.machine for each in outcomes if each.machine), "unknown machine")
    said = [f"{len(outcomes)} paths in {seconds:.0f} s ({machine})"]
    said += [f"{status}: {', '.join(names)}" for status, names in of.items() if names]
    return ("FAILED: " if of["failed"] else "passed: ") + "; ".join(said)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of paths, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names of paths, and end")
    parser.add_argument("--jobs", type=int, default=len(NAMES), help="paths at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a path may take (%(default)s)")
    parser.add_argument("--cache", help="folder for compiled kernels; the default is atom's own")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try this script without a GPU"
    )
    parser.add_argument("--result", help=argparse.SUPPRESS)  # of a path's own process: the file for its result
    asked = parser.parse_args()
    asked.names = asked.only.split(",") if asked.only else [*NAMES]
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"there is no path {unknown[0]}; paths: {', '.join(NAMES)}")
    if asked.jobs < 1:
        parser.error("--jobs: at least 1")
    return asked


def main() -> int:
    asked = read_arguments()
    if asked.list:
        print("\n".join(NAMES))
        return 0
    if asked.result:
        outcome = run_path(asked.names[0], asked.device, asked.cache)
        Path(asked.result).write_text(json.dumps([*outcome, describe_machine(asked.device)]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, outcomes = time.monotonic(), list[Outcome]()
    for outcome in run_paths(asked.names, command_of(asked.device, asked.cache), asked.jobs, asked.seconds):
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
    for outcome in outcomes:
        if outcome.status == "failed":
            print(f"\n{outcome.name}:\n{outcome.log}")
    print(verdict(outcomes, time.monotonic() - began), flush=True)
    return int(any(each.status == "failed" for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
