"""From a piece's text to a shared object, by way of aten and Inductor, and the check that it does what its ops say."""

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
from atom.pieces.find import NAME
from atom.pieces.identity import OPTIONS
from atom.pieces.load import load_piece

HINT = 16  # rows that Inductor plans its loops for
LARGE = 1 << 24  # elements of a weight that is not filled to check a piece


def compile_piece(text: str) -> dict[str, bytes]:
    """The files of a piece's code, for sizes of its open dims from 1 on. PassError where its ops assume more."""
    from torch._inductor.utils import fresh_cache

    program = parse(text, NAME).programs[NAME]
    with fresh_cache():
        module, inputs, environment = _expand(program)
        made = Path(str(torch._inductor.aot_compile(module, tuple(inputs), options=OPTIONS)))
        if environment.guards:
            used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
            raise PassError(f"a piece of {used} compiles only where {[guard.expr for guard in environment.guards]}")
        calls = made.with_suffix(".json")  # the calls into torch that are not in its C interface
        files = {"piece.so": made.read_bytes(), **({"piece.json": calls.read_bytes()} if calls.exists() else {})}
    _check(program, files)
    return files


@torch.inference_mode()
def _check(program: Program, files: dict[str, bytes]) -> None:
    """Hold the code against its traces: the compiler took the open dims for 2 or more, and planned for HINT."""
    generator = torch.Generator().manual_seed(0)

    def example(type: Type, rows: int) -> Tensor:
        shape = [rows if isinstance(dim, str) else dim for dim in type.shape]
        if type.dtype == "i64":
            return torch.zeros(shape, dtype=torch.int64)
        if math.prod(shape) > LARGE:
            return torch.zeros(shape, dtype=TORCH_DTYPES[type.dtype])  # pages that nobody touches
        return torch.randn(shape, generator=generator).to(TORCH_DTYPES[type.dtype])

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
