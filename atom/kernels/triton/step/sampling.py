"""Sample tokens from logits on a GPU, without sorting the vocabulary.

It does what `atom.kernels.torch.step.sampling` does on a CPU.

    sample(logits, slots, state, "filtered", out)              # logits [R, V], slots i32[R]
    score_drawn(logits, asked, out, totals, chosen, ranks)     # of the tokens drawn; nothing can fail here

A row is read in parts of fixed size by programs of their own, so that one row keeps a device busy, and what a row draws
depends on nothing but that row:

    _summarize  a part's largest logit, and its best token, by noise if the row is drawn without filters; of a
                filtered row its mass, and how many logits lie in each bin below the largest                (R x parts)
    _limit      the bin that what top_k, top_p and min_p keep ends in, by those counts                       (R)
    _gather     the few logits down to that bin                                                              (R x parts)
    _draw       the token, and the slot's new state                                                          (R)

Without filters a batch needs the first and the last of them. Of a filtered row, the few gathered logits are ranked by
comparing all pairs, and the best with noise is taken of those that are kept. If they are many (a flat distribution),
the values at which top_k and top_p end are found by bisection instead, each step a pass that counts and weighs what is
above.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom import sampling_params
from atom.kernels.step import State
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import next_power_of_2
from atom.kernels.triton.step.noise import exponential, hash_seed

PART = 4096  # logits that a program reads
PART_WARPS = 8  # of such a program: a thread reads 8 logits at a time, twice
MAX_GATHERED = 8192  # logits of a filtered row that are gathered; if it may keep more, the row itself is read again
MAX_PAIRED = 512  # logits of a filtered row that are ranked by comparing all pairs

PENALTIES = "repetition_penalty", "frequency_penalty", "presence_penalty"  # columns, in the order of kernels' arguments
FILTERS = "temperature", "top_k", "top_p", "min_p"
MIN_TEMPERATURE = tl.constexpr(sampling_params.MIN_TEMPERATURE)  # anything lower is greedy
NUM_BINS = tl.constexpr(64)  # the last holds all that is further below the largest logit
BINS_PER_NAT = tl.constexpr(2.0)  # of logit / temperature
NOWHERE = tl.constexpr(2**31 - 1)  # beyond every id
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def sample(logits: Tensor, slots: Tensor, state: State, kind: str, out: Tensor, penalties: bool = False) -> None:
    """Sample the next token of each row, as torch's `sampling.sample`. The rows of logits are contiguous."""
    assert kind in sampling_params.SAMPLING_KINDS and logits.stride(1) == 1
    (num_rows, vocab), device = logits.shape, logits.device
    num_parts = -(-vocab // PART)
    largest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    best_id = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    best = sums = bins = limits = ends = values = ids = None
    if kind != "greedy":
        best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    if kind == "filtered":
        sums = torch.empty(num_rows, num_parts, dtype=torch.float64, device=device)
        bins = torch.empty(num_rows, num_parts, NUM_BINS.value, dtype=torch.int32, device=device)
        limits = torch.empty(num_rows, dtype=torch.int32, device=device)
        ends = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
        values = torch.empty(num_rows, MAX_GATHERED, dtype=torch.float32, device=device)
        ids = torch.empty(num_rows, MAX_GATHERED, dtype=torch.int32, device=device)

    read = (logits, logits.stride(0), vocab, slots)
    penalty = (state.counts if penalties else None, *(state.columns[name] for name in PENALTIES))
    params = [state.columns[name] for name in FILTERS]
    seeds = (state.seed, state.lengths)
    found = (largest, best, best_id, sums)
    gathered = (limits, ends, values, ids, MAX_GATHERED)
    width = 0 if state.history is None else state.history.shape[1]
    written = (state.num_slots, state.tokens, state.reported, state.history, width, out)
    grid, padded = (num_parts, num_rows), next_power_of_2(num_parts)
    exact = {"enable_fp_fusion": False}  # a product is rounded before a sum, as on the host
    _summarize[grid](*read, *penalty, *params, *seeds, *found, bins, PART, PART // 2, num_warps=PART_WARPS, **exact)
    if kind == "filtered":
        _limit[(num_rows,)](*read[2:], *params, largest, bins, *gathered, num_parts, padded, **exact)
        _gather[grid](*read, *penalty, *params, largest, *gathered, PART, padded, num_warps=PART_WARPS, **exact)
    _draw[(num_rows,)](
        *read, *penalty, *params, *seeds, *written, *found, *gathered, num_parts, PART, padded, MAX_PAIRED,
        state.reported.shape[1], num_warps=8, **exact,
    )  # fmt: skip


def score_drawn(logits: Tensor, rows: Tensor, drawn: Tensor, totals: Tensor, chosen: Tensor, ranks: Tensor) -> None:
    """As torch's `sampling.score_drawn`. It allocates nothing, so that it cannot fail after the draw."""
    _score[(len(rows),)](
        logits, logits.stride(0), logits.shape[-1], rows, drawn, totals, chosen, ranks, PART, num_warps=PART_WARPS
    )


@jit(do_not_specialize_on_alignment=["rows"])
def _summarize(
    logits, stride, vocab, rows, counts, repetition, frequency, presence, temperature, top_k, top_p, min_p,
    seed, lengths, largest, best, best_id, sums, bins, PART: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    penalty = (counts, slot, repetition, frequency, presence)
    # a lane adds few numbers, and lanes are added in double precision
    ids = part * PART + tl.arange(0, PART // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = _load(logits + row * stride, ids, vocab, penalty)
    x = tl.where(x != x, float("inf"), x)  # there is no distribution either way
    peak = tl.max(tl.max(x, axis=0), axis=0)
    at = row * tl.num_programs(0) + part
    tl.store(largest + at, peak)
    time, shortest = tl.where(x == peak, 1.0, float("inf")), 1.0
    if best is not None:
        if tl.load(temperature + slot) >= MIN_TEMPERATURE:
            inverse = _inverse(temperature + slot)
            is_filtered = False
            if sums is not None:
                is_filtered = _is_filtered(top_k + slot, top_p + slot, min_p + slot, vocab)
                if is_filtered:
                    weights = _weigh(x, peak, inverse)
                    tl.store(sums + at, tl.sum(tl.sum(weights, axis=0).to(tl.float64), axis=0))
                    own = _bins_below(x, peak, inverse)
                    counted = tl.histogram(tl.reshape(own, [PART], can_reorder=True), NUM_BINS)
                    tl.store(bins + at * NUM_BINS + tl.arange(0, NUM_BINS), counted)
            if not is_filtered:
                key = hash_seed(tl.load(seed + slot), tl.load(lengths + slot))
                time = _race(x, peak, inverse, key, ids)
                shortest = tl.min(tl.min(time, axis=0), axis=0)
        tl.store(best + at, shortest)
    found = (time == shortest) & (ids < vocab)
    tl.store(best_id + at, tl.min(tl.min(tl.where(found, ids, NOWHERE), axis=0), axis=0))


@jit(do_not_specialize_on_alignment=["rows"])
def _limit(
    vocab, rows, temperature, top_k, top_p, min_p,
    largest, bins, limits, ends, values, value_ids, max_gathered, num_parts, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """limits i32[R]: the last bin, counted from the row's largest logit, that a kept token may be in; -1: read all of
    the row. ends i32[R, parts]: how many logits of this part and those before it lie in these bins."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if not _is_drawn_filtered(temperature + slot, top_k + slot, top_p + slot, min_p + slot, vocab):
        tl.store(limits + row, -1)
        return
    parts = tl.arange(0, NUM_PARTS)
    peaks = tl.load(largest + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    peak, inverse = tl.max(peaks, axis=0), _inverse(temperature + slot)
    shifts = _bins_below(peaks, peak, inverse)
    bin = tl.arange(0, NUM_BINS)
    own = bin[None, :] - shifts[:, None]
    is_counted = (own >= 0) & (bin < NUM_BINS - 1)[None, :] & (parts < num_parts)[:, None]
    by_part = tl.load(bins + (row * num_parts + parts[:, None]) * NUM_BINS + own, mask=is_counted, other=0)
    counted = tl.sum(by_part, axis=0)
    counted += tl.where(bin == NUM_BINS - 1, vocab - tl.sum(counted, axis=0), 0)

    # the weights that a bin may hold; products were rounded before they were binned
    slack = 0.01 + tl.abs(peak) * inverse * BINS_PER_NAT * 2.4e-7
    max_weight = tl.exp((1 - bin + slack) / BINS_PER_NAT)
    min_weight = tl.exp((-1 - bin - slack) / BINS_PER_NAT)
    lowest = tl.load(min_p + slot).to(tl.float32)
    k = _top_k(top_k + slot, vocab)
    limit = tl.sum((max_weight >= lowest).to(tl.int32), axis=0) - 1
    if k < vocab:  # all of them are wanted, as under min_p: top_p is a share of their mass
        limit = tl.minimum(limit, tl.sum((tl.cumsum(counted, axis=0) < k).to(tl.int32), axis=0))
    elif lowest == 0:
        mass = tl.sum(tl.where(bin < limit, counted * min_weight, 0.0), axis=0)
        tail = tl.cumsum(counted * max_weight, axis=0, reverse=True)
        is_needed = tail > (1 - tl.load(top_p + slot)).to(tl.float32) * mass
        limit = tl.maximum(tl.sum(is_needed.to(tl.int32), axis=0) - 1, 0)

    upto = tl.cumsum(tl.sum(tl.where((bin <= limit)[None, :], by_part, 0), axis=1), axis=0)
    tl.store(ends + row * num_parts + parts, upto, mask=parts < num_parts)
    is_few = (limit < NUM_BINS - 1) & (tl.max(upto, axis=0) <= max_gathered)
    tl.store(limits + row, tl.where(is_few, limit, -1))


@jit(do_not_specialize_on_alignment=["rows"])
def _gather(
    logits, stride, vocab, rows, counts, repetition, frequency, presence, temperature, top_k, top_p, min_p,
    largest, limits, ends, values, value_ids, max_gathered, PART: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Gathers logits down to the row's limit, in the order of their ids."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_parts = tl.num_programs(0)
    limit = tl.load(limits + row)
    if limit < 0:
        return
    slot = tl.load(rows + row).to(tl.int64)
    penalty = (counts, slot, repetition, frequency, presence)
    parts = tl.arange(0, NUM_PARTS)
    peak = tl.max(tl.load(largest + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), axis=0)
    own_peak = tl.load(largest + row * num_parts + part)
    inverse = _inverse(temperature + slot)
    ids = part * PART + tl.arange(0, PART)
    x = _load(logits + row * stride, ids, vocab, penalty)
    own = _bins_below(x, own_peak, inverse)
    chosen = (own < NUM_BINS - 1) & (own + _bins_below(own_peak, peak, inverse) <= limit)
    start = tl.load(ends + row * num_parts + part - 1, mask=part > 0, other=0)
    to = row * max_gathered + start + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(values + to, x, mask=chosen)
    tl.store(value_ids + to, ids, mask=chosen)


@jit(do_not_specialize_on_alignment=["rows", "out"])
def _draw(
    logits, stride, vocab, rows, counts, repetition, frequency, presence, temperature, top_k, top_p, min_p,
    seed, lengths, num_slots, tokens, reported, history, width, out, largest, best, best_id, sums,
    limits, ends, values, value_ids, max_gathered: tl.constexpr, num_parts: tl.constexpr,
    PART: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_PAIRED: tl.constexpr, NUM_REPORTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot >= num_slots:  # padding
        tl.store(out + row, 0)
        return
    penalty = (counts, slot, repetition, frequency, presence)
    logits += row * stride
    parts = tl.arange(0, NUM_PARTS)
    is_part = parts < num_parts
    peaks = tl.load(largest + row * num_parts + parts, mask=is_part, other=float("-inf"))
    best_ids = tl.load(best_id + row * num_parts + parts, mask=is_part, other=NOWHERE)
    peak = tl.max(peaks, axis=0)
    length = tl.load(lengths + slot)
    inverse = _inverse(temperature + slot)
    time = tl.where(peaks == peak, 1.0, float("inf"))
    if best is not None:  # noqa: SIM102 (the second condition is not known when this is compiled)
        if tl.load(temperature + slot) >= MIN_TEMPERATURE:
            own = tl.load(best + row * num_parts + parts, mask=is_part, other=float("inf"))
            time = own * tl.exp(-_below(peaks, peak) * inverse)
    token = tl.min(tl.where(time == tl.min(time, axis=0), best_ids, NOWHERE), axis=0)
    if not (tl.abs(peak) < float("inf")):  # it holds a nan or an inf, or nothing but -inf
        token = _largest(logits, vocab, num_parts * PART, PART)
    elif limits is not None:  # noqa: SIM102 (the second condition is not known when this is compiled)
        if _is_drawn_filtered(temperature + slot, top_k + slot, top_p + slot, min_p + slot, vocab):
            k, lowest = _top_k(top_k + slot, vocab), tl.load(min_p + slot).to(tl.float32)
            weights = _weigh(peaks, peak, inverse).to(tl.float64)
            total = tl.sum(tl.load(sums + row * num_parts + parts, mask=is_part, other=0.0) * weights, axis=0)
            request = (k, (k < vocab) | (lowest > 0), tl.load(top_p + slot), total)
            scale = (peak, inverse, lowest)
            key = hash_seed(tl.load(seed + slot), length)
            values += row * max_gathered
            value_ids += row * max_gathered
            size = tl.load(ends + row * num_parts + num_parts - 1)
            if tl.load(limits + row) < 0:
                token = _draw_by_bisection(logits, None, vocab, request, scale, key, penalty, num_parts * PART, PART)
            elif size > NUM_PAIRED:
                none = (None, slot, repetition, frequency, presence)  # the values have had their penalties
                token = _draw_by_bisection(values, value_ids, size, request, scale, key, none, max_gathered, PART)
            else:
                token = _draw_by_pairs(values, value_ids, size, request, scale, key, NUM_PAIRED)
    token = tl.where(token == NOWHERE, 0, token)  # all of it is nan
    tl.store(out + row, token)
    tl.store(tokens + slot, token)
    tl.store(reported + slot * NUM_REPORTED + length % NUM_REPORTED, token)
    if history is not None:
        tl.store(history + slot * width + length, token.to(tl.int32), mask=length < width)
    tl.store(lengths + slot, length + 1)
    if counts is not None:
        counted = counts + slot * vocab + token
        tl.store(counted, tl.load(counted) + 2)


@jit
def _score(logits, stride, vocab, rows, drawn, totals, chosen, ranks, PART: tl.constexpr):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    logits += row * stride
    value = _finite(tl.load(logits + tl.load(drawn + row)))
    num_above = tl.zeros([PART], tl.int32)
    for start in range(0, vocab, PART):
        ids = start + tl.arange(0, PART)
        x = _finite(tl.load(logits + ids, mask=ids < vocab, other=float("-inf")))
        num_above += (x > value).to(tl.int32)
    tl.store(chosen + at, value - tl.load(totals + at))
    tl.store(ranks + at, tl.sum(num_above, axis=0) + 1)


@jit
def _finite(x):
    """As float32, a nan as the lowest."""
    x = x.to(tl.float32)
    return tl.where(x != x, -LARGEST, tl.clamp(x, -LARGEST, LARGEST))


@jit
def _load(logits, ids, size, penalty):
    """A row's logits as float32 after its penalties, -inf after the last."""
    counts, slot, repetition, frequency, presence = penalty
    x = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    if counts is not None:
        factor = tl.load(repetition + slot).to(tl.float32)
        each = tl.load(frequency + slot).to(tl.float32)
        once = tl.load(presence + slot).to(tl.float32)
        if (factor != 1) | (each != 0) | (once != 0):
            count = tl.load(counts + slot * size + ids, mask=ids < size, other=0)
            x = tl.where(count > 0, tl.where(x > 0, tl.math.div_rn(x, factor), x * factor), x)
            x = tl.where(count > 1, x - ((count >> 1).to(tl.float32) * each + once), x)
    return x


@jit
def _inverse(temperature):
    """1 / temperature, or 1 if greedy."""
    value = tl.load(temperature)
    return tl.where(value < MIN_TEMPERATURE, 1.0, 1.0 / value).to(tl.float32)


@jit
def _top_k(top_k, vocab):
    value = tl.load(top_k)
    return tl.where((value > 0) & (value < vocab), value, vocab)


@jit
def _is_filtered(top_k, top_p, min_p, vocab):
    return (tl.load(top_p) < 1) | (tl.load(min_p) > 0) | (_top_k(top_k, vocab) < vocab)


@jit
def _is_drawn_filtered(temperature, top_k, top_p, min_p, vocab):
    return (tl.load(temperature) >= MIN_TEMPERATURE) & _is_filtered(top_k, top_p, min_p, vocab)


@jit
def _below(x, largest):
    """x less the largest, also if that is -inf."""
    return x - tl.where(largest == float("-inf"), 0.0, largest)


@jit
def _weigh(x, largest, inverse):
    """Probabilities relative to that of `largest`; 0 for -inf, also if that is the largest."""
    return tl.exp(_below(x, largest) * inverse)


@jit
def _race(x, largest, inverse, key, ids):
    """Exponential times over the weights of `_weigh`, of which the shortest is drawn."""
    return exponential(key, ids) * tl.exp(-_below(x, largest) * inverse)


@jit
def _bins_below(x, largest, inverse):
    """How many bins x lies below `largest` on a grid that all parts of a row share, at most the last bin. i32."""
    scale = inverse * BINS_PER_NAT
    below = tl.floor(largest * scale) - tl.floor(x * scale)
    return tl.where(below < NUM_BINS - 1, below, NUM_BINS - 1).to(tl.int32)


@jit
def _largest(logits, vocab, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest id of the largest number of a row, NOWHERE if there is none."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], NOWHERE, tl.int32)
    for start in range(0, LIMIT, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < vocab, other=float("nan")).to(tl.float32)
        is_better = (x > best) | ((x == best) & (ids == NOWHERE))
        best, ids = tl.where(is_better, x, best), tl.where(is_better, start + lanes, ids)
    return tl.min(tl.where(best == tl.max(best, axis=0), ids, NOWHERE), axis=0)


@jit
def _draw_by_pairs(values, ids, size, request, scale, key, SIZE: tl.constexpr):
    """The id drawn among at most SIZE values in the order of their ids, which hold all that may be kept."""
    k, is_whole, p, total = request
    peak, inverse, _ = scale
    index = tl.arange(0, SIZE)
    x = tl.load(values + index, mask=index < size, other=float("-inf"))
    rank = tl.zeros([SIZE], tl.int32)
    before = tl.zeros([SIZE], tl.float64)  # mass of what is more likely
    start = 0
    while start < size:
        others = start + tl.arange(0, 32)
        y = tl.load(values + others, mask=others < size, other=float("-inf"))[:, None]
        is_before = (y > x[None, :]) | ((y == x[None, :]) & (others[:, None] < index[None, :]))
        rank += tl.sum(is_before.to(tl.int32), axis=0)
        before += tl.sum(tl.where(is_before, _weigh_kept(y, scale), 0.0), axis=0)
        start += 32
    weights = tl.where(rank < k, _weigh_kept(x, scale), 0.0)
    mass = tl.where(is_whole, tl.sum(weights.to(tl.float64), axis=0), total)
    is_kept = (weights > 0) & (before < p * mass)
    ids = tl.load(ids + index, mask=index < size, other=0)
    time = tl.where(is_kept, _race(x, peak, inverse, key, ids), float("inf"))
    return tl.min(tl.where(is_kept & (time == tl.min(time, axis=0)), ids, NOWHERE), axis=0)


@jit
def _draw_by_bisection(values, ids, size, request, scale, key, penalty, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """The id drawn among at most LIMIT values in the order of their ids, which hold all that may be kept.

    ids: None if these are the values' own places
    """
    k, is_whole, p, total = request
    peak, inverse, _ = scale
    number, mass, low, _ = _above(values, size, float("-inf"), float("-inf"), scale, penalty, LIMIT, BLOCK)
    mass = tl.where(is_whole, mass, total)  # what top_p is a share of
    lowest, nth = low, number  # of what is kept, and how many of its equals are
    for step in range(2):  # where top_k ends, where top_p ends
        target = tl.where(step == 0, k.to(tl.float64), p * mass)
        is_step = ((step == 0) & (k < number)) | ((step == 1) & (p < 1))
        # the lowest value above which there is less than the target; low and high are values themselves
        high, num_before, before = peak, number * 0, mass * 0
        while is_step & (low < high):
            middle = low * 0.5 + high * 0.5
            middle = tl.where((middle > low) & (middle < high), middle, high)
            num_above, above, next_above, next_below = _above(values, size, middle, low, scale, penalty, LIMIT, BLOCK)
            if tl.where(step == 0, num_above.to(tl.float64), above) < target:
                high, num_before, before = next_below, num_above, above
            else:
                low = next_above
        if is_step:
            weight = _weigh(high, peak, inverse).to(tl.float64)
            rest = tl.where(step == 0, target - num_before, (target - before) / weight)
            lowest, nth = high, tl.maximum(tl.ceil(rest), 1.0).to(tl.int32)
            low, mass = high, before + nth * weight
    return _draw_from(values, ids, size, lowest, nth, scale, key, penalty, LIMIT, BLOCK)


@jit
def _draw_from(values, ids, size, lowest, num_equal, scale, key, penalty, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """The id drawn among the values above `lowest` and the first ones that equal it."""
    peak, inverse, _ = scale
    lanes = tl.arange(0, BLOCK)
    best, best_ids = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], NOWHERE, tl.int32)
    num_seen = num_equal * 0
    for start in range(0, LIMIT, BLOCK):
        at = start + lanes
        x = _load(values, at, size, penalty)
        is_equal = x == lowest
        place = num_seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
        num_seen += tl.sum(is_equal.to(tl.int32), axis=0)
        own = at if ids is None else tl.load(ids + at, mask=at < size, other=0)
        time = _race(x, peak, inverse, key, own)
        is_better = ((x > lowest) | (is_equal & (place <= num_equal))) & (time < best)
        best, best_ids = tl.where(is_better, time, best), tl.where(is_better, own, best_ids)
    return tl.min(tl.where(best == tl.min(best, axis=0), best_ids, NOWHERE), axis=0)


@jit
def _above(values, size, middle, low, scale, penalty, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Number and mass of the values with a weight from `middle` up, the smallest of them, and the largest value from
    `low` up that is below `middle`."""
    lanes = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    next_above = tl.full([BLOCK], float("inf"), tl.float32)
    next_below = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, LIMIT, BLOCK, num_stages=3):
        x = _load(values, start + lanes, size, penalty)
        weights = _weigh_kept(x, scale)
        is_above = (x >= middle) & (weights > 0)
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, weights, 0.0)
        next_above = tl.where(is_above, tl.minimum(next_above, x), next_above)
        next_below = tl.where((x < middle) & (x >= low), tl.maximum(next_below, x), next_below)
    number, mass = tl.sum(number, axis=0), tl.sum(mass.to(tl.float64), axis=0)
    return number, mass, tl.min(next_above, axis=0), tl.max(next_below, axis=0)


@jit
def _weigh_kept(x, scale):
    """Weights, 0 below min_p."""
    peak, inverse, lowest = scale
    weights = _weigh(x, peak, inverse)
    return tl.where(weights < lowest, 0.0, weights)
