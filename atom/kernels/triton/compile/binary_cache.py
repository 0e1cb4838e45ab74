"""Keep our kernels' binaries in the cache folder.

A copied folder needs no compiler.

    binaries = keep_in(Cache(Path("~/.cache/atom-run")))    # before the first kernel is launched
    ...                                                     # launch kernels
    binaries.used()                                         # keys of kind "binaries" that these kernels need
    binaries.num_compiled                                   # 0: all of them were found
    binaries.print_warnings()                               # from now on, warnings go to stderr

An entry is one kernel's binary with its metadata, or one module of Triton's launcher. It holds no path, and like all
code in the cache it counts only while its owner and its checksums are right. Kernels that are not of our JIT class stay
in Triton's own folder, and so does what is compiled while Triton's compiler is debugged.

Of processes that want the same entry, as the ranks of an engine do, one makes it and the others wait for that.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.cache import CacheManager, FileCacheManager, triton_key

from atom.cache import Cache, digest, key_of
from atom.cache.files import BINARIES, MANIFEST
from atom.cache.temporary import temporary_folder
from atom.kernels.triton.compile.compile_processes import KEPT, CompileProcesses, identify
from atom.process.messages import say


def keep_in(cache: Cache) -> BinaryCache:
    """Keep what is compiled of our kernels in this cache from now on."""
    BinaryCache.current = BinaryCache(cache)
    return BinaryCache.current


@contextmanager
def kept() -> Iterator[None]:
    """Within this context, Triton's cache is that of our kernels, in this thread only."""
    binaries = BinaryCache.current
    if binaries is None or _is_debugged():
        yield
        return
    with ExitStack() as locks:
        token = _active.set(_Making(binaries, locks, set()))
        try:
            with _by_thread:
                yield
        finally:
            _active.reset(token)


def compile_kept(compile: Callable[..., Any], src: Any, **options: Any) -> Any:
    """`triton.compile`, for what is not in the cache; within `kept`."""
    making = _active.get()
    return compile(src, **options) if making is None else making.compile(compile, src, **options)


def _is_debugged() -> bool:
    """Whether Triton's compiler is debugged or overridden."""
    knob = knobs.compilation
    is_changed = knob.override or knob.dump_ir or knob.always_compile or knob.use_ir_loc
    return bool(is_changed or knob.listener or knobs.runtime.add_stages_inspection_hook)


class BinaryCache:
    """The entries of our kernels, one object for all engines, since Triton compiles each kernel once in a process."""

    current: ClassVar[BinaryCache | None] = None

    def __init__(self, cache: Cache) -> None:
        self.cache, self.processes = cache, CompileProcesses()
        self._folder = temporary_folder()  # Triton reads back what it has just written
        self._used: dict[str, None] = {}
        self._compiled: list[str] = []
        self._not_kept: dict[str, dict[str, str]] = {}  # files of entries that could not be written to the cache folder
        self._printing, self.hashing = threading.Lock(), threading.Lock()  # several threads compile
        self._num_printed = sys.maxsize  # how many of the cache's warnings were printed: all, until `print_warnings`

    @property
    def num_compiled(self) -> int:
        """The number of compilations."""
        return len(self._compiled)

    def used(self) -> list[str]:
        """The keys of all entries that were found or made."""
        return list(self._used)

    def print_warnings(self) -> None:
        """Print the cache's warnings as they come from now on; those of the start were the caller's to print."""
        self._num_printed = len(self.cache.warnings)

    def find(self, ingredients: dict[str, str]) -> dict[str, str]:
        """The files of a trusted entry, path by name; none if there is no such entry."""
        key = key_of(ingredients)
        folder = self.cache.find(BINARIES, key)
        self._print_new()
        if folder is None:
            return self._not_kept.get(key, {})
        self._used[key] = None
        return _files_in(folder)

    def publish(self, ingredients: dict[str, str], files: dict[str, bytes | Path]) -> dict[str, str]:
        """Store a new entry; its files, path by name."""
        key = key_of(ingredients)
        folder = self.cache.publish(BINARIES, key, files, {"name": ingredients["file"], "ingredients": ingredients})
        self._print_new()
        self._used[key] = None
        self._compiled.append(key)
        if not folder.is_relative_to(self.cache.folder):
            self._not_kept[key] = _files_in(folder)
        return _files_in(folder)

    @cached_property
    def triton(self) -> str:
        """Triton's version: its files as the installer listed them, else as Triton reads them in 0.5 s."""
        records = Path(triton.__file__).parents[1].glob("*triton*.dist-info/RECORD")
        lines = [line for record in records for line in record.read_text().splitlines()]
        files = sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
        return digest("\n".join(files) if any("libtriton" in line for line in files) else triton_key())

    def private_folder(self) -> Path:
        """A new folder that lives as long as this process."""
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def _print_new(self) -> None:
        with self._printing:
            new = self.cache.warnings[self._num_printed :]
            self._num_printed += len(new)
        for line in new:
            say(line)


def _files_in(folder: Path) -> dict[str, str]:
    return {path.name: str(path) for path in folder.iterdir() if path.name != MANIFEST}


class _Making(NamedTuple):
    """Binaries that a thread makes within `kept`."""

    binaries: BinaryCache
    locks: ExitStack  # of entries that this thread makes, until `kept` ends: a kernel has a launcher then, too
    locked: set[str]  # their keys

    def compile(
        self, compile: Callable[..., Any], src: Any, *, target: Any, options: dict[str, Any], **rest: Any
    ) -> Any:
        """Triton's CompiledKernel, found or compiled; the ingredients of its key are those of Triton's own."""
        named = {"triton": self.binaries.triton, "file": f"{src.name[:100]}.json"}
        ingredients = named | identify(src, target, options)
        if files := self.find(ingredients):
            return CompiledKernel(src, files, key_of(ingredients))
        if (compiled := self.binaries.processes.compile(src, target, options)) is not None:
            return CompiledKernel(src, self.binaries.publish(ingredients, dict(compiled)), key_of(ingredients))
        with self.binaries.hashing:
            triton_key()  # cached by Triton, which otherwise reads all its files when it first asks for it
        kernel = compile(src, target=target, options=options, **rest)
        files = kernel.metadata_group
        made: dict[str, bytes | Path] = {name: Path(files[name]) for name in files if Path(name).suffix in KEPT}
        self.binaries.publish(ingredients, made)
        return kernel

    def find(self, ingredients: dict[str, str]) -> dict[str, str]:
        """The files of a trusted entry, path by name, once no other process makes it; none where this one is to."""
        key, files = key_of(ingredients), self.binaries.find(ingredients)
        if files or key in self.locked:
            return files
        with ExitStack() as lock:
            lock.enter_context(self.binaries.cache.lock(BINARIES, key))
            if not (files := self.binaries.find(ingredients)):
                self.locked.add(key)
                self.locks.push(lock.pop_all())
        return files

    def lock_loading(self) -> None:
        """Hold back other threads' loads until `kept` ends; a module is the last thing that it finds or makes.

        All launchers of Triton 3.6 bear one name (3.8 has one launcher). When CPython loads a file again
        (`import_find_extension`), it writes the file's functions into the module that bore the name last, which
        another thread may be about to take its launcher from.
        """
        self.locks.enter_context(_loading)


class _Manager(CacheManager):  # type: ignore[misc]
    """Triton's cache of one key: a module, which is asked for first, or the files of a compiled kernel."""

    def __init__(self, key: str, making: _Making) -> None:
        self._key = key
        self._making, self._binaries = making, making.binaries
        self._modules: set[str] = set()
        self._folder: Path | None = None

    def get_file(self, filename: str) -> str | None:
        self._modules.add(filename)
        if (path := self._making.find(self._module(filename)).get(filename)) is not None:
            self._making.lock_loading()
        return path

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        if filename in self._modules:
            path = self._binaries.publish(self._module(filename), {filename: content})[filename]
            self._making.lock_loading()
            return path
        self._folder = self._folder or self._binaries.private_folder()
        (self._folder / filename).write_bytes(content)
        return str(self._folder / filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        return None  # `compile` has looked for it before

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        pass

    def _module(self, filename: str) -> dict[str, str]:
        libc = " ".join(platform.libc_ver())  # that it is linked to
        return {"triton key": self._key, "file": filename, "libc": libc}


class _ByThread:
    """Selects Triton's cache by thread: that of our kernels while a thread compiles one, else the former one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before: Any = None  # the knob's former value
        self._others: Any = FileCacheManager

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1 and knobs.cache.manager_class != self.find:
                self._before = vars(knobs.cache).get("manager_class")
                self._others = knobs.cache.manager_class or FileCacheManager
                knobs.cache.manager_class = self.find

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and knobs.cache.manager_class == self.find:  # nobody has set it meanwhile
                if self._before is None:
                    del knobs.cache.manager_class
                else:
                    knobs.cache.manager_class = self._before

    def find(self, key: str, **purpose: bool) -> CacheManager:
        """The cache manager of a key, in place of Triton's `manager_class`."""
        making = _active.get()
        return self._others(key, **purpose) if making is None else _Manager(key, making)


_active: ContextVar[_Making | None] = ContextVar("active", default=None)  # of this thread
_by_thread = _ByThread()
_loading = threading.RLock()  # of modules
