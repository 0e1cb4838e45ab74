"""Compile all our kernels with the oldest and the newest Triton allowed.

The first variant of each kernel goes through the front end of both, to Triton's IR, and if it is in Gluon with one of
them on to a cubin; the others go through the front end of one, or with --to-end all to cubins of both. A kernel that no
recorded launch reaches is an error, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    from kernel_launches import Launch

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".venv" / "triton"  # unpacked, by version


class Failure(NamedTuple):
    kernel: str
    variant: str
    triton: str  # its version
    error: str


Task = tuple["Launch", bool]  # and whether it is compiled to the end


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("arch", nargs="?", default="sm_90")
    arguments.add_argument("--to-end", action="store_true", help="compile all variants to a cubin")
    arguments.add_argument("--newest", action="store_true", help="only with the newest Triton")
    given = arguments.parse_args()
    began = time.monotonic()
    try:
        tritons = find_tritons(given.newest)
    except LookupError as error:
        print(f"check-kernels: {error}", file=sys.stderr)
        return 1
    fetched = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        launches, missing = record(given.arch, Path(folder), given.to_end)
        failures = compile_all(launches, given.arch, tritons, given.to_end)
    for each in missing:
        print(f"{each}: scripts/kernel_launches.py has no call that launches it", file=sys.stderr)
    for failure in failures:
        print(f"{failure.kernel}, Triton {failure.triton}: {failure.error}\n  {failure.variant}", file=sys.stderr)
    kernels = {each.kernel for each in launches}
    seconds = f"{time.monotonic() - fetched:.0f} s" + (
        f" after {fetched - began:.0f} s of fetching Triton" if fetched - began > 10 else ""
    )
    found = f": {len(failures)} failed, {len(missing)} not covered" if failures or missing else ""
    counts = f"{len(kernels)} kernels, {len(launches)} variants, Triton {' and '.join(tritons)}, {seconds}"
    print(f"{given.arch}: {counts}{found}")
    return 1 if failures or missing else 0


def find_tritons(is_newest: bool = False) -> dict[str, Path | None]:
    """The oldest and the newest Triton that pyproject.toml allows, with their folders; None: that of .venv.

    LookupError if one is neither here nor can be fetched.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (allowed,) = (Requirement(each).specifier for each in extras["cuda"] if each.startswith("triton"))
    (least,) = (each.version for each in allowed if each.operator == ">=")
    oldest = least if least.count(".") == 2 else f"{least}.0"
    installed = importlib.metadata.version("triton")
    here = {installed, *(each.name for each in WHEELS.glob("*.*"))}
    offered = _run_pip("index", "versions", "triton", pattern=r"(?<=[:,] )(\d+\.\d+\.\d+)(?=,|$)")
    if not offered:
        print(
            "check-kernels: cannot ask which versions of Triton there are; takes those that are here", file=sys.stderr
        )
    newest = max(allowed.filter({*here, *offered}), key=Version)
    wanted = [newest] if is_newest else [oldest, newest]
    return {each: None if each == installed else fetch_triton(each) for each in wanted}


def fetch_triton(version: str) -> Path:
    """The folder of a version, which is fetched unless it is here."""
    folder = WHEELS / version
    if not folder.exists():
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS, prefix=".") as part:
            options = "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", f"{part}/triton"
            done = subprocess.run([*_pip(), "install", *options, f"triton=={version}"], capture_output=True, text=True)
            if done.returncode:
                raise LookupError(f"Triton {version} is not in {folder}, and cannot be fetched: {done.stderr.strip()}")
            shutil.move(f"{part}/triton", folder)
    return folder


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _run_pip(*args: str, pattern: str) -> list[str]:
    """What a pattern finds in the output of pip."""
    done = subprocess.run([*_pip(), *args], capture_output=True, text=True)
    return re.findall(pattern, done.stdout, re.MULTILINE)


def record(arch: str, folder: Path, is_thorough: bool = False) -> tuple[list[Launch], list[str]]:
    """The launches to compile, and the kernels that none is of."""
    import kernel_launches

    kernel_launches.use_gpu(arch)
    launches = kernel_launches.record_launches(arch, folder, is_thorough)
    # those in Gluon, and some that give them their inputs, are Hopper's
    missing = kernel_launches.find_kernels() - {each.kernel for each in launches} if arch == "sm_90" else set()
    return kernel_launches.pick_launches(launches, is_thorough), sorted(missing)


def compile_all(
    launches: Sequence[Launch], arch: str, tritons: dict[str, Path | None], is_to_end: bool = False
) -> list[Failure]:
    """Compile in as many processes as there are cores, at least one for each Triton. is_to_end: all to a cubin."""
    count = max(1, len(os.sched_getaffinity(0)) // len(tritons))
    running = list[tuple[subprocess.Popen[str], list[Task], str]]()
    shares = share_tasks(launches, len(tritons), is_to_end)
    for (version, folder), tasks in zip(tritons.items(), shares, strict=True):
        for part in (tasks[at::count] for at in range(count)):
            running.append((start(part, arch, folder), part, version))
    return [failure for process, part, version in running for failure in read_failures(process, part, version)]


def share_tasks(launches: Sequence[Launch], num_tritons: int, is_to_end: bool = False) -> list[list[Task]]:
    """What each Triton compiles: the first variant of each kernel, and in turns the others.

    Those in Gluon, whose layouts meet the hardware's rules only in the end, one of them compiles to the end.
    is_to_end: each compiles all variants, to the end
    """
    if is_to_end:
        return [[(each, True) for each in launches]] * num_tritons
    firsts = [*{each.kernel: at for at, each in reversed([*enumerate(launches)])}.values()]
    gluon = [at for at in firsts if ".hopper." in launches[at].kernel]
    others = [at for at in range(len(launches)) if at not in firsts]
    return [
        [(launches[at], at in gluon[number::num_tritons]) for at in [*firsts, *others[number::num_tritons]]]
        for number in range(num_tritons)
    ]


def start(tasks: Sequence[Task], arch: str, triton: Path | None) -> subprocess.Popen[str]:
    """Start a process that compiles. triton: the folder of a version; None: that of .venv"""
    path = [str(each) for each in (triton, ROOT, ROOT / "scripts", os.environ.get("PYTHONPATH")) if each]
    with tempfile.TemporaryFile() as queue:
        pickle.dump(list(tasks), queue)
        queue.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", f"import check_kernels; check_kernels.work({arch!r})"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, stdin=queue, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip


def read_failures(process: subprocess.Popen[str], tasks: Sequence[Task], version: str) -> Iterator[Failure]:
    """What failed to compile; a process that died, of what it compiled last."""
    lines = process.communicate()[0].splitlines()
    launch = tasks[0][0]
    for line in map(json.loads, lines):
        if isinstance(line, int):
            launch = tasks[line][0]
        else:
            yield Failure(launch.kernel, str(launch), version, line)
    if process.returncode:
        yield Failure(launch.kernel, str(launch), version, f"the compiler's process ended with {process.returncode}")


def work(arch: str) -> None:
    """Compile the tasks of stdin; a line on stdout before each, and one for each error."""
    import kernel_launches

    kernel_launches.use_gpu(arch)
    for at, (launch, is_to_end) in enumerate(pickle.load(sys.stdin.buffer)):
        print(at, flush=True)
        try:
            kernel_launches.compile_launch(launch, arch, is_to_end)
        except Exception as error:
            print(json.dumps(explain(error)), flush=True)


def explain(error: BaseException) -> str:
    """Its text, and those of the errors that led to it unless it has them."""
    text = str(error)
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        text += "" if str(error) in text else f"\n{type(error).__name__}: {error}"
    return text


if __name__ == "__main__":
    sys.exit(main())
