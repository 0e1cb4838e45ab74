"""Softmax with scale, soft cap and sinks, for decode and prefill attention.

    rule = Rule(scale=0.125, sinks=sinks)
    totals = softmax_(scores)                        # the log-sum-exp of each row, at half the cost of logsumexp
    sums.mul_(kept_of_sinks(totals, sinks))          # as if each row had one more score

A sink is applied after the sum: with totals t, the values keep exp(t) / (exp(t) + exp(sink)) of their weight, so parts
of a row are merged without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """How dot products of queries and keys become attention weights."""

    scale: float  # of the dot products
    softcap: float | None = None  # of scaled dot products s: cap * tanh(s / cap)
    sinks: Tensor | None = None  # [N]: one more score per head, without a value
    value_scale: float = 1.0  # of the values, and so of their sums
    slopes: Tensor | None = None  # fp32[N]: what a head's scores fall by with each position between query and key


def softmax_(scores: Tensor) -> Tensor:
    """Softmax of fp32[..., C] in place over the last dim; returns the log-sum-exp of each row.

    That is the highest score minus the log of its weight.
    """
    highest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    return highest.sub_(scores.amax(-1).log_())


def kept_of_sinks(totals: Tensor, sinks: Tensor) -> Tensor:
    """Log-sum-exps fp32[...] and sinks [...] -> fp32[..., 1], the weight that the sinks leave to the values"""
    return torch.sigmoid(totals - sinks).unsqueeze(-1)
