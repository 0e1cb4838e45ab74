#!/usr/bin/env bash
# ptxas moves `wgmma.wait_group` ahead of arithmetic that stands before it and does not depend on it. An attention kernel
# computes a softmax while the matmul of the last weights and values runs, and waits for it afterwards (FlashAttention-3);
# in the machine code the wait is ahead of the softmax, and nothing runs meanwhile. The PTX has them in the right order,
# and the shuffles of the softmax do not stop it. It moves no wait into another basic block: the loop of an
# `mbarrier.try_wait` between them, of a phase that is over, keeps all of the softmax ahead of the wait.
# Kept in that order, attention on an H200 was 2 to 10% slower.
# No GPU is needed: what is counted is the exponentials between the two waits of a loop, 66 of a thread.
# Seen: Triton 3.6.0 (ptxas of CUDA 12.8) and 3.8.0: plain 0, with a loop between them 66.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'P'
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@gluon.jit
def kernel(out, count, PINNED: gl.constexpr):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ATTENDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ATTENDED, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [128, 64], SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [128, 64], SHARED)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    mbarrier.arrive(done)
    best = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    weights = gl.zeros([64, 128], gl.bfloat16, WEIGHTS)
    acc = gl.zeros([64, 64], gl.float32, ATTENDED)
    for _ in range(count):
        scores = gl.zeros([64, 128], gl.float32, SCORES)
        scores = warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        higher = gl.maximum(best, gl.max(scores, 1))
        new = gl.exp2(scores - higher[:, None])
        fade = gl.exp2(best - higher)
        total = total * fade + gl.sum(new, 1)
        best = higher
        if PINNED:
            mbarrier.wait(done, 0)
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, ATTENDED))[:, None]
        weights = gl.convert_layout(new.to(gl.bfloat16), WEIGHTS)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, ATTENDED))[:, None]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ATTENDED))[:, None]
    gl.store(out + rows * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ATTENDED))[None, :], acc)


triton.runtime.driver.set_active(Driver())
seen = []
for pinned in (False, True):
    made = kernel.warmup(triton.MockTensor(triton.language.float32), 9, pinned, grid=(1,), num_warps=4)
    numbers = {}
    for form, exponential in (("ptx", r"ex2\.approx"), ("sass", r"MUFU\.EX2")):
        waits = r"wgmma\.wait_group\S* (\d)" if form == "ptx" else r"DEPBAR\.LE gsb0, 0x(\d)"
        found = re.findall(f"{waits}|{exponential}", made.asm[form])
        first = found.index("1")
        numbers[form] = found.index("0", first) - first - 1
    print(f"Triton {triton.__version__}, {'a loop between' if pinned else 'plain'}: {numbers}")
    seen.append(numbers)
plain, loop = seen
raise SystemExit(not (plain["ptx"] == loop["ptx"] == loop["sass"] == 66 and plain["sass"] < 20))
P
for version in 3.6.0 3.8.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check triton==$version setuptools
    TRITON_CACHE_DIR="$folder/cache" "$folder/$version/bin/python" "$folder/program.py"
done
