"""Triton's binaries as entries of the cache folder, so that a copied folder starts warm, without any compiler.

    store = store_in(Cache(Path("~/.cache/atom-run")))    # before the first kernel is launched
    ...                                                    # launch kernels
    store.used()                                           # keys of kind "triton": what these kernels need
    store.num_compiled                                     # 0: all of it was there
    store.tell()                                           # from now on, what it finds wrong goes to stderr

An entry is one kernel's binary with its metadata, or one module of Triton's launcher. It holds no path, and like all
code in the cache it counts only while its owner and its checksums are right.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
import threading
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import cache as triton_cache
from triton.runtime.cache import CacheManager, FileCacheManager

from atom.cache import Cache

KIND = "triton"
KEPT = {".json", ".cubin", ".hsaco"}  # what a launch reads; the steps between source and binary are not


def store_in(cache: Cache) -> Store:
    """Have Triton keep in this cache what it compiles from now on."""
    store = Store(cache)
    knobs.cache.manager_class = store.manager
    if installed := _installed_files():
        triton_cache.triton_key = lambda: installed
    return store


def _installed_files() -> str:
    """A digest of Triton's files as the installer listed them; "" if it did not. Hashing 400 MB of them takes 0.5 s."""
    records = Path(triton.__file__).parents[1].glob("*triton*.dist-info/RECORD")
    lines = [line for record in records for line in record.read_text().splitlines()]
    files = sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
    return _digest("\n".join(files)) if any("libtriton" in line for line in files) else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Store:
    """What Triton's cache managers of this process share."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._folder = tempfile.TemporaryDirectory(prefix="atom-run-")  # Triton reads what it has just put there
        self._used: dict[str, None] = {}
        self._compiled: list[str] = []
        self._not_kept: dict[str, dict[str, str]] = {}  # files of entries for which the cache folder has no place
        self._telling = threading.Lock()  # several threads compile
        self._num_told = sys.maxsize  # of the cache's warnings: all, until `tell`

    @property
    def num_compiled(self) -> int:
        """How often something had to be compiled."""
        return len(self._compiled)

    def used(self) -> list[str]:
        """The keys of all entries that were found or made."""
        return list(self._used)

    def manager(self, key: str, override: bool = False, dump: bool = False) -> CacheManager:
        """Triton's `manager_class`; what its debugging overrides and dumps stays in its own folders."""
        return FileCacheManager(key, override, dump) if override or dump else _Manager(key, self)

    def tell(self) -> None:
        """Print the cache's warnings from now on, as they come: whoever told those of the start is done with it."""
        self._num_told = len(self.cache.warnings)

    def find(self, ingredients: dict[str, str]) -> dict[str, str]:
        """The files of a trusted entry, path by name; none if there is no such entry."""
        key = _key_of(ingredients)
        folder = self.cache.find(KIND, key)
        self._tell_new()
        if folder is None:
            return self._not_kept.get(key, {})
        self._used[key] = None
        return _files_in(folder)

    def publish(self, ingredients: dict[str, str], files: dict[str, bytes | Path]) -> dict[str, str]:
        """Store an entry that had to be made: its files, path by name."""
        key = _key_of(ingredients)
        folder = self.cache.publish(KIND, key, files, {"name": ingredients["file"], "ingredients": ingredients})
        self._tell_new()
        self._used[key] = None
        self._compiled.append(key)
        if not folder.is_relative_to(self.cache.folder):
            self._not_kept[key] = _files_in(folder)
        return _files_in(folder)

    def private_folder(self) -> Path:
        """A new folder that lives as long as this process."""
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def _tell_new(self) -> None:
        with self._telling:
            new = self.cache.warnings[self._num_told :]
            self._num_told += len(new)
        for line in new:
            print(f"atom-run: {line}", file=sys.stderr)


def _key_of(ingredients: dict[str, str]) -> str:
    return _digest(json.dumps(ingredients, sort_keys=True))


def _files_in(folder: Path) -> dict[str, str]:
    return {path.name: str(path) for path in folder.iterdir() if path.name != "manifest.json"}


class _Manager(CacheManager):  # type: ignore[misc]
    """The cache of one of Triton's keys.

    A module is asked for by `get_file` and put by itself; a kernel's files are put one by one, then as a group.
    """

    def __init__(self, key: str, store: Store) -> None:
        self._key = key
        self._store = store
        self._alone: set[str] = set()
        self._folder: Path | None = None

    def get_file(self, filename: str) -> str | None:
        self._alone.add(filename)
        return self._store.find(self._module(filename)).get(filename)

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        if filename in self._alone:
            return self._store.publish(self._module(filename), {filename: content})[filename]
        self._folder = self._folder or self._store.private_folder()
        (self._folder / filename).write_bytes(content)
        return str(self._folder / filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        return self._store.find(self._group(filename)) or None

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        kept: dict[str, bytes | Path] = {name: Path(path) for name, path in group.items() if Path(name).suffix in KEPT}
        self._store.publish(self._group(filename), kept)

    def _group(self, filename: str) -> dict[str, str]:
        return {"triton key": self._key, "file": filename}

    def _module(self, filename: str) -> dict[str, str]:
        return self._group(filename) | {"libc": " ".join(platform.libc_ver())}  # that it is linked to
