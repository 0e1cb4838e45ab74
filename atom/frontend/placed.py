"""Write what places the rows of images among the tokens of a body.

    placed = write_placed(writer, vision)       # adds inputs to the body
    x = placed.put(writer, x)                   # ahead of the first layer
    x = placed.put(writer, x, part=1)           # after it, if deeper layers of the tower give parts, too (DeepStack)

Inputs: `rows` i32[T] has the row of each token, -1 of a text's; `encoded` [N, H * parts] the rows of images, of which a
step may read any; `rope_positions` i64[T, 3] what turns the sections of a rope; `ends` i32[T] the position of the last
token of an image for its tokens, -1 for a text's, in layers in which an image's tokens see all of it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from atom.config import VisionConfig
from atom.frontend.writer import Writer
from atom.graph import Type, ops
from atom.graph.graph import ENCODED, ENDS, ROPE_POSITIONS, ROWS

POSITIONS = 3  # of a token in an image: time, row, column


class Placed(NamedTuple):
    """Inputs of a body that takes rows of images."""

    rows: Node
    encoded: Node
    num_parts: int
    rope_positions: Node | None  # None: no rope has sections

    def put(self, writer: Writer, x: Node, part: int = 0) -> Node:
        """x [T, H] with the rows in place of tokens that have one; of a further part, they are added."""
        which = {"part": part, "adds": part > 0}
        placed: Node = writer.call(ops.place_rows, x, self.rows, self.encoded, **which, name=x.name)
        return placed


def write_placed(writer: Writer, vision: VisionConfig) -> Placed:
    model, program, num_parts = writer.model, writer.program, vision.row_parts
    rows = program.input(ROWS, Type("i32", ("T",)))
    encoded = program.input(ENCODED, Type(writer.dtype, ("N", model.hidden * num_parts)))
    has_sections = any(attention.rope.sections is not None for attention in model.attentions)
    positions = program.input(ROPE_POSITIONS, Type("i64", ("T", POSITIONS))) if has_sections else None
    if vision.bidirectional:
        writer.ends.update(dict.fromkeys(vision.bidirectional, program.input(ENDS, Type("i32", ("T",)))))
    return Placed(rows, encoded, num_parts, positions)
