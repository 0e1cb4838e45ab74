"""Rotary embeddings: the recipe of the frequencies, and the scale of cos and sin.

freqs = rope_freqs(RopeConfig(kind="linear", factor=4.0, dims=64))     # fp32[32]
"""

from __future__ import annotations

import math
from typing import Any

from atom.config import RopeConfig
from atom.graph import RopeFreqs

FIELDS = {  # of the recipe, by kind
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "truncate"),
    "factors": ("factors",),
    "proportional": ("factor", "partial"),
}


def rope_freqs(rope: RopeConfig) -> RopeFreqs:
    assert rope.dims is not None, "config.load sets it"
    fields: dict[str, Any] = {name: getattr(rope, name) for name in FIELDS[rope.kind]}
    if "factors" in fields:
        fields["factors"] = tuple(rope.factors or ())
    return RopeFreqs(rope.dims, rope.theta, rope.kind, **fields)


def rotary_scale(rope: RopeConfig) -> float:
    """The scale of cos and sin: explicit, or derived for yarn (Peng et al. 2023, section 3.4)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None and rope.kind in ("yarn", "factors"):
        return rope.attention_factor
    if rope.kind != "yarn":
        return 1.0
    return mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)
