"""The JIT class of our Gluon kernels, and what Triton's versions name differently.

@jit
def kernel(x, n):
    tiles = reinterpret(boxes, gl.uint8, [4, 64, 128], LAYOUT)   # of shared memory
    async_load(descriptor, [0, 0], ready, tiles.index(0))        # by TMA
    barrier()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from triton.experimental.gluon import _runtime
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from atom.kernels.triton.compile.jit import JITFunction

_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret  # private before 3.9
# 3.6 has other names for these
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# PTX of 4 neighbours in fp8 to bf16: the even ones, then the odd ones
EVEN_ODD_FP8_PTX = gl.constexpr("""{
.reg .b32 a, b, t;
shl.b32 t, $2, 8;
shl.b32 a, $2, 4;
and.b32 b, $2, 0x7f007f00;
and.b32 a, a, 0x07f007f0;
shr.u32 b, b, 4;
lop3.b32 a, t, 0x80008000, a, 0xEA;
lop3.b32 b, $2, 0x80008000, b, 0xEA;
mov.b32 t, 0x7b807b80;
mul.rn.bf16x2 $0, a, t;
mul.rn.bf16x2 $1, b, t;
}""")


class GluonJITFunction(JITFunction, _runtime.GluonJITFunction):  # type: ignore[misc]
    """As JITFunction, of Gluon's language."""


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`gluon.jit` with our class."""
    return partial(jit, **options) if fn is None else GluonJITFunction(fn, **options)
