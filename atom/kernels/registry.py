"""The order of backends by device and level, and lookups in that order.

    backends = backends_of("cpu", level=1)
    for kernel in candidates(ops.paged_attention, backends):
        reason = kernel.accepts(target, *types, **attributes)     # None: yes

The first kernel that accepts wins; the reference, an op's own body, accepts all and is last.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from atom import plugins
from atom.errors import ConfigError, UnsupportedError
from atom.graph import LaidOut, PackedWeight, Program, Type
from atom.graph.graph import results_of, type_of
from atom.graph.ops import Op
from atom.kernels.backend import Backend, Communicator, Kernel, PieceCompiler, Rendezvous, Target, Tuner
from atom.kernels.reference import BACKEND as REFERENCE
from atom.kernels.reference import body_kernel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from atom.cache import Cache
    from atom.graph import Graph
    from atom.kernels.step import StepKernels

# modules next to this one, by device and level; pieces begin at level 2, and level 3 is its text in CUDA graphs
ORDER: dict[str, tuple[tuple[str, ...], ...]] = {
    "cpu": (
        ("gloo", "reference"),
        ("cpp", "int8", "torch", "widened", "gloo", "reference"),
        ("inductor", "cpp", "int8", "torch", "widened", "gloo", "reference"),
    ),
    "cuda": (
        ("nccl", "reference"),
        ("aiter", "hopper", "triton", "nccl", "reference"),
        ("aiter", "hopper", "triton", "generated", "nccl", "reference"),
        ("aiter", "hopper", "triton", "generated", "nccl", "reference"),
    ),
}
# of batch_invariant=true, at every level: only kernels with that property, which pieces of Inductor have not
INVARIANT_ORDER = {
    "cpu": ("fixed_cpp", "gloo", "reference"),
    "cuda": ("fixed_hopper", "fixed_triton", "triton", "generated", "nccl", "reference"),
}
# of backends whose name is not that of their module
MODULES = {
    "widened": "fp32_upcast",
    "fixed_cpp": "cpp.fixed",
    "fixed_hopper": "hopper.fixed",
    "fixed_triton": "triton.fixed",
}
_ORDERS = (*(levels[-1] for levels in ORDER.values()), *INVARIANT_ORDER.values())
BACKENDS = tuple(dict.fromkeys(name for names in _ORDERS for name in names))  # of atom itself

KNOWN = frozenset(kernel.op for kernel in REFERENCE.kernels)  # ops that are not plugged in


def find_backend(name: str) -> Backend:
    """UnsupportedError if there is none of this name, ConfigError if an entry point does not name one."""
    plugged_in = plugins.named(plugins.BACKENDS)
    if name not in BACKENDS and name not in plugged_in:
        there = ", ".join((*plugged_in, *BACKENDS))
        raise UnsupportedError(f"there is no kernel backend '{name}'; backends: {there}")
    if name in BACKENDS:
        backend: Backend = importlib.import_module(f"atom.kernels.{MODULES.get(name, name)}").BACKEND
        return backend
    found = plugins.find_value(name, plugins.BACKENDS)
    if not isinstance(found, Backend) or {found.name, *(kernel.backend for kernel in found.kernels)} != {name}:
        raise ConfigError(f"{plugins.BACKENDS}: {name} = {plugged_in[name]}: it is no Backend whose name is {name}")
    return found


def highest_level(device: str) -> int:
    return len(ORDER[device]) - 1


def backends_of(device: str, level: int | None = None, *, batch_invariant: bool = False) -> tuple[Backend, ...]:
    """The backends of a device in the order of a level, or of its highest; from level 1 on users' come first.

    batch_invariant: those that have kernels with this property, and no other kernels of them
    """
    highest = highest_level(device)
    level = highest if level is None else min(level, highest)
    order = INVARIANT_ORDER[device] if batch_invariant else ORDER[device][level]
    found = map(find_backend, (*(plugins.named(plugins.BACKENDS) if level else ()), *order))
    return tuple(map(_invariant_part, found)) if batch_invariant else tuple(found)


def _invariant_part(backend: Backend) -> Backend:
    return replace(backend, kernels=tuple(kernel for kernel in backend.kernels if kernel.batch_invariant))


def find_step_kernels(device: str, backend: str | None = None) -> StepKernels:
    """The functions that prepare and sample a device's steps: the first backend's that has them, or the named one's."""
    backends = backends_of(device) if backend is None else (find_backend(backend),)
    return next(each.step_kernels for each in backends if each.step_kernels is not None)()


def candidates(op: Op, backends: Sequence[Backend]) -> Iterator[Kernel]:
    """The kernels of an op from these backends, in their order; of a user's op, its body."""
    found = [kernel for backend in backends for kernel in backend.kernels if kernel.op is op]
    is_plugged_in = op not in KNOWN and any(backend.name == "reference" for backend in backends)
    return iter([*found, body_kernel(op)] if is_plugged_in else found)


def find_kernel(op: Op, backend: str) -> Kernel:
    """The kernel that a text names. UnsupportedError if there is none."""
    for kernel in candidates(op, (find_backend(backend),)):
        return kernel
    raise UnsupportedError(f"there is no kernel {backend}.{op.name}")


@contextmanager
def building_kernels(graph: Graph) -> Iterator[None]:
    """Compile what a graph's kernels need besides pieces, unless the cache folder has it, in threads until the end."""
    calls: dict[tuple[Callable[..., object], tuple[Type, ...]], None] = {}
    for node in (node for program in graph.programs.values() for node in program.nodes):
        if (build := find_kernel(node.target, node.meta.get("kernel", "reference")).build) is not None:
            calls[build, tuple(type_of(node.args[place]) for place in node.target.weights)] = None
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        waiting = [pool.submit(build, *types) for build, types in calls]
        yield
        for each in waiting:
            each.result()


def find_target(device: str) -> Target:
    """This machine as a target. UnsupportedError if it has no such device."""
    return Target(device, frozenset().union(*(backend.find_features() for backend in backends_of(device))))


def find_versions(device: str) -> dict[str, str]:
    """The libraries of this machine that code for a device depends on, and the sources of users' backends."""
    plugged_in = plugins.named(plugins.BACKENDS)
    found = {f"sources of {name}": plugins.digest_of(plugins.module_of(name, plugins.BACKENDS)) for name in plugged_in}
    for backend in backends_of(device):
        found |= backend.find_versions()
    return found


def find_piece_compiler(device: str) -> PieceCompiler:
    return next(backend.piece_compiler for backend in backends_of(device) if backend.piece_compiler is not None)


def find_tuners(device: str, place: torch.device) -> list[Tuner]:
    """The tuners of a device's kernels, for each table the first backend's. place: the device itself."""
    found: dict[str, Tuner] = {}
    for tuner in (tuner for each in backends_of(device) for tuner in each.find_tuners(place)):
        found.setdefault(tuner.table, tuner)
    return [*found.values()]


def connect_rank(device: str, rendezvous: Rendezvous) -> Communicator:
    """Connect to the other ranks of an engine, which do so at about the same time."""
    return next(each.connect for each in backends_of(device) if each.connect is not None)(rendezvous)


def shuffle(weight: Tensor | PackedWeight, layout: str) -> Tensor | LaidOut | PackedWeight:
    """A weight [O, I] in a kernel's own layout; of a weight [E, O, I] each expert by itself, but for JOINS_EXPERTS."""
    return _backend_of(layout).layouts[layout](weight)


def _backend_of(layout: str) -> Backend:
    """The backend that has a layout."""
    backends = map(find_backend, (*plugins.named(plugins.BACKENDS), *BACKENDS))
    return next(backend for backend in backends if layout in backend.layouts)


def layout_type(weight: Type, layout: str) -> Type | None:
    """The type of a packed weight's one tensor in a kernel's layout; None if a file cannot hold that."""
    find_type = _backend_of(layout).map_layouts.get(layout)
    return None if find_type is None else find_type(weight)


def keep_binaries(device: str, cache: Cache) -> AbstractContextManager[None]:
    """Keep in this cache folder what a device's backends compile, from now on."""
    return _all(backend.keep_binaries(cache) for backend in backends_of(device))


def compile_launches(device: str, pool: Executor) -> AbstractContextManager[None]:
    """Within this context, have the pool compile the kernels that this thread would launch, and launch nothing."""
    return _all(backend.compile_launches(pool) for backend in backends_of(device))


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def tensor_type(node: Node) -> Type:
    """The type of the tensor that an input of a piece is; of a packed weight it is in a kernel's layout."""
    type: Type = node.meta["type"]
    if type.fmt is None:
        return type
    kernel = next(find_kernel(user.target, user.meta["kernel"]) for user in node.users)
    assert kernel.packed_type is not None, f"{kernel.op.name} accepted a packed weight"
    return kernel.packed_type(type)


def trace_calls(program: Program) -> Callable[..., Any]:
    """A piece's program as a function that can be traced, made of its kernels' `trace` functions."""

    def evaluate(*inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[Node, Any] = {
            node: value if (type := node.meta["type"]).fmt is None else LaidOut(type, value)
            for node, value in zip(program.inputs, inputs, strict=True)
        }
        for node in program.nodes:
            trace = find_kernel(node.target, node.meta["kernel"]).trace
            assert trace is not None, f"split_pieces took {node.target.name}"
            result = trace(*(values[arg] if isinstance(arg, Node) else arg for arg in node.args), **node.kwargs)
            for part, value in zip(results_of(node), result if isinstance(result, tuple) else (result,), strict=True):
                values[part] = value
        return tuple(values[node] for node in program.results)

    return evaluate
