"""The blocks of a layer, by name: h [T, H] -> [T, H].

    a = write_block(writer, h, "attention", rotary, layer, x)

`model.branches` says which blocks a layer has. Functions by `kind` write them: attention.py, mlp.py and recurrent.py.
"""

from __future__ import annotations

from torch.fx import Node

from atom.config import AttentionConfig, BlockScalesConfig, BlockSettings, MLPConfig, ModelConfig
from atom.frontend.attention import ATTENTIONS
from atom.frontend.mlp import MLPS, mlp_of
from atom.frontend.recurrent import RECURRENT
from atom.frontend.rope import Rotary
from atom.frontend.writer import Writer


def write_block(writer: Writer, h: Node, name: str, rotary: Rotary | None, layer: int, x: Node) -> Node:
    """Write a block of a layer, with norms that only it has.

    h: what the layer's blocks read, normed.
    x: the hidden states that h is made of.
    """
    norms = writer.model.own_norms.get(name)
    if norms is not None and norms.before:
        h = writer.norm(x, f"own_{name}_norm", layer)
    scales = writer.model.block_scales.get(name, BlockScalesConfig())
    read, given = (None if by == 1 else by for by in (scales.read, scales.given))
    y = _write(writer, writer.scale(h, read), name, rotary, layer, x)
    if norms is not None and norms.after:
        y = writer.norm(y, f"own_{name}_after_norm", layer, name="y")
    y = writer.scale(y, given)
    return writer.affine(y, f"{name}_given", layer) if scales.stored else y


def _write(writer: Writer, h: Node, name: str, rotary: Rotary | None, layer: int, x: Node) -> Node:
    block = block_of(writer.model, name, layer)
    if isinstance(block, AttentionConfig):
        return ATTENTIONS[block.kind](writer, h, block, rotary, layer)
    if isinstance(block, MLPConfig):
        return MLPS[block.kind](writer, h, block, layer, x)
    return RECURRENT[type(block)](writer, h, block, layer)


def block_of(model: ModelConfig, name: str, layer: int) -> BlockSettings:
    """The fields of the block of this name in a layer."""
    if name == "mlp":
        return mlp_of(model, layer)
    return model.attention if name == "attention" else model.blocks[name].settings
