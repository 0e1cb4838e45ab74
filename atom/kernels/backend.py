"""The interface of a backend: kernels, layouts, piece compiler, tuner.

backend = find_backend("torch")
for kernel in backend.kernels:
    reason = kernel.accepts(target, *types, **attributes)     # None: yes
    run = kernel.load(LoadContext())                          # a callable with the op's signature
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from atom.graph.ops import Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from atom.cache import Cache
    from atom.graph import Graph
    from atom.kernels.step import StepKernels

T = TypeVar("T")
Accepts = Callable[..., str | None]  # (target, *types of the arguments, **attributes) -> None, or why not
PieceCode = Callable[..., "list[Tensor]"]  # of a piece's inputs and weights


@dataclass(frozen=True)
class Target:
    """What the kernels will run on."""

    device: str  # cpu, or cuda, which is AMD's GPUs too
    features: frozenset[str] = frozenset()  # what this one can do: onednn_bf16, …; a GPU's vendor and architecture


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
    layout: str | None = None  # of its weight, its second argument: one of its backend's layouts; None: as stored
    trace: Callable[..., Any] | None = None  # what stands for it in a compiled piece; None: it runs between pieces


class PieceCompiler(ABC):
    """Makes code of a piece's text, and a function of the code."""

    uses_processes: bool  # several compile at a time in processes of their own; else in threads

    @abstractmethod
    def takes(self, kernel: Kernel) -> bool:
        """Whether a call of this kernel may be part of a piece."""

    @abstractmethod
    def compile(self, text: str) -> dict[str, bytes]:
        """The files of a piece's code, for sizes of its open dims from 1 on. PassError where its ops assume more."""

    @abstractmethod
    def load(self, folder: Path) -> PieceCode:
        """The code in a folder, without a compiler. ArtifactError where it cannot be loaded."""

    @abstractmethod
    def ingredients(self, target: Target) -> dict[str, str]:
        """What the code depends on beside its text, our sources and the versions of the backends, in words."""

    def kernel_names(self, text: str) -> list[str]:
        """What a trace calls the kernels of a piece; none where a piece is no kernel of a device."""
        return []

    def find_missing(self) -> str | None:
        """What has to be installed to compile; None: nothing."""
        return None


class Tuner(Protocol):
    """Products whose kernels have parameters, of which the fastest for a GPU are measured in a model's own steps."""

    gpu: str  # the name that parameters are kept under,
    table: str  # and among a GPU's, those of these kernels: one of `tuned.KERNELS`

    def products(self, graph: Graph) -> Sequence[Any]:
        """Those of a text, that read most first; each has out, inner and num_calls."""

    def key(self, rows: int, product: Any) -> str:
        """What parameters of such a product are known under."""

    def known(self, table: Mapping[str, Sequence[Any]]) -> Any:
        """What finds parameters: those of a table, by key, else those that are the rule."""

    def trial(self, known: Any) -> Any:
        """What finds parameters: those that are put into its `chosen`, by key, else known ones."""

    def kernels(self, find: Any) -> Mapping[tuple[Op, str], Callable[..., Any]]:
        """Kernels, by op and backend, that find their parameters so."""

    def options(self, rows: int, product: Any, find: Any) -> tuple[Any, Sequence[Any]]:
        """The parameters that are found, and others that may be faster."""

    def recording(self) -> Any:
        """`kernels` that note their calls; `calls_of(product)`: what takes `parameters` to make them again."""

    def agrees(self, call: Any, parameters: Any) -> bool:
        """Whether a call gives with these parameters what it should."""

    def is_unfit(self, error: Exception) -> bool:
        """Whether parameters raised this since they cannot be run here."""

    def search(self, current: Any, options: Any, prepare: Any, on_timed: Callable[[], object]) -> Any:
        """The fastest of these; prepare(parameters)() times a step that has them, in seconds."""

    def take_turns(self, one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
        """The least seconds of each of two steps."""

    def to_entry(self, parameters: Any) -> list[Any]:
        """What they are kept as."""


@dataclass(frozen=True)
class Backend:
    """A folder of kernels. What takes time or a library to find out is a function."""

    name: str
    kernels: tuple[Kernel, ...]
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # of weights [O, I], by name
    find_features: Callable[[], frozenset[str]] = frozenset  # of this machine's device; UnsupportedError without one
    find_versions: Callable[[], dict[str, str]] = dict  # libraries of this machine that its code depends on
    piece_compiler: PieceCompiler | None = None  # of pieces, without which its kernels are their ops' bodies
    keep_binaries: Callable[[Cache], AbstractContextManager[object]] = lambda _: nullcontext()  # in this cache folder
    compile_launches: Callable[[Executor], AbstractContextManager[object]] = lambda _: nullcontext()  # and launch none
    step_kernels: Callable[[], StepKernels] | None = None  # that prepare a step's inputs and sample its tokens
    find_tuner: Callable[[torch.device], Tuner] | None = None  # what it can tune on a device; None: nothing
