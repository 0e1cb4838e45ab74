#!/usr/bin/env bash
# Gluon (triton.experimental) 3.6.0 refuses `gl.zeros(shape, dtype, x.type.layout)` in a kernel, where 3.8.0 takes it:
# gl.zeros is a jitted function, and in 3.6.0 a layout that reaches one as a plain argument has no `_flatten_ir`.
# Bound to a `gl.constexpr` name first, the same layout compiles in both. Builtins such as gl.arange take either.
# No GPU is needed: the kernels are compiled for sm_90 as far as their IR.
# Seen: 3.6.0: plain CompilationError, bound compiles; 3.8.0: both compile.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'P'
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


@gluon.jit
def plain(out):
    ACC: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x = gl.full([128], 1.0, gl.float32, ACC)
    y = gl.zeros([128], gl.float32, x.type.layout)
    gl.store(out + gl.arange(0, 128, layout=ACC), x + y)


@gluon.jit
def bound(out):
    ACC: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x = gl.full([128], 1.0, gl.float32, ACC)
    SAME: gl.constexpr = x.type.layout
    y = gl.zeros([128], gl.float32, SAME)
    gl.store(out + gl.arange(0, 128, layout=ACC), x + y)


def is_compiled(kernel) -> bool:
    try:
        triton.compile(GluonASTSource(kernel, {"out": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
    except CompilationError as error:
        print(f"{triton.__version__} {kernel.__name__}: {str(error).splitlines()[-1]}")
        return False
    print(f"{triton.__version__} {kernel.__name__}: compiles")
    return True


raise SystemExit([is_compiled(plain), is_compiled(bound)] != [sys.argv[1] == "yes", True])
P
for pair in 3.6.0:no 3.8.0:yes; do
  python3 -m venv "$folder/${pair%:*}"
  "$folder/${pair%:*}/bin/pip" install --quiet --disable-pip-version-check "triton==${pair%:*}" setuptools
  TRITON_CACHE_DIR="$folder/cache" "$folder/${pair%:*}/bin/python" "$folder/program.py" "${pair#*:}"
done
