"""Rotary embeddings: the recipe of the frequencies, and the scale of cos and sin.

freqs = rope_freqs(RopeConfig(kind="linear", factor=4.0, dims=64))     # fp32[32]
"""

from __future__ import annotations

import math

from atom.config import RopeConfig
from atom.graph import RopeFreqs


def rope_freqs(rope: RopeConfig) -> RopeFreqs:
    assert rope.dims is not None, "config.load sets it"
    dim = rope.dims
    match rope.kind:
        case "linear":
            return RopeFreqs(dim, rope.theta, "linear", rope.factor)
        case "llama3":
            return RopeFreqs(dim, rope.theta, "llama3", rope.factor, rope.original_max_position,
                             low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor)  # fmt: skip
        case "yarn":
            return RopeFreqs(dim, rope.theta, "yarn", rope.factor, rope.original_max_position,
                             beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)  # fmt: skip
        case "factors":
            return RopeFreqs(dim, rope.theta, "factors", factors=tuple(rope.factors or ()))
    assert rope.kind == "default", f"config.load leaves no rope of kind {rope.kind}"
    return RopeFreqs(dim, rope.theta)


def rotary_scale(rope: RopeConfig) -> float:
    """The scale of cos and sin: stated, or derived for yarn (Peng et al. 2023, section 3.4)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None and rope.kind in ("yarn", "factors"):
        return rope.attention_factor
    if rope.kind != "yarn":
        return 1.0
    return mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)
