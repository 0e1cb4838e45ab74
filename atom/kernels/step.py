"""The signatures of a backend's functions that prepare inputs and sample tokens.

    kernels = find_step_kernels("cuda")
    kernels.decode_inputs(slots, state, tables, block_size, inputs)     # each row computes its slot's newest token
    kernels.sample(logits, slots, state, "filtered", out)               # and draws the next one, which the slot keeps

Shapes by letter: S rows, R rows that sample, T tokens, C kinds of cache, M blocks of a row's table, V tokens of the
vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atom.graph import Batch

CHUNK_ELEMENTS = 1 << 22  # logits that `top_logprobs` holds in 8 bytes each at once


class Inputs(NamedTuple):
    """The inputs of a lowered body, in memory of a fixed address.

    The starts of `batch` are given, all else there is made; it has the slots and tables of each kind of cache apart.
    """

    tokens: Tensor  # i64[T]
    positions: Tensor  # i64[T]
    batch: Batch
    slots: Tensor  # i64[C, T], of all kinds
    tables: Tensor  # i32[C, S, M], likewise


class State(Protocol):
    """The fields of `runtime.request_state.RequestState`, by slot; slot `num_slots` is that of padding rows."""

    num_slots: int
    tokens: Tensor
    lengths: Tensor
    reported: Tensor
    seed: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    counts: Tensor


class Rows(Protocol):
    """The fields of `runtime.step_input.PackedRows` that inputs are made of, i32."""

    @property
    def slots(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def ends(self) -> Tensor: ...
    @property
    def given(self) -> Tensor: ...
    @property
    def row_of(self) -> Tensor: ...


class StepKernels(NamedTuple):
    """The step functions of one backend, from its modules `prepare_inputs` and `sampling`; see there."""

    extend_tables: Callable[[Tensor, Tensor], None]
    decode_inputs: Callable[[Tensor, State, Tensor, int, Inputs], None]
    mixed_inputs: Callable[[Rows, State, Tensor, int, Inputs], None]
    sample: Callable[[Tensor, Tensor, State, str, Tensor, bool], None]
    score_drawn: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def import_step_kernels(package: str) -> StepKernels:
    """Import the step functions of a backend's package."""
    inputs, sampling = (importlib.import_module(f"{package}.{name}") for name in ("prepare_inputs", "sampling"))
    return StepKernels(
        inputs.extend_tables, inputs.decode_inputs, inputs.mixed_inputs, sampling.sample, sampling.score_drawn
    )


def top_logprobs(logits: Tensor, rows: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely tokens of some rows of unprocessed logits, a nan counting as the lowest.

    logits: any float [R, V]; rows: i64[A]. Gives the log-sum-exps totals fp32[A], and the num_top best, best first and
    among equals the lower id first: ids i32[A, num_top], log probabilities fp32.
    """
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = [_find_top(logits.index_select(0, part), num_top) for part in torch.split(rows, size)]
    totals, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return totals, ids, values


def _find_top(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    values = logits.float().nan_to_num(nan=torch.finfo(torch.float32).min)
    total = values.logsumexp(-1, keepdim=True)
    ids = most_likely(values, min(num_top, values.shape[-1]))
    return total[:, 0], ids.int(), values.gather(-1, ids) - total


def most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids i64[R, count] of the largest logits of each row, best first and among equals the lower id first.

    One integer orders both: the bits of a float32 (they compare as integers once the negative ones are flipped), then
    the id counted from the end.
    """
    vocab = logits.shape[-1]
    key = (logits + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal 0.0
    key ^= (key >> 63).bitwise_and_(0x7FFFFFFF)
    key = key.bitwise_left_shift_(32).add_(torch.arange(vocab - 1, -1, -1, device=key.device))
    return vocab - 1 - (key.topk(count).values & 0xFFFFFFFF)
