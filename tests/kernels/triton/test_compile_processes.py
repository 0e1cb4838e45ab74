"""Processes that compile kernels: what they give is what this process compiles, and they leave nothing behind."""

from __future__ import annotations

from pathlib import Path

from kernels.compiling import compile_for_hopper

PROGRAM = """
import os, signal, sys, tempfile
from pathlib import Path
from kernels.compiling import use_hopper
import torch
from atom.cache import Cache
from atom.kernels.triton import compile_processes, sampling
from atom.kernels.triton.binary_cache import BinaryCache, keep_in

use_hopper()
tempfile.tempdir = sys.argv[1]
asked = compile_processes.compile
given = []
compile_processes.compile = lambda *args: given.append(asked(*args)) or given[-1]
first, second = (Cache(Path(sys.argv[1], name)) for name in ("processes", "here"))

def compile_one():
    zeros = torch.zeros(8)
    sampling._limit.device_caches.clear()
    sampling._limit.warmup(
        9, zeros.int(), zeros.double(), zeros.long(), zeros.double(), zeros.double(), zeros, *[zeros.int()] * 3, zeros,
        zeros.int(), 64, 2, 32, grid=(1,),
    )

def files(cache):
    return {
        path.relative_to(cache.folder).as_posix(): path.read_bytes()
        for path in cache.folder.glob("binaries/*/*") if path.name != "manifest.json"
    }

compile_processes.MAX_PROCESSES = 2
os.sched_getaffinity = lambda _: {0, 1}
assert compile_processes.compile(None, None, None) is None, "none were started"
keep_in(first)
compile_processes.start(), compile_processes.start(), compile_processes.wait()
(processes,) = compile_processes._current
compile_one()
assert sorted(Path(name).suffix for name in given[-1]) == [".cubin", ".json"]
keep_in(second)
calls = len(given)
compile_processes.stop()
compile_one()
assert given[calls:] == [None] and files(first) == files(second) and len(files(first)) == 2
assert processes._parent.returncode == -signal.SIGKILL and not Path(processes._folder.name).exists()

# a kernel that is another one there, and processes that are gone
compile_processes.start(), compile_processes.wait()
sampling.NUM_BINS = type(sampling.NUM_BINS)(32)
sampling._limit.hash = None
keep_in(Cache(Path(sys.argv[1], "other")))
compile_one()
assert given[-1] is None
os.killpg(compile_processes._current[0]._parent.pid, signal.SIGKILL)
sampling.NUM_BINS = type(sampling.NUM_BINS)(64)
sampling._limit.hash = None
for name in ("gone", "all gone", "still"):
    keep_in(Cache(Path(sys.argv[1], name)))
    compile_one()
    assert given[-1] is None and len(files(BinaryCache.current.cache)) == 2
compile_processes.stop()
"""


def test_their_files_are_those_that_this_process_compiles_and_it_does_where_they_do_not(tmp_path: Path):
    compile_for_hopper(PROGRAM, str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton"))
