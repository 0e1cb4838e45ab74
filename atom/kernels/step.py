"""The signatures of a backend's functions that prepare inputs and sample tokens.

    kernels = find_step_kernels("cuda")
    kernels.decode_inputs(slots, state, tables, block_size, inputs)     # each row computes its slot's newest token
    kernels.sample(logits, slots, state, "filtered", out)               # and draws the next one, which the slot keeps

Shapes by letter: S rows, R rows that sample, T tokens, C kinds of cache, M blocks of a row's table, V tokens of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from atom.graph import Batch

# times 1 - top_p or 1 / top_k: tokens less probable than that, relative to the likeliest, are not drafted
MIN_SHARE = 0.5


class Inputs(NamedTuple):
    """The inputs of a lowered body, in memory of a fixed address.

    The starts of `batch` are given, all else there is made; it has the slots and tables of each kind of cache apart.
    """

    tokens: Tensor  # i64[T]
    positions: Tensor  # i64[T]
    batch: Batch
    slots: Tensor  # i64[C, T], of all kinds
    tables: Tensor  # i32[C, S, M], of all kinds
    adapters: Tensor | None = None  # i64[T], if the body takes them
    steering: Tensor | None = None  # fp32[T, K], if the body takes it
    rows: Tensor | None = None  # i32[T], if the body takes images: of `encoded`; -1: none
    encoded: Tensor | None = None  # [N, W], the encoded images
    rope_positions: Tensor | None = None  # i64[T, 3], if the body takes them
    ends: Tensor | None = None  # i32[T], if the body takes them; None: none is after its token


class State(Protocol):
    """The fields of `runtime.step.request_state.RequestState`, by slot; slot `num_slots` is that of padding rows."""

    num_slots: int
    tokens: Tensor
    lengths: Tensor
    reported: Tensor
    seed: Tensor
    rope_deltas: Tensor
    columns: Mapping[str, Tensor]
    counts: Tensor
    history: Tensor | None
    drafts: Tensor | None


class Rows(Protocol):
    """The fields of `runtime.step.input.PackedRows` that inputs are made of, i32."""

    @property
    def slots(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def new_length(self) -> Tensor: ...
    @property
    def host_tokens(self) -> Tensor: ...
    @property
    def token_index(self) -> Tensor: ...
    @property
    def row_of(self) -> Tensor: ...


class BlockCopier(Protocol):
    """Copies blocks of several caches to rows and back."""

    def gather(self, blocks: Tensor, rows: Tensor) -> None: ...
    def scatter(self, rows: Tensor, blocks: Tensor) -> None: ...


class StateCopier(Protocol):
    """Copies the recurrent states of slots to blocks and back."""

    def to_blocks(self, slots: Tensor, blocks: Tensor) -> None: ...
    def to_slots(self, slots: Tensor, blocks: Tensor) -> None: ...


class StepKernels(NamedTuple):
    """The step functions of one backend."""

    extend_tables: Callable[[Tensor, Tensor], None]
    decode_inputs: Callable[[Tensor, State, Tensor, int, Inputs, Tensor | None], None]
    mixed_inputs: Callable[[Rows, State, Tensor, int, Inputs], None]
    draft_inputs: Callable[[Tensor, Rows | None, State, Inputs], tuple[Tensor, Tensor]]
    sample: Callable[[Tensor, Tensor, State, str, Tensor, bool], None]
    score_drawn: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    find_ngrams: Callable[[Tensor, State, int, int], None]
    draw_noise: Callable[[Tensor, State, int], tuple[Tensor, Tensor, Tensor]]
    accept: Callable[[Tensor, Tensor, Tensor, State, int, Tensor | None], None]
    finish_drafts: Callable[[Tensor, Tensor, Tensor, State, bool], Tensor]
    keep_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    block_copier: Callable[[Sequence[Tensor]], BlockCopier]
    state_copier: Callable[[Sequence[Tensor], Sequence[Tensor]], StateCopier]

    @classmethod
    def of(cls, inputs: Any, sampling: Any, speculation: Any, blocks: Any) -> StepKernels:
        """The functions of a backend's modules `prepare_inputs`, `sampling`, `speculation` and `blocks`; see there."""
        return cls(
            inputs.extend_tables,
            inputs.decode_inputs,
            inputs.mixed_inputs,
            inputs.draft_inputs,
            sampling.sample,
            sampling.score_drawn,
            speculation.find_ngrams,
            speculation.draw_noise,
            speculation.accept,
            speculation.finish_drafts,
            speculation.keep_rows,
            blocks.BlockCopier,
            blocks.StateCopier,
        )
