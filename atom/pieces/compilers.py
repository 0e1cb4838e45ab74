"""From a piece's text to its code, and the check that this does what its ops say.

For a CPU that is a shared object, by way of aten and Inductor, for a GPU a module of Triton's, which `rows` writes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from atom.errors import PassError
from atom.graph import TORCH_DTYPES, Program, Type, parse
from atom.graph.graph import results_of
from atom.kernels import find_kernel
from atom.kernels.triton.codegen import write_source
from atom.pieces.key import OPTIONS
from atom.pieces.load import LIBRARY, SOURCE, load_piece
from atom.pieces.piece import NAME

HINT = 16  # rows that Inductor plans its loops for
LARGE = 1 << 24  # elements of a weight that does not get values of its own to check a piece


def compile_piece(text: str, device: str = "cpu") -> dict[str, bytes]:
    """The files of a piece's code, for sizes of its open dims from 1 on. PassError where its ops assume more.

    For a GPU it is Triton's source, which Triton compiles when it is first run: with a GPU at hand, here.
    """
    program = parse(text, NAME).programs[NAME]
    files = _compile_library(program) if device == "cpu" else {SOURCE: write_source(text).encode()}
    if device == "cpu" or torch.cuda.is_available():
        _check(program, files, device)
    return files


def _compile_library(program: Program) -> dict[str, bytes]:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        module, inputs, environment = _expand(program)
        made = Path(str(torch._inductor.aot_compile(module, tuple(inputs), options=OPTIONS)))
        if environment.guards:
            used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
            raise PassError(f"a piece of {used} compiles only where {[guard.expr for guard in environment.guards]}")
        calls = made.with_suffix(".json")  # the calls into torch that are not in its C interface
        return {LIBRARY: made.read_bytes(), **({"piece.json": calls.read_bytes()} if calls.exists() else {})}


@torch.inference_mode()
def _check(program: Program, files: dict[str, bytes], device: str) -> None:
    """Hold the code against its traces: the compiler took the open dims for 2 or more, and planned for HINT."""
    generator = torch.Generator(device).manual_seed(0)

    def example(type: Type, rows: int) -> Tensor:
        shape = [rows if isinstance(dim, str) else dim for dim in type.shape]
        if type.dtype == "i64":
            return torch.arange(math.prod(shape), device=device).view(shape) % 2
        if math.prod(shape) <= LARGE:
            return torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[type.dtype])
        if device == "cpu":
            return torch.zeros(shape, dtype=TORCH_DTYPES[type.dtype])  # pages that nobody touches
        first = torch.randn(shape[1:], generator=generator, device=device)
        return first.to(TORCH_DTYPES[type.dtype]).expand(shape)

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        run = load_piece(Path(folder))
        for rows in (1, 2, HINT + 1):
            inputs = [example(node.meta["type"], rows) for node in program.inputs]
            for ours, theirs in zip(run(*inputs), _evaluator(program)(*inputs), strict=True):
                allowed = 1e-4 if theirs.dtype is torch.float32 else 2e-2
                error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6)
                if ours.shape != theirs.shape or not error <= allowed:
                    used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
                    raise PassError(f"a compiled piece of {used} is {error:.2g} off at {rows} rows")


def _expand(program: Program) -> tuple[torch.fx.GraphModule, list[Tensor], Any]:
    """The program in aten, the fake inputs that it was traced with, and the environment of their symbols."""
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
    return make_fx(_evaluator(program), _allow_non_fake_inputs=True)(*inputs), inputs, environment


def _evaluator(program: Program) -> Callable[..., Any]:
    """The program as a function that can be traced."""

    def evaluate(*inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[Node, Any] = dict(zip(program.inputs, inputs, strict=True))
        for node in program.nodes:
            trace = find_kernel(node.target, node.meta["kernel"]).trace
            assert trace is not None, f"split_pieces took {node.target.name}"
            result = trace(*(values[arg] if isinstance(arg, Node) else arg for arg in node.args), **node.kwargs)
            for part, value in zip(results_of(node), result if isinstance(result, tuple) else (result,), strict=True):
                values[part] = value
        return tuple(values[node] for node in program.results)

    return evaluate
