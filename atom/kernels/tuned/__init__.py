"""Parameters of kernels that were measured to be the fastest, by GPU: a JSON file each, here and in <cache>/tuned.

parameters("NVIDIA H200", "linear", "1 6144 4096 1")     # ["vector", 8, 8, 3, 1], or None where nobody has measured
measured = read("NVIDIA H200", Path(cache))              # with those that tune=true found on this machine before them
keep("NVIDIA H200", Path(cache), "linear", {"1 6144 4096 1": ["vector", 8, 8, 3, 1]})

A key says what a kernel's choice depends on: of a linear the rows up to which it holds, outputs, inputs, and 2 where
half of the outputs are gates. ["library"] is where the vendor's is the fastest. What is not listed follows from the
kernel's own rule.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from atom.artifact.files import (
    MAX_JSON,
    Damaged,
    Unfit,
    check_owner,
    create_file,
    open_file,
    reason_of,
    sync_folder,
    unfinished_name,
)
from atom.kernels.registry import Target

FOLDER = "tuned"  # of the cache folder
FORMS = {"linear": {"vector": range(4, 5), "matrix": range(4, 9), "library": range(1)}}  # by kernel, style: how many
Table = dict[str, list[Any]]  # of a kernel, by key
Measured = dict[str, Table]  # by kernel


def parameters(gpu: str, kernel: str, key: str) -> list[Any] | None:
    """What was measured on a GPU of this name, of what comes with atom."""
    found: list[Any] | None = _packaged(gpu).get(kernel, {}).get(key)
    return found


def read(gpu: str, cache: Path, tell: Callable[[str], object] = lambda line: None) -> Measured:
    """What was measured on a GPU of this name: in this cache folder, and where nobody did there, what comes with atom.

    A file that is damaged, or that others can have written, has a line, and is not used.
    """
    packaged, own = _packaged(gpu), read_own(gpu, cache, tell)
    return {kernel: packaged.get(kernel, {}) | own.get(kernel, {}) for kernel in FORMS}


def read_own(gpu: str, cache: Path, tell: Callable[[str], object] = lambda line: None) -> Measured:
    """What is in this cache folder alone."""
    path = file_of(gpu, cache)
    if not os.path.lexists(path):
        return {}
    try:
        for folder in (path.parent.parent, path.parent):
            check_owner(folder, is_folder=True)
        with open_file(path, is_use=False) as file:
            return _parse(file.read(MAX_JSON))
    except (Unfit, OSError) as error:
        what = reason_of(error)
        tell(f"{what if str(path.parent) in what else f'{path}: {what}'}, ignored")
        return {}


def keep(gpu: str, cache: Path, kernel: str, found: Mapping[str, list[Any]]) -> Path:
    """Add to what is in this cache folder, at once or not at all: the file. Unfit or OSError where that cannot be."""
    path = file_of(gpu, cache)
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        check_owner(folder, is_folder=True)
    with FileLock(path.with_suffix(".lock"), mode=0o600):  # another search may add to it too
        own = read_own(gpu, cache)
        new = unfinished_name(path.parent)
        try:
            with create_file(new) as file:
                file.write(_show(own | {kernel: own.get(kernel, {}) | dict(found)}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        sync_folder(path.parent)
    return path


def file_of(gpu: str, folder: Path) -> Path:
    """Where this cache folder has what was measured on a GPU of this name."""
    return Path(os.path.realpath(folder)) / FOLDER / _name(gpu)


def with_parameters(target: Target, cache: Path) -> Target:
    """The target of a launch that reads this cache folder: parameters are part of what is compiled for a GPU."""
    if target.device == "cpu":
        return target
    measured = {name: read(name, cache) for name in target.features}  # one of them is the GPU's name
    text = json.dumps({name: found for name, found in measured.items() if any(found.values())}, sort_keys=True)
    return replace(target, parameters=hashlib.sha256(text.encode()).hexdigest()[:32])


@cache
def _packaged(gpu: str) -> Measured:
    file = Path(__file__).with_name(_name(gpu))
    return json.loads(file.read_text()) if file.is_file() else {}


def _name(gpu: str) -> str:
    return re.sub(r"\W+", "_", gpu.lower()) + ".json"


def _parse(raw: bytes) -> Measured:
    """Damaged where it is not what `_show` writes."""
    try:
        measured: Measured = json.loads(raw)
        for kernel, table in measured.items():
            for style, *numbers in table.values():
                is_whole = all(type(number) is int and number >= 0 for number in numbers)
                if not is_whole or len(numbers) not in FORMS[kernel][style]:
                    raise ValueError
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise Damaged("it is damaged") from None
    return measured


def _show(measured: Measured) -> bytes:
    """An entry a line, as in the files that come with atom."""
    tables = []
    for kernel, table in sorted(measured.items()):
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in table.items())
        tables.append(f"  {json.dumps(kernel)}: {{\n{lines}\n  }}")
    return ("{\n" + ",\n".join(tables) + "\n}\n").encode()
