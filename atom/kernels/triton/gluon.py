"""The JIT class of our Gluon kernels.

@jit
def kernel(x, n): ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from triton.experimental.gluon import _runtime

from atom.kernels.triton.jit import JITFunction


class GluonJITFunction(JITFunction, _runtime.GluonJITFunction):  # type: ignore[misc]
    """As JITFunction, of Gluon's language."""


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`gluon.jit` with our class."""
    return partial(jit, **options) if fn is None else GluonJITFunction(fn, **options)
