"""Words are loaded and stored whole where collectives are compiled for a GPU, and blocks of them side by side.

On NVIDIA's a kernel is launched early, and does neither until the preceding one has ended.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

COMPILE = """
import sys, torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

arch = sys.argv[1]
target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
if target.backend == "hip":  # as where torch is ROCm's
    torch.version.hip = "6.4"
from atom.kernels.peers import collectives
from atom.kernels.triton.gpu import Gpu

gpu = Gpu(132, 232448, (0, 0) if target.backend == "hip" else (target.arch // 10, target.arch % 10))
collectives.find_gpu = lambda device: gpu
TYPES = {torch.int32: "*i32", torch.int64: "*i64", int: "i32"}

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **options):
        params = self.kernel.params
        given = dict(zip(self.kernel.arg_names, args)) | {p.name: options.pop(p.name) for p in params if p.name in options}
        constants = {p.name: given[p.name] for p in params if p.is_constexpr or given[p.name] is None}
        signature = {name: "constexpr" if name in constants else TYPES[getattr(value, "dtype", type(value))]
                     for name, value in given.items()}
        aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type) in enumerate(signature.items())
                   if type[0] == "*" or type == "i32" and given[name] % 16 == 0}
        made = triton.compile(ASTSource(self.kernel, signature, constants, aligned), target, options)
        print("====", made.asm["ptx" if target.backend == "cuda" else "amdgcn"])

for name in ("_all_reduce_kernel", "_reduce_scatter_kernel", "_gather_kernel"):
    setattr(collectives, name, Compile(getattr(collectives, name)))
for ranks in (2, 8):
    x = torch.zeros(8, 1024 * ranks, dtype=torch.bfloat16)
    arena = collectives.Arena(torch.zeros(ranks, dtype=torch.int64), torch.ones(128, dtype=torch.int32),
                              torch.zeros(128, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1)
    collectives.all_reduce(x, arena)
    collectives.all_reduce_in_parts(x, arena)
    collectives.reduce_scatter(x, arena)
    collectives.all_gather(x, 1024 * ranks * ranks, arena)
    collectives.gather_tokens([x, torch.zeros(8, 2), torch.zeros(8, 2, dtype=torch.int64)], arena)
"""
KERNELS = ("all_reduce", "all_reduce_in_parts", "reduce_scatter", "all_gather", "gather_tokens")
THREADS, BLOCK = 128, 512


@functools.cache
def compile_all(arch: str) -> list[tuple[str, int, str]]:
    """Each collective's name, its number of ranks, and its assembly."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    texts = done.stdout.split("====")[1:]
    assert len(texts) == 2 * len(KERNELS)
    return [(name, ranks, texts.pop(0)) for ranks in (2, 8) for name in KERNELS]


@pytest.mark.slow
def test_words_are_loaded_and_stored_whole():
    for name, ranks, text in compile_all("sm_90"):
        found = Counter(re.findall(r"\b(ld\.volatile[.\w]*|st\.(?:volatile\.)?global[.\w]*b64)", text))
        pairs = BLOCK // THREADS // 2  # of words, by a thread
        waits = 2 if name == "all_reduce_in_parts" else 1
        loads = pairs * (2 * ranks - 1 if waits == 2 else ranks)  # of all ranks; of all others for the second shot
        stores = pairs * (ranks - 1) * waits
        assert found == {
            "ld.volatile.global.v2.b64": loads,
            "ld.volatile.global.b32": waits,  # of the flag that ends the wait
            "st.global.v2.b64": stores,
        }, (name, ranks)


@pytest.mark.slow
def test_nothing_is_loaded_or_stored_before_the_preceding_kernel_has_ended():
    for name, ranks, text in compile_all("sm_90"):
        found = re.findall(r"griddepcontrol\.\w+|\b(?:ld|st)\.[.\w]*global", text)
        assert found[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"], (name, ranks)
        assert len(found) > 4 and not any(each.startswith("grid") for each in found[2:]), (name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_words_pass_the_caches_of_amd_s_gpus_two_by_two(arch: str):
    """sc0 and sc1 together are the scope of the system: https://llvm.org/docs/AMDGPUUsage.html"""
    for name, ranks, text in compile_all(arch):
        words = re.findall(r"global_(load|store)_dwordx4 (.*)", text)
        assert all(rest.endswith("off sc0 sc1") for _, rest in words), (name, ranks)
        waits = 2 if name == "all_reduce_in_parts" else 1
        kinds = Counter(kind for kind, _ in words)
        assert kinds["load"] == (2 * ranks - 1 if waits == 2 else ranks), (name, ranks)
        assert kinds["store"] >= (ranks - 1) * waits, "loops may be unrolled"
        assert len(re.findall("global_load_dword .* sc0 sc1", text)) == waits, "of the flag that ends the wait"
