#!/usr/bin/env bash
# ptxas (CUDA 12.8, which Triton 3.6.0 brings) reads elsewhere in a `wgmma` with 32 columns or fewer after one with 64, if
# both find their tile at one place of shared memory. The PTX adds 64-bit constants to one address, which are the matrix
# descriptors of the steps of each product; the machine code adds the low half of the second product's constants to some
# other register (UIADD3 UR6, UP0, UR9, 0x40), and the high half to the same one (UIADD3.X UR7, UR9, ...) in place of 0.
# All of its steps but the first read what is there: sums are wrong, on an H200 as well. So in plain Triton, two `tl.dot`.
# The assembler of CUDA 12.9, which the same wheel has for Blackwell, makes it right of the same PTX.
# No GPU is needed: what a sum's halves are made of is read off the machine code.
# Seen: Triton 3.6.0: 64 columns: ptxas 12.8 right, 12.9 right; 32: 12.8 wrong, 12.9 right; 16: 12.8 wrong, 12.9 right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'P'
import re
import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FOLDER = Path(sys.argv[0]).parent


@triton.jit
def kernel(a, b, c, out, N: tl.constexpr):
    """(a b) b [64, 64] and then (a b) c [64, N]."""
    i, j, n = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, N)[None, :]
    program = tl.program_id(0)
    b = tl.load(b + program * 4096 + i * 64 + j)
    product = tl.dot(tl.load(a + program * 4096 + i * 64 + j), b).to(tl.float16)
    tl.store(out + program * 4096 + i * 64 + j, tl.dot(product, b))
    c = tl.load(c + program * 64 * N + i * N + n)
    tl.store(out + program * 64 * N + i * N + n, tl.dot(product, c))


def assemble(ptx, ptxas):
    """The lines of the machine code."""
    (FOLDER / "k.ptx").write_text(ptx)
    subprocess.run([BIN / ptxas, "-arch=sm_90a", FOLDER / "k.ptx", "-o", FOLDER / "k.cubin"], check=True)
    done = subprocess.run([BIN / "cuobjdump", "-sass", FOLDER / "k.cubin"], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", done.stdout, re.MULTILINE)


def is_wrong(lines):
    """Whether a 64-bit sum has both its halves from one register."""
    low = {}  # by the carry: what the low half is made of
    for line in lines:
        name, *operands = re.split(r"[ ,]+", line.strip())
        if name == "UIADD3.X" and any(low.get(each) == operands[1] for each in operands):
            return True
        low = {carry: source for carry, source in low.items() if source not in operands[:1]}
        if name == "UIADD3" and operands[1].startswith("UP") and operands[2] not in (operands[0], "URZ"):
            low[operands[1]] = operands[2]
    return False


seen = {}
types = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "out": "*fp32", "N": "constexpr"}
for columns in (64, 32, 16):
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(4)}
    ptx = triton.compile(ASTSource(kernel, types, {(4,): columns}, aligned), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert len(re.findall(rf"wgmma\.mma_async\S*m64n{columns}k16", ptx)) >= 4
    seen[columns] = [is_wrong(assemble(ptx, each)) for each in ("ptxas", "ptxas-blackwell")]
    old, new = ("wrong" if each else "right" for each in seen[columns])
    print(f"Triton {triton.__version__}, {columns} columns: ptxas 12.8 {old}, 12.9 {new}")
raise SystemExit(seen != {64: [False, False], 32: [True, False], 16: [True, False]})
P
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check triton==3.6.0 setuptools
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/program.py"
