"""Ops with recurrent state, in C++.

    y = causal_conv(x, state, batch, weight, bias, kind="silu")    # arguments as in the op `batched_causal_conv`

The reference runs sequence by sequence and token by token, at some ten calls of torch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from atom.graph import Batch, ops
from atom.kernels.backend import LoadContext, Target
from atom.kernels.cpp.build import RECURRENT, load_library

MAX_TAPS = 8  # of a convolution in C++

STEP = "Tensor(a!) states, Tensor slots, Tensor starts, Tensor lengths"
SCAN = f"(Tensor x, Tensor dt, Tensor b, Tensor c, {STEP}, Tensor a_log, Tensor d) -> Tensor"
LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
for schema in (
    f"causal_conv(Tensor x, {STEP}, Tensor weight, Tensor? bias, bool has_silu) -> Tensor",
    f"gated_delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, {STEP}, float scale, bool normalize) "
    "-> Tensor",
    f"lightning(Tensor q, Tensor k, Tensor v, {STEP}, Tensor slopes, float scale) -> Tensor",
    f"ssd{SCAN}",
    f"selective_scan{SCAN}",
):
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]


def loader(op: ops.Op, run: Callable[..., Tensor]) -> Callable[[LoadContext], Callable[..., Any]]:
    """How a kernel of an op is loaded: as its body if the library cannot be compiled."""
    return lambda _: run if load_library(RECURRENT) else op.body


def accepts_conv(_target: Target, _x: Any, _state: Any, _batch: Any, weight: Any, *_bias: Any, kind: str | None = None,
                 **_attributes: Any) -> str | None:  # fmt: skip
    """silu or no activation, up to 8 taps"""
    if kind not in (None, "silu"):
        return f"has no activation '{kind}'"
    return f"has no {weight.shape[1]} taps" if weight.shape[1] > MAX_TAPS else None


def causal_conv(x: Tensor, state: Tensor, batch: Batch, weight: Tensor, bias: Tensor | None = None, *,
                kind: str | None = None) -> Tensor:  # fmt: skip
    return torch.ops.atom.causal_conv(  # type: ignore[no-any-return]
        x, state, batch.slots, batch.starts, batch.lengths, weight, bias, kind is not None
    )


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch, *,
                scale: float, normalize: bool = False) -> Tensor:  # fmt: skip
    return torch.ops.atom.gated_delta(  # type: ignore[no-any-return]
        q, k, v, decay, beta, state, batch.slots, batch.starts, batch.lengths, scale, normalize
    )


def lightning(q: Tensor, k: Tensor, v: Tensor, state: Tensor, batch: Batch, slopes: Tensor, *,
              scale: float = 1.0) -> Tensor:  # fmt: skip
    return torch.ops.atom.lightning(  # type: ignore[no-any-return]
        q, k, v, state, batch.slots, batch.starts, batch.lengths, slopes, scale
    )


def ssd(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, a_log: Tensor, d: Tensor) -> Tensor:
    return torch.ops.atom.ssd(  # type: ignore[no-any-return]
        x, dt, b, c, state, batch.slots, batch.starts, batch.lengths, a_log, d
    )


def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, a_log: Tensor,
                   d: Tensor) -> Tensor:  # fmt: skip
    return torch.ops.atom.selective_scan(  # type: ignore[no-any-return]
        x, dt, b, c, state, batch.slots, batch.starts, batch.lengths, a_log, d
    )
