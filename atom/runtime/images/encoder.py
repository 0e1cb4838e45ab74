"""ImageEncoder: encode images on the device, and keep their rows.

encoder = ImageEncoder(graph, encoded, max_tokens)        # of a graph with the program VISION
encoder.run(executables[VISION], step.encode, send)       # before the step's body
inputs = encoder.extend(inputs, slots, state)             # of a body whose tokens are text
inputs = encoder.extend(inputs, slots, state, images)     # or have images, as `SentImages`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atom.graph import BODY, VISION, Graph, Type
from atom.graph.graph import ENDS, ROPE_POSITIONS
from atom.kernels.step import Inputs, State
from atom.runtime.step.input import Encode

Send = Callable[[Any, torch.dtype], Tensor]  # to the device


class SentImages(NamedTuple):
    """What a step sends of the images of its tokens."""

    rows: Tensor  # i32[T], as `StepInput.image_rows`
    rope: Tensor | None  # i32[4, N], as `StepInput.rope_positions`; None: all tokens have those of their slots
    ends: Tensor | None = None  # i32[T], as `StepInput.image_ends`; None: tokens see none after their own


def encoded_type(graph: Graph) -> Type:
    """The type [M, W] of the rows that images become."""
    (rows,) = graph.programs[VISION].results
    return rows.meta["type"]  # type: ignore[no-any-return]


class ImageEncoder:
    def __init__(self, graph: Graph, encoded: Tensor, max_tokens: int) -> None:
        """
        encoded: [N, W], the rows to keep
        max_tokens: of a step, with padding
        """
        self.encoded = encoded
        self._text = torch.full((max_tokens,), -1, dtype=torch.int32, device=encoded.device)
        inputs = {node.name for node in graph.programs[BODY].inputs}
        self._has_sections, self.has_ends = ROPE_POSITIONS in inputs, ENDS in inputs

    def run(self, program: Callable[[Mapping[str, Any]], tuple[Any, ...]], encode: Encode, send: Send) -> None:
        """Encode images, and keep their rows. program: VISION"""
        inputs = {
            name: send(np.frombuffer(content, dtype).reshape(shape).copy(), getattr(torch, dtype)).view(shape)
            for name, (dtype, shape, content) in encode.inputs.items()
        }
        (made,) = program(inputs)
        self.encoded.index_copy_(0, send(encode.rows, torch.int32).long(), made)

    def extend(self, inputs: Inputs, slots: Tensor, state: State, images: SentImages | None = None) -> Inputs:
        """A step's inputs with those that a body takes of images.

        slots: i32[T], of each token
        images: None: all tokens are text
        """
        num_tokens, rope = len(inputs.tokens), None
        if self._has_sections:
            moved = state.rope_deltas.index_select(0, slots)
            rope = torch.add(inputs.positions[:, None], moved[:, None].expand(-1, 3))
            if images is not None and images.rope is not None:
                index, *axes = images.rope.long()
                rope.index_copy_(0, index, torch.stack(axes, 1))
        rows, ends = (self._text[:num_tokens], None) if images is None else (images.rows, images.ends)
        return inputs._replace(rows=rows, encoded=self.encoded, rope_positions=rope, ends=ends)

    def rehearse(self, num_tokens: int) -> SentImages:
        """What a step with images sends, of tokens that are text."""
        text = self._text[:num_tokens]
        return SentImages(text, None, text)
