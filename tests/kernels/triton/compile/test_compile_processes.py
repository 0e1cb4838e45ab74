"""Processes that compile kernels: what they give is what this process compiles, and they leave no files and processes."""

from __future__ import annotations

from pathlib import Path

from kernels.compiling import compile_for_hopper

PROGRAM = """
import os, signal, sys, tempfile
from types import SimpleNamespace
from pathlib import Path
from kernels.compiling import use_hopper
import torch
from atom.cache import Cache
from atom.kernels.triton.compile import compile_processes
from atom.kernels.triton.step import sampling
from atom.kernels.triton.compile.binary_cache import BinaryCache, keep_in

use_hopper()
tempfile.tempdir = sys.argv[1]
compile_processes.MAX_PROCESSES = 2
os.sched_getaffinity = lambda _: {0, 1}
given = []

class Watched(compile_processes.CompileProcesses):
    def compile(self, *args):
        given.append(super().compile(*args))
        return given[-1]

processes = Watched()

def compile_one(name):
    keep_in(Cache(Path(sys.argv[1], name))).processes = processes
    sampling._limit.device_caches.clear()
    zeros = torch.zeros(8)
    sampling._limit.warmup(
        9, zeros.int(), zeros.double(), zeros.long(), zeros.double(), zeros.double(), zeros, *[zeros.int()] * 3, zeros,
        zeros.int(), 64, 2, 2, grid=(1,),
    )
    folder = BinaryCache.current.cache.folder
    found = {path.name: path.read_bytes() for path in folder.glob("binaries/*/*") if path.name != "manifest.json"}
    assert sorted(Path(name).suffix for name in found) == [".cubin", ".json"]
    return found

here = compile_one("here")
assert given.pop() is None, "none were started"
processes.start(), processes.start(), processes.wait()
running = processes._running
assert compile_one("processes") == here == given.pop()

# a kernel that is another one there, and processes that are gone
sampling.NUM_BINS = type(sampling.NUM_BINS)(32)
sampling._limit.hash = None
assert compile_one("other") != here and given.pop() is None
sampling.NUM_BINS = type(sampling.NUM_BINS)(64)
sampling._limit.hash = None
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # which they have not
assert compile_one("variable") and given.pop() is None
del os.environ["TRITON_DEFAULT_FP_FUSION"]
assert compile_one("again") == here == given.pop()
assert processes.compile(SimpleNamespace(constants={(0,): object()}), None, {}) is None, "cannot be encoded"
given.clear()
os.killpg(running.parent.pid, signal.SIGKILL)
for name in ("gone", "all gone", "still"):
    assert compile_one(name) == here and given.pop() is None
processes.start(), processes.wait()
assert processes._running is not running and compile_one("begun again") == here == given.pop()
running = processes._running
processes.stop()
assert running.parent.returncode == -signal.SIGKILL and not Path(running.folder.name).exists()
assert compile_one("stopped") == here and given.pop() is None
"""


def test_their_files_are_those_that_this_process_compiles_and_it_does_where_they_do_not(tmp_path: Path):
    compile_for_hopper(PROGRAM, str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton"))
