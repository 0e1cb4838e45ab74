"""Define an op: a reference body, a shape rule, a docstring.

@op(lambda x, *, by: x)                        # the shape rule, over the types of the tensors
def scale(x, *, by): return x * by             # the reference body

scale.infer(Type("bf16", ("T", 576)), by=2.0)  # its result's type
OPS["scale"]                                   # by the name that the text uses
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atom.graph.types import Dim, Type

SEMANTIC, LOWERED = "semantic", "lowered"


BOTH = frozenset({SEMANTIC, LOWERED})


@dataclass(frozen=True, eq=False)
class Op:
    name: str
    body: Callable[..., Any]
    infer: Callable[
        ..., Type | tuple[Type, ...]
    ]  # over the types of the tensors; raises ValueError where they do not fit
    levels: frozenset[str]  # where it is legal
    is_state: bool
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name


OPS: dict[str, Op] = {}


def op(
    infer: Callable[..., Type | tuple[Type, ...]], *, levels: frozenset[str] = BOTH, state: bool = False
) -> Callable[[Callable[..., Any]], Op]:
    """Make an op from a reference body and a shape rule."""

    def register(body: Callable[..., Any]) -> Op:
        made = Op(body.__name__, body, infer, levels, state, inspect.signature(body))
        OPS[made.name] = made
        return made

    return register


def need(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def divide(dim: Dim, parts: int) -> int:
    need(isinstance(parts, int) and parts > 0, f"{parts} is no number of parts from 1")
    need(isinstance(dim, int) and dim % parts == 0, f"{dim} does not divide by {parts}")
    return int(dim) // parts
