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
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, JITFunction

ALLOCATING = {torch.empty, torch.empty_like, Tensor.new_empty}  # for a kernel to write


@contextmanager
def compile_launches(pool: Executor) -> Iterator[None]:
    """Have the pool compile and load, by the end of this, the kernels that would be launched in it.

    It begins when the step has been walked through: a thread that compiles holds the interpreter's lock at times, and
    the step would wait for it at every call.
    """
    run, seen, is_walked = JITFunction.run, set[Hashable](), threading.Event()

    def find(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch = (kernel, *map(_describe, args), *options.items())
            if launch not in seen:
                seen.add(launch)
                run(kernel, *args, grid=grid, warmup=True, **options)

    def load(compile: Callable[[], Any]) -> Any:
        is_walked.wait()
        kernel = compile()
        kernel.run  # noqa: B018 (it has the binary loaded, and what launches it compiled)
        return kernel

    def submit(compile: Callable[[], Any]) -> Future[Any]:
        return pool.submit(load, compile)

    with AsyncCompileMode(SimpleNamespace(submit=submit)):
        JITFunction.run = find
        try:
            with _Ones():
                yield
        finally:
            JITFunction.run = run
            is_walked.set()


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
