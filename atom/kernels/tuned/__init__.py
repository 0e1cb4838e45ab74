"""Tuned kernel parameters by GPU, as JSON: packaged, and in <cache>/tuned.

parameters("NVIDIA H200", "linear", "1 6144 4096 1")     # ["vector", 8, 8, 3, 1]; None: not measured
measured = read("NVIDIA H200", Path(cache))              # those that tune=true found on this machine come first
save("NVIDIA H200", Path(cache), "linear", {"1 6144 4096 1": ["vector", 8, 8, 3, 1]})
merge(Path(other), read_all(Path(cache)))                # add one cache folder's entries to another's

A key has what a kernel's choice depends on. For a linear: the max rows that the entry is for, outputs, inputs, 2 if
half of the outputs are gates, otherwise 1, and the encoding of a packed weight, as in "1 6144 4096 1 e4m3[1,*]". The
entry ["library"] means that the vendor's library is fastest. Without an entry, the kernel's own rule applies. In the
table "experts" rows are pairs of token and expert, rounded up to a power of 2, and the experts are listed: "256
128x1536 2048 2". In the table "drafts" a key is the max number of sequences of a step and the digest of the text, and
an entry has the microseconds of a step with 0, 1, … drafts per sequence. A file in <cache>/tuned is valid for the
versions of atom and Triton that it names.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import atom
from atom.cache.files import (
    MAX_JSON,
    Damaged,
    Unfit,
    check_owner,
    locked,
    open_file,
    prepare_folder,
    reason_of,
    replace_file,
)

FOLDER = "tuned"  # of the cache folder
BUCKETS = (1, 8, 16, 32, 64, 128, 256)  # max rows of the parameters of a linear
GPU = re.compile(r"[a-z0-9_]{1,100}")  # the stem of a file's name
# see `kernels.triton.linear.weight_encoding`
PACKED = r"(?:e4m3|i8|u8|u4|e2m1)[zm]?\[[1-9][0-9]*,(?:[1-9][0-9]*|\*)\](?: fp8| int8)?(?: wgmma| k)?"
NUMBER = "[1-9][0-9]*"
KEY = re.compile(rf"({'|'.join(map(str, BUCKETS))}) {NUMBER} {NUMBER} ([12])(?: {PACKED})?")
EXPERTS_KEY = re.compile(rf"({NUMBER}) {NUMBER}x{NUMBER} {NUMBER} [12](?: {PACKED})?")
SIZES = [1 << at for at in range(11)]
TILES, WARPS, STAGES, COUNTS = SIZES[4:], SIZES[:5], range(1, 10), range(1, 65)
SHUFFLED = [SIZES[3:8], SIZES[:3], range(2, 9), range(1, 9)]
# by kind: min number of values, and the range of each; see `kernels.triton.linear.tiles`
ENTRY_SCHEMAS: Mapping[str, tuple[int, list[Any]]] = {
    "vector": (4, [SIZES, WARPS, STAGES, COUNTS]),
    "matrix": (4, [TILES, TILES, WARPS, STAGES, SIZES[:4], COUNTS, [0, *SIZES], SIZES[3:]]),
    "wgmma": (4, SHUFFLED),
    "row": (1, [COUNTS[:8]]),
    "library": (0, []),
}
EXPERTS_ENTRY_SCHEMAS = {"tiles": (5, [TILES, TILES, TILES, WARPS, STAGES]), "wgmma": (4, SHUFFLED)}  # as above
DRAFTS = "drafts"  # the table of steps
DRAFTS_KEY = re.compile(rf"({'|'.join(map(str, BUCKETS))}) [0-9a-f]{{16}}")
Table = dict[str, list[Any]]  # of a kernel, by key
Measured = dict[str, Table]  # by kernel


def parameters(gpu: str, kernel: str, key: str) -> list[Any] | None:
    """The packaged parameters of a GPU of this name."""
    found: list[Any] | None = _packaged(gpu).get(kernel, {}).get(key)
    return found


def read(gpu: str, cache: Path, warn: Callable[[str], object] = lambda line: None) -> Measured:
    """The parameters of a GPU of this name: those of this cache folder, otherwise the packaged ones.

    A file that is damaged, that other users may have written, or that was measured with other versions is ignored, and
    `warn` gets a line; so are entries that the kernels do not accept.
    """
    packaged, own = _packaged(gpu), read_own(gpu, cache, warn)
    return {kernel: packaged.get(kernel, {}) | own.get(kernel, {}) for kernel in FITS}


def read_own(gpu: str, cache: Path, warn: Callable[[str], object] = lambda line: None) -> Measured:
    """The parameters of this cache folder, without packaged ones."""
    path = file_of(gpu, cache)
    written = _load(path, warn)
    found = {kernel: {key: entry for key, entry in written.get(kernel, {}).items() if FITS[kernel](key, entry)}
             for kernel in FITS}  # fmt: skip
    if num_others := sum(len(written.get(kernel, {})) - len(found[kernel]) for kernel in FITS):
        warn(f"{path}: entries that these kernels do not take are ignored: {num_others}")
    return {kernel: table for kernel, table in found.items() if table}


def save(gpu: str, cache: Path, kernel: str, found: Mapping[str, list[Any]]) -> Path:
    """Add parameters to this cache folder, atomically; the file. Unfit or OSError if that fails."""
    path = file_of(gpu, cache)
    folder = prepare_folder(path.parent)
    with locked(folder.parent, f"{FOLDER}-{path.stem}"):  # another process may tune too
        written = _load(path)
        content = {"versions": _versions()} | written | {kernel: written.get(kernel, {}) | dict(found)}
        replace_file(path, _show(content))
    return path


def read_all(cache: Path, warn: Callable[[str], object] = lambda line: None) -> dict[str, Measured]:
    """The parameters of this cache folder, without packaged ones, by the stem of the GPU's file."""
    gpus = sorted(path.stem for path in file_of("", cache).parent.glob("*.json"))
    return {gpu: found for gpu in gpus if (found := read_own(gpu, cache, warn))}


def merge(cache: Path, measured: Mapping[str, Any]) -> Counter[str]:
    """Merge what `read_all` returned for another cache folder; own entries win. The number of new entries by GPU.

    Entries that the kernels do not accept are skipped. Unfit or OSError as in `save`.
    """
    merged = Counter[str]()
    for gpu, tables in measured.items():
        if not GPU.fullmatch(gpu) or not isinstance(tables, dict):
            continue
        own = read_own(gpu, cache)
        for kernel in FITS:
            table = tables.get(kernel)
            known = own.get(kernel, {})
            found = table.items() if isinstance(table, dict) else ()
            if new := {key: entry for key, entry in found if key not in known and FITS[kernel](key, entry)}:
                save(gpu, cache, kernel, new)
                merged[gpu] += len(new)
    return merged


def file_of(gpu: str, folder: Path) -> Path:
    """The file of this cache folder for a GPU of this name."""
    return Path(os.path.realpath(folder)) / FOLDER / _name(gpu)


@cache
def _packaged(gpu: str) -> Measured:
    file = Path(__file__).with_name(_name(gpu))
    return json.loads(file.read_text()) if file.is_file() else {}


def _name(gpu: str) -> str:
    return re.sub(r"\W+", "_", gpu.lower()) + ".json"


def _versions() -> dict[str, str]:
    """The versions that the fastest parameters depend on, besides the GPU."""
    import triton

    return {"atom": atom.__version__, "triton": triton.__version__}


def _load(path: Path, warn: Callable[[str], object] = lambda line: None) -> dict[str, dict[str, Any]]:
    """Read a file that `_show` wrote, by kernel; empty, with a line to `warn`, if it must not be used."""
    if not os.path.lexists(path):
        return {}
    try:
        for folder in (path.parent.parent, path.parent):
            check_owner(folder, is_folder=True)
        with open_file(path, is_use=False) as file:
            written = _parse(file.read(MAX_JSON))
        if written.pop("versions", None) != _versions():
            raise Unfit("it was measured with another atom or Triton (run tune=true again)")
    except (Unfit, OSError) as error:
        what = reason_of(error)
        warn(f"{what if str(path.parent) in what else f'{path}: {what}'}, ignored")
        return {}
    return written


def _parse(raw: bytes) -> dict[str, dict[str, Any]]:
    try:
        tables = json.loads(raw)
    except (ValueError, RecursionError):
        raise Damaged("it is damaged") from None
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise Damaged("it is damaged")
    return tables


def _fits_drafts(key: str, entry: Any) -> bool:
    """Whether these are a key and an entry of the table `drafts`."""
    if DRAFTS_KEY.fullmatch(key) is None or not isinstance(entry, list) or not 2 <= len(entry) <= 8:
        return False
    return all(type(each) is float and 0 < each < math.inf for each in entry)


def _fits_linear(key: str, entry: Any) -> bool:
    """Whether these are a linear's key and parameters that its kernels accept."""
    match = KEY.fullmatch(key)
    if match is None or not _fits_schema(entry, ENTRY_SCHEMAS):
        return False
    rows, gates = map(int, match.groups())
    is_shuffled = key.endswith(" wgmma")
    if entry[0] != "library" and (entry[0] in ("wgmma", "row")) != is_shuffled:
        return False
    if entry[0] == "row" and (rows, gates) != (1, 1):
        return False
    return entry[0] != "vector" or (rows == 1 and entry[1] >= gates)


def _fits_experts(key: str, entry: Any) -> bool:
    """Whether these are the key and the parameters of a grouped linear of experts."""
    match = EXPERTS_KEY.fullmatch(key)
    if match is None or not _fits_schema(entry, EXPERTS_ENTRY_SCHEMAS):
        return False
    rows = int(match[1])
    return rows & rows - 1 == 0 and (entry[0] == "wgmma") == key.endswith(" wgmma")


def _fits_schema(entry: Any, schemas: Mapping[str, tuple[int, list[Any]]]) -> bool:
    """Whether an entry is the name of a schema and numbers in its ranges."""
    if not isinstance(entry, list) or not entry or entry[0] not in list(schemas):
        return False
    kind, *numbers = entry
    min_count, allowed = schemas[kind]
    if not min_count <= len(numbers) <= len(allowed):
        return False
    return all(type(number) is int and number in each for number, each in zip(numbers, allowed, strict=False))


FITS: dict[str, Callable[[str, Any], bool]] = {  # by table
    "linear": _fits_linear, "experts": _fits_experts, DRAFTS: _fits_drafts,
}  # fmt: skip


def _show(measured: Mapping[str, Mapping[str, Any]]) -> bytes:
    """JSON with one entry per line, as in the packaged files."""
    tables = []
    for kernel, table in measured.items():
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in table.items())
        tables.append(f"  {json.dumps(kernel)}: {{\n{lines}\n  }}")
    return ("{\n" + ",\n".join(tables) + "\n}\n").encode()
