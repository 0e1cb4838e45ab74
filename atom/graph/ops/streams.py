"""Ops of hyper-connections: how tokens read, mix and write their streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.ops.base import op
from atom.graph.types import Type, need


def _stream_logits(x: Type, weight: Type, scale: Type, bias: Type, *, eps: float) -> Type:
    rows, inner = weight.shape
    need(x.shape[-1] == inner, f"x has {x.shape[-1]} columns, the weight {inner}")
    need(scale.shape == bias.shape == (rows,), f"scale and bias are {scale} and {bias}, for {rows} outputs")
    return Type("fp32", (*x.shape[:-1], rows))


@op(_stream_logits)
def stream_logits(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """x [T, S H] of S streams side by side, weight [M, S H], scale and bias [M] -> fp32[T, M], all in float32

    A linear of x, normed over all streams (rms, without a weight), each output times its scale, plus its bias.
    """
    wide = x.float()
    made = F.linear(wide, weight.float()) * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return made * scale.float() + bias.float()


def _sinkhorn(logits: Type, *, streams: int, rounds: int, eps: float) -> Type:
    need(logits.shape[-1] == streams * streams, f"{logits} are no matrices of {streams} streams")
    need(isinstance(rounds, int) and rounds > 0, f"{rounds} rounds are less than 1")
    return logits


@op(_sinkhorn)
def sinkhorn(logits: Tensor, *, streams: int, rounds: int, eps: float) -> Tensor:
    """logits fp32[T, S S] -> weights fp32[T, S S] for `mix_streams`, whose matrix is about doubly stochastic

    Logit i S + j is of how much of stream i goes to stream j. A softmax over j is brought to columns, then rows and
    columns of sum 1, `rounds` of these in all (Sinkhorn and Knopp 1967). eps is added to the softmax and to each sum.
    """
    shares = logits.view(*logits.shape[:-1], streams, streams).softmax(-1) + eps
    shares = shares / (shares.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        shares = shares / (shares.sum(-1, keepdim=True) + eps)
        shares = shares / (shares.sum(-2, keepdim=True) + eps)
    return shares.mT.flatten(-2)
