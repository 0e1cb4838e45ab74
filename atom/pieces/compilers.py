"""From a piece's text to its code, and the check that this does what its ops say.

For a CPU that is a shared object, by way of aten and Inductor, for a GPU a module of Triton's, which `rows` writes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from atom.errors import PassError
from atom.graph import TORCH_DTYPES, Program, Type, ops, parse
from atom.graph.graph import results_of
from atom.kernels import find_kernel
from atom.kernels.triton.codegen import write_source
from atom.pieces.key import OPTIONS
from atom.pieces.load import LIBRARY, SOURCE, load_piece
from atom.pieces.piece import NAME

HINT = 16  # rows that Inductor plans its loops for
LARGE = 1 << 24  # elements of a weight, of which no more get values of their own to check a piece


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
    draw = _Draw(program, device)
    weights = {node: draw(node) for node in program.inputs if _is_closed(node)}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        run = load_piece(Path(folder))
        for rows in (1, 2, HINT + 1):
            inputs = [weights[node] if node in weights else draw(node, rows) for node in program.inputs]
            for ours, theirs in zip(run(*inputs), _evaluator(program)(*inputs), strict=True):
                allowed = 1e-4 if theirs.dtype is torch.float32 else 2e-2
                error = _relative_error(ours.float(), theirs.float()) if ours.shape == theirs.shape else math.inf
                if not error <= allowed:
                    used = ", ".join(dict.fromkeys(node.target.name for node in program.nodes))
                    raise PassError(f"a compiled piece of {used} is {error:.2g} off at {rows} rows")


class _Draw:
    """Draws the inputs of a piece so that all it computes is of order 1, as in a model: fp16 ends at 65504."""

    def __init__(self, program: Program, device: str) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._multiplied = {node.args[1] for node in program.nodes if node.target is ops.linear}

    def __call__(self, node: Node, rows: int = 0) -> Tensor:
        """Of an input, with as many rows; of a weight, which has none that are open."""
        type: Type = node.meta["type"]
        shape = [rows if isinstance(dim, str) else dim for dim in type.shape]
        if type.dtype == "i64":
            return torch.arange(math.prod(shape), device=self._device).view(shape) % 2
        dtype, scale = TORCH_DTYPES[type.dtype], shape[-1] ** -0.5 if node in self._multiplied else 1.0
        if math.prod(shape) <= LARGE:
            return (self._normal(shape) * scale).to(dtype)
        if self._device != "cpu":
            num_rows, width = shape  # each row is the one before it, moved by one
            return (self._normal([num_rows + width]) * scale).to(dtype).as_strided((num_rows, width), (1, 1))
        drawn = torch.zeros(shape, dtype=dtype)  # behind its first rows pages that nobody touches
        first = drawn[: max(LARGE // math.prod(shape[1:]), 2)]
        first.copy_(self._normal(first.shape) * scale)
        return drawn

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)


def _is_closed(node: Node) -> bool:
    return not any(isinstance(dim, str) for dim in node.meta["type"].shape)


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, without what is the same inf or nan in both; nan where only one is."""
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(is_same, 0.0, ours - theirs)
    finite = torch.where(theirs.isfinite(), theirs, 0.0)
    return float(difference.norm() / finite.norm().clamp(min=1e-6))


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
