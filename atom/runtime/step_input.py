"""StepInput: one step as plain numbers and arrays, for a runner.

It can be sent to another process as it is.

    step = builder.build(plan)                                  # `atom.runtime.step_builder`
    sent = msgspec.msgpack.encode(step)
    pending = runner.execute(msgspec.msgpack.decode(sent, type=StepInput))

A row is a place in the batch, a slot one in the runner's request state. Nothing here names a sequence.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import Any, Protocol

import msgspec
import numpy as np

from atom.config import SamplingParams
from atom.runtime.types import Sampled

NUM_REPORTED = 8  # of a slot's tokens that the host can read: more than the steps that may be on their way
ADMISSION = struct.Struct("=qqQq6d")  # slot, tokens known, seed, top_k and the other numbers of `pack_admission`


class BatchShape(msgspec.Struct, frozen=True):
    """T tokens of S rows, R of which sample. The first D rows have a token each, the others have what lies behind."""

    num_tokens: int
    num_rows: int
    num_samples: int
    num_decodes: int = 0

    def holds(self, other: BatchShape) -> bool:
        """Whether the other fits, with a row of padding behind its rows where there are tokens of padding."""
        num_tokens, num_more = (each.num_tokens - each.num_decodes for each in (other, self))
        num_rows = other.num_rows - other.num_decodes + (num_tokens < num_more)
        return (
            other.num_decodes <= self.num_decodes
            and num_tokens <= num_more
            and num_rows <= self.num_rows - self.num_decodes
            and other.num_samples <= self.num_samples
        )

    def split(self, packed: Any) -> tuple[Any, ...]:
        """An array or a tensor i32 -> slots [S], starts [S + 1], ends [S] (0 where the device knows it), slots of the
        rows that sample [R], their places among the tokens [R], tokens given [T] (-1 as ends), row of each token [T]"""
        rows, samples, tokens = self.num_rows, self.num_samples, self.num_tokens
        bounds = accumulate((rows, rows + 1, rows, samples, samples, tokens, tokens), initial=0)
        return tuple(packed[start:stop] for start, stop in pairwise(bounds))

    def pad(self, slot: int) -> bytearray:
        """i32, see `split`: all rows and tokens are padding, of nobody's slot."""
        packed = bytearray(4 * (3 * self.num_rows + 1 + 2 * self.num_samples + 2 * self.num_tokens))
        slots, starts, _, sampled, _, _, row_of = self.split(np.frombuffer(packed, np.int32))
        slots[:] = sampled[:] = slot
        for each in (starts, row_of):
            each[:] = np.minimum(np.arange(len(each)), self.num_decodes)
        return packed


class Capacity(msgspec.Struct, frozen=True):
    """What a runner has room for, told once."""

    kinds: tuple[str, ...]  # of cache, in the order of its block tables
    num_slots: int  # slot `num_slots` is nobody's: that of padding
    table_width: int  # blocks of a slot
    vocab: int
    decode_sizes: tuple[int, ...] = ()  # numbers of decodes that are captured, smallest first
    mixed_shapes: tuple[BatchShape, ...] = ()  # of steps with prompts, likewise


class Counted(msgspec.Struct):
    """What the penalties of a slot count."""

    slot: int
    prompt: list[int]
    output: list[int]


class Shaping(msgspec.Struct):
    """What the host says of logits, by row that samples: values added, then values set, then the tokens allowed."""

    added: list[tuple[int, int, float]] = []  # row, token id below the vocabulary's size, value
    banned: list[tuple[int, int]] = []  # row, token id
    allowed: list[tuple[int, bytes]] = []  # row, bool[V]


class Scored(msgspec.Struct):
    """A row whose prompt's tokens have their log probabilities reported."""

    row: int
    first: int  # place of its first token in the batch
    targets: list[int]  # what follows this token, and those behind it
    num_top: int


class StepInput(msgspec.Struct, kw_only=True):
    """A step. Its batch may be padded to a shape that the runner has captured."""

    shape: BatchShape
    is_decode: bool  # each row computes the newest token of its slot: no token is given
    packed: bytearray  # i32: the rows' slots [S] where is_decode, else see BatchShape.split
    admissions: bytearray = bytearray()  # see pack_admission, one behind the other
    counted: list[Counted] = []  # of admissions with penalties
    table_entries: bytearray = bytearray()  # i32[2, E]: places counted through the tables [C, slots + 1, M], and blocks
    reported: list[int] = []  # by row that samples: the place of its token in the state's `reported`
    sampling: str = "greedy"  # one of SAMPLING_KINDS
    has_penalties: bool = False
    shaping: Shaping | None = None
    logprobs: list[tuple[int, int]] = []  # row that samples, how many of the most likely tokens beside its own
    scored: list[Scored] = []


class Pending(Protocol):
    """A step that runs, or has run."""

    def wait(self) -> Sampled:
        """What it gave, once it is there."""


class Runner(Protocol):
    """The verb `execute`."""

    run_ahead: int  # steps that may be planned behind one that is not committed

    def execute(self, step: StepInput) -> Pending:
        """Start a step. Of one that raised nothing counts: it may be told and started again."""


def pack_admission(slot: int, num_tokens: int, params: SamplingParams, seed: int) -> bytes:
    """A slot gets a sequence that has `num_tokens` tokens when the next one is sampled. A seed is taken modulo 2^64."""
    p = params
    floats = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
    return ADMISSION.pack(slot, num_tokens, seed & 0xFFFF_FFFF_FFFF_FFFF, p.top_k, *floats)
