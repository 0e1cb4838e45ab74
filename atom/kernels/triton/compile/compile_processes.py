"""Compile kernels in worker processes.

processes = CompileProcesses()
processes.start()                                      # they import Triton meanwhile
files = processes.compile(src, target, options)        # by name; None: compile it in this process
processes.stop()

Triton's front end is Python and takes half of a compilation, so that threads of one process compile little more than
two kernels at a time. The processes are forks of one that has imported Triton. They use no GPU, write to a folder that
`stop` removes, and end with this process.

A request names its kernel by module. A process declines what would be another binary there: of another kernel, for
instance since a global of its module was changed here, or under other options, variables or tools.
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
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.compiler.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key

from atom.cache import digest
from atom.cache.temporary import temporary_folder
from atom.kernels.triton.compile.piece_compiler import load_module
from atom.process.child_process import end, start_python

MAX_PROCESSES = 16  # a start has some 60 to 100 kernels
IDLE_SECONDS = 900.0  # after which a process ends, where nobody has stopped it; weights are read meanwhile
KEPT = {".json", ".cubin", ".hsaco"}  # the files that a launch reads; intermediate representations are not kept
Files = dict[str, bytes]  # by name
Plain = None | bool | int | float | str


def identify(src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, str]:
    """Key ingredients of a binary besides Triton, as in Triton's own cache."""
    backend = make_backend(target)
    return {
        "source": src.hash(),
        "backend": backend.hash(),
        "options": backend.parse_options(options).hash(),
        "environment": digest(str(sorted(get_cache_invalidating_env_vars().items()))),
    }


class CompileProcesses:
    """Processes for a start with many kernels; threads may share them."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._changing = threading.Lock()

    def start(self) -> None:
        """Start the processes, unless they run, there is but one core, or Triton interprets kernels."""
        count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
        with self._changing:
            if self._running and self._running.has_ended():
                self._running.close()
                self._running = None
            if self._running is None and count > 1 and not knobs.runtime.interpret:
                with contextlib.suppress(OSError):  # no process or file is left: this one compiles
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
        """The files of a compiled kernel; None: no process has compiled it. This one then does, or raises the error."""
        running = self._running
        return running.compile(src, target, options) if running else None


class _Running:
    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self._starting = [Connection(ours.detach()) for ours, _ in pairs]
        self._num_left = count
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()  # None: all are gone
        self._collecting, self._counting = threading.Lock(), threading.Lock()
        self.folder = temporary_folder(ignore_cleanup_errors=True)
        fds = [each.fileno() for _, each in pairs]
        code = f"from {__name__} import work; work({self.folder.name!r}, {fds})"
        # ptxas and other tools have their temporary files there, too
        self.parent = start_python(code, stderr=subprocess.DEVNULL, pass_fds=fds, TMPDIR=self.folder.name)
        for _, each in pairs:
            each.close()

    def collect(self, waits: bool = False) -> None:
        """Put processes that have become ready into the queue. waits: until each is ready or gone"""
        with self._collecting:
            for each in [each for each in self._starting if waits or each.poll()]:
                try:
                    each.recv_bytes()
                    self._idle.put(each)
                except (EOFError, OSError):
                    self._lose()
                self._starting.remove(each)

    def compile(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Files | None:
        request = encode(src, target, options)
        self.collect()
        if request is None or self._starting:
            return None
        if (process := self._idle.get()) is None:
            self._idle.put(None)  # for the next
            return None
        try:
            process.send_bytes(request)
            files = msgspec.msgpack.decode(process.recv_bytes(), type=Files)
        except BaseException as error:  # it may answer this request when the next one is sent
            process.close()
            self._lose()
            if isinstance(error, EOFError | OSError):
                return None
            raise
        self._idle.put(process)
        return files or None

    def has_ended(self) -> bool:
        return self.parent.poll() is not None

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
    path: str | None  # of a piece, which cannot be imported by name


class _Type(msgspec.Struct, tag="type"):
    name: str  # a type of Triton, as in triton.language


class _Constant(msgspec.Struct):
    place: tuple[int, ...]
    value: Plain | _Name | _Type


class _Compilation(msgspec.Struct):
    """The source and target of a compilation."""

    kernel: _Name
    triton: str  # its version
    identity: dict[str, str]  # as `identify` gives it in the process that asks
    signature: dict[str, str]
    constants: list[_Constant]
    attributes: list[tuple[tuple[int, ...], list[list[Plain]]]]
    target: tuple[str, int | str, int]
    options: dict[str, Any]


def encode(src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> bytes | None:
    """What a process is sent; None if something cannot be encoded, or Proton changes what is compiled."""
    if options.get("instrumentation_mode"):
        return None
    constants = []
    for place, value in src.constants.items():
        if isinstance(value, triton.JITFunction):
            value = _locate(value)
        elif isinstance(value, triton.language.dtype):
            value = _Type(value.name)
        elif not isinstance(value, Plain):
            return None
        constants.append(_Constant(place, value))
    compilation = _Compilation(
        _locate(src.fn), triton.__version__, identify(src, target, options), src.signature, constants,
        [*src.attrs.items()], (target.backend, target.arch, target.warp_size), options,
    )  # fmt: skip
    try:
        return msgspec.msgpack.encode(compilation)
    except (TypeError, OverflowError):
        return None


def _locate(kernel: triton.JITFunction) -> _Name:
    is_found = kernel.__module__ in sys.modules
    return _Name(kernel.__module__, kernel.__name__, None if is_found else kernel.__globals__.get("__file__"))


def work(folder: str, fds: list[int]) -> None:
    """Serve each of these sockets in a fork of this process until all have ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # compilers may print, and nobody reads it
    triton_key()  # reads all of Triton's files
    for index, fd in enumerate(fds):
        if os.fork() == 0:
            for each in fds[index + 1 :]:
                os.close(each)
            try:
                _Worker(Path(folder, str(fd))).serve(Connection(fd))
            finally:
                os._exit(0)
        os.close(fd)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


class _Worker:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[str, ModuleType] = {}  # by path
        knobs.cache.dir = str(folder)

    def serve(self, link: Connection) -> None:
        link.send_bytes(b"ready")
        with contextlib.suppress(EOFError, OSError):
            while link.poll(IDLE_SECONDS):
                request = link.recv_bytes()
                try:
                    files = self._compile(msgspec.msgpack.decode(request, type=_Compilation))
                except Exception:  # whatever it is, the other process raises it when it compiles this kernel
                    files = {}
                link.send_bytes(msgspec.msgpack.encode(files))

    def _compile(self, asked: _Compilation) -> Files:
        target, kernel = GPUTarget(*asked.target), self._find(asked.kernel)
        driver.set_active(_NoDevice(target))
        kernel.create_binder()  # finds the class of its source
        constants = {each.place: self._value(each.value) for each in asked.constants}
        src = kernel.ASTSource(kernel, asked.signature, constants, dict(asked.attributes))
        options = _to_tuples(asked.options)
        if (triton.__version__, identify(src, target, options)) != (asked.triton, asked.identity):
            return {}
        files = triton.compile(src, target=target, options=options).metadata_group
        made = {name: Path(path).read_bytes() for name, path in files.items() if Path(name).suffix in KEPT}
        shutil.rmtree(self._folder, ignore_errors=True)
        return made

    def _value(self, sent: Plain | _Name | _Type) -> Any:
        if isinstance(sent, _Name):
            return self._find(sent)
        return triton.language.dtype(sent.name) if isinstance(sent, _Type) else sent

    def _find(self, sent: _Name) -> Any:
        if sent.path is None:
            return getattr(importlib.import_module(sent.module), sent.name)
        if sent.path not in self._pieces:
            self._pieces[sent.path] = load_module(Path(sent.path))
        return getattr(self._pieces[sent.path], sent.name)


def _to_tuples(sent: Any) -> Any:
    """Options as they were: their sequences are tuples, by which Triton hashes them."""
    if isinstance(sent, dict):
        return {name: _to_tuples(value) for name, value in sent.items()}
    return tuple(map(_to_tuples, sent)) if isinstance(sent, list) else sent


class _NoDevice:
    """A driver of a process that only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target
