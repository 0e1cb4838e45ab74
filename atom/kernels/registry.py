"""Which implementations an op has: (op, backend, accepts, load), in one place for all backends.

    for kernel in candidates(ops.paged_attention, ("torch", "reference")):
        reason = kernel.accepts(target, *types, **attributes)     # None: yes
        run = kernel.load(LoadContext())                          # a callable with the op's signature

The first that accepts wins; the reference, an op's own body, accepts all and is last.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from atom.errors import UnsupportedError
from atom.graph import ops
from atom.graph.ops import Op

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Target:
    """What the kernels will run on."""

    device: str  # cpu, or cuda, which is AMD's GPUs too
    features: frozenset[str] = frozenset()  # what this one can do: onednn_bf16, …; a GPU's vendor and architecture


BACKENDS = ("triton", "generated", "inductor", "torch")  # modules beside this one
T = TypeVar("T")
Accepts = Callable[..., str | None]  # (target, *types of the arguments, **attributes) -> None, or why not


class LoadContext:
    """What the kernels of a program share, memory from step to step above all: calls must run one after another."""

    def __init__(self) -> None:
        self._shared: dict[Callable[[], Any], Any] = {}

    def share(self, make: Callable[[], T]) -> T:
        """The object of a class, made for the first kernel that asks for it."""
        if make not in self._shared:
            self._shared[make] = make()
        return self._shared[make]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kernel:
    op: Op
    backend: str
    accepts: Accepts
    load: Callable[[LoadContext], Callable[..., Any]]  # a callable with the op's signature
    layout: str | None = None  # of its weight, its second argument: a key of LAYOUTS of its backend; None: as stored
    trace: Callable[..., Any] | None = None  # what stands for it in a compiled piece; None: it runs between pieces


# ops whose bodies a compiler can trace: no state, no shape that depends on data
COMPILED = frozenset({
    ops.embedding, ops.linear, ops.rms_norm, ops.layer_norm, ops.add, ops.mul, ops.scale, ops.softcap, ops.activate,
    ops.gated_activate, ops.add_rms_norm, ops.split, ops.split_heads, ops.merge_heads, ops.rotary, ops.rope,
})  # fmt: skip


def reference(op: Op) -> Kernel:
    """The op's own body as a kernel."""
    trace = op.body if op in COMPILED else None
    return Kernel(op, "reference", lambda *_args, **_attributes: None, lambda _: op.body, trace=trace)


def candidates(op: Op, backends: Sequence[str]) -> Iterator[Kernel]:
    """The kernels of an op from these backends, in their order."""
    for backend in backends:
        if backend == "reference":
            yield reference(op)
        else:
            yield from (kernel for kernel in _backend(backend).KERNELS if kernel.op is op)


def find_kernel(op: Op, backend: str) -> Kernel:
    """The kernel that a text names. UnsupportedError where there is none."""
    for kernel in candidates(op, (backend,)):
        return kernel
    raise UnsupportedError(f"there is no kernel {backend}.{op.name}")


def find_target(device: str) -> Target:
    """The target that this machine is. UnsupportedError where it has no such device."""
    return Target(device, _backend("torch" if device == "cpu" else "triton").find_features())


def shuffle(weight: Tensor, layout: str) -> Tensor:
    """A weight [O, I] in a kernel's own layout; of a weight [E, O, I], each expert's is laid out by itself."""
    return _backend("torch").LAYOUTS[layout](weight)  # type: ignore[no-any-return]


def _backend(name: str) -> ModuleType:
    if name in BACKENDS:
        return importlib.import_module(f"atom.kernels.{name}")
    raise UnsupportedError(f"there is no kernel backend '{name}'; backends: {', '.join(BACKENDS)}, reference")
