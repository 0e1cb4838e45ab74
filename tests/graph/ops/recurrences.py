"""Cases of ops with recurrent state, and the steps of an engine in which several sequences take part.

case = make_case("gated_delta", tokens=65)
whole = case.run()                                          # by the semantic op
(out,) = in_steps(ops.OPS["batched_gated_delta"], [case], chunk=7)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from graph.ops.checked import Cache, checked
from torch import Tensor
from torch.nn.functional import softplus

from atom.graph import Batch, LatestState, Type, ops

NAN = float("nan")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Case(NamedTuple):
    """One sequence: the arguments of a semantic op."""

    op: ops.Op
    values: tuple[Tensor, ...]  # of its tokens
    state: LatestState
    weights: tuple[Tensor | None, ...]
    attributes: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return len(self.values[0])

    @property
    def zeros(self) -> Tensor:
        return torch.zeros(*map(int, self.state.type.shape), dtype=TORCH[self.state.type.dtype])

    def run(self) -> Tensor:
        made: Tensor = checked(self.op, *self.values, Cache(self.state, self.zeros), *self.weights, **self.attributes)
        return made

    def apart(self) -> Case:
        """The same with values that are columns of wider tensors, as a split gives them."""
        rows = [each.flatten(1) for each in self.values]
        views = [torch.cat((each, each), 1)[:, : each.shape[1]] for each in rows]
        return self._replace(values=tuple(map(Tensor.view_as, views, self.values)))

    def kept_in(self, dtype: str) -> Case:
        """The same with states in this dtype."""
        return self._replace(state=LatestState("0", Type(dtype, self.state.type.shape)))

    def wide(self) -> Case:
        """The same numbers in float32."""
        values = tuple(each.float() for each in self.values)
        weights = tuple(None if each is None else each.float() for each in self.weights)
        return Case(self.op, values, _leaf(self.zeros.float()), weights, self.attributes)


TORCH = {name: dtype for dtype, name in NAMES.items()}
Sizes = dict[str, int]


def make_case(name: str, tokens: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> Case:
    """A case of an op with random numbers, of which the weights do not depend on the seed.

    options: sizes and attributes of the op, see its function below
    """
    return MAKERS[name](tokens, dtype, torch.Generator().manual_seed(seed), **options)


def _leaf(state: Tensor) -> LatestState:
    return LatestState("0", Type(NAMES[state.dtype], tuple(state.shape)))


def _weights() -> torch.Generator:
    return torch.Generator().manual_seed(99)


def _causal_conv(tokens: int, dtype: torch.dtype, random: torch.Generator, *, channels: int = 37, taps: int = 4,
                 kind: str | None = "silu", has_bias: bool = True) -> Case:  # fmt: skip
    own = _weights()
    weight, bias = (
        torch.randn(channels, taps, generator=own).to(dtype),
        torch.randn(channels, generator=own).to(dtype),
    )
    x = torch.randn(tokens, channels, generator=random).to(dtype)
    state = _leaf(torch.zeros(taps - 1, channels, dtype=dtype))
    return Case(ops.causal_conv, (x,), state, (weight, bias if has_bias else None), {"kind": kind})


def _gated_delta(tokens: int, dtype: torch.dtype, random: torch.Generator, *, key_heads: int = 3, heads: int = 9,
                 key_dim: int = 20, value_dim: int = 12, by_dim: bool = False, normalize: bool = True) -> Case:  # fmt: skip
    q, k = torch.randn(2, tokens, key_heads, key_dim, generator=random).to(dtype).unbind()
    k = k if normalize else k / key_dim**0.5  # which a step of the rule must not overshoot
    v = torch.randn(tokens, heads, value_dim, generator=random).to(dtype)
    decay = -softplus(torch.randn(tokens, heads, *[key_dim] * by_dim, generator=random) - 1)
    beta = torch.rand(tokens, heads, generator=random).to(dtype)
    state = _leaf(torch.zeros(heads, key_dim, value_dim))
    attributes = {"scale": key_dim**-0.5, "normalize": normalize}
    return Case(ops.gated_delta, (q, k, v, decay, beta), state, (), attributes)


def _lightning(tokens: int, dtype: torch.dtype, random: torch.Generator, *, heads: int = 3, dim: int = 20) -> Case:
    q, k, v = torch.randn(3, tokens, heads, dim, generator=random).to(dtype).unbind()
    slopes = torch.rand(heads, generator=_weights())
    return Case(ops.lightning, (q, k, v), _leaf(torch.zeros(heads, dim, dim)), (slopes,), {"scale": 0.5})


def _ssd(tokens: int, dtype: torch.dtype, random: torch.Generator, *, heads: int = 9, dim: int = 12, groups: int = 3,
         size: int = 20) -> Case:  # fmt: skip
    own = _weights()
    x = torch.randn(tokens, heads, dim, generator=random).to(dtype)
    dt = softplus(torch.randn(tokens, heads, generator=random) - 2)
    b, c = torch.randn(2, tokens, groups, size, generator=random).to(dtype).unbind()
    a_log, d = torch.randn(2, heads, generator=own).unbind()
    return Case(ops.ssd, (x, dt, b, c), _leaf(torch.zeros(heads, dim, size)), (a_log, d), {})


def _selective_scan(tokens: int, dtype: torch.dtype, random: torch.Generator, *, channels: int = 37,
                    size: int = 16) -> Case:  # fmt: skip
    own = _weights()
    x = torch.randn(tokens, channels, generator=random).to(dtype)
    dt = softplus(torch.randn(tokens, channels, generator=random) - 2)
    b, c = torch.randn(2, tokens, size, generator=random).to(dtype).unbind()
    a_log, d = torch.randn(channels, size, generator=own), torch.randn(channels, generator=own)
    return Case(ops.selective_scan, (x, dt, b, c), _leaf(torch.zeros(channels, size)), (a_log, d), {})


MAKERS: dict[str, Callable[..., Case]] = {
    "causal_conv": _causal_conv,
    "gated_delta": _gated_delta,
    "lightning": _lightning,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
}


class Step(NamedTuple):
    values: list[Tensor]  # of the step's tokens, two of padding
    batch: Batch
    parts: list[tuple[int, int, int]]  # the sequence, its first and last token of this step


def steps_of(cases: Sequence[Case], chunk: int, places: Tensor, padding: int) -> Iterator[Step]:
    """Each step takes a chunk of every sequence; each begins a step after the one before it. places: their slots"""
    last = max(n + -(-case.num_tokens // chunk) for n, case in enumerate(cases))
    for step in range(last + 1):
        begins = [(n, (step - n) * chunk) for n in range(min(len(cases), step + 1))]
        parts = [(n, at, min(at + chunk, cases[n].num_tokens)) for n, at in begins if at < cases[n].num_tokens]
        counts = [stop - start for _, start, stop in parts]
        values = [
            torch.cat([*(cases[n].values[v][start:stop] for n, start, stop in parts), value.new_full((2, *value.shape[1:]), NAN)])
            for v, value in enumerate(cases[0].values)
        ]  # fmt: skip
        batch = Batch(
            {}, {}, torch.tensor([*accumulate(counts, initial=0), sum(counts)]).int(),
            torch.tensor([*(stop for _, _, stop in parts), 1]).int(), 0,
            slots=torch.tensor([*(int(places[n]) for n, _, _ in parts), padding]).int(),
        )  # fmt: skip
        yield Step(values, batch, parts)


def states_of(state: Tensor, num_slots: int, kept: int = 1) -> Tensor:
    """The same state as each of those that slots keep."""
    return state.repeat(num_slots, kept, *[1] * state.dim())


def in_steps(run: Callable[..., Tensor], cases: Sequence[Case], chunk: int) -> list[Tensor]:
    """What a batched op gives for each sequence, if they come one after another and slots hold NaN before.

    Every step has a sequence and two tokens of padding, and the last one nothing else.
    """
    first = cases[0]
    count = len(cases) + 3
    slots = states_of(torch.full_like(first.zeros, NAN), count)
    places = torch.randperm(count - 1, generator=_weights())[: len(cases)]
    made: list[list[Tensor]] = [[] for _ in cases]
    for values, batch, parts in steps_of(cases, chunk, places, count - 1):
        out = run(*values, slots, batch, *first.weights, **first.attributes)
        assert out.shape[0] == len(values[0]) and out.is_contiguous()
        for row, (n, _, _) in enumerate(parts):
            made[n].append(out[batch.starts[row] : batch.starts[row + 1]])
    unused = torch.ones(count).bool().index_fill_(0, places, False)
    assert slots[unused].isnan().all(), "the slots of others are left alone"
    return [torch.cat(each) for each in made]


def with_drafts(run: Callable[..., Tensor], case: Case, kept: int, first: int, *, in_rows: bool = False) -> Tensor:
    """What a batched op gives for a sequence whose steps end with drafts of NaN, which the next step takes back.

    kept: states of a slot, one more than the drafts of a step
    first: tokens of the first step, which has no drafts
    in_rows: drafts are rows of one token each, as those of the host are
    """
    slots, parts = states_of(torch.full_like(case.zeros, NAN), 3, kept), []
    at, num_right, seen = 0, first, set[int]()
    while at < case.num_tokens:
        right = [each[at : at + num_right] for each in case.values]
        num_right = len(right[0])
        num_tokens = kept if at else first
        rejected = num_tokens - num_right
        values = [torch.cat((each, each.new_full((rejected, *each.shape[1:]), NAN))) for each in right]
        counts = [1] * num_tokens if in_rows and at else [num_tokens]
        lengths = [at + end for end in accumulate(counts)]
        batch = Batch(
            {}, {}, torch.tensor([*accumulate(counts, initial=0)]).int(), torch.tensor(lengths).int(),
            len(counts) if at else 0, counts[0], torch.tensor([1] * len(counts)).int(),
        )  # fmt: skip
        parts.append(run(*values, slots, batch, *case.weights, **case.attributes)[:num_right])
        at, num_right = at + num_right, 1 + len(parts) % kept
        seen.add(num_right)
    assert seen == {*range(1, 1 + kept)}, "no draft was accepted, each number of them, and all"
    assert slots[[0, 2]].isnan().all(), "the slots of others are left alone"
    return torch.cat(parts)
