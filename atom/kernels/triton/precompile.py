"""Compile the kernels of a step on all cores before their first launch.

    with compile_launches(pool):
        model.decode(rows)           # launches nothing, but tells which kernels such a step launches, and how
    model.decode(rows)               # finds them compiled and loaded

Such a step is a real one but for what is in its tensors, on which no launch depends. So a kernel is compiled for just
what it will be given: types, strides, and whether pointers are aligned. Only kernels of our own class are held back,
and only in the thread that walks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALLOCATING = {torch.empty, torch.empty_like, Tensor.new_empty}  # for a kernel to write


@contextmanager
def compile_launches(pool: Executor) -> Iterator[None]:
    """Have the pool compile and load, by the end of this, the kernels that would be launched in it by this thread.

    It begins when the step has been walked through: a thread that compiles holds the interpreter's lock at times, and
    the step would wait for it at every call. After an exception nothing more is begun: what is not compiled then is
    when it is first launched.
    """
    walk = Walk()
    with _Ones():
        token = walking.set(walk)
        try:
            yield
        finally:
            walking.reset(token)
    futures = [pool.submit(task) for task in walk.tasks.values()]
    try:
        for future in as_completed(futures):
            future.result()
    finally:
        for future in futures:
            future.cancel()


class Walk:
    """The launches of a thread that are compiled later, and not launched."""

    def __init__(self) -> None:
        self.tasks: dict[Hashable, Callable[[], object]] = {}  # one for each binary
        self._seen = set[Hashable]()

    def add(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any], find: Callable[[], Any]) -> None:
        """A launch; find: gives its binary where it is there, and calls `defer` where it is not."""
        with torch._C.DisableTorchFunction():
            launch = (kernel, *map(_describe, args), *options.items())
            if launch not in self._seen:
                self._seen.add(launch)
                find()

    def defer(self, binary: Hashable, compile: Callable[[], object]) -> None:
        self.tasks.setdefault(binary, compile)


walking: ContextVar[Walk | None] = ContextVar("walking", default=None)  # of this thread


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
