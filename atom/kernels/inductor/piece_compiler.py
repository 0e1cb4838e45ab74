"""Compile a piece for a CPU: aten, Inductor, a shared object.

files = InductorCompiler().compile(text)      # {"piece.so": …, "piece.json": …}, some seconds
run = InductorCompiler().load(folder)         # milliseconds, without a compiler
"""

from __future__ import annotations

import json
import platform
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atom.errors import ArtifactError, PassError
from atom.graph import TORCH_DTYPES, Program, parse
from atom.kernels.backend import Kernel, PieceCode, PieceCompiler, Target
from atom.kernels.registry import find_backend, trace_calls

LIBRARY = "piece.so"
HINT = 16  # rows that Inductor plans its loops for
OPTIONS = {  # of Inductor
    "cpp.dynamic_threads": True,  # as many threads as the process has, not as this machine has now
    "aot_inductor.precompile_headers": False,  # needs openssl, and reads a fixed path in /tmp
}


class InductorCompiler(PieceCompiler):
    uses_processes = True

    def takes(self, kernel: Kernel) -> bool:
        return kernel.trace is not None

    def compile(self, text: str) -> dict[str, bytes]:
        from torch._inductor.utils import fresh_cache

        (program,) = parse(text, "piece").programs.values()
        with fresh_cache():
            module, inputs, environment = _expand(program)
            made = Path(str(torch._inductor.aot_compile(module, tuple(inputs), options=OPTIONS)))
            if environment.guards:
                used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
                raise PassError(f"a piece of {used} compiles only where {[guard.expr for guard in environment.guards]}")
            calls = made.with_suffix(".json")  # its calls into torch that are not in torch's C interface
            return {LIBRARY: made.read_bytes(), **({"piece.json": calls.read_bytes()} if calls.exists() else {})}

    def load(self, folder: Path) -> PieceCode:
        find_backend("torch")  # compiled code calls ops that it registers

        try:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)
        except RuntimeError as error:
            raise ArtifactError(f"{folder}: this piece cannot be loaded: {str(error).splitlines()[0]}") from None
        run = runner.run

        def call(*tensors: Tensor) -> list[Tensor]:
            return run(
                [tensor if tensor.is_mkldnn or tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
            )

        return call

    def ingredients(self, target: Target) -> dict[str, str]:
        return {"strides": "contiguous", "compiler options": json.dumps(OPTIONS)}

    def find_missing(self) -> str | None:
        """Inductor takes a C++ compiler."""
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            found = shutil.which(get_cpp_compiler())
        except InvalidCxxCompiler:
            found = None
        return None if found else "a C++ compiler: install g++"


def _expand(program: Program) -> tuple[torch.fx.GraphModule, list[Tensor], Any]:
    """Trace the program to aten: the module, its fake inputs, and the environment of their symbols."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv(duck_shape=False)
    sizes: dict[str, Any] = {}

    def size(dim: int | str) -> Any:
        if isinstance(dim, str) and dim not in sizes:
            source = ConstantSource(dim)
            symbol = environment.create_symbol(HINT, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            sizes[dim] = environment.create_symintnode(symbol, hint=HINT, source=source)
        return sizes[dim] if isinstance(dim, str) else dim

    with FakeTensorMode(shape_env=environment, static_shapes=False):
        types = [node.meta["type"] for node in program.inputs]
        inputs = [torch.empty([size(dim) for dim in type.shape], dtype=TORCH_DTYPES[type.dtype]) for type in types]
    return make_fx(trace_calls(program), _allow_non_fake_inputs=True)(*inputs), inputs, environment


def find_versions() -> dict[str, str]:
    """What compiled code depends on of this machine: a machine with equal values can run it."""
    return {"torch": torch.__version__, "instruction set": instruction_set(), "libraries": libraries()}


@cache
def instruction_set() -> str:
    """The instruction set that compiled code may use on this CPU."""
    kinds = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "neon", "asimd", "sve", "bf16", "popcnt", "movbe")
    lines = (line for line in _lines_of("/proc/cpuinfo") if line.lower().startswith(("flags", "features")))
    stated = next(lines, "").partition(":")[2].split()
    return " ".join(
        [torch.backends.cpu.get_cpu_capability(), *sorted({flag for flag in stated if flag.startswith(kinds)})]
    )


@cache
def libraries() -> str:
    """The libc and the libstdc++ that compiled code is loaded with: those of another machine may lack a symbol."""
    loaded = {Path(line.split()[-1]).resolve().name for line in _lines_of("/proc/self/maps") if "libstdc++" in line}
    return " ".join([*platform.libc_ver(), *sorted(loaded)])


def _lines_of(path: str) -> list[str]:
    """The lines of a file that only Linux has, none elsewhere."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
