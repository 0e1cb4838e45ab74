"""Log probabilities of the most likely tokens, in torch, on any device.

totals, ids, top = top_logprobs(logits, rows, num_top=5)     # of the rows that report them

Shapes by letter as in `atom.kernels.step`; A: rows that report log probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # logits held at once, in 8 bytes each


def top_logprobs(logits: Tensor, rows: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely tokens of some rows of unprocessed logits; nan counts as the lowest.

    logits: any float [R, V]
    rows: i64[A]
    num_top: tokens per row

    Returns the log-sum-exps fp32[A], and the num_top best tokens, best first, ties by lower id: ids i32[A, num_top] and
    log probabilities fp32[A, num_top].
    """
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = [_find_top(logits.index_select(0, part), num_top) for part in torch.split(rows, size)]
    totals, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return totals, ids, values


def _find_top(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    values = logits.float().nan_to_num(nan=torch.finfo(torch.float32).min)
    total = _log_sum_exp(values).unsqueeze(1)
    ids = most_likely(values, min(num_top, values.shape[-1]))
    return total[:, 0], ids.int(), values.gather(-1, ids) - total


def _log_sum_exp(values: Tensor) -> Tensor:
    """fp32[R, V] -> fp32[R]; each row by itself, since torch sums a row in an order that depends on their number."""
    if values.is_cuda:
        from atom.kernels.triton.step.log_sum_exp import log_sum_exp

        return log_sum_exp(values)
    return torch.cat([values.new_empty(0), *(row.logsumexp(0, keepdim=True) for row in values)])


def most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids i64[R, count] of the largest logits of each row, best first, ties by lower id.

    One integer key orders both: the bits of the float32 (comparable as integers once negative ones are flipped), then
    the id counted from the end.
    """
    vocab = logits.shape[-1]
    key = (logits + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal 0.0
    key ^= (key >> 63).bitwise_and_(0x7FFFFFFF)
    key = key.bitwise_left_shift_(32).add_(torch.arange(vocab - 1, -1, -1, device=key.device))
    return vocab - 1 - (key.topk(count).values & 0xFFFFFFFF)
