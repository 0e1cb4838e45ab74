"""Tuned kernel parameters by GPU, as JSON: packaged, and in <cache>/tuned.

parameters("NVIDIA H200", "linear", "1 6144 4096 1")     # ["vector", 8, 8, 3, 1], or None where nobody has measured
measured = read("NVIDIA H200", Path(cache))              # with those that tune=true found on this machine before them
keep("NVIDIA H200", Path(cache), "linear", {"1 6144 4096 1": ["vector", 8, 8, 3, 1]})
take_in(Path(other), read_all(Path(cache)))              # add to one cache folder what another has and it has not

A key says what a kernel's choice depends on: of a linear the rows up to which it holds, outputs, inputs, 2 where half
of the outputs are gates, and of a packed weight how it holds numbers, as in "1 6144 4096 1 e4m3[1,*]". ["library"] is
where the vendor's library is the fastest. What is not listed follows from the kernel's own rule. In the table "experts"
rows are pairs of token and expert, up to a power of 2, and the experts are named: "256 128x1536 2048 2". In the table
"drafts" an entry is of steps of a model that drafts, by their sequences and the text's digest: microseconds with 0, 1,
… drafts of each. A file in <cache>/tuned holds for the versions of atom and Triton that it names.
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
BUCKETS = (1, 8, 16, 32, 64, 128, 256)  # rows up to which parameters of a linear hold
GPU = re.compile(r"[a-z0-9_]{1,100}")  # the stem of a file's name
# see `kernels.triton.linear.weight_encoding.WeightEncoding`
PACKED = r"(?:e4m3|i8|u8|u4|e2m1)[zm]?\[[1-9][0-9]*,(?:[1-9][0-9]*|\*)\](?: fp8| int8)?(?: wgmma| k)?"
NUMBER = "[1-9][0-9]*"
KEY = re.compile(rf"({'|'.join(map(str, BUCKETS))}) {NUMBER} {NUMBER} ([12])(?: {PACKED})?")
EXPERTS_KEY = re.compile(rf"({NUMBER}) {NUMBER}x{NUMBER} {NUMBER} [12](?: {PACKED})?")
SIZES = [1 << at for at in range(11)]
TILES, WARPS, STAGES, COUNTS = SIZES[4:], SIZES[:5], range(1, 10), range(1, 65)
SHUFFLED = [SIZES[3:8], SIZES[:3], range(2, 9), range(1, 9)]
FORMS = {  # by kind: the least number of values in an entry, and the range of each; see `kernels.triton.linear.tiles`
    "vector": (4, [SIZES, WARPS, STAGES, COUNTS]),
    "matrix": (4, [TILES, TILES, WARPS, STAGES, SIZES[:4], COUNTS, [0, *SIZES], SIZES[3:]]),
    "wgmma": (4, SHUFFLED),
    "library": (0, []),
}
EXPERTS_FORMS = {"tiles": (5, [TILES, TILES, TILES, WARPS, STAGES]), "wgmma": (4, SHUFFLED)}  # as above
DRAFTS = "drafts"  # the table of steps
DRAFTS_KEY = re.compile(rf"({'|'.join(map(str, BUCKETS))}) [0-9a-f]{{16}}")
Table = dict[str, list[Any]]  # of a kernel, by key
Measured = dict[str, Table]  # by kernel


def parameters(gpu: str, kernel: str, key: str) -> list[Any] | None:
    """The packaged parameters of a GPU of this name."""
    found: list[Any] | None = _packaged(gpu).get(kernel, {}).get(key)
    return found


def read(gpu: str, cache: Path, warn: Callable[[str], object] = lambda line: None) -> Measured:
    """The parameters of a GPU of this name: those of this cache folder, else the packaged ones.

    A file that is damaged, that others can have written, or that was measured with other versions is not used, and
    `warn` gets a line; the same goes for entries that these kernels do not take.
    """
    packaged, own = _packaged(gpu), read_own(gpu, cache, warn)
    return {kernel: packaged.get(kernel, {}) | own.get(kernel, {}) for kernel in FITS}


def read_own(gpu: str, cache: Path, warn: Callable[[str], object] = lambda line: None) -> Measured:
    """The parameters of this cache folder alone."""
    path = file_of(gpu, cache)
    written = _load(path, warn)
    found = {kernel: {key: entry for key, entry in written.get(kernel, {}).items() if FITS[kernel](key, entry)}
             for kernel in FITS}  # fmt: skip
    if num_others := sum(len(written.get(kernel, {})) - len(found[kernel]) for kernel in FITS):
        warn(f"{path}: entries that these kernels do not take are ignored: {num_others}")
    return {kernel: table for kernel, table in found.items() if table}


def keep(gpu: str, cache: Path, kernel: str, found: Mapping[str, list[Any]]) -> Path:
    """Add parameters to this cache folder, atomically; the file. Unfit or OSError where that fails."""
    path = file_of(gpu, cache)
    folder = prepare_folder(path.parent)
    with locked(folder.parent, f"{FOLDER}-{path.stem}"):  # another search may add to it too
        written = _load(path)
        content = {"versions": _versions()} | written | {kernel: written.get(kernel, {}) | dict(found)}
        replace_file(path, _show(content))
    return path


def read_all(cache: Path, warn: Callable[[str], object] = lambda line: None) -> dict[str, Measured]:
    """The parameters of this cache folder alone, by the name of the GPU's file."""
    gpus = sorted(path.stem for path in file_of("", cache).parent.glob("*.json"))
    return {gpu: found for gpu in gpus if (found := read_own(gpu, cache, warn))}


def take_in(cache: Path, measured: Mapping[str, Any]) -> Counter[str]:
    """Merge what `read_all` gave for another cache folder; what is here stays. The number of new entries by GPU.

    Entries that these kernels do not take are left out. Unfit or OSError as in `keep`.
    """
    taken = Counter[str]()
    for gpu, tables in measured.items():
        if not GPU.fullmatch(gpu) or not isinstance(tables, dict):
            continue
        own = read_own(gpu, cache)
        for kernel in FITS:
            table = tables.get(kernel)
            known = own.get(kernel, {})
            found = table.items() if isinstance(table, dict) else ()
            if new := {key: entry for key, entry in found if key not in known and FITS[kernel](key, entry)}:
                keep(gpu, cache, kernel, new)
                taken[gpu] += len(new)
    return taken


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
    """The versions that the fastest parameters depend on beside the GPU."""
    import triton

    return {"atom": atom.__version__, "triton": triton.__version__}


def _load(path: Path, warn: Callable[[str], object] = lambda line: None) -> dict[str, dict[str, Any]]:
    """Read a file of `_show`, by kernel; where it is not to be used nothing, and `warn` gets a line."""
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


def _is_times(key: str, entry: Any) -> bool:
    """Whether these are the key and the times of steps with drafts."""
    if DRAFTS_KEY.fullmatch(key) is None or not isinstance(entry, list) or not 2 <= len(entry) <= 8:
        return False
    return all(type(each) is float and 0 < each < math.inf for each in entry)


def _is_product(key: str, entry: Any) -> bool:
    """Whether these are a linear's key and parameters that its kernels take."""
    product = KEY.fullmatch(key)
    if product is None or not _has_form(entry, FORMS):
        return False
    rows, gates = map(int, product.groups())
    is_shuffled = key.endswith(" wgmma")
    if entry[0] != "library" and (entry[0] == "wgmma") != is_shuffled:
        return False
    return entry[0] != "vector" or (rows == 1 and entry[1] >= gates)


def _is_experts(key: str, entry: Any) -> bool:
    """Whether these are the key and the tiles of a product by experts."""
    product = EXPERTS_KEY.fullmatch(key)
    if product is None or not _has_form(entry, EXPERTS_FORMS):
        return False
    rows = int(product[1])
    return rows & rows - 1 == 0 and (entry[0] == "wgmma") == key.endswith(" wgmma")


def _has_form(entry: Any, forms: Mapping[str, tuple[int, list[Any]]]) -> bool:
    """Whether an entry is the name of a form and numbers that it takes."""
    if not isinstance(entry, list) or not entry or entry[0] not in list(forms):
        return False
    form, *numbers = entry
    least, allowed = forms[form]
    if not least <= len(numbers) <= len(allowed):
        return False
    return all(type(number) is int and number in each for number, each in zip(numbers, allowed, strict=False))


FITS: dict[str, Callable[[str, Any], bool]] = {  # by table
    "linear": _is_product, "experts": _is_experts, DRAFTS: _is_times,
}  # fmt: skip


def _show(measured: Mapping[str, Mapping[str, Any]]) -> bytes:
    """An entry a line, as in the files that come with atom."""
    tables = []
    for kernel, table in measured.items():
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in table.items())
        tables.append(f"  {json.dumps(kernel)}: {{\n{lines}\n  }}")
    return ("{\n" + ",\n".join(tables) + "\n}\n").encode()
