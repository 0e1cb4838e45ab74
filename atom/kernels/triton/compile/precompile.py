"""Compile the kernels of a step on all cores before their first launch.

    with compile_launches(pool):
        model.decode(rows)           # launches nothing, but records which kernels such a step launches, and how
    model.decode(rows)               # finds them compiled and loaded

Such a step is a real one except for the values in its tensors, on which no launch depends. So a kernel is compiled for
just the arguments that it will get: types, strides, and whether pointers are aligned. Only kernels of our own JIT class
are held back, and only in this thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from atom.kernels.triton.compile.binary_cache import BinaryCache
from atom.kernels.triton.compile.compile_processes import CompileProcesses

ALLOCATING = {torch.empty, torch.empty_like, Tensor.new_empty}  # functions that allocate outputs of kernels


@contextmanager
def compile_launches(pool: Executor) -> Iterator[None]:
    """Within this context, record this thread's launches; at its end the pool compiles and loads their kernels.

    Compilation starts when the step has been walked through: a compiling thread holds the interpreter's lock at times,
    and the step would wait for it at every call. After an exception no further kernel is compiled here, but when it is
    first launched.
    """
    walk, futures = Walk(), list[Future[object]]()
    processes = BinaryCache.current.processes if BinaryCache.current else CompileProcesses()
    try:
        with _Ones():
            token = walking.set(walk)
            try:
                yield
            finally:
                walking.reset(token)
        processes.wait()
        futures += [pool.submit(task) for task in walk.tasks.values()]
        for future in as_completed(futures):
            future.result()
    finally:
        for future in futures:
            future.cancel()
        processes.stop()


class Walk:
    """Records a thread's launches, which are compiled later instead of launched."""

    def __init__(self) -> None:
        self.tasks: dict[Hashable, Callable[[], object]] = {}  # one for each binary
        self._seen = set[Hashable]()

    def add(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any], find: Callable[[], Any]) -> None:
        """Record a launch. find: gives its binary, or calls `defer` if it is not compiled."""
        with torch._C.DisableTorchFunction():
            launch = (kernel, *map(_describe, args), *options.items())
            if launch not in self._seen:
                self._seen.add(launch)
                find()

    def defer(self, binary: Hashable, compile: Callable[[], object]) -> None:
        self.tasks.setdefault(binary, compile)


walking: ContextVar[Walk | None] = ContextVar("walking", default=None)  # of this thread


def _describe(arg: Any) -> Any:
    """A hashable description of an argument; equal ones are compiled alike by Triton."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16
    return (type(arg), arg) if isinstance(arg, Hashable) else object()


class _Ones(TorchFunctionMode):
    """Fills allocated integers with ones, since torch may use what a kernel would have written, and 1 is a valid token,
    cache slot, block and length."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.fill_(1) if func in ALLOCATING and not result.is_floating_point() else result
