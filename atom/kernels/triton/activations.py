"""The activations of Triton kernels, generated ones included.

y = activation(x, "silu")                            # of fp32, in fp32
m = gated(gate, up, tl.bfloat16, "silu")           # as the op `gated_activate`, but for the last rounding
gate = Gate("silu")                                  # what the host hands from one function to the next

`atom.graph.ops.ACTIVATIONS` has the references.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from atom.kernels.triton.compile.jit import jit


class Gate(NamedTuple):
    """The gated activation after a linear: the attributes of the op `gated_activate`."""

    kind: str
    limit: float | None = None
    alpha: float | None = None  # of swigluoai and situ


def constants_of(gate: Gate | None) -> tuple[str | None, float | None, float | None]:
    """KIND, LIMIT and ALPHA of a kernel, None without a gated activation."""
    return gate or (None, None, None)


@jit
def activation(x, KIND: tl.constexpr):
    """x fp32 -> fp32"""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "sigmoid":
        y = tl.sigmoid(x)
    elif KIND == "softplus":
        y = softplus(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if KIND == "relu2":
            y *= y
    return y


@jit
def gated(gate, up, DTYPE: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr = None,
          ALPHA: tl.constexpr = None):  # fmt: skip
    """gate and up projections, fp32 -> gated activation, rounded to DTYPE at each step but the last, as in the op."""
    if KIND == "situ":
        up = up if LIMIT is None else LIMIT * tanh(up / LIMIT)
        gate = ALPHA * tanh(gate / ALPHA) * tl.sigmoid(gate) * up
    elif KIND == "swiglustep":
        gate = activation(gate, "silu")
    if LIMIT is not None and KIND != "situ":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "swigluoai":
        shares = _round(tl.sigmoid(_round(ALPHA * gate, DTYPE)), DTYPE)
        gate, up = gate * shares, _round(up + 1, DTYPE)
    elif KIND != "swiglustep" and KIND != "situ":
        gate = activation(gate, KIND)
    return gate if KIND == "situ" else _round(gate, DTYPE) * up


@jit
def activate_rounded(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr = None, ALPHA: tl.constexpr = None):
    """gate and up projections -> their gated activation, rounded as they are."""
    return gated(gate.to(tl.float32), up.to(tl.float32), gate.dtype, KIND, LIMIT, ALPHA).to(gate.dtype)


@jit
def xielu(x, alpha_p, alpha_n):
    """x fp32 and the stored numbers -> fp32, as the op `xielu`; exp(m) - 1 - m is a series near 0, where it cancels"""
    m = tl.minimum(x, -1e-6)
    series = 1 / 2 + m * (1 / 6 + m * (1 / 24 + m * (1 / 120 + m * (1 / 720 + m * (1 / 5040)))))
    bent = tl.where(m > -0.5, m * m * series, tl.exp(m) - 1 - m) + (m - x)
    return tl.where(x > 0, softplus(alpha_p) * x * x, (0.5 + softplus(alpha_n)) * bent) + 0.5 * x


@jit
def softplus(x):
    """x fp32 -> fp32; log(1 + power) is a series near 0, where 1 hides it"""
    power = tl.exp(-tl.abs(x))
    series = power * (1 - power * (1 / 2 - power * (1 / 3 - power * (1 / 4 - power * (1 / 5)))))
    return tl.maximum(x, 0.0) + tl.where(power < 0.05, series, tl.log(1.0 + power))


@jit
def _round(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@jit
def tanh(x):
    """x fp32 -> fp32"""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * 62 / 2835))))
    power = tl.exp(-2 * tl.abs(x))
    far = (1 - power) / (1 + power)
    return tl.where(square < 0.09, series, tl.where(x < 0, -far, far))
