"""Words are loaded and stored whole where collectives are compiled for a GPU, and blocks of them side by side."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from atom.kernels.peers import collectives

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
        made = triton.compile(ASTSource(self.kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
        print("====", made.asm["ptx"])

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


@pytest.mark.slow
def test_words_are_loaded_and_stored_whole():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    texts = done.stdout.split("====")[1:]
    assert len(texts) == 2 * len(KERNELS)
    for number, text in enumerate(texts):
        ranks, name = (2, 8)[number // len(KERNELS)], KERNELS[number % len(KERNELS)]
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
