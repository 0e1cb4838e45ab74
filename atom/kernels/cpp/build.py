"""Build C++ sources for this CPU, and load them.

    load_library("packed.cpp")          # from the cache folder, otherwise compiled in seconds; once per process
                                        # False: it cannot be compiled

Libraries are compiled for the instructions of this CPU, which are part of their key.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, ClassVar

import torch

from atom.cache import Cache, digest, key_of
from atom.cache.files import BINARIES
from atom.cache.temporary import temporary_folder
from atom.errors import ArtifactError
from atom.kernels.cpu import instruction_set, left_out, libraries
from atom.process.child_process import start_python
from atom.process.messages import say

FOLDER = Path(__file__).parent
SOURCES = PLAIN, PACKED, ATTENTION, RECURRENT, FIXED = (
    "plain.cpp",
    "packed.cpp",
    "attention.cpp",
    "recurrent.cpp",
    "fixed.cpp",
)
LIBRARY = "library.so"
HEADER = "numbers.h"  # of all sources
# loops at 64 bytes: the same code from elsewhere ran 5% to 8% slower
FLAGS = ("-O3", "-march=native", "-falign-loops=64", "-std=c++20", "-fopenmp-simd", "-shared", "-fPIC")
# of GCC's time for this source three quarters are joins of three and four instructions, which make it no faster
FLAGS_OF = {PACKED: ("--param=max-combine-insns=2",)}
SECONDS = 300  # max time of a compiler


class _Process:
    """State of this process, shared by the loader's threads."""

    locks: ClassVar = {source: threading.Lock() for source in SOURCES}
    cache: Cache | None = None  # None: not set, compile without a cache
    loaded: ClassVar[dict[str, bytes | None]] = {}  # libraries by source; None: it cannot be compiled
    num_interrupted = 0  # compilers ended by Ctrl-C


@contextmanager
def keep_libraries(cache: Cache) -> Iterator[None]:
    """Keep libraries in a cache folder, and look for them there, from then on."""
    _Process.cache = cache
    yield


def build_library(source: str) -> None:
    """Load a library, and store it in the cache folder if it is missing there."""
    if load_library(source) and (cache := _Process.cache) is not None:
        ingredients = _ingredients(source)
        if not cache.holds(BINARIES, key_of(ingredients)):  # this process has it from another folder
            _keep(cache, source, ingredients, _Process.loaded[source] or b"")


def load_library(source: str) -> bool:
    """Load the library of a source, which registers its ops. False if it cannot be compiled; a line says why."""
    num_interrupted = _Process.num_interrupted
    with _Process.locks[source]:
        if num_interrupted < _Process.num_interrupted:  # while this waited for another thread
            raise KeyboardInterrupt
        if source not in _Process.loaded:
            try:
                content = _find_or_compile(source, _Process.cache)
                with tempfile.NamedTemporaryFile(prefix="atom-run-", suffix=".so") as file:
                    file.write(content)
                    file.flush()
                    torch.ops.load_library(file.name)  # type: ignore[no-untyped-call]
                _Process.loaded[source] = content
            except (ArtifactError, OSError) as error:
                say(f"{error}; without it this is slower")
                _Process.loaded[source] = None
        return _Process.loaded[source] is not None


def _find_or_compile(source: str, cache: Cache | None) -> bytes:
    if cache is None:
        return _compile(source)
    ingredients = _ingredients(source)
    key = key_of(ingredients)
    found = cache.find(BINARIES, key)
    if found is None:
        with cache.lock(BINARIES, key):  # one process compiles, others wait
            found = cache.find(BINARIES, key) or _keep(cache, source, ingredients, _compile(source))
    return (found / LIBRARY).read_bytes()


def _keep(cache: Cache, source: str, ingredients: dict[str, str], library: bytes) -> Path:
    about = {"name": source, "device": "cpu", "ingredients": ingredients}
    return cache.publish(BINARIES, key_of(ingredients), {LIBRARY: library}, about)


def _ingredients(source: str) -> dict[str, str]:
    return {
        "sources": digest("".join((FOLDER / name).read_text() for name in (source, HEADER))),
        "torch": torch.__version__,
        "instruction set": instruction_set(),
        "libraries": libraries(),
        "flags": " ".join((*FLAGS, *FLAGS_OF.get(source, ()))),
    }


def _without(flag: str) -> str:
    """The compiler's flag for doing without instructions of /proc/cpuinfo's name."""
    return "-mno-" + (flag.replace("_", "-") if flag.startswith("amx") else flag.replace("_", ""))


def accepted(compiler: str, flags: Sequence[str]) -> list[str]:
    """Those of the flags that a compiler takes: one that refuses -mno-avx512fp16 writes no such instruction."""
    command = [compiler, "-fsyntax-only", "-x", "c++", os.devnull]
    return [flag for flag in flags if subprocess.run([*command, flag], capture_output=True).returncode == 0]


def find_compiler() -> str | None:
    """The path of a C++ compiler that takes GCC's flags."""
    return shutil.which("g++") or shutil.which("clang++")


def _compile(source: str) -> bytes:
    compiler, torch_folder = find_compiler(), Path(torch.__file__).parent
    if compiler is None:
        raise ArtifactError(f"{source} cannot be compiled: there is no C++ compiler; install g++")
    say(f"compiling {source}")
    places = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    with temporary_folder() as folder, Path(folder, "errors.txt").open("w+") as errors:
        made = Path(folder) / LIBRARY
        flags = [*FLAGS, *FLAGS_OF.get(source, ()), *accepted(compiler, [*map(_without, left_out())])]
        command = [compiler, *flags, str(FOLDER / source), *places, "-ltorch_cpu", "-lc10", "-o", str(made)]
        code = _run(command, folder, errors)
        if code == -signal.SIGINT:  # a terminal's Ctrl-C reaches the compiler too
            _Process.num_interrupted += 1
            raise KeyboardInterrupt
        if code is None:
            raise ArtifactError(f"{source} is not compiled after {SECONDS} s")
        if code:
            errors.seek(0)
            reason = next((line.rstrip() for line in errors if "error" in line), f"{compiler} failed")
            raise ArtifactError(f"{source} cannot be compiled: {reason}")
        return made.read_bytes()


def _run(command: Sequence[str], folder: str, errors: IO[str]) -> int | None:
    """Run a compiler that ends with this process; its exit code, None after SECONDS. folder: of its temporary files"""
    code = "import sys; from atom.process.child_process import run_guarded; run_guarded(*sys.argv[1:])"
    process = start_python(code, *command, stderr=errors, has_own_session=False, TMPDIR=folder)
    assert process.stdin is not None and process.stdout is not None, "they are pipes"
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.stdin.close()  # ends the compiler, if it runs
        process.stdout.close()
        process.wait()
