"""Describe the hardware, packages and commit of a measurement.

Results of different machines must not be taken for a change of the program.

    describe_machine()      # "8 x NVIDIA H200" or "64 x AMD EPYC 9654 96-Core Processor"
    package_versions()      # {"torch": "2.11.0+cu130", …, "python": "3.12.3"}
    find_commit()           # "1971904d", "1971904d-dirty", or None of an installed package

It names and counts models, never a host. It reads /proc and /sys and starts no program but git.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections import Counter
from pathlib import Path

GIT_SECONDS = 10.0  # that a question to git may take
CHECKOUT = Path(__file__).parents[2]  # of which atom/ is a folder, if it is no installed package
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")  # that numbers follow from


def describe_machine(root: Path = Path("/")) -> str:
    """The GPUs of this machine or, if it has none, its CPUs. root: where /proc and /sys are."""
    return describe_gpus(root) or describe_cpus(root)


def describe_gpus(root: Path) -> str:
    names = []
    for path in sorted((root / "proc/driver").glob("*/gpus/*/information")):
        names += [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("Model:")]
    for path in sorted((root / "sys/class/drm").glob("card[0-9]*/device/product_name")):
        names += [path.read_text().strip()]
    return " + ".join(f"{count} x {name}" for name, count in Counter(filter(None, names)).items())


def describe_cpus(root: Path = Path("/")) -> str:
    path = root / "proc/cpuinfo"
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{len(names) or os.cpu_count()} x {name}"


def package_versions() -> dict[str, str]:
    """The versions of the packages that are installed, and of Python; nothing is imported."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "python": platform.python_version()}


def find_commit(checkout: Path = CHECKOUT) -> str | None:
    """The commit that is checked out, "-dirty" if tracked files outside docs/ differ from it; None if git has none.

    A folder within another repository, as site-packages may be, is no checkout.
    """
    if not (checkout / ".git").exists():
        return None

    def ask(*words: str) -> str:
        given = ["git", "-C", str(checkout), *words]
        return subprocess.run(given, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):  # git is missing, refuses the folder, or hangs
        commit = ask("rev-parse", "--short", "HEAD")
        return f"{commit}-dirty" if ask("status", "--porcelain", "-uno", "--", ".", ":!docs") else commit
    return None
