"""The value of a packed weight: its parts as tensors.

weight = PackedWeight(Type("bf16", (64, 96), "mxfp4"), {"values": blocks, "scales": exponents})
weight.shape                # (64, 96)
weight.unpack()             # bf16[64, 96]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.dtypes import DTYPES
from atom.graph.formats import parse_format
from atom.graph.types import Type
from atom.graph.unpack import unpack


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [..., O, I] as kernels take it that unpack it themselves; ops' reference bodies unpack all of it."""

    type: Type  # with its format
    parts: Mapping[str, Tensor]  # values, scales and others, as `parts_of` names them
    layout: str | None = None  # a kernel's own, of the values

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.type.shape))

    @property
    def kind(self) -> str:
        """How the parts become numbers, a key of `unpack.UNPACK`."""
        return parse_format(str(self.type.fmt)).kind

    @property
    def device(self) -> torch.device:
        return self.parts["values"].device

    def unpack(self) -> Tensor:
        """The plain tensor, in the dtype that the graph computes in."""
        assert self.layout is None, f"its values are in the layout {self.layout}"
        return unpack(str(self.type.fmt), self.parts).to(getattr(torch, DTYPES[self.type.dtype].name))


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A packed weight in a kernel's own layout."""

    type: Type  # with its format
    tensor: Tensor


def plain(weight: Tensor | PackedWeight) -> Tensor:
    """A weight as a plain tensor."""
    return weight.unpack() if isinstance(weight, PackedWeight) else weight
