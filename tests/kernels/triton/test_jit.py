"""Kernels of another library are launched, compiled and kept as Triton does it, whatever ours do meanwhile.

In a process of its own, without the interpreter: Triton compiles for a GPU that is not there, and launches tell of
themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels.compiling import run_program
from kernels.triton.test_precompile import run  # noqa: F401

FOREIGN = """
import importlib, os, pkgutil
from types import SimpleNamespace
from triton import knobs
from triton.runtime import build, cache

triton.compiler.compile = triton.compile
inside, go_on = threading.Event(), threading.Event()
class Launcher:
    def __init__(self, src, metadata):
        self.name = src.fn.__name__
        if self.name == "own":
            inside.set(), go_on.wait(60)
        manager = cache.get_cache_manager(self.name.encode().hex())
        manager.get_file("launcher.so") or manager.put(self.name.encode(), "launcher.so")
    def __call__(self, *args):
        launched.append((self.name, args[-1]))
Driver.launcher_cls = Launcher
Driver.utils = SimpleNamespace(load_binary=lambda *args: (None, None, 0, 0, 1024), unload_module=lambda module: None,
                               get_device_properties=lambda device: {"max_shared_mem": 1 << 17})

def see():
    kernel = [getattr(triton.JITFunction, name) for name in ("__getitem__", "run", "create_binder", "_do_compile", "__init__")]
    keys = [cache.triton_key, cache.get_cache_key, cache.get_cache_manager, build.get_cache_manager, knobs.cache.manager_class]
    return kernel + keys + [triton.jit, triton.compile, vars(knobs.cache).get("manager_class")]

def kept_in(folder):
    return sorted({path.name for path in Path(folder).rglob("*") if path.suffix in (".cubin", ".so")})

@triton.jit
def foreign(x, N: tl.constexpr): tl.store(x, N)
memory = torch.zeros(4)
foreign[(1,)](memory, 1)
before, launch = see(), foreign[(1,)].__qualname__

import atom.kernels.triton
for module in pkgutil.walk_packages(atom.kernels.triton.__path__, "atom.kernels.triton."):
    importlib.import_module(module.name)
from atom.cache import Cache
from atom.kernels.triton.binary_cache import keep_in
from atom.kernels.triton.jit import jit
from atom.kernels.triton.precompile import compile_launches
binaries = keep_in(Cache(Path(sys.argv[1])))
@jit
def own(x, N: tl.constexpr): tl.store(x, N)
starting = threading.Thread(target=lambda: own[(1,)](memory, 2))
starting.start()
assert inside.wait(60)
foreign[(1,)](memory, 3)  # is compiled while ours is
go_on.set()
starting.join(60)
with ThreadPoolExecutor(1) as pool, compile_launches(pool):
    own[(1,)](memory, 4)
    foreign[(1,)](memory, 5)
own[(1,)](memory, 4), foreign[(1,)](memory, 5)
print(json.dumps([see() == before, foreign[(1,)].__qualname__ == launch, launched, binaries.num_compiled,
                  kept_in(os.environ["TRITON_CACHE_DIR"]), kept_in(Path(sys.argv[1]) / "binaries")]))
"""


def test_another_library_s_kernels_do_not_see_ours(run: Any, tmp_path: Path):  # noqa: F811
    is_as_it_was, is_launched_the_same, launched, num_compiled, foreign, own = run(FOREIGN, str(tmp_path / "atom"))
    assert is_as_it_was and is_launched_the_same
    assert launched == [["foreign", 1], ["foreign", 3], ["own", 2], ["foreign", 5], ["own", 4], ["foreign", 5]]
    assert num_compiled == 3, "two of ours, and what launches them"
    assert foreign == ["foreign.cubin", "launcher.so"]
    assert own == ["launcher.so", "own.cubin"]


KEYS = """
import sys
from atom.kernels.triton import sampling
from atom.kernels.triton.attention import prefill
from atom.kernels.triton.linear import packed_hopper

kernels = [sampling._limit, sampling._gather, sampling._draw, packed_hopper._multiply, prefill._prefill]
for kernel in kernels if sys.argv[1] == "forwards" else kernels[::-1]:
    kernel.cache_key
print([kernel.cache_key for kernel in kernels])
"""


def test_a_kernel_s_key_does_not_depend_on_those_before_it():
    forwards, backwards = (run_program(KEYS, order).stdout for order in ("forwards", "backwards"))
    assert forwards == backwards and forwards.count(",") == 4
