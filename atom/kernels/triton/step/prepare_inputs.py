"""Prepare a step's inputs from the request state, on a GPU.

So a plan names no token.

    extend_tables(tables, entries)                                      # blocks that were allocated to slots
    decode_inputs(slots, state, tables, block_size, inputs)             # each row computes its slot's newest token
    mixed_inputs(rows, state, tables, block_size, inputs)               # and prompts, whose tokens the host gave
    tokens, token_index = draft_inputs(slots, rows, state, inputs)      # of the draft that follows the step

Shapes by letter as in `atom.kernels.step`; `atom.kernels.torch.step.prepare_inputs` says what each argument is.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.step import Inputs, Rows, State
from atom.kernels.triton.compile.jit import jit

TOKENS = 128  # that a program makes inputs of
ENTRIES = 256  # of a table that are copied at a time


def extend_tables(tables: Tensor, entries: Tensor) -> None:
    num_entries = entries.shape[1]
    _extend[(-(-num_entries // ENTRIES),)](tables, entries, num_entries, ENTRIES=ENTRIES)


def decode_inputs(
    slots: Tensor, state: State, tables: Tensor, block_size: int, inputs: Inputs, max_accepted: Tensor | None = None
) -> None:
    _launch(slots, None, max_accepted, state, tables, block_size, inputs)


def mixed_inputs(rows: Rows, state: State, tables: Tensor, block_size: int, inputs: Inputs) -> None:
    _launch(rows.slots, rows, None, state, tables, block_size, inputs)


def draft_inputs(slots: Tensor, rows: Rows | None, state: State, inputs: Inputs) -> tuple[Tensor, Tensor]:
    history, positions = state.history, inputs.positions
    assert history is not None
    num_tokens, num_rows = len(positions), len(slots)
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=positions.device)
    token_index = torch.empty(num_rows, dtype=torch.int64, device=positions.device)
    owners, row_of, firsts = (rows.slots, rows.row_of, rows.token_index) if rows else (slots, None, None)
    _prepare_draft[(-(-max(num_tokens, num_rows) // TOKENS),)](
        slots, owners, row_of, firsts, positions, state.lengths, history, tokens, token_index, num_tokens, num_rows,
        history.shape[1], QUERIES=inputs.batch.query_len, TOKENS=TOKENS,
    )  # fmt: skip
    return tokens, token_index


def _launch(
    slots: Tensor,
    rows: Rows | None,
    max_accepted: Tensor | None,
    state: State,
    tables: Tensor,
    block_size: int,
    inputs: Inputs,
) -> None:
    """rows: None if all are decodes"""
    drafts, stride, num_drafts = None, 0, inputs.batch.query_len - 1
    if num_drafts:
        assert state.drafts is not None
        drafts, stride = state.drafts, state.drafts.stride(0)
    host_tokens, row_of, starts, new_length = None, None, None, None
    if rows:
        host_tokens, row_of, starts, new_length = rows.host_tokens, rows.row_of, rows.starts, rows.new_length
    (num_kinds, _, width), num_rows = tables.shape, slots.shape[0]
    num_tokens = 0 if host_tokens is None else host_tokens.shape[0]
    given = (tables, inputs.slots, inputs.tables) if num_kinds else (None, None, None)
    _prepare[(num_rows + -(-num_tokens // TOKENS), max(num_kinds, 1))](
        slots, host_tokens, row_of, starts, new_length, max_accepted, drafts, state.tokens, state.lengths, *given,
        inputs.tokens, inputs.positions, inputs.batch.lengths, inputs.slots.stride(0), inputs.tables.stride(0),
        num_rows, inputs.batch.num_decodes, num_tokens, state.num_slots, width, stride,
        NUM_DRAFTS=num_drafts, BLOCK_SIZE=block_size, ENTRIES=ENTRIES, TOKENS=TOKENS,
    )  # fmt: skip


@jit(do_not_specialize=["num_entries"])
def _extend(tables, entries, num_entries, ENTRIES: tl.constexpr):
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    is_there = at < num_entries
    index = tl.load(entries + at, mask=is_there, other=0).to(tl.int64)
    tl.store(tables + index, tl.load(entries + num_entries + at, mask=is_there, other=0), mask=is_there)


@jit(
    do_not_specialize=["num_rows", "num_decodes", "num_tokens", "slots_stride", "tables_stride"],
    do_not_specialize_on_alignment=[
        "rows",
        "host_tokens",
        "row_of",
        "starts",
        "new_length",
        "max_accepted",
        "positions",
    ],
)
def _prepare(
    rows, host_tokens, row_of, starts, new_length, max_accepted, drafts, newest, known, slot_tables, slots, tables,
    tokens, positions, lengths, slots_stride, tables_stride, num_rows, num_decodes, num_tokens, num_slots, width,
    drafts_stride, NUM_DRAFTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """slot_tables, slots, tables: None of a model without attention"""
    program, kind = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if slot_tables is not None:
        slot_tables += kind * (num_slots + 1) * width
        slots += kind * slots_stride
    if program < num_rows:  # a row: its table and length
        slot = tl.load(rows + program).to(tl.int64)
        end = tl.load(known + slot)
        if new_length is not None:
            given_end = tl.load(new_length + program)
            end = tl.where((given_end > 0) | (slot == num_slots), given_end, end)
            if (given_end > 0) & (kind == 0):
                tl.store(known + slot, end)
        end += tl.where(program < num_decodes, NUM_DRAFTS, 0)
        tl.store(lengths + program, end)
        if tables is not None:
            target = tables + kind * tables_stride + program.to(tl.int64) * width
            entries = tl.arange(0, ENTRIES)
            first = 0
            while first * BLOCK_SIZE < end:
                is_there = first + entries < width
                found = tl.load(slot_tables + slot * width + first + entries, mask=is_there, other=0)
                tl.store(target + first + entries, found, mask=is_there)
                first += ENTRIES
        if host_tokens is None:  # and the newest token, and drafts
            for number in tl.static_range(1 + NUM_DRAFTS):
                at, position = program * (1 + NUM_DRAFTS) + number, end - 1 - NUM_DRAFTS + number
                has_kv, token = True, tl.load(newest + slot)
                if number > 0:
                    has_kv = number <= tl.load(max_accepted + program)
                    token = tl.maximum(tl.load(drafts + slot * drafts_stride + number - 1), 0)
                if slots is not None:
                    place = slot_tables + slot * width + position // BLOCK_SIZE
                    block = tl.load(place, mask=has_kv, other=0).to(tl.int64)
                    tl.store(slots + at, block * BLOCK_SIZE + position % BLOCK_SIZE)
                tl.store(tokens + at, token)
                tl.store(positions + at, position.to(tl.int64))
    elif host_tokens is not None:
        at = (program - num_rows) * TOKENS + tl.arange(0, TOKENS)
        is_there = at < num_tokens
        row = tl.load(row_of + at, mask=is_there, other=0)
        owner = tl.load(rows + row, mask=is_there, other=0).to(tl.int64)
        last = tl.load(new_length + row, mask=is_there, other=1)
        last = tl.where(last > 0, last, tl.load(known + owner, mask=is_there & (last == 0), other=1))
        last += tl.where(row < num_decodes, NUM_DRAFTS, 0)
        has_kv = is_there & (owner < num_slots)
        place = tl.where(has_kv, last - (tl.load(starts + row + 1, mask=is_there, other=0) - at), 0)
        host_token = tl.load(host_tokens + at, mask=is_there, other=0).to(tl.int64)
        is_known = host_token < 0
        token = tl.where(is_known, tl.load(newest + owner, mask=is_there & is_known, other=0), host_token)
        if NUM_DRAFTS > 0:
            number = -2 - host_token
            is_draft = (number >= 0) & (number < NUM_DRAFTS)
            draft = tl.load(drafts + owner * drafts_stride + number, mask=is_there & is_draft, other=0)
            token = tl.where(number >= 0, tl.maximum(draft, 0), token)
            has_kv = has_kv & ((number < 0) | is_draft)
        if slots is not None:
            blocks = tl.load(slot_tables + owner * width + place // BLOCK_SIZE, mask=has_kv, other=0).to(tl.int64)
            tl.store(slots + at, tl.where(has_kv, blocks * BLOCK_SIZE + place % BLOCK_SIZE, 0), mask=is_there)
        tl.store(tokens + at, token, mask=is_there)
        tl.store(positions + at, place.to(tl.int64), mask=is_there)


@jit(
    do_not_specialize=["num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["slots", "owners", "row_of", "firsts", "positions"],
)
def _prepare_draft(
    slots, owners, row_of, firsts, positions, known, history, tokens, token_index, num_tokens, num_rows, width,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = at < num_tokens
    row = at // QUERIES
    if row_of is not None:
        row = tl.load(row_of + at, mask=is_token, other=0)
    owner = tl.load(owners + row, mask=is_token, other=0).to(tl.int64)
    next_place = tl.load(positions + at, mask=is_token, other=0) + 1
    next_place = tl.minimum(tl.maximum(next_place, 0), width - 1)
    token = tl.load(history + owner * width + next_place, mask=is_token, other=0)
    tl.store(tokens + at, token.to(tl.int64), mask=is_token)
    is_row = at < num_rows
    place = (at * QUERIES).to(tl.int64)
    if firsts is not None:
        place = tl.load(firsts + at, mask=is_row, other=0).to(tl.int64)
    slot = tl.load(slots + at, mask=is_row, other=0)
    first = tl.load(positions + place, mask=is_row, other=0)
    num_accepted = tl.load(known + slot, mask=is_row, other=0) - 2 - first
    place += tl.minimum(tl.maximum(num_accepted, 0), QUERIES - 1)
    tl.store(token_index + at, tl.minimum(place, num_tokens - 1), mask=is_row)
