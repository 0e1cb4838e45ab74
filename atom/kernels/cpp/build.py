"""Build packed.cpp for this CPU, and load it.

    load_library()          # from the cache folder, else compiled in some seconds; once in a process
                            # False: it cannot be

It is compiled for the instructions of this very CPU, which are part of its key.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from atom.cache import Cache, digest, key_of
from atom.cache.files import BINARIES
from atom.errors import ArtifactError
from atom.kernels.cpu import instruction_set, libraries

SOURCE = Path(__file__).with_name("packed.cpp")
LIBRARY = "packed.so"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp-simd", "-shared", "-fPIC")
SECONDS = 300  # that a compiler may take


class _Process:
    """What this process has found; threads of a loader ask at the same time."""

    lock = threading.Lock()
    cache: Cache | None = None  # None: the library is compiled by each process that uses it
    is_loaded: bool | None = None  # False: it cannot be compiled; None: nobody has asked


@contextmanager
def keep_library(cache: Cache) -> Iterator[None]:
    """Keep the library in a cache folder, and look for it there, from now on."""
    _Process.cache = cache
    yield


def load_library() -> bool:
    """Load the library, which registers the ops of `panels`. False where it cannot be compiled; a line says why."""
    with _Process.lock:
        if _Process.is_loaded is None:
            try:
                with tempfile.TemporaryDirectory(prefix="atom-run-") as made:
                    torch.ops.load_library(_find_or_compile(Path(made), _Process.cache))  # type: ignore[no-untyped-call]
                _Process.is_loaded = True
            except (ArtifactError, OSError) as error:
                print(f"atom-run: {error}; until then packed weights are unpacked", file=sys.stderr)
                _Process.is_loaded = False
        return _Process.is_loaded


def find_compiler() -> str | None:
    """The path of a C++ compiler that takes GCC's flags."""
    return shutil.which("g++") or shutil.which("clang++")


def _find_or_compile(folder: Path, cache: Cache | None) -> Path:
    """The library in the cache, or, where that takes nothing, in this folder."""
    if cache is None:
        return _compile(folder)
    ingredients = {
        "source": digest(SOURCE.read_text()),
        "torch": torch.__version__,
        "instruction set": instruction_set(),
        "libraries": libraries(),
        "flags": " ".join(FLAGS),
    }
    key = key_of(ingredients)
    found = cache.find(BINARIES, key)
    if found is None:
        with cache.lock(BINARIES, key):  # one process compiles, others wait
            found = cache.find(BINARIES, key)
            if found is None:
                about = {"name": LIBRARY, "device": "cpu", "ingredients": ingredients}
                found = cache.publish(BINARIES, key, {LIBRARY: _compile(folder)}, about)
    return found / LIBRARY


def _compile(folder: Path) -> Path:
    compiler, made, torch_folder = find_compiler(), folder / LIBRARY, Path(torch.__file__).parent
    if compiler is None:
        raise ArtifactError(f"{SOURCE.name} cannot be compiled: there is no C++ compiler; install g++")
    print(f"atom-run: compiling {SOURCE.name}", file=sys.stderr)
    places = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    command = [compiler, *FLAGS, str(SOURCE), *places, "-ltorch_cpu", "-lc10", "-o", str(made)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.CalledProcessError as error:
        reason = next(
            (line for line in error.stderr.splitlines() if "error" in line), f"{compiler} ended with an error"
        )
        raise ArtifactError(f"{SOURCE.name} cannot be compiled: {reason}") from None
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{SOURCE.name} is not compiled after {SECONDS} s") from None
    return made
