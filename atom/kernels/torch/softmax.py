"""Softmax with scale, soft cap and sinks, for decode and prefill attention.

    rule = Rule(scale=0.125, sinks=sinks)
    totals = softmax_(scores)                        # the log-sum-exp of each row, for half of what a logsumexp costs
    sums.mul_(kept_of_sinks(totals, sinks))          # as if each row had had one more score

A sink takes its share after the sum: with totals t, the values keep exp(t) / (exp(t) + exp(sink)) of theirs, so that
parts of a row are merged without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """The rule by which products of queries and keys become attention weights."""

    scale: float  # of the products
    softcap: float | None = None  # of the scaled products: cap * tanh(product / cap)
    sinks: Tensor | None = None  # [N], one more score of each head, without a value
    value_scale: float = 1.0  # of the values, and so of their sums


def softmax_(scores: Tensor) -> Tensor:
    """fp32[..., C] in place over the last dim; gives the log-sum-exp of each row.

    It is the highest score less the log of its share.
    """
    highest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    return highest.sub_(scores.amax(-1).log_())


def kept_of_sinks(totals: Tensor, sinks: Tensor) -> Tensor:
    """Log-sum-exps fp32[...] and sinks [...] -> fp32[..., 1], the share of the values that the sinks leave"""
    return torch.sigmoid(totals - sinks).unsqueeze(-1)
