"""Rotary embeddings: the recipe of frequencies, the scale of cos and sin, rotations.

freqs = rope_freqs(RopeConfig(kind="linear", factor=4.0, dims=64))     # fp32[32]
q = rotate(writer, q, rotary.queries, rotary.interleaved, "q")
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch.fx import Node

from atom.config import RopeConfig
from atom.frontend.writer import Writer
from atom.graph import RopeFreqs, ops

FIELDS = {  # of the recipe, by kind
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "truncate"),
    "factors": ("factors",),
    "proportional": ("factor", "partial"),
}


class Rotary(NamedTuple):
    """cos and sin of this step's positions, fp32[T, D / 2] each."""

    keys: tuple[Node, Node] | None  # None: keys are not rotated
    queries: tuple[Node, Node]  # as keys, but that queries may grow with the position
    interleaved: bool
    second: tuple[Node, Node] | None = None  # of the second half of a head's dims, if each half turns by itself
    back: tuple[Node, Node] | None = None  # mqa: of the output, by minus the angle
    runs: tuple[Node, Node] | None = None  # of the first position of each token's run, if runs have entries
    grown: tuple[Node, Node] | None = None  # mla: of the dims of queries that have no position, if these grow


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


def rotate(writer: Writer, x: Node, pair: tuple[Node, Node] | None, interleaved: bool, name: str) -> Node:
    """x [T, N, D] rotated by cos and sin; None: as it is"""
    if pair is None:
        return x
    rotated: Node = writer.call(ops.rope, x, *pair, interleaved=interleaved, name=name)
    return rotated


def rotate_last(writer: Writer, x: Node, pair: tuple[Node, Node], interleaved: bool, name: str) -> Node:
    """x [T, N, D], the last of its dims rotated"""
    size, turned = int(x.meta["type"].shape[-1]), 2 * int(pair[0].meta["type"].shape[-1])
    if size == turned:
        return rotate(writer, x, pair, interleaved, name)
    still, last = writer.call(ops.split, x, sizes=[size - turned, turned], name=(name, f"{name}_rope"))
    last = rotate(writer, last, pair, interleaved, f"{name}_rope")
    joined: Node = writer.call(ops.join, still, last, name=name)
    return joined


def rotate_halves(writer: Writer, x: Node, pair: tuple[Node, Node] | None, rotary: Rotary, name: str) -> Node:
    """x [T, N, D], rotated; both halves of the dims by pairs of their own, if `rotary` has a second one"""
    if rotary.second is None:
        return rotate(writer, x, pair, rotary.interleaved, name)
    size = int(x.meta["type"].shape[-1]) // 2
    halves = writer.call(ops.split, x, sizes=[size, size], name=(name, name))
    both = zip(halves, (pair, rotary.second), strict=True)
    joined: Node = writer.call(ops.join, *(rotate(writer, half, own, False, name) for half, own in both), name=name)
    return joined
