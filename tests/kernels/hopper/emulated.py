"""Kernels in Gluon as plain Python on a CPU: a program after the other, on torch's tensors, without layouts.

    few = emulate(few_hopper, _unpack=unpack)       # a namespace of the module's functions, its kernels among them
    few.multiply_gates(x, ids, weight, None, "silu")

What is copied is there at once, and barriers do nothing. So it shows that indices, masks and sums are right, and nothing
of what a GPU does at the same time.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Value(torch.Tensor):
    """A tensor of a kernel."""

    type = property(lambda self: SimpleNamespace(layout=None))  # type: ignore[assignment]

    def to(self, dtype: torch.dtype) -> Any:  # type: ignore[override]
        return super().to(dtype)

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


class Memory:
    """Shared memory: its first dim is of slots."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, _Bits(tensor.dtype), tensor.shape

    def index(self, slot: Any) -> Memory:
        return Memory(self.tensor[int(slot)])

    def permute(self, dims: tuple[int, ...]) -> Memory:
        return Memory(self.tensor.permute(dims))

    def _reinterpret(self, _dtype: Any, shape: list[int], _layout: Any) -> Memory:
        return Memory(self.tensor.view(shape))

    def load(self, _layout: Any) -> Value:
        return value(self.tensor.clone())

    def store(self, x: Tensor) -> None:
        self.tensor.copy_(x)


class _Bits:
    """A dtype of memory, which kernels ask for its size."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, dtype.itemsize * 8


class Descriptor:
    """A tensor as the TMA sees it: views of sizes by strides in elements, of which boxes are copied."""

    def __init__(self, tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.dtype = _Bits(tensor.dtype)
        self.flat, self.sizes, self.strides = _flat(tensor), sizes, strides

    def copy(self, begin: list[Any], target: Memory) -> None:
        place, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        for dim, (start, size, stride) in enumerate(zip(begin, self.sizes, self.strides, strict=True)):
            at = int(start) + torch.arange(target.shape[dim])
            at = at.view([-1 if each == dim else 1 for each in range(len(self.sizes))])
            place, inside = place + at * stride, inside & (at >= 0) & (at < size)
        target.store(torch.where(inside, self.flat[place.where(inside, 0)], 0))


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
    mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.broadcast_to(offset.shape)
    _flat(pointer.tensor)[offset[mask]] = x[mask].to(pointer.tensor.dtype)


class Kernel:
    def __init__(self, run: Callable[..., None], language: Any) -> None:
        self.run, self.language = run, language

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool) -> None:
            given = [Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
            for program in itertools.product(*map(range, grid)):
                self.language.program_id = program.__getitem__
                self.run(*given)

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
        float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64, uint8=torch.uint8,
        arange=lambda start, stop, layout: value(torch.arange(start, stop)),
        zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        where=torch.where, sum=lambda x, dim: x.sum(dim), convert_layout=lambda x, layout: x,
        thread_barrier=lambda: None, expand_dims=lambda x, dim: x.unsqueeze(dim), static_assert=lambda holds, why: None,
        allocate_shared_memory=lambda dtype, shape, layout: Memory(_garbage(getattr(dtype, "dtype", dtype), shape)),
    )  # fmt: skip
    layouts = (
        "NVMMADistributedLayout NVMMASharedLayout SliceLayout DotOperandLayout DistributedLinearLayout BlockedLayout"
    )
    for name in layouts.split():
        setattr(made, name, lambda *_: SimpleNamespace(value=None))
    return made


def _garbage(dtype: torch.dtype, shape: list[int]) -> Tensor:
    """What memory holds before it is written: NaN where there is one."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0x7F, dtype=dtype)


def emulate(module: ModuleType, **replaced: Any) -> SimpleNamespace:
    """A module in Gluon as plain Python. replaced: other functions of the names that it imports"""
    language, nothing = _language(), lambda *_, **__: None
    cuda = SimpleNamespace(gdc_wait=nothing, gdc_launch_dependents=nothing)
    names = {
        "gl": language,
        "jit": lambda fn=None, **_: Kernel(fn, language) if fn else lambda fn: Kernel(fn, language),
        "tl": SimpleNamespace(extra=SimpleNamespace(cuda=cuda), constexpr=language.constexpr),
        "mma_v2": lambda a, b, sums: value(a.float() @ b.float() + sums),
        "mbarrier": SimpleNamespace(MBarrierLayout=nothing, init=nothing, expect=nothing, wait=nothing),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=lambda source, begin, _bar, target: source.copy(begin, target)
        ),
        "TensorDescriptors": lambda *_: SimpleNamespace(find=Descriptor),
        "fence_async_shared": nothing,
        "barrier": nothing,
        **replaced,
    }
    tree = ast.parse(inspect.getsource(module))
    tree.body = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Assign)]
    made = dict(vars(module)) | names
    exec(compile(tree, str(module.__file__), "exec", __future__.annotations.compiler_flag), made)
    return SimpleNamespace(**made | replaced)
