"""Compile kernels in other processes.

start()                                      # kernels are about to be compiled: the processes import Triton meanwhile
files = compile(src, target, options)        # by name; None: compile it in this process
stop()

Triton's front end is Python and takes half of a compilation, so that threads of one process compile little more than
two kernels at a time. The processes are forks of one that has imported Triton. They use no GPU and write to a folder
that ends with them.

A request names its kernel by module. A process whose kernel is another one, for instance since a global of the module
was changed here, declines it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
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

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key

from atom.child_process import end, start_python

MAX_PROCESSES = 16  # a start has some 60 to 100 kernels
IDLE_SECONDS = 120.0  # after which a process ends, where nobody has stopped it
KEPT = {".json", ".cubin", ".hsaco"}  # the files that a launch reads; intermediate representations are not kept
_current: list[_Processes] = []  # one at most
_changing = threading.Lock()


def start() -> None:
    """Start the processes, unless they run or there is but one core."""
    count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    with _changing:
        if not _current and count > 1:
            _current.append(_Processes(count))


def wait() -> None:
    """Wait until processes that were started can compile."""
    for processes in _current:
        processes.collect(waits=True)


def stop() -> None:
    """End the processes, which compile nothing now."""
    with _changing:
        while _current:
            _current.pop().close()


def compile(src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, bytes] | None:
    """The files of a compiled kernel by name; None where no process has compiled it: this one can, and tells errors."""
    return next((processes.compile(src, target, options) for processes in _current), None)


class _Processes:
    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self._starting = [Connection(ours.detach()) for ours, _ in pairs]
        self._num_left = count
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()  # None: all are gone
        self._collecting, self._counting = threading.Lock(), threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="atom-run-", ignore_cleanup_errors=True)
        theirs = [each.fileno() for _, each in pairs]
        code = f"from {__name__} import work; work({self._folder.name!r}, {theirs})"
        self._parent = start_python(code, stderr=subprocess.DEVNULL, pass_fds=theirs)
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

    def compile(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, bytes] | None:
        self.collect()
        if self._starting:
            return None
        if (process := self._idle.get()) is None:
            self._idle.put(None)  # for the next
            return None
        files: dict[str, bytes] | None = None
        try:
            kernel = src.fn, src.signature, src.constants, src.attrs, type(src)
            process.send_bytes(_dump((*kernel, target, options), src.hash()))
            files = pickle.loads(process.recv_bytes())
        except (pickle.PicklingError, AttributeError, KeyError, TypeError):  # what no process can be told
            self._idle.put(process)
        except (EOFError, OSError):
            self._lose()
        else:
            self._idle.put(process)
        return files

    def _lose(self) -> None:
        with self._counting:
            self._num_left -= 1
            if not self._num_left:
                self._idle.put(None)

    def close(self) -> None:
        end(self._parent)
        self._folder.cleanup()


class _Pickler(pickle.Pickler):
    """Pickles a kernel, and functions that kernels call, as its module and name."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, triton.JITFunction):
            return None
        is_found = value.__module__ in sys.modules  # else it is of a piece, which is loaded by its path
        return value.__module__, None if is_found else value.__globals__["__file__"], value.__name__


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        module, path, name = pid
        return getattr(_load(module, path) if path else importlib.import_module(module), name)


def _dump(value: Any, digest: str) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return pickle.dumps((digest, out.getvalue()))


_loaded: dict[str, ModuleType] = {}


def _load(name: str, path: str) -> ModuleType:
    """A module that is not found by its name."""
    if path not in _loaded:
        spec = spec_from_loader(name, SourceFileLoader(name, path))
        assert spec is not None and spec.loader is not None
        _loaded[path] = module_from_spec(spec)
        spec.loader.exec_module(_loaded[path])
    return _loaded[path]


class _NoDevice:
    """A driver of a process that only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target


def work(folder: str, numbers: list[int]) -> None:
    """Serve each of these sockets in a fork of this process, which has one thread, until all have ended."""
    triton_key()  # reads all of Triton's files
    for place, number in enumerate(numbers):
        if os.fork() == 0:
            for each in numbers[place + 1 :]:
                os.close(each)
            try:
                _serve(Path(folder, str(number)), Connection(number))
            finally:
                os._exit(0)
        os.close(number)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(folder: Path, link: Connection) -> None:
    sys.dont_write_bytecode = True  # beside a piece, which is an entry of the cache
    knobs.cache.dir = str(folder)
    link.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while link.poll(IDLE_SECONDS):
            try:
                answer = _compile(folder, *pickle.loads(link.recv_bytes()))
            except EOFError:
                break
            except Exception:  # whatever it is, the other process tells it when it compiles this kernel
                answer = None
            link.send_bytes(pickle.dumps(answer))


def _compile(folder: Path, digest: str, request: bytes) -> dict[str, bytes] | None:
    fn, signature, constants, attrs, source, target, options = _Unpickler(io.BytesIO(request)).load()
    src = source(fn, signature, constants, attrs)
    if src.hash() != digest:
        return None
    driver.set_active(_NoDevice(target))
    files = triton.compile(src, target=target, options=options).metadata_group
    made = {name: Path(path).read_bytes() for name, path in files.items() if Path(name).suffix in KEPT}
    shutil.rmtree(folder, ignore_errors=True)
    return made
