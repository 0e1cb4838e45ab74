"""Draft tokens of a slot and accept them, on a GPU.

    find_ngrams(slots, state, 2, 4)             # to state.drafts: what followed the last tokens where they stood before
    keys, *rest = draw_noise(slots, state, 3)   # of the next three draws
    gumbel_argmax(logits, keys[0], *rest)       # what a program drafts for the first of them
    accept(drawn, left, max_accepted, state, 1, None)           # which rows draw after their first draft
    drafts = finish_drafts(drawn, left, slots, state, False)    # what is reported of them
    keep_rows(kept, slots, hidden, token_index) # what the next drafts of slots are read from

`atom.kernels.torch.step.speculation` says what each argument is.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels import step
from atom.kernels.step import State
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import next_power_of_2
from atom.kernels.triton.step.noise import exponential, hash_seed, uniform
from atom.kernels.triton.step.sampling import FILTERS, MIN_TEMPERATURE, NOWHERE, PART_WARPS

MIN_SHARE = tl.constexpr(step.MIN_SHARE)
PART = 4096  # logits that a program reads
PLACES = 1024  # that a program compares at a time
PARTS = 8  # programs of a row
ROWS = 128  # of a program that accepts
COLUMNS = 1024  # that a program copies


def find_ngrams(slots: Tensor, state: State, min_n: int, max_n: int) -> None:
    history, drafts = state.history, state.drafts
    assert history is not None and drafts is not None
    num_rows, num_drafts = slots.shape[0], drafts.shape[1]
    found = torch.zeros(num_rows, dtype=torch.int64, device=slots.device)
    _find[(PARTS, num_rows)](slots, state.lengths, history, found, history.shape[1], min_n, max_n, PLACES)
    _repeat[(num_rows,)](
        slots, state.lengths, history, found, drafts, history.shape[1], num_drafts, next_power_of_2(num_drafts)
    )


def accept(drawn: Tensor, left: Tensor, max_accepted: Tensor, state: State, depth: int, rates: Tensor | None) -> None:
    assert state.drafts is not None
    num_rows = drawn.shape[1]
    _accept[(-(-num_rows // ROWS),)](
        drawn, left, max_accepted, state.drafts, state.seed, state.lengths, rates, num_rows, state.num_slots, depth,
        state.drafts.shape[1], ROWS,
    )  # fmt: skip


def finish_drafts(drawn: Tensor, left: Tensor, slots: Tensor, state: State, is_by_chance: bool) -> Tensor:
    assert state.drafts is not None
    num_draws, num_rows = drawn.shape
    drafts = torch.empty(num_rows, num_draws - 1, dtype=torch.int64, device=drawn.device)
    _finish[(-(-num_rows // ROWS),)](
        drawn, left, slots, state.drafts, drafts, num_rows, state.num_slots, state.drafts.shape[1], num_draws,
        is_by_chance, ROWS,
    )  # fmt: skip
    return drafts


def keep_rows(kept: Tensor, slots: Tensor, values: Tensor, token_index: Tensor) -> None:
    width, stride = kept[0].numel(), values.stride(0)
    assert kept.is_contiguous() and values[:1].is_contiguous(), "rows have gaps"
    _keep[(-(-width // COLUMNS), len(slots))](kept, slots, values, token_index, width, stride, COLUMNS)


def draw_noise(slots: Tensor, state: State, num_draws: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = len(slots)
    keys = torch.empty(num_draws, num_rows, dtype=torch.int64, device=slots.device)
    temperatures, depths = torch.empty(2, num_rows, dtype=torch.float32, device=slots.device)
    params = [state.columns[name] for name in FILTERS]
    _draw_noise[(-(-num_rows // ROWS),)](
        slots, state.seed, state.lengths, *params, keys, temperatures, depths, num_rows, num_draws, ROWS
    )
    return keys, temperatures, depths


def gumbel_argmax(
    logits: Tensor, keys: Tensor, temperatures: Tensor, depths: Tensor, offsets: Tensor | None = None
) -> Tensor:
    (num_rows, vocab), device = logits.shape, logits.device
    num_parts = -(-vocab // PART)
    best = torch.empty(2, num_rows, num_parts, dtype=torch.float32, device=device)
    best_id = torch.empty(num_rows, num_parts, dtype=torch.int64, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    grid, padded, read = (num_parts, num_rows), next_power_of_2(num_parts), (logits, logits.stride(0), vocab)
    _largest_of_part[grid](*read, best[0], PART, num_warps=PART_WARPS)
    _best_of_part[grid](
        *read, keys, temperatures, depths, offsets, best[0], best[1], best_id, PART, padded, num_warps=PART_WARPS
    )
    _best_of_row[(num_rows,)](best[1], best_id, tokens, num_parts, padded)
    return tokens


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["depths"])
def _draw_noise(
    slots, seed, lengths, temperature, top_k, top_p, min_p, keys, temperatures, depths, num_rows,
    NUM_DRAWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=0)
    k, heat = tl.load(top_k + slot, mask=is_row, other=0), tl.load(temperature + slot, mask=is_row, other=0)
    heat = tl.where((heat < MIN_TEMPERATURE) | (k == 1), 0.0, heat).to(tl.float32)
    share = 1 - tl.load(top_p + slot, mask=is_row, other=1)
    share = tl.maximum(share, tl.where(k > 0, 1.0 / tl.maximum(k, 1).to(tl.float64), 0.0)) * MIN_SHARE
    min_share = tl.maximum(share, tl.load(min_p + slot, mask=is_row, other=0)).to(tl.float32)
    tl.store(temperatures + row, heat, mask=is_row)
    tl.store(depths + row, tl.where(heat > 0, -heat * tl.log(min_share), 0.0), mask=is_row)
    seeds, length = tl.load(seed + slot, mask=is_row, other=0), tl.load(lengths + slot, mask=is_row, other=0)
    for number in tl.static_range(NUM_DRAWS):
        tl.store(keys + number * num_rows + row, hash_seed(seeds, length + number).to(tl.int64), mask=is_row)


@jit
def _largest_of_part(logits, stride, vocab, largest, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    tl.store(largest + row * tl.num_programs(0) + part, tl.max(x, axis=0))


@jit(do_not_specialize_on_alignment=["keys", "depths", "best"])
def _best_of_part(
    logits, stride, vocab, keys, temperatures, depths, offsets, largest, best, best_id,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_parts, parts = tl.num_programs(0), tl.arange(0, PARTS)
    at = row * num_parts + part
    peak = tl.max(tl.load(largest + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), axis=0)
    lowest = peak - tl.load(depths + row)
    if tl.load(largest + at) < lowest:  # nothing of this part is kept
        tl.store(best + at, float("inf"))
        tl.store(best_id + at, NOWHERE)
        return
    columns = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    tokens = columns.to(tl.int64)
    if offsets is not None:
        tokens += tl.load(offsets + columns, mask=columns < vocab, other=0)
    time = tl.where(x == peak, 1.0, float("inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        time = exponential(tl.load(keys + row).to(tl.uint64), tokens) * tl.exp((peak - x) / temperature)
        time = tl.where(x >= lowest, time, float("inf"))
    shortest = tl.min(time, axis=0)
    tl.store(best + at, shortest)
    tl.store(best_id + at, tl.min(tl.where((time == shortest) & (columns < vocab), tokens, NOWHERE), axis=0))


@jit(do_not_specialize_on_alignment=["best"])
def _best_of_row(best, best_id, tokens, num_parts, PARTS: tl.constexpr):
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    time = tl.load(best + row * num_parts + parts, mask=parts < num_parts, other=float("inf"))
    found = tl.load(best_id + row * num_parts + parts, mask=parts < num_parts, other=NOWHERE)
    token = tl.min(tl.where(time == tl.min(time, axis=0), found, NOWHERE), axis=0)
    tl.store(tokens + row, tl.where(token == NOWHERE, 0, token))


@jit(do_not_specialize_on_alignment=["rows"])
def _find(rows, lengths, history, found, width, MIN_N: tl.constexpr, MAX_N: tl.constexpr, PLACES: tl.constexpr):
    """found i64[S]: n of the longest match and the place after it, the latest; 0: none"""
    row = tl.program_id(1)
    slot = tl.load(rows + row).to(tl.int64)
    length = tl.load(lengths + slot)
    tokens = history + slot * width
    best = tl.zeros([PLACES], tl.int64)
    first = tl.program_id(0) * PLACES
    while first < length - 1:
        at = first + tl.arange(0, PLACES)  # the last token of a place
        is_same = at < length - 1
        num = tl.zeros([PLACES], tl.int64)
        for back in tl.static_range(MAX_N):
            last = tl.load(tokens + length - 1 - back, mask=back < length, other=-1)
            each = tl.load(tokens + at - back, mask=is_same & (at >= back), other=-2)
            is_same = is_same & (each == last)
            num += is_same.to(tl.int64)
        best = tl.maximum(best, tl.where(num >= MIN_N, num * 4294967296 + at + 1, 0))
        first += tl.num_programs(0) * PLACES
    tl.atomic_max(found + row, tl.max(best, axis=0))


@jit(do_not_specialize_on_alignment=["rows"])
def _repeat(rows, lengths, history, found, drafts, width, NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(rows + row).to(tl.int64)
    length = tl.load(lengths + slot)
    best = tl.load(found + row)
    place = (best & 0xFFFFFFFF).to(tl.int32)
    number = tl.arange(0, BLOCK)
    at = place + number % tl.maximum(length - place, 1)
    tokens = tl.load(history + slot * width + at, mask=at < length, other=-1)
    tokens = tl.where(best > 0, tokens, -1).to(tl.int64)
    tl.store(drafts + slot * NUM_DRAFTS + number, tokens, mask=number < NUM_DRAFTS)


@jit(do_not_specialize=["num_rows", "depth"], do_not_specialize_on_alignment=["max_accepted"])
def _accept(
    drawn, left, max_accepted, drafts, seed, lengths, rates, num_rows, num_slots, depth,
    NUM_DRAFTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    before = (depth - 1) * num_rows + row
    slot = tl.load(left + before, mask=is_row, other=0)
    is_next = (slot < num_slots) & (tl.load(max_accepted + row, mask=is_row, other=0) >= depth)
    if rates is None:
        draft = tl.load(drafts + slot.to(tl.int64) * NUM_DRAFTS + depth - 1, mask=is_row, other=-1)
        is_next = is_next & (tl.load(drawn + before, mask=is_row, other=0) == draft)
    else:
        seeds = tl.load(seed + slot, mask=is_row, other=0)
        chance = uniform(hash_seed(-1 - seeds, tl.load(lengths + slot, mask=is_row, other=0)))
        is_next = is_next & (chance < tl.load(rates + depth - 1).to(tl.float64))
    tl.store(left + before + num_rows, tl.where(is_next, slot, num_slots), mask=is_row)


@jit(do_not_specialize=["num_rows", "num_draws"], do_not_specialize_on_alignment=["slots"])
def _finish(
    drawn, left, slots, drafts, out, num_rows, num_slots, width, num_draws, BY_CHANCE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """num_draws is no constant: steps have fewer than those that kernels are compiled ahead for."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=0).to(tl.int64)
    for draw in range(num_draws):
        at = draw * num_rows + row
        is_over = tl.load(left + at, mask=is_row, other=0) == num_slots
        tl.store(drawn + at, tl.full([ROWS], -1, tl.int64), mask=is_row & is_over)
    for number in range(num_draws - 1):
        draft = tl.load(drafts + slot * width + number, mask=is_row, other=0)
        if BY_CHANCE:
            draft = tl.maximum(draft, 0)
        tl.store(out + row * (num_draws - 1) + number, draft, mask=is_row)


@jit(do_not_specialize_on_alignment=["slots"])
def _keep(kept, slots, values, token_index, width, stride, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot, place = tl.load(slots + row).to(tl.int64), tl.load(token_index + row)
    found = tl.load(values + place * stride + columns, mask=columns < width)
    tl.store(kept + slot * width + columns, found, mask=columns < width)
