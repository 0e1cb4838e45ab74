"""Kernels compiled before they are first launched, each by itself, whatever needs what the others compute.

    with compile_launches(pool):
        model.decode(rows)           # launches nothing, but tells which kernels such a step launches, and how
    model.decode(rows)               # finds them compiled and loaded

Such a step is a real one but for what is in its tensors, on which no launch depends. So a kernel is compiled for just
what it will be given: types, strides, and whether pointers are aligned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, JITFunction

ALLOCATING = {torch.empty, torch.empty_like, Tensor.new_empty}  # for a kernel to write


@contextmanager
def compile_launches(pool: Executor) -> Iterator[None]:
    """Have the pool compile and load, by the end of this, the kernels that would be launched in it by this thread.

    It begins when the step has been walked through: a thread that compiles holds the interpreter's lock at times, and
    the step would wait for it at every call. After an exception nothing more is begun: what is not compiled then is
    when it is first launched.
    """
    kernels: dict[int, Any] = {}  # by id
    seen = set[Hashable]()

    def find(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch = (kernel, *map(_describe, args), *options.items())
            if launch not in seen:
                seen.add(launch)
                found = _run(kernel, *args, grid=grid, warmup=True, **options)
                kernels[id(found)] = found

    with AsyncCompileMode(SimpleNamespace(submit=_Compilation)) as mode, _Ones():
        token = walking.set(find)
        try:
            yield
        finally:
            walking.reset(token)
            mode.raw_futures.clear()  # which Triton would wait for
    futures = [pool.submit(_load, kernel) for kernel in kernels.values()]
    try:
        for future in as_completed(futures):
            future.result()
    finally:
        for future in futures:
            future.cancel()


_run = JITFunction.run
walking: ContextVar[Callable[..., None] | None] = ContextVar("walking", default=None)  # what a thread launches with


def _launch(kernel: Any, *args: Any, **options: Any) -> Any:
    return (walking.get() or _run)(kernel, *args, **options)


JITFunction.run = _launch  # for good: walks of several threads may begin and end in any order


class _Compilation:
    """What Triton takes for a future: it is compiled once, by the first thread that asks for the kernel."""

    def __init__(self, compile: Callable[[], Any]) -> None:
        self._compile, self._lock, self._kernel = compile, threading.Lock(), None

    def result(self) -> Any:
        with self._lock:
            if self._kernel is None:
                self._kernel = self._compile()
            return self._kernel


def _load(kernel: Any) -> None:
    """Have a kernel's binary loaded, and what launches it compiled; another walk may have found it first."""
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    compiled.run  # noqa: B018


def _describe(arg: Any) -> Any:
    """What is hashable, and of two arguments equal only where Triton compiles the same for them."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16
    return (type(arg), arg) if isinstance(arg, Hashable) else object()


class _Ones(TorchFunctionMode):
    """Integers that are allocated for a kernel to write are ones, for torch may go by them, and 1 is a token, a place
    in the cache, a block and a length."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.fill_(1) if func in ALLOCATING and not result.is_floating_point() else result
