"""Compile kernels in other processes.

processes = CompileProcesses()
processes.start()                                      # they import Triton meanwhile
files = processes.compile(src, target, options)        # by name; None: compile it in this process
processes.stop()

Triton's front end is Python and takes half of a compilation, so that threads of one process compile little more than
two kernels at a time. The processes are forks of one that has imported Triton. They use no GPU and write to a folder
that ends with them.

A request names its kernel by module. A process whose kernel is another one, for instance since a global of the module
was changed here, declines it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key

from atom.child_process import end, start_python

MAX_PROCESSES = 16  # a start has some 60 to 100 kernels
IDLE_SECONDS = 900.0  # after which a process ends, where nobody has stopped it; weights are read meanwhile
KEPT = {".json", ".cubin", ".hsaco"}  # the files that a launch reads; intermediate representations are not kept
Files = dict[str, bytes]  # by name
Plain = None | bool | int | float | str


class CompileProcesses:
    """Processes for a start with many kernels; threads may share them."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._changing = threading.Lock()

    def start(self) -> None:
        """Start the processes, unless they run or there is but one core."""
        count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
        with self._changing:
            if self._running is None and count > 1:
                self._running = _Running(count)

    def wait(self) -> None:
        """Wait until processes that were started can compile."""
        if running := self._running:
            running.collect(waits=True)

    def stop(self) -> None:
        """End the processes, which compile nothing now."""
        with self._changing:
            running, self._running = self._running, None
        if running:
            running.close()

    def compile(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Files | None:
        """The files of a compiled kernel; None where no process has compiled it: this one can, and tells errors."""
        running = self._running
        return running.compile(src, target, options) if running else None


class _Running:
    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self._starting = [Connection(ours.detach()) for ours, _ in pairs]
        self._num_left = count
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()  # None: all are gone
        self._collecting, self._counting = threading.Lock(), threading.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="atom-run-", ignore_cleanup_errors=True)
        theirs = [each.fileno() for _, each in pairs]
        code = f"from {__name__} import work; work({self.folder.name!r}, {theirs})"
        self.parent = start_python(code, stderr=subprocess.DEVNULL, pass_fds=theirs)
        for _, each in pairs:
            each.close()

    def collect(self, waits: bool = False) -> None:
        """Take those that have become ready. waits: for all"""
        with self._collecting:
            for each in [each for each in self._starting if waits or each.poll()]:
                try:
                    each.recv_bytes()
                    self._idle.put(each)
                except (EOFError, OSError):
                    self._lose()
                self._starting.remove(each)

    def compile(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Files | None:
        request = _request(src, target, options)
        self.collect()
        if request is None or self._starting:
            return None
        if (process := self._idle.get()) is None:
            self._idle.put(None)  # for the next
            return None
        try:
            process.send_bytes(msgspec.msgpack.encode(request))
            files = msgspec.msgpack.decode(process.recv_bytes(), type=Files)
        except (EOFError, OSError):
            self._lose()
            return None
        self._idle.put(process)
        return files or None

    def _lose(self) -> None:
        with self._counting:
            self._num_left -= 1
            if not self._num_left:
                self._idle.put(None)

    def close(self) -> None:
        end(self.parent)
        self.folder.cleanup()


class _Name(msgspec.Struct, tag="kernel"):
    """Where a kernel, or a function that kernels call, is found."""

    module: str
    name: str
    path: str | None  # of a piece, which is no module that is found by its name


class _Type(msgspec.Struct, tag="type"):
    name: str  # a type of Triton, as in triton.language


class _Constant(msgspec.Struct):
    place: tuple[int, ...]
    value: Plain | _Name | _Type


class _Request(msgspec.Struct):
    """What an ASTSource is made of, and what it is compiled for."""

    kernel: _Name
    digest: str
    signature: dict[str, str]
    constants: list[_Constant]
    attributes: list[tuple[tuple[int, ...], list[list[Plain]]]]
    target: tuple[str, int | str, int]
    options: dict[str, Any]


def _request(src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> _Request | None:
    """None where a constant is of a kind that is not told."""
    constants = []
    for place, value in src.constants.items():
        if isinstance(value, triton.JITFunction):
            value = _name(value)
        elif isinstance(value, triton.language.dtype):
            value = _Type(value.name)
        elif not isinstance(value, Plain):
            return None
        constants.append(_Constant(place, value))
    return _Request(
        _name(src.fn), src.hash(), src.signature, constants, [*src.attrs.items()],
        (target.backend, target.arch, target.warp_size), options,
    )  # fmt: skip


def _name(kernel: triton.JITFunction) -> _Name:
    is_found = kernel.__module__ in sys.modules
    return _Name(kernel.__module__, kernel.__name__, None if is_found else kernel.__globals__["__file__"])


def work(folder: str, numbers: list[int]) -> None:
    """Serve each of these sockets in a fork of this process, which has one thread, until all have ended."""
    triton_key()  # reads all of Triton's files
    for place, number in enumerate(numbers):
        if os.fork() == 0:
            for each in numbers[place + 1 :]:
                os.close(each)
            try:
                _Worker(Path(folder, str(number))).serve(Connection(number))
            finally:
                os._exit(0)
        os.close(number)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


class _Worker:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[str, ModuleType] = {}  # by path
        knobs.cache.dir = str(folder)
        sys.dont_write_bytecode = True  # beside a piece, which is an entry of the cache

    def serve(self, link: Connection) -> None:
        link.send_bytes(b"ready")
        with contextlib.suppress(EOFError, OSError):
            while link.poll(IDLE_SECONDS):
                told = link.recv_bytes()
                try:
                    files = self._compile(msgspec.msgpack.decode(told, type=_Request))
                except Exception:  # whatever it is, the other process tells it when it compiles this kernel
                    files = {}
                link.send_bytes(msgspec.msgpack.encode(files))

    def _compile(self, told: _Request) -> Files:
        target, kernel = GPUTarget(*told.target), self._find(told.kernel)
        driver.set_active(_NoDevice(target))
        kernel.create_binder()  # finds the class of its source
        constants = {each.place: self._value(each.value) for each in told.constants}
        src = kernel.ASTSource(kernel, told.signature, constants, dict(told.attributes))
        if src.hash() != told.digest:
            return {}
        files = triton.compile(src, target=target, options=_tuples(told.options)).metadata_group
        made = {name: Path(path).read_bytes() for name, path in files.items() if Path(name).suffix in KEPT}
        shutil.rmtree(self._folder, ignore_errors=True)
        return made

    def _value(self, told: Plain | _Name | _Type) -> Any:
        if isinstance(told, _Name):
            return self._find(told)
        return triton.language.dtype(told.name) if isinstance(told, _Type) else told

    def _find(self, told: _Name) -> Any:
        module = importlib.import_module(told.module) if told.path is None else self._load(told.module, told.path)
        return getattr(module, told.name)

    def _load(self, name: str, path: str) -> ModuleType:
        if path not in self._pieces:
            spec = spec_from_loader(name, SourceFileLoader(name, path))
            assert spec is not None and spec.loader is not None
            self._pieces[path] = module_from_spec(spec)
            spec.loader.exec_module(self._pieces[path])
        return self._pieces[path]


def _tuples(told: Any) -> Any:
    """Options as they were: their sequences are tuples, by which Triton hashes them."""
    if isinstance(told, dict):
        return {name: _tuples(value) for name, value in told.items()}
    return tuple(map(_tuples, told)) if isinstance(told, list) else told


class _NoDevice:
    """A driver of a process that only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target
