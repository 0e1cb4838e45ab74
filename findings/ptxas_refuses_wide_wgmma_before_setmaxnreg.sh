#!/usr/bin/env bash
# ptxas (CUDA 12.8, which Triton 3.6.0 brings) refuses `wgmma.m64n256` in a kernel of 512 threads, whose registers are
# 128 a thread, though `setmaxnreg.inc` gives the warps that run it 160 before: C7602, "Insufficient registers (128)".
# What a thread may have is read off the launch bounds for one instruction. Two `m64n128` in its place compile, with the
# same sums in as many registers. So three groups of warps of a Gluon kernel cannot each have a tile of 64 x 256 at once.
# No GPU is needed: the kernels are compiled for sm_90a.
# Seen: Triton 3.6.0: one of 256 columns PTXASError C7602, two of 128 compile, 128 registers at launch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'P'
import contextlib
import io
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.runtime.errors import PTXASError


@gluon.jit
def multiply(a, b, out, WHO: gl.constexpr, COLUMNS: gl.constexpr):
    """64 rows by 256 columns, in products of COLUMNS."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))[:, None]
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))[None, :]
    first = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    second = gl.zeros([64, COLUMNS], gl.float32, SUMS)
    for step in range(gl.program_id(0)):
        first = warpgroup_mma(a.index(WHO), b.index(0).permute((1, 0)), first, is_async=True)
        if COLUMNS == 128:
            second = warpgroup_mma(a.index(WHO), b.index(1).permute((1, 0)), second, is_async=True)
        first, second = warpgroup_mma_wait(0, deps=(first, second))
    places = out + (WHO * 64 + rows) * 256 + columns
    gl.store(places, first)
    if COLUMNS == 128:
        gl.store(places + 128, second)


@gluon.jit
def idle():
    pass


@gluon.jit
def kernel(out, COLUMNS: gl.constexpr):
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], SHARED)
    b = gl.allocate_shared_memory(gl.bfloat16, [256 // COLUMNS, COLUMNS, 64], SHARED)
    gl.warp_specialize(
        [
            (multiply, (a, b, out, 0, COLUMNS)),
            (multiply, (a, b, out, 1, COLUMNS)),
            (multiply, (a, b, out, 2, COLUMNS)),
            (idle, ()),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


def compile(columns):
    source = GluonASTSource(kernel, {"out": "*fp32", "COLUMNS": "constexpr"}, {(1,): columns})
    options = {"num_warps": 4, "maxnreg": 128}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # which the PTX is printed to if ptxas fails
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except PTXASError as error:
        (said,) = set(re.findall(r"\(C7602\) Insufficient registers \(\d+\)", str(error)))
        return said
    ptx = made.asm["ptx"]
    raised = {int(n) for n in re.findall(r"setmaxnreg\.inc\S*\s+(\d+)", ptx)}
    assert 160 in raised and re.search(r"\.reqntid 512", ptx) and re.search(r"\.maxnreg 128", ptx)
    return "compiles"


seen = [compile(256), compile(128)]
print(f"{triton.__version__}: one product of 256 columns: {seen[0]}; two of 128: {seen[1]}")
raise SystemExit(seen != ["(C7602) Insufficient registers (128)", "compiles"])
P
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check triton==3.6.0 setuptools
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/program.py"
