"""Low-rank adapters beside a linear: each token has its own, or none.

L adapters (Hu et al. 2022) stand side by side: a [S L r, I], rows by slice, adapter and rank, and b [O, L r], columns
by adapter and rank. A slice is a run of the linear's outputs with an a of its own, such as q of a joined qkv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from atom.graph.ops.base import LOWERED, op
from atom.graph.ops.dense import gated_activate, gated_activate_type
from atom.graph.types import Type, need


def _fits(rows: Type, outputs: int, a_rows: int, b: Type, adapters: Type, rank: int, sizes: Sequence[int]) -> None:
    need(rank > 0 and b.shape[1] % rank == 0, f"b has {b.shape[1]} columns, no multiple of rank {rank}")
    need(sum(sizes) == outputs == b.shape[0], f"slices {list(sizes)} and {b.shape[0]} rows of b for {outputs} outputs")
    need(a_rows == len(sizes) * int(b.shape[1]), f"a has {a_rows} rows for {len(sizes)} slices of {b.shape[1]}")
    need(adapters == Type("i64", rows.shape[:1]), f"the adapters are {adapters} for {rows}")


def _lora(y: Type, x: Type, a: Type, b: Type, adapters: Type, *, rank: int, sizes: Sequence[int]) -> Type:
    _fits(y, int(y.shape[-1]), int(a.shape[0]), b, adapters, rank, sizes)
    need(a.shape[1] == x.shape[-1], f"a is {a} for {x}")
    need(y.dtype == x.dtype == a.dtype == b.dtype, f"{y}, {x}, {a} and {b} differ in dtype")
    return y


@op(_lora)
def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, *, rank: int, sizes: Sequence[int]) -> Tensor:
    """y [T, O], x [T, I], a [S L r, I], b [O, L r], adapters i64[T], -1 for none -> y + b a x of each token's adapter,
    [T, O]; in float32, rounded once"""
    factors = a.view(len(sizes), -1, rank, a.shape[1])
    return _add(y, lambda rows, at, number: x[rows].float() @ factors[at, number].float().T, b, adapters, rank, sizes)


def _add(y: Tensor, shrink: Callable[[Tensor, int, int], Tensor], b: Tensor, adapters: Tensor, rank: int,
         sizes: Sequence[int]) -> Tensor:  # fmt: skip
    """shrink: of rows i64[N], a slice and an adapter, fp32[N, r]"""
    out = y.clone()
    for number in sorted(set(adapters.tolist())):
        rows, start = (adapters == number).nonzero()[:, 0], 0
        for at, size in enumerate(sizes if number >= 0 else ()):
            factor = b[start : start + size, number * rank : (number + 1) * rank]
            total = y[rows, start : start + size].float() + shrink(rows, at, number) @ factor.float().T
            out[rows, start : start + size] = total.to(y.dtype)
            start += size
    return out


def _expand_lora(y: Type, b: Type, adapters: Type, *, rank: int, sizes: Sequence[int], kind: str | None = None) -> Type:
    outputs = sum(sizes)
    _fits(y, outputs, int(y.shape[-1]) - outputs, b, adapters, rank, sizes)
    need(y.dtype == b.dtype, f"{y} and {b} differ in dtype")
    return y.with_last(outputs) if kind is None else gated_activate_type(y.with_last(outputs), kind=kind)


@op(_expand_lora, level=LOWERED)
def expand_lora(
    y: Tensor, b: Tensor, adapters: Tensor, *, rank: int, sizes: Sequence[int], kind: str | None = None
) -> Tensor:
    """y [T, O + S L r], the outputs of a linear and of the a behind its weight; b and adapters as in lora -> [T, O];
    with a kind, gated_activate behind it gives [T, O / 2]"""
    outputs = sum(sizes)

    def shrink(rows: Tensor, at: int, number: int) -> Tensor:
        first = outputs + at * b.shape[1] + number * rank
        return y[rows, first : first + rank].float()

    total = _add(y[:, :outputs], shrink, b, adapters, rank, sizes)
    return total if kind is None else gated_activate(total, kind=kind)
