"""Blocks with recurrent state: h [T, H] -> [T, H]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from atom.config import ShortConvConfig
from atom.frontend.writer import Writer
from atom.graph import LatestState, Recipe, Type, ops


def short_conv(writer: Writer, h: Node, block: ShortConvConfig, layer: int) -> Node:
    """out(c * conv(b * x)) of b, c, x = in(h) (Liquid AI 2025)."""
    hidden = writer.model.hidden
    bcx = writer.linear(h, "conv_in", 3 * hidden, block.bias, layer)
    b, c, x = writer.call(ops.split, bcx, sizes=[hidden] * 3, name=("b", "c", "x"))
    x = causal_conv(writer, writer.call(ops.mul, b, x, name="x"), "conv", block.taps, block.bias, layer)
    return writer.linear(writer.call(ops.mul, c, x, name="x"), "conv_out", hidden, block.bias, layer)


def causal_conv(
    writer: Writer, x: Node, role: str, taps: int, has_bias: bool, layer: int, kind: str | None = None
) -> Node:
    """The convolution [T, C] -> [T, C] of a role, which is stored as [C, 1, taps], and then an activation.

    kind: of the activation; None: none
    """
    channels = int(x.meta["type"].shape[1])
    state = LatestState(writer.name("layer", layer), Type(writer.dtype, (taps - 1, channels)))
    weights: list[Recipe] = [writer.weight(role, (channels, taps), layer)]
    if has_bias:
        weights.append(writer.weight(role, (channels,), layer, "bias"))
    made: Node = writer.call(ops.causal_conv, x, state, *weights, kind=kind, name=role)
    return made


RECURRENT: dict[type, Callable[[Writer, Node, Any, int], Node]] = {ShortConvConfig: short_conv}
