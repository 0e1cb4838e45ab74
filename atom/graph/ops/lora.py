"""Low-rank adapters of a linear: each token has its own, or none.

L adapters (Hu et al. 2022) stand side by side: a [S L r, I], rows by slice, adapter and rank, and b [O, L r], columns
by adapter and rank. A slice is a run of the linear's outputs with an a of its own, such as q of a joined qkv.

For the linears of experts, rows are grouped by expert and adapter, so that each group has factors of its own:

    pairs = pair_adapters(ids, adapters, loras=8)                   # expert and adapter in one number
    grouped, order, ends = group(h, pairs, experts=72)              # of 8 experts
    expert_ends = ends_of_experts(ends, loras=8)
    y = grouped_linear(grouped, weight, expert_ends)
    y = grouped_lora(y, grouped, a, b, ends)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from atom.graph.ops.base import LOWERED, divide, op
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
    """y [T, O + S L r], the outputs of a linear whose weight is followed by each a -> [T, O]; with a kind, followed by
    gated_activate: [T, O / 2]. b and adapters as in lora"""
    outputs = sum(sizes)

    def shrink(rows: Tensor, at: int, number: int) -> Tensor:
        first = outputs + at * b.shape[1] + number * rank
        return y[rows, first : first + rank].float()

    total = _add(y[:, :outputs], shrink, b, adapters, rank, sizes)
    return total if kind is None else gated_activate(total, kind=kind)


def _pair_adapters(ids: Type, adapters: Type, *, loras: int) -> Type:
    need(adapters == Type("i64", ids.shape[:1]), f"the adapters are {adapters} for {ids}")
    need(loras > 0, f"there are {loras} adapters")
    return ids


@op(_pair_adapters)
def pair_adapters(ids: Tensor, adapters: Tensor, *, loras: int) -> Tensor:
    """ids i64[T, k], adapters i64[T], -1 for none -> i64[T, k], the expert times L + 1, and of these the first without
    an adapter"""
    return ids * (loras + 1) + adapters[:, None] + 1


def _ends_of_experts(ends: Type, *, loras: int) -> Type:
    return Type("i64", (divide(ends.shape[0], loras + 1),))


@op(_ends_of_experts)
def ends_of_experts(ends: Tensor, *, loras: int) -> Tensor:
    """ends i64[E (L + 1)] of the rows by expert and adapter -> i64[E], by expert"""
    return ends[loras :: loras + 1].contiguous()


def _grouped_lora(y: Type, x: Type, a: Type, b: Type, ends: Type) -> Type:
    need(len(a.shape) == len(b.shape) == 4, f"a is {a}, b {b}")
    experts, slots, rank, inner = map(int, a.shape)
    need(b.shape == (experts, slots, y.shape[-1], rank), f"a is {a}, b {b} for {y}")
    need(inner == x.shape[-1] and y.shape[0] == x.shape[0], f"a is {a} for {x} and {y}")
    need(ends.shape == (experts * slots,), f"{ends} are the ends of {experts} experts with {slots} adapters")
    need(y.dtype == x.dtype == a.dtype == b.dtype, f"{y}, {x}, {a} and {b} differ in dtype")
    return y


@op(_grouped_lora)
def grouped_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """y [P, O] and x [P, I] by expert and adapter, a [E, L + 1, r, I] and b [E, L + 1, O, r], the first of each expert
    zeros, ends i64[E (L + 1)] -> y + b a x, [P, O]; in float32, rounded once"""
    out, first = y.clone(), 0
    for group, last in enumerate(ends.tolist()):
        expert, slot = divmod(group, a.shape[1])
        if slot and first < last:
            added = x[first:last].float() @ a[expert, slot].float().T @ b[expert, slot].float().T
            out[first:last] = (y[first:last].float() + added).to(y.dtype)
        first = last
    return out
