"""Define an op: a reference body, a shape rule, a docstring.

@op(lambda x, *, by: x)                        # the shape rule, over the types of the tensors
def scale(x, *, by): return x * by             # the reference body

scale.infer(Type("bf16", ("T", 576)), by=2.0)  # its result's type
OPS["scale"]                                   # by the name that the text uses
OPS["linear"].weight                           # 1: which argument is its weight
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.graph.types import Dim, Type, need

SEMANTIC, LOWERED = "semantic", "lowered"


@dataclass(frozen=True, eq=False)
class Op:
    name: str
    body: Callable[..., Any]
    infer: Callable[..., Type | tuple[Type, ...]]  # of the arguments' types; ValueError if they do not fit
    level: str | None  # the one at which it is legal; None: both are
    is_state: bool
    weights: tuple[int, ...]  # the arguments that may be packed, and laid out as a kernel wants: matrices, not norms
    signature: inspect.Signature
    is_collective: bool = False  # its body takes a list of all ranks' tensors, and gives what each of them gets
    lowered: Op | None = None  # of a semantic op with recurrent state: the op of a batch that takes its place
    heads: Mapping[str, int | None] = field(default_factory=dict)  # see `op`
    state_flops: int = 0  # of an op with recurrent state: a token's operations on each number of it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def weight(self) -> int:
        """Which argument is the weight, of an op that has one."""
        (place,) = self.weights
        return place


OPS: dict[str, Op] = {}


def op(
    infer: Callable[..., Type | tuple[Type, ...]], *, level: str | None = None, state: bool = False,
    weight: int | tuple[int, ...] = (), collective: bool = False, heads: Mapping[str, int | None] | None = None,
    state_flops: int = 0,
) -> Callable[[Callable[..., Any]], Op]:  # fmt: skip
    """Make an op from a reference body and a shape rule.

    weight: which argument is one, see `Op.weights`.
    heads: of an op that computes heads or channels apart, by parameter, the dim that has them, which ranks divide; None
        of an attribute that counts them. The result has them in dim 1.
    state_flops: see `Op.state_flops`
    """

    def register(body: Callable[..., Any]) -> Op:
        weights = weight if isinstance(weight, tuple) else (weight,)
        made = Op(body.__name__, body, infer, level, state, weights, inspect.signature(body), collective,
                  heads=heads or {}, state_flops=state_flops)  # fmt: skip
        OPS[made.name] = made
        return made

    return register


def multiply(rows: Dim, by: int) -> Dim:
    """A number of rows, which a letter may stand for, times another: "T" by 4 is "4*T"."""
    if isinstance(rows, int):
        return rows * by
    count, _, letter = rows.rpartition("*")
    return f"{int(count or 1) * by}*{letter}"


def divide_rows(rows: Dim, parts: int) -> Dim:
    """Undo `multiply`: "4*T" by 4 is "T". ValueError if the parts are not equal."""
    if isinstance(rows, int):
        return divide(rows, parts)
    count, _, letter = rows.rpartition("*")
    rest = divide(int(count or 1), parts)
    return letter if rest == 1 else f"{rest}*{letter}"


def divide(dim: Dim, parts: int) -> int:
    need(isinstance(parts, int) and parts > 0, f"{parts} is no number of parts from 1")
    need(isinstance(dim, int) and dim % parts == 0, f"{dim} does not divide by {parts}")
    return int(dim) // parts
