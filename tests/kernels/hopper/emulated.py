"""Kernels in Gluon as plain Python on a CPU: a program after the other, on torch's tensors, without layouts.

    few = emulate(few_hopper, _unpack=unpack)       # a namespace of the module's functions, its kernels among them
    few.multiply_gate_up(x, ids, weight, None, Gate("silu"), counters)
    groups = WarpGroups().names                     # for kernels whose warps have parts of their own
    grouped = emulate(grouped_hopper, **groups)

What is copied is there at once. Barriers do nothing, unless warps have parts of their own: these are threads then, which
wait for each other as on a GPU, and what they store by TMA is read as late as they let it. So it shows that indices,
masks and sums are right, that no part waits for ever, and that none writes to what is still to be stored, but nothing
else of what a GPU does at the same time within a part.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from atom.graph import ops


class Value(torch.Tensor):
    """A tensor of a kernel."""

    type = property(lambda self: SimpleNamespace(layout=None))  # type: ignore[assignment]

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        dtype = getattr(dtype, "dtype", dtype)
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self, *_: Any) -> Any:  # type: ignore[override]
        return self[..., 0], self[..., 1]


def value(x: Tensor) -> Value:
    return x.as_subclass(Value)


class Pointer:
    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.tensor, self.offset[index])

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset


class Memory:
    """Shared memory: its first dim is of slots."""

    layout = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, _Bits(tensor.dtype), tensor.shape

    def index(self, slot: Any) -> Memory:
        return Memory(self.tensor[int(slot)])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.tensor.narrow(dim, start, length))

    def permute(self, dims: tuple[int, ...]) -> Memory:
        return Memory(self.tensor.permute(dims))

    def reinterpret(self, _dtype: Any, shape: list[int], _layout: Any) -> Memory:
        return Memory(self.tensor.view(shape))

    def load(self, _layout: Any) -> Value:
        return value(self.tensor.clone())

    def store(self, x: Tensor) -> None:
        self.tensor.view(x.dtype if x.dtype == torch.uint8 else self.tensor.dtype).copy_(x)


class _Bits:
    """A dtype of memory, which kernels ask for its size."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, dtype.itemsize * 8


class Descriptor:
    """A tensor as the TMA sees it: views of sizes by strides in elements, of which boxes are copied."""

    def __init__(self, tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.dtype = _Bits(tensor.dtype)
        raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch indexes no fp8
        self.flat, self.sizes, self.strides = _flat(raw), sizes, strides

    def copy(self, begin: list[Any], target: Memory) -> None:
        place, inside = self._places(begin, target)
        target.store(torch.where(inside, self.flat[place.where(inside, 0)], 0))

    def fill(self, begin: list[Any], source: Memory) -> None:
        place, inside = self._places(begin, source)
        stored = source.tensor if source.tensor.dtype == self.flat.dtype else source.tensor.view(self.flat.dtype)
        self.flat[place[inside]] = stored[inside]

    def _places(self, begin: list[Any], box: Memory) -> tuple[Tensor, Tensor]:
        """Where in memory the elements of a box are, and which are within the tensor."""
        place, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        for dim, (start, size, stride) in enumerate(zip(begin, self.sizes, self.strides, strict=True)):
            at = int(start) + torch.arange(box.shape[dim])
            at = at.view([-1 if each == dim else 1 for each in range(len(self.sizes))])
            place, inside = place + at * stride, inside & (at >= 0) & (at < size)
        return place, inside


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a tensor from its first element on."""
    storage = torch.empty(0, dtype=tensor.dtype)
    storage.set_(tensor.untyped_storage())
    return storage[tensor.storage_offset() :]


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    flat, offset = _flat(pointer.tensor), torch.as_tensor(pointer.offset)
    if mask is None:
        return value(flat[offset])
    mask, offset = torch.broadcast_tensors(torch.as_tensor(mask), offset)
    return value(torch.where(mask, flat[offset.where(mask, 0)], other).to(flat.dtype))


def _store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    offset = torch.as_tensor(pointer.offset)
    x, offset = torch.broadcast_tensors(torch.as_tensor(x), offset)
    mask = torch.as_tensor(True if mask is None else mask).broadcast_to(offset.shape)
    flat, x = _flat(pointer.tensor), x.to(pointer.tensor.dtype)
    if x.itemsize == 1:  # torch indexes no fp8
        flat, x = flat.view(torch.uint8), x.view(torch.uint8)
    flat[offset[mask]] = x[mask]


def _atomic_add(pointer: Pointer, x: int, **_: Any) -> Any:
    before = _load(pointer).clone()
    _store(pointer, before + x)
    return before


def _scan(x: Tensor, dim: int, combine: Callable[[Any, Any], Any]) -> Tensor:
    return value(torch.stack(list(itertools.accumulate(x.unbind(dim), combine)), dim))


class Kernel:
    def __init__(self, run: Callable[..., None], language: Any) -> None:
        self.run, self.language = run, language

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **options: Any) -> None:
            given = [Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
            names = {key: each for key, each in options.items() if key.isupper()}  # the rest is for the compiler
            self.language.num_programs = grid.__getitem__
            for program in itertools.product(*map(range, grid)):
                self.language.program_id = program.__getitem__
                self.run(*given, **names)

        return launch

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class Constant(int):
    """A number that kernels are compiled for, of which the host asks the value."""

    @property
    def value(self) -> int:
        return int(self)


def _language() -> Any:
    made = SimpleNamespace(
        constexpr=lambda x: Constant(x) if isinstance(x, int) else x, static_range=range, load=_load, store=_store,
        atomic_add=_atomic_add,
        float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16, int16=torch.int16, int32=torch.int32, int64=torch.int64, uint8=torch.uint8,
        arange=lambda start, stop, layout=None: value(torch.arange(start, stop)),
        zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        max=torch.amax, min=torch.amin, associative_scan=_scan,
        where=torch.where, join=lambda a, b: torch.stack((a, b), -1), sum=lambda x, *dim: x.sum(*dim), cdiv=lambda a, b: -(-a // b), convert_layout=lambda x, layout: x,
        zeros_like=torch.zeros_like, exp=torch.exp, exp2=torch.exp2, abs=torch.abs, cumsum=torch.cumsum, rsqrt=torch.rsqrt, sigmoid=torch.sigmoid,
        num_warps=lambda: 4,
        expand_dims=lambda x, dim: x.unsqueeze(dim), static_assert=lambda holds, why: None,
        allocate_shared_memory=lambda dtype, shape, layout: Memory(_garbage(getattr(dtype, "dtype", dtype), shape)),
    )  # fmt: skip
    layouts = (
        "NVMMADistributedLayout NVMMASharedLayout SliceLayout DotOperandLayout DistributedLinearLayout BlockedLayout "
        "SwizzledSharedLayout"
    )
    for name in layouts.split():
        setattr(made, name, lambda *args: SimpleNamespace(value=None, version=args[0]))
    return made


def _garbage(dtype: torch.dtype, shape: list[int]) -> Tensor:
    """What memory holds before it is written: NaN if there is one."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0x7F, dtype=dtype)


def activate_rounded(gate: Value, up: Value, kind: str, limit: float | None, alpha: float | None) -> Value:
    """`activations.activate_rounded`"""
    both = torch.cat((gate.flatten(), up.flatten()))[None]
    return value(ops.gated_activate.body(both, kind=kind, limit=limit, alpha=alpha)[0].view(gate.shape))


class WarpGroups:
    """Parts of a kernel that warps of their own run, as threads.

    A barrier's phase ends once all have arrived and all bytes that were expected have come.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: dict[int, int] = {}  # by the address of a barrier
        self._missing: dict[int, int] = {}  # arrivals, of its phase
        self._bytes: dict[int, int] = {}
        self._phases: dict[int, int] = {}
        self._stores = threading.local()  # of each part: those that it has not waited for, oldest first
        multiplied = {"warpgroup_mma": self._multiply, "warpgroup_mma_wait": lambda _, deps: deps[0]}
        self.names = multiplied | {
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda *_: None, init=self._init, wait=self._wait,
                expect=lambda bar, size: self._arrive(bar, size), arrive=lambda bar: self._arrive(bar, 0),
            ),
            "tma": SimpleNamespace(store_wait=self._wait_for_stores),
            "async_load": self._copy,
            "async_store": lambda target, begin, source: self._pending().append((target, begin, source)),
            "wait_for_inputs": lambda _: None,
            "warp_specialize": self._specialize,
        }  # fmt: skip

    def _specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        @torch.inference_mode()  # which each thread has one of
        def run(part: Callable[..., None], args: tuple[Any, ...]) -> None:
            part(*tree_map_only(Value, torch.clone, args))  # each part has numbers of its own
            assert not self._pending(), "the kernel ends before its stores have read their memory"

        with ThreadPoolExecutor(len(parts)) as pool:
            for running in [pool.submit(run, *part) for part in parts]:
                running.result()

    def _pending(self) -> list[Any]:
        return vars(self._stores).setdefault("pending", [])

    def _wait_for_stores(self, max_pending: int) -> None:
        pending = self._pending()
        while len(pending) > max_pending:
            target, begin, source = pending.pop(0)
            target.fill(begin, source)

    @staticmethod
    def _multiply(left: Memory | Value, right: Memory, sums: Value, use_acc: bool = True, is_async: bool = False
                  ) -> Value:  # fmt: skip
        numbers = left.tensor if isinstance(left, Memory) else left
        product = value(numbers.float() @ right.tensor.float())
        return product + sums if use_acc else product

    def _init(self, bar: Memory, count: int) -> None:
        at = bar.tensor.data_ptr()
        self._counts[at] = self._missing[at] = int(count)
        self._bytes[at] = self._phases[at] = 0

    def _arrive(self, bar: Memory, size: int) -> None:
        at = bar.tensor.data_ptr()
        with self._changed:
            self._missing[at] -= 1
            assert self._missing[at] >= 0, "more arrive than are waited for"
            self._bytes[at] += size
            self._end_phase(at)

    def _copy(self, source: Descriptor, begin: list[Any], bar: Memory, target: Memory) -> None:
        source.copy(begin, target)
        at = bar.tensor.data_ptr()
        with self._changed:
            self._bytes[at] -= target.tensor.nbytes
            self._end_phase(at)

    def _end_phase(self, at: int) -> None:
        if self._missing[at] == self._bytes[at] == 0:
            self._missing[at] = self._counts[at]
            self._phases[at] += 1
            self._changed.notify_all()

    def _wait(self, bar: Memory, phase: int) -> None:
        at = bar.tensor.data_ptr()
        with self._changed:
            ended = self._changed.wait_for(lambda: self._phases[at] % 2 != int(phase), timeout=60)
        assert ended, "a part of the kernel waits for ever"


def emulate(module: ModuleType, **replaced: Any) -> SimpleNamespace:
    """A module in Gluon as plain Python. replaced: other functions of the names that it imports"""
    language, nothing = _language(), lambda *_, **__: None
    cuda = SimpleNamespace(gdc_wait=nothing, gdc_launch_dependents=nothing)
    language.extra = SimpleNamespace(cuda=cuda)

    def jit(fn: Callable[..., None] | None = None, **_: Any) -> Any:
        return Kernel(fn, language) if fn else lambda fn: Kernel(fn, language)

    names = {
        "gl": language,
        "jit": jit,
        "triton_jit": jit,
        "tl": language,
        "mma_v2": lambda a, b, sums: value(a.float() @ b.float() + sums),
        "warpgroup_mma": lambda a, b, sums, is_async: value(a.float() @ b.tensor.float() + sums),
        "warpgroup_mma_wait": lambda _, deps: deps[0],
        "mbarrier": SimpleNamespace(MBarrierLayout=nothing, init=nothing, expect=nothing, wait=nothing),
        "async_load": lambda source, begin, _bar, target: source.copy(begin, target),
        "reinterpret": Memory.reinterpret,
        "TensorDescriptors": lambda *_: SimpleNamespace(find=Descriptor),
        "fence_async_shared": nothing,
        "barrier": nothing,
        **replaced,
    }
    language.warp_specialize = replaced.pop("warp_specialize", None)
    language.inline_asm_elementwise = replaced.pop("inline_asm_elementwise", None)
    tree = ast.parse(inspect.getsource(module))
    tree.body = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Assign)]
    made = dict(vars(module)) | names
    exec(compile(tree, str(module.__file__), "exec", __future__.annotations.compiler_flag), made)
    return SimpleNamespace(**made | replaced)
