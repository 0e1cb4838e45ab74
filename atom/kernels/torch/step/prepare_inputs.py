"""Prepare a step's inputs from the request state, on a CPU.

    extend_tables(tables, entries)                                      # blocks newly allocated to slots
    decode_inputs(slots, state, tables, block_size, inputs)             # each row computes its slot's newest token
    mixed_inputs(rows, state, tables, block_size, inputs)               # and prompts, whose tokens the host gave
    tokens, token_index = draft_inputs(slots, rows, state, inputs)      # of the draft that follows the step

Shapes by letter as in `atom.kernels.step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.kernels.step import Inputs, Rows, State


def extend_tables(tables: Tensor, entries: Tensor) -> None:
    """entries: i32[2, E], flat indices into tables i32[C, num_slots + 1, M], and their block numbers"""
    tables.view(-1)[entries[0].long()] = entries[1]


def decode_inputs(
    slots: Tensor, state: State, tables: Tensor, block_size: int, inputs: Inputs, max_accepted: Tensor | None = None
) -> None:
    """Inputs of S decodes.

    slots: i32[S]
    tables: i32[C, num_slots + 1, M]
    max_accepted: i32[S], the drafts of each row that write to the cache, the others write to block 0; a row has the
      newest token of its slot and as many of its drafts as `inputs` has room for. None: it has no drafts
    """
    index, num_queries = slots.long(), len(inputs.tokens) // max(len(slots), 1)
    numbers, tokens = torch.arange(num_queries), inputs.tokens.view(len(slots), -1)
    tokens[:, 0] = state.tokens[index]
    if max_accepted is not None:
        assert state.drafts is not None
        tokens[:, 1:] = state.drafts[index, : num_queries - 1].clamp(min=0)
    torch.add(state.lengths[index], num_queries - 1, out=inputs.batch.lengths)
    torch.add(state.lengths[index, None] - 1, numbers, out=inputs.positions.view(len(slots), -1))
    _copy_tables(tables, index, block_size, inputs)
    _find_slots(tables, index.repeat_interleave(num_queries), inputs.positions, block_size, inputs)
    if max_accepted is not None:
        inputs.slots.view(-1, len(slots), num_queries).mul_(numbers <= max_accepted[:, None])


def mixed_inputs(rows: Rows, state: State, tables: Tensor, block_size: int, inputs: Inputs) -> None:
    """Inputs of S rows of T tokens, some of them drafts of decodes.

    A slot whose tokens the host gave gets its new length. Tokens of a padding row write to block 0; one of no tokens
    attends to nothing.
    """
    lengths, new_length, host_tokens = inputs.batch.lengths, rows.new_length, rows.host_tokens
    index, row = rows.slots.long(), rows.row_of.long()
    is_new, is_padding = new_length > 0, index == state.num_slots
    known = state.lengths[index]
    torch.where(is_new | is_padding, new_length, known, out=lengths)
    state.lengths[index[is_new]] = new_length[is_new]
    num_drafts, has_kv = inputs.batch.query_len - 1, ~is_padding[row]
    lengths[: inputs.batch.num_decodes] += num_drafts
    _copy_tables(tables, index, block_size, inputs)
    owner = index[row]
    positions = lengths[row] - (rows.starts[1:][row] - torch.arange(len(host_tokens)))
    torch.mul(positions, has_kv, out=inputs.positions)
    torch.where(host_tokens < 0, state.tokens[owner], host_tokens.long(), out=inputs.tokens)
    _find_slots(tables, owner, inputs.positions, block_size, inputs)
    if num_drafts:
        assert state.drafts is not None
        number = -2 - host_tokens.long()
        is_draft = (number >= 0) & (number < num_drafts)
        inputs.tokens[number >= 0] = 0
        inputs.tokens[is_draft] = state.drafts[owner[is_draft], number[is_draft]].clamp(min=0)
        has_kv &= (number < 0) | is_draft
    inputs.slots.mul_(has_kv)


def draft_inputs(slots: Tensor, rows: Rows | None, state: State, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The tokens i64[T] that follow those of a step that has sampled, and for each row that samples the index i64[R] of
    the token after which its last one was drawn.

    slots: i32[R]
    rows: None if all are decodes
    """
    assert state.history is not None
    positions, num_queries, index = inputs.positions, inputs.batch.query_len, slots.long()
    if rows is None:
        owners, token_index = index.repeat_interleave(num_queries), torch.arange(len(slots)) * num_queries
    else:
        owners, token_index = rows.slots[rows.row_of].long(), rows.token_index.long()
    # a prompt and padding have none; a rehearsal has any number
    num_accepted = (state.lengths[index] - 2 - positions[token_index]).clamp(0, num_queries - 1)
    token_index = (token_index + num_accepted).clamp(max=len(positions) - 1)
    return state.history[owners, (positions + 1).clamp(0, state.history.shape[1] - 1)].long(), token_index


def _copy_tables(tables: Tensor, index: Tensor, block_size: int, inputs: Inputs) -> None:
    """Copy the filled part of the rows' tables."""
    width = -(-int(inputs.batch.lengths.max()) // block_size)
    inputs.tables[:, :, :width] = tables[:, index, :width]


def _find_slots(tables: Tensor, index: Tensor, positions: Tensor, block_size: int, inputs: Inputs) -> None:
    """index i64[T]: the slot of each token"""
    blocks = tables[:, index, positions // block_size].long()
    torch.add(positions % block_size, blocks, alpha=block_size, out=inputs.slots)
