"""StepInput: one step as plain numbers and arrays, for a runner.

It can be sent to another process as it is.

    step = builder.build(plan)                                  # `atom.runtime.step.builder`
    sent = msgspec.msgpack.encode(step)
    pending = runner.execute(msgspec.msgpack.decode(sent, type=StepInput))

A row is an index in the batch, a slot one in the runner's request state. Nothing here names a sequence.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from atom.runtime.types import BlockCopies, Sampled
from atom.sampling_params import COLUMNS, SamplingParams

NUM_REPORTED = 8  # last tokens of a slot that the host can read: more than steps in flight, and than tokens of a draft
NUM_GROUPS = 16  # max groups of decodes with a common prefix in a step
NO_DRAFT = -2 - NUM_REPORTED  # in place of a token: none; -2 stands for the slot's first draft, -3 for the second one
CODES = {"i64": "q", "f64": "d"}  # of `struct`
# slot, tokens known, seed, adapter and rope delta of `pack_admission`, then the sampling parameters that kernels read
ADMISSION = struct.Struct("=qqQqq" + "".join(CODES[dtype] for dtype in COLUMNS.values()))


class PackedRows(NamedTuple):
    """The rows and tokens of a step with prompts: arrays or tensors i32."""

    slots: Any  # [S]
    starts: Any  # [S + 1], of its rows among the tokens
    new_length: Any  # [S]: tokens known after the step; 0: the slot has the length
    sampled: Any  # [R]: slots of the rows that sample
    token_index: Any  # [R]: which of the step's tokens each of them samples after
    host_tokens: (
        Any  # [T]: tokens that the host gives; -1: the slot's newest one; from -2 down its drafts, see NO_DRAFT
    )
    row_of: Any  # [T]
    max_accepted: Any  # [R]: drafts after that token that may be accepted


class BatchShape(msgspec.Struct, frozen=True):
    """T tokens of S rows, R of which sample. The first D rows are decodes, the others prompts.

    A decode has one token, and those that the runner drafts for it, or takes from the host. If it does neither, a token
    that the host has drafted is a decode of its own, in the slot of its sequence.
    """

    num_tokens: int
    num_rows: int
    num_samples: int
    num_decodes: int = 0
    num_drafts: int = 0  # of each decode, by the runner

    @property
    def num_decoded(self) -> int:
        """The tokens of decodes, which come first."""
        return self.num_decodes * (1 + self.num_drafts)

    def drafting(self, num_drafts: int) -> BatchShape:
        """The same shape with this number of drafts for each decode. It has none yet."""
        num_tokens = self.num_tokens + self.num_decodes * num_drafts
        return msgspec.structs.replace(self, num_tokens=num_tokens, num_drafts=num_drafts)

    def holds(self, other: BatchShape) -> bool:
        """Whether the other shape fits, with one more row for padding if there are padding tokens."""
        num_tokens, num_more = (each.num_tokens - each.num_decoded for each in (other, self))
        num_rows = other.num_rows - other.num_decodes + (num_tokens < num_more)
        return (
            other.num_decodes <= self.num_decodes
            and other.num_drafts <= self.num_drafts
            and num_tokens <= num_more
            and num_rows <= self.num_rows - self.num_decodes
            and other.num_samples <= self.num_samples
        )

    def split(self, packed: Any) -> PackedRows:
        """The parts of an array or a tensor i32, in their order."""
        rows, samples, tokens = self.num_rows, self.num_samples, self.num_tokens
        bounds = accumulate((rows, rows + 1, rows, samples, samples, tokens, tokens, samples), initial=0)
        return PackedRows(*(packed[start:stop] for start, stop in pairwise(bounds)))

    def pad(self, slot: int) -> bytearray:
        """A batch of nothing but padding, i32 as in `split`. slot: the slot of padding"""
        packed = bytearray(4 * (3 * self.num_rows + 1 + 3 * self.num_samples + 2 * self.num_tokens))
        rows = self.split(np.frombuffer(packed, np.int32))
        rows.slots[:] = rows.sampled[:] = slot
        num_queries = 1 + self.num_drafts
        rows.starts[:] = np.minimum(np.arange(self.num_rows + 1) * num_queries, self.num_decoded)
        rows.row_of[:] = np.minimum(np.arange(self.num_tokens) // num_queries, self.num_decodes)
        if self.num_drafts:  # which see themselves, as other decodes of padding do
            rows.new_length[: self.num_decodes] = 1
        return packed


class PrefixRule(msgspec.Struct, frozen=True):
    """When decodes with a common prefix are grouped."""

    kind: str  # of the block tables that are compared
    token_bytes: int  # of a token's KV in a layer of a rank
    saved_bytes: int  # min bytes of a layer that need not be read


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of a runner, and the shapes of its CUDA graphs."""

    kinds: tuple[str, ...]  # of state with an entry for each token, in the order of its block tables
    num_slots: int  # slot `num_slots` is that of padding
    table_width: int  # blocks of a slot
    vocab: int
    decode_sizes: tuple[int, ...] = ()  # captured numbers of decodes, ascending
    mixed_shapes: tuple[BatchShape, ...] = ()  # captured shapes of steps with prompts, ascending
    num_drafts: int = 0  # max tokens that the runner drafts for a sequence
    draft_sizes: tuple[tuple[int, int], ...] = ()  # captured numbers of decodes, and of drafts of each
    recurrent: tuple[str, ...] = ()  # kinds of recurrent state, which blocks have copies of
    num_states: int = 1  # that a slot keeps of each of these kinds, that after n tokens as number n % num_states
    block_size: int = 0  # tokens
    prefixes: PrefixRule | None = None  # None: decodes are not grouped
    num_scales: int = 0  # of steering vectors, that a slot has
    num_taps: int = 0  # layers whose hidden states a step can report


class Counted(msgspec.Struct):
    """The tokens that the penalties of a slot count."""

    slot: int
    prompt: list[int]
    output: list[int]


class History(msgspec.Struct):
    """The tokens of a slot so far, from which its drafts are made."""

    slot: int
    tokens: bytearray  # i32


class Shaping(msgspec.Struct):
    """The host's logit processors, by row that samples: values added, then tokens banned, then tokens allowed."""

    added: list[tuple[int, int, float]] = []  # row, token id below the vocabulary's size, value
    banned: list[tuple[int, int]] = []  # row, token id
    allowed: list[tuple[int, bytes]] = []  # row, bool[V]


class Scored(msgspec.Struct):
    """A row whose prompt tokens have their log probabilities reported."""

    row: int
    first: int  # index of its first token in the batch
    targets: list[int]  # the token that follows it, and the next ones
    num_top: int
    num_rows: int  # that the head computes: targets, and padding if other data groups have more


class Pooled(msgspec.Struct):
    """A row, some tokens of which go into an embedding."""

    row: int
    first: int  # index of the first of them in the batch
    num_tokens: int


class Tapped(msgspec.Struct):
    """Tokens of a row whose hidden states are reported."""

    row: int
    number: int  # of the tap among those of its sequence
    index: int  # of the layer among those that the body returns
    first: int  # index of the first token in the batch
    num_tokens: int
    is_sum: bool  # only their sum


class Draft(msgspec.Struct):
    """Drafts of a row to verify: each is accepted if the row of the token before it draws it."""

    row: int  # that samples
    first: int  # row that samples after the first token; the rows of the other tokens follow
    tokens: list[int]
    slot: int
    length: int  # tokens known


class Encode(msgspec.Struct):
    """Images that a step encodes before its body runs."""

    inputs: dict[str, tuple[str, tuple[int, ...], bytes]]  # of the program VISION: numpy's dtype, shape and content
    rows: bytearray  # i32[M]: where each row of its result goes among those that the device keeps


class StepInput(msgspec.Struct, kw_only=True, tag=True):
    """A step. Its batch may be padded to a captured shape."""

    shape: BatchShape
    is_decode: bool  # each row computes its slot's newest token; the host sends no tokens
    packed: bytearray  # i32, as in BatchShape.split; of decodes only the slots [S] and, with drafts, max_accepted [S]
    admissions: bytearray = bytearray()  # of `pack_admission`, one after the other
    steering: bytearray = bytearray()  # f32[A, K] of the admissions, if there are steering vectors
    counted: list[Counted] = []  # of admissions with penalties
    histories: list[History] = []  # of admissions, if the runner drafts
    table_entries: bytearray = bytearray()  # i32[2, E]: flat indices into the tables [C, slots + 1, M], and blocks
    # by kind i32[2, N]: states, slot * num_states + number, that are copied from these blocks, before all
    restores: dict[str, bytearray] = {}
    # by kind i32[4, N]: states that are copied to these blocks, after all; the row that samples, -1: none; the tokens
    # after which it has that state. If its draws have not passed these, the copy does not take place
    copies: dict[str, bytearray] = {}
    reported: list[int] = []  # by row that samples: the index of its token in the state's `reported`
    sampling: str = "greedy"  # one of SAMPLING_KINDS
    has_penalties: bool = False
    shaping: Shaping | None = None
    logprobs: list[
        tuple[int, int]
    ] = []  # row that samples, how many of the most likely tokens to report besides its own
    scored: list[Scored] = []
    pooled: list[Pooled] = []
    tapped: list[Tapped] = []
    # i32[2 D + NUM_GROUPS + 1] of decodes that are grouped, as in `SharedPrefixes`: lengths, members, starts
    prefixes: bytearray = bytearray()
    num_pooled: int = 0  # tokens that the pool computes: those of `pooled`, and padding as other data groups have more
    drafts: list[Draft] = []
    drafted: bytearray = bytearray()  # i64[D, 1 + drafts]: slots, and what the host has drafted for them, -1 for none
    encode: Encode | None = None
    image_rows: bytearray = bytearray()  # i32[T]: the kept row that each token takes; -1: none. Empty: no token has one
    # i32[T]: of tokens that see all of their image the position of its last one, -1 of others. Empty: there are none
    image_ends: bytearray = bytearray()
    rope_positions: bytearray = bytearray()  # i32[4, N]: tokens whose rope has other positions than those of the slot
    others: list[StepInput] = []  # of the other data groups, of the same shape


class Pending(Protocol):
    """A started step."""

    def wait(self) -> Sampled:
        """Wait for the step; what was sampled."""


class Runner(Protocol):
    """Executes steps."""

    run_ahead: int  # steps that may be planned after one that is not committed

    def execute(self, step: StepInput) -> Pending:
        """Start a step. One that raised did not take place: it may be built and started again."""

    def copy(self, copies: BlockCopies) -> None:
        """Start copies of blocks, which run during the next step."""


def pack_admission(
    slot: int, num_tokens: int, params: SamplingParams, seed: int, adapter: int = -1, rope_delta: int = 0
) -> bytes:
    """Pack a sequence's admission to a slot.

    num_tokens: tokens known when it samples next
    seed: taken modulo 2^64
    adapter: number of its LoRA adapter; -1: none
    rope_delta: from the positions of tokens after its last image to those that their rope takes
    """
    columns = (getattr(params, name) for name in COLUMNS)
    return ADMISSION.pack(slot, num_tokens, seed & 0xFFFF_FFFF_FFFF_FFFF, adapter, rope_delta, *columns)
