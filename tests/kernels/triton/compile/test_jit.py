"""Kernels of another library are launched, compiled and kept as Triton does it, whatever ours do meanwhile.

In a process of its own, without the interpreter: Triton compiles for a GPU that is not there, and launches report
themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernels.compiling import run_program
from kernels.triton.compile.test_precompile import run  # noqa: F401

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

import atom.kernels.hopper, atom.kernels.triton
for package in (atom.kernels.hopper, atom.kernels.triton):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
from atom.cache import Cache
from atom.kernels.triton.compile.binary_cache import keep_in
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.compile.precompile import compile_launches
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


@pytest.mark.slow
def test_another_library_s_kernels_do_not_see_ours(run: Any, tmp_path: Path):  # noqa: F811
    is_as_it_was, is_launched_the_same, launched, num_compiled, foreign, own = run(FOREIGN, str(tmp_path / "atom"))
    assert is_as_it_was and is_launched_the_same
    assert launched == [["foreign", 1], ["foreign", 3], ["own", 2], ["foreign", 5], ["own", 4], ["foreign", 5]]
    assert num_compiled == 3, "two of ours, and what launches them"
    assert foreign == ["foreign.cubin", "launcher.so"]
    assert own == ["launcher.so", "own.cubin"]


KEYS = """
import sys
from atom.kernels.triton.step import sampling
from atom.kernels.triton.attention import prefill
from atom.kernels.hopper import packed_linear as packed_hopper

kernels = [sampling._limit, sampling._gather, sampling._draw, packed_hopper._multiply, prefill._prefill]
for kernel in kernels if sys.argv[1] == "forwards" else kernels[::-1]:
    kernel.cache_key
print([kernel.cache_key for kernel in kernels])
"""


@pytest.mark.slow
def test_a_kernel_s_key_does_not_depend_on_those_before_it():
    forwards, backwards = (run_program(KEYS, order).stdout for order in ("forwards", "backwards"))
    assert forwards == backwards and forwards.count(",") == 4


AGAIN = """
import ast
from triton import knobs
from atom.kernels.triton.compile.jit import jit

class Recorded(Kernel):
    def __init__(self, src, options): self.text = [src.fn.__name__, str(sorted(src.signature.items())), options["num_warps"]]
    @property
    def run(self):
        return lambda *args: launched.append([*self.text, args[:3], len(args), [each for each in args[9:] if not hasattr(each, "data_ptr")]])
triton.compiler.compile = lambda src, target=None, options=None, **rest: Recorded(src, options)
by_triton = []
triton_s = triton.JITFunction.run
triton.JITFunction.run = lambda self, *args, **options: by_triton.append(1) or triton_s(self, *args, **options)

@jit
def own(x, n, N: tl.constexpr): tl.store(x + n, N)
memory = torch.zeros(64)
def launch(hook=None):
    counts = []
    for x, n, N, grid, warps in [(memory, 5, 8, (3,), 4), (memory[1:], 5, 8, (3, 2), 4), (memory, 1, 8, (3, 2, 7), 4), (memory, 6, 8, (4,), 4),
                                 (memory.double(), 5, 8, lambda given: (given["n"],), 4), (memory, 5, 9, (3,), 4), (memory, 5, 8, (3,), 8)]:
        own[grid](x, n, N, num_warps=warps)
        counts.append(len(by_triton))
        by_triton.clear()
    return counts
first, again = launch(), launch()
noted = []
hook = lambda metadata: noted.append(1)
knobs.runtime.launch_enter_hook.add(hook)
hooked = launch()
knobs.runtime.launch_enter_hook.remove(hook)
half = len(launched) // 3
print(json.dumps([first, again, hooked, launched[:half] == launched[half : 2 * half], launched[:half]]))
"""


def test_only_the_first_launch_of_a_kind_is_by_triton(run: Any):  # noqa: F811
    first, again, hooked, is_same, launched = run(AGAIN)
    assert first == [1, 1, 1, 0, 1, 1, 1], "the fourth is of the kind of the first"
    assert again == [0] * 7
    assert hooked == [1] * 7, "a hook is called for what Triton launches"
    assert is_same, "the same binaries, grids and arguments"
    assert [each[3] for each in launched] == [
        [3, 1, 1],
        [3, 2, 1],
        [3, 2, 7],
        [4, 1, 1],
        [5, 1, 1],
        [3, 1, 1],
        [3, 1, 1],
    ]
    assert [each[2] for each in launched] == [4] * 6 + [8]
    assert launched[0][1] != launched[2][1], "n=1 is a constant"
