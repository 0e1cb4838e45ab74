"""The interface of a backend: kernels, layouts, piece compiler, tuner.

backend = find_backend("torch")
for kernel in backend.kernels:
    reason = kernel.accepts(target, *types, **attributes)     # None: yes
    run = kernel.load(LoadContext())                          # a callable with the op's signature
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from atom.errors import UnsupportedError
from atom.graph.formats import parse_format
from atom.graph.ops import OPS, Op
from atom.graph.types import Type

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from atom.cache import Cache
    from atom.graph import Graph, LaidOut, Mesh, PackedWeight
    from atom.kernels.step import StepKernels

    ShuffledWeight = Tensor | LaidOut | PackedWeight

T = TypeVar("T")
Accepts = Callable[..., str | None]  # (target, *types of the arguments, **attributes) -> None, or why not
Layout = Callable[..., str | None]  # (*types of an op's packed weights) -> their layout, None for the stored one
PieceCode = Callable[..., "list[Tensor]"]  # of a piece's inputs and weights


@dataclass(frozen=True)
class Target:
    """The machine to compile for: its device and features."""

    device: str  # cpu, or cuda, which is AMD's GPUs too
    features: frozenset[str] = frozenset()  # of this machine: onednn_bf16, …; a GPU's vendor and architecture


class Held(NamedTuple):
    """A tensor that is sent after each replay of the CUDA graph that computes it."""

    x: Tensor
    send: Callable[[Tensor], object]


class Communicator(Protocol):
    """What a rank's collectives run on: each gives what the op of its name does, of the ranks along an axis.

    Every rank of a stage makes the same calls in the same order. A sum has the same bits on all of them.
    """

    def num_ranks(self, axis: str) -> int:
        """How many ranks meet along an axis."""

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor: ...

    def all_gather(self, x: Tensor, *, axis: str, size: int) -> Tensor: ...

    def gather_tokens(
        self, x: Tensor, weights: Tensor, ids: Tensor, *, axis: str, ranks: int
    ) -> tuple[Tensor, ...]: ...

    def reduce_scatter(self, x: Tensor, *, axis: str, ranks: int) -> Tensor: ...

    def dispatch(
        self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int
    ) -> tuple[Tensor, ...]: ...

    def collect(self, x: Tensor, ids: Tensor, first: Tensor, *, axis: str, ranks: int, experts: int) -> Tensor: ...

    def send(self, x: Tensor, *, axis: str, to: int) -> Tensor: ...

    def receive(self, like: Tensor, *, axis: str, source: int, columns: int | None, dtype: str) -> Tensor: ...

    def take_held(self) -> list[Held]:
        """Take the messages that `send` has held back, since a CUDA graph was being captured."""

    def watch(self, check: Callable[[], object]) -> None:
        """Have a collective in which the host waits call this now and then: it raises if a rank is gone."""

    def abort(self) -> None:
        """End collectives that a device still waits in. Any thread may call this, once the ranks have ended."""


class Rendezvous(NamedTuple):
    """How the ranks of an engine find each other."""

    rank: int
    mesh: Mesh
    host: str  # this rank's address, at which the others find it
    exchange: Callable[[bytes], list[bytes]]  # a rank's bytes for those of all, in order; all call it at once
    folder: Path | None  # a private one of all ranks, for memory that they share; None: they are on several hosts
    collectives: str = "auto"  # parallel.collectives


class LoadContext:
    """State shared by the kernels of a program, such as memory kept from step to step: calls must run in order."""

    def __init__(self, communicator: Communicator | None = None) -> None:
        """communicator: of an engine of several ranks"""
        self.communicator = communicator
        self._shared: dict[Callable[[], Any], Any] = {}

    def share(self, make: Callable[[], T]) -> T:
        """The program's one object of a class, made when the first kernel asks for it."""
        if make not in self._shared:
            self._shared[make] = make()
        return self._shared[make]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kernel:
    op: Op
    backend: str
    accepts: Accepts
    load: Callable[[LoadContext], Callable[..., Any]]  # a callable with the op's signature
    layout: str | None = None  # of its op's weight: one of its backend's layouts; None: as stored
    packed_layout: Layout | None = None  # of packed weights; None: as stored
    packed_type: Callable[[Type], Type] | None = None  # the type of its tensor
    is_for_packed: bool = False  # it takes packed weights only
    trace: Callable[..., Any] | None = None  # its function in a compiled piece; None: it runs between pieces
    reads_prefixes_once: bool = False  # of decodes that `Batch.prefixes` groups
    build: Callable[..., object] | None = None  # compiles what it needs for weights of these types; None: nothing
    batch_invariant: bool = False  # the bits of a token's result depend on no other token of the batch, nor on how many

    @property
    def has_layouts(self) -> bool:
        return self.layout is not None or self.packed_layout is not None

    def layout_of(self, *weights: Type) -> str | None:
        """The layout of weights of these types, None for the stored one."""
        if weights[0].fmt is None:
            return self.layout
        return None if self.packed_layout is None else self.packed_layout(*weights)


def kinds_in(layout: str, kinds: Collection[str] | None = None) -> Layout:
    """The rule by which weights of these kinds are in a layout. kinds: None for all"""

    def find_layout(first: Type, *_others: Type) -> str | None:
        return layout if kinds is None or parse_format(str(first.fmt)).kind in kinds else None

    return find_layout


def accepts_all(_target: Target, *_types: Any, **_attributes: Any) -> None:
    """all calls

    What a kernel accepts that takes every call.
    """


@dataclass(frozen=True)
class OnDevice:
    """Accepts calls on one kind of device."""

    device: str
    accepts: Accepts  # what else it depends on
    packed: Collection[str]  # kinds of packed weights that it unpacks
    acts: Collection[str]  # formats of activations that it multiplies in
    gives: Collection[str]  # formats that it may give its result in, which kernels of its backend then take

    def __call__(self, target: Target, *types: Any, **attributes: Any) -> str | None:
        if (act := attributes.get("act")) is not None and act.partition("[")[0] not in self.acts:
            return f"has no matmuls of activations in {act}"
        if (given := attributes.get("gives")) is not None and given.partition("[")[0] not in self.gives:
            return f"gives no rows in {given}"
        for type in types:
            if isinstance(type, Type) and type.fmt is not None and parse_format(type.fmt).kind not in self.packed:
                return f"its weight is stored as {type.fmt}"
        if target.device != self.device:
            return f"runs on {self.device}, not on {target.device}"
        return self.accepts(target, *types, **attributes)


def on_device(
    device: str, accepts: Accepts = accepts_all, *, packed: Collection[str] = (), acts: Collection[str] = (),
    gives: Collection[str] = (),
) -> OnDevice:  # fmt: skip
    """What a kernel of one kind of device accepts: see `OnDevice`."""
    return OnDevice(device, accepts, packed, acts, gives)


def gpu_kernel(
    op: Op, backend: str, load: Callable[[LoadContext], object], accepts: Accepts = accepts_all, *,
    packed: Collection[str] = (), acts: Collection[str] = (), gives: Collection[str] = (), **options: Any,
) -> Kernel:  # fmt: skip
    """A GPU's kernel whose module is imported once a program has it.

    load: imports the module; gives it or an object that has a callable of the op's name
    packed, acts and gives: as in `OnDevice`
    """
    here = on_device("cuda", accepts, packed=packed, acts=acts, gives=gives)
    return Kernel(op, backend, here, lambda context: getattr(load(context), op.name), **options)


MOVES = ("all_gather", "send", "receive")  # collectives that sum nothing


def collective_kernels(backend: str, device: str) -> tuple[Kernel, ...]:
    """Those of all collectives."""
    return tuple(_collective_kernel(op, backend, device) for op in OPS.values() if op.is_collective)


def _collective_kernel(op: Op, backend: str, device: str) -> Kernel:
    """The kernel of a collective, which is its program's communicator's. UnsupportedError with one rank."""

    def load(context: LoadContext) -> Callable[..., Any]:
        if context.communicator is None:
            raise UnsupportedError(f"{op.name} is for several ranks, and this is one: set parallel")
        return getattr(context.communicator, op.name)  # type: ignore[no-any-return]

    return Kernel(op, backend, on_device(device), load, batch_invariant=op.name in MOVES)


class PieceCompiler(ABC):
    """Compiles a piece's text to code, and loads the code as a function."""

    uses_processes: bool  # pieces are compiled in parallel processes, else in threads

    @abstractmethod
    def takes(self, kernel: Kernel) -> bool:
        """Whether a call of this kernel may be part of a piece."""

    @abstractmethod
    def compile(self, text: str) -> dict[str, bytes]:
        """Compile a piece for open dims from 1 on; the files of its code. PassError if its ops assume more."""

    @abstractmethod
    def load(self, folder: Path) -> PieceCode:
        """Load the code in a folder, without a compiler. ArtifactError if that fails."""

    @abstractmethod
    def ingredients(self, target: Target) -> dict[str, str]:
        """Key ingredients besides the piece's text, our sources and the backends' versions, in words."""

    def kernel_names(self, text: str) -> list[str]:
        """The names of a piece's kernels in a profiler trace; empty if a piece is no kernel of a device."""
        return []

    def find_missing(self) -> str | None:
        """The package that must be installed to compile; None: nothing."""
        return None


class Tuner(Protocol):
    """Tunes matmuls: measures the fastest kernel parameters for a GPU in a model's own steps."""

    gpu: str  # the GPU's name in files of parameters
    table: str  # the table of these kernels in such a file: one of `tuned.FITS`
    what: str  # the matmuls, as a line for the user names them

    def matmuls(self, graph: Graph) -> Sequence[Any]:
        """The matmuls of a text, those that read most first; each has out, inner and num_calls."""

    def key(self, rows: int, matmul: Any) -> str:
        """The key of such a matmul's parameters in a table."""

    def known(self, table: Mapping[str, Sequence[Any]]) -> Any:
        """A lookup of parameters: in a table, else by the kernel's rule."""

    def trial(self, known: Any) -> Any:
        """A lookup of parameters: in its `chosen`, by key, else the known ones."""

    def kernels(self, find: Any) -> Mapping[tuple[Op, str], Callable[..., Any]]:
        """Kernels by op and backend that use this lookup."""

    def options(self, rows: int, matmul: Any, find: Any) -> tuple[Any, Sequence[Any]]:
        """The parameters of this lookup, and candidates that may be faster."""

    def recording(self) -> Any:
        """Kernels that record their calls; `calls_of(matmul)`, if any, repeat them with other parameters."""

    def agrees(self, call: Any, parameters: Any) -> bool:
        """Whether a call with these parameters gives the right result."""

    def is_unfit(self, error: Exception) -> bool:
        """Whether this error says that parameters cannot be run here."""

    def search(self, current: Any, options: Any, prepare: Any, on_timed: Callable[[], object]) -> Any:
        """Find the fastest parameters; prepare(parameters)() times a step with them, in seconds."""

    def take_turns(self, one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
        """Time two steps alternately; the min seconds of each."""

    def to_entry(self, parameters: Any) -> list[Any]:
        """Parameters as an entry of a table."""


@dataclass(frozen=True)
class Backend:
    """A backend: its kernels, and functions for all that takes time or a library to find out."""

    name: str
    kernels: tuple[Kernel, ...]
    layouts: Mapping[str, Callable[[Any], ShuffledWeight]] = field(default_factory=dict)  # of weights, by name
    map_layouts: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # of those that a file can hold: the
    # type that a packed weight's tensor has; None if this machine does not make it
    find_features: Callable[[], frozenset[str]] = frozenset  # of this machine's device; UnsupportedError without one
    find_versions: Callable[[], dict[str, str]] = dict  # libraries of this machine that its code depends on
    piece_compiler: PieceCompiler | None = None  # None: its kernels are their ops' bodies within pieces
    keep_binaries: Callable[[Cache], AbstractContextManager[object]] = lambda _: nullcontext()  # in this cache folder
    compile_launches: Callable[[Executor], AbstractContextManager[object]] = lambda _: nullcontext()  # and launch none
    connect: Callable[[Rendezvous], Communicator] | None = None
    step_kernels: Callable[[], StepKernels] | None = None  # that prepare a step's inputs and sample its tokens
    find_tuners: Callable[[torch.device], Sequence[Tuner]] = lambda _: ()  # what it can tune on a device
    vendor: str | None = None  # the feature of the GPUs that it is for; None: of all
