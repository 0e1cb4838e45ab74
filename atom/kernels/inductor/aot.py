"""Compile a piece's text ahead of time with Inductor.

    files = compile_text(text)          # {"piece.so": …, "piece.json": …}, some seconds
    has_compiler()                      # whether there is a C++ compiler

The code releases the interpreter's lock (GIL) while it runs, which torch's runner holds: a piece may take seconds.

Imported only to compile: it loads as much of torch again as the rest of atom does.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._inductor.codegen.common import (
    get_scheduling_for_device,
    get_wrapper_codegen_for_device,
    init_backend_registration,
    register_backend_for_device,
)
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from atom.errors import PassError
from atom.graph import TORCH_DTYPES, Program, parse
from atom.kernels.inductor.piece_compiler import LIBRARY, OPTIONS
from atom.kernels.registry import tensor_type, trace_calls

HINT = 16  # rows for which Inductor plans its loops
# weak: without an interpreter, or with its symbols hidden, there is no lock to release
RELEASE_GIL = """
extern "C" {
__attribute__((weak)) int PyGILState_Check();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
}
namespace {
struct ReleaseGIL {
  void* state = PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~ReleaseGIL() noexcept(false) {  // a daemon thread may be unwound here while the interpreter ends
    if (state) PyEval_RestoreThread(state);
  }
};
}
"""


def has_compiler() -> bool:
    try:
        return shutil.which(get_cpp_compiler()) is not None
    except InvalidCxxCompiler:
        return False


class _Wrapper(CppWrapperCpu):  # type: ignore[misc]  # its module has no types here
    """Writes the C++ function that runs a piece; it releases the interpreter's lock once it has read its inputs."""

    @staticmethod
    def create(*_args: Any, **_options: Any) -> _Wrapper:
        return _Wrapper()

    def write_header(self) -> None:
        super().write_header()
        self.header.splice(RELEASE_GIL)

    def write_wrapper_decl(self) -> None:
        super().write_wrapper_decl()
        self.prefix.writeline("ReleaseGIL release_gil;")


def compile_text(text: str) -> dict[str, bytes]:
    """The files of a piece's code. PassError if its ops assume more of symbolic dims than that they are at least 1."""
    (program,) = parse(text, "piece").programs.values()
    init_backend_registration()
    scheduling, python_wrapper = get_scheduling_for_device("cpu"), get_wrapper_codegen_for_device("cpu")
    register_backend_for_device("cpu", scheduling, python_wrapper, _Wrapper)
    with fresh_cache():
        module, inputs, environment = _expand(program)
        made = Path(str(torch._inductor.aot_compile(module, tuple(inputs), options=OPTIONS)))
        if environment.guards:
            used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
            raise PassError(f"a piece of {used} compiles only where {[guard.expr for guard in environment.guards]}")
        calls = made.with_suffix(".json")  # its calls into torch that are not in torch's C interface
        return {LIBRARY: made.read_bytes(), **({"piece.json": calls.read_bytes()} if calls.exists() else {})}


def _expand(program: Program) -> tuple[torch.fx.GraphModule, list[Tensor], Any]:
    """Trace the program to aten: the module, its fake inputs, and the environment of their symbols."""
    environment = ShapeEnv(duck_shape=False)
    sizes: dict[str, Any] = {}

    def size(dim: int | str) -> Any:
        if isinstance(dim, str) and dim not in sizes:
            source = ConstantSource(dim)
            symbol = environment.create_symbol(HINT, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            sizes[dim] = environment.create_symintnode(symbol, hint=HINT, source=source)
        return sizes[dim] if isinstance(dim, str) else dim

    with FakeTensorMode(shape_env=environment, static_shapes=False):
        types = [tensor_type(node) for node in program.inputs]
        inputs = [torch.empty([size(dim) for dim in type.shape], dtype=TORCH_DTYPES[type.dtype]) for type in types]
    return make_fx(trace_calls(program), _allow_non_fake_inputs=True)(*inputs), inputs, environment
