"""The JIT class of our Triton kernels.

It compiles ahead and keeps binaries in the cache folder.

@jit(do_not_specialize=["n"])
def kernel(x, n, BLOCK: tl.constexpr): ...

kernel[grid](x, n, BLOCK=128, num_warps=4)    # as Triton has it

A kernel's later launches go by Triton no more, which looks up its knobs, globals and options at each.

All of that is for these kernels only. Those of another library in the process are launched, compiled and cached as
Triton does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver, interpreter

from atom.kernels.triton.compile.binary_cache import compile_kept, kept
from atom.kernels.triton.compile.precompile import walking
from atom.kernels.triton.gpu import load_driver


class JITFunction(triton.JITFunction):  # type: ignore[misc]
    """A kernel, or a function that kernels call."""

    @property
    def cache_key(self) -> str:
        """Triton's, but the same whichever kernels were compiled before.

        Triton counts the globals of a called function only where that function has a key already. Ours are called by
        name.
        """
        if self.hash is None:
            called = [self.__globals__.get(name) for name in self.fn.__code__.co_names]
            for each in called:
                if isinstance(each, JITFunction) and each is not self:
                    each.cache_key  # noqa: B018
        key: str = super().cache_key
        return key

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.launched: dict[Any, Any] = {}  # binaries, by device and all that Triton would choose them by

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not self.device_caches:  # its first launch
            load_driver()
        walk = walking.get()
        if walk is not None:
            return walk.add(self, args, options, partial(super().run, *args, grid=grid, warmup=True, **options))
        if warmup or has_hooks():
            return super().run(*args, grid=grid, warmup=warmup, **options)
        device = driver.active.get_current_device()
        binder = self.device_caches[device][-1]
        values, specialization, options_of_all = binder(*args, **options)
        key = device, *specialization, *options_of_all.items()
        if (kernel := self.launched.get(key)) is None:
            kernel = super().run(*args, grid=grid, warmup=False, **options)
            if kernel is not None:
                self.launched[key] = kernel
            return kernel
        sizes = (*(grid(values) if callable(grid) else grid), 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        function, metadata = kernel.function, kernel.packed_metadata
        kernel.run(*sizes, stream, function, metadata, None, None, None, *values.values())
        return kernel

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.compile: Callable[..., Any] = partial(compile_kept, self.compile)
        return binder

    def _do_compile(self, key: Any, signature: Any, device: int, *rest: Any) -> Any:
        """Compile a kernel; None within a `Walk`, which compiles it later."""
        walk, is_warmup = walking.get(), rest[-1]
        if walk is not None:
            return walk.defer((id(self), device, key), partial(self._compile, False, key, signature, device, *rest))
        return self._compile(is_warmup, key, signature, device, *rest)

    def _compile(self, is_warmup: bool, key: Any, signature: Any, device: int, *rest: Any) -> Any:
        """Compile a kernel and, unless this is a warm-up, load it; another thread may have been first."""
        binaries = self.device_caches[device][0]
        with kept():
            kernel = binaries[key] if key in binaries else super()._do_compile(key, signature, device, *rest)
            if not (is_warmup or kernel is None or hasattr(kernel, "result")):  # a hook or a pool compiles it
                kernel.run  # noqa: B018
        return kernel


CALL = interpreter.InterpretedFunction.__call__  # Triton's own


class InterpretedFunction(interpreter.InterpretedFunction):  # type: ignore[misc]
    """A kernel, or a function that kernels call, under TRITON_INTERPRET=1."""

    def run(self, *args: Any, **options: Any) -> Any:
        with patching_once():
            return super().run(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it in a launch, which has patched triton.language; Triton would patch it again, in 0.5 ms a call."""
        return self.rewrite()(*args, **options)


@contextmanager
def patching_once() -> Iterator[None]:
    """In a launch, let tl.sum and the like patch triton.language at a module's first call; Triton does at each."""
    patched = set[int]()

    def call_patched(function: Any, *args: Any, **options: Any) -> Any:
        if (module := id(function.fn.__globals__)) in patched:
            return function.rewrite()(*args, **options)
        patched.add(module)
        return CALL(function, *args, **options)

    interpreter.InterpretedFunction.__call__ = call_patched
    try:
        yield
    finally:
        interpreter.InterpretedFunction.__call__ = CALL


def has_hooks() -> bool:
    """Whether a hook, such as a profiler's, is called for launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` with our classes."""
    if fn is None:
        return partial(jit, **options)
    return InterpretedFunction(fn, **options) if knobs.runtime.interpret else JITFunction(fn, **options)
