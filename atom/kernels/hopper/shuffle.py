"""Lay packed weights out for the tensor cores of NVIDIA's Hopper.

    weight = shuffle(packed)    # once: the same parts, the values' columns in another order, in groups of 64 bytes

A thread of four that share a row of a product's left operand takes 16 consecutive bytes of each group; they hold its
columns of all the products of 16 columns that the group is made of. So it loads them at once, and what it unpacks
from them is where the tensor cores want it. Scales and zeros stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph import PackedWeight
from atom.graph.formats import parse_format

LAYOUT = "wgmma"
GROUP = 64  # bytes of a row
AT_ONCE = 1 << 26  # bytes, of which some copies are made


def shuffle(weight: PackedWeight) -> PackedWeight:
    """A weight [..., O, I] whose values are u8[..., O, bytes], filled up with zeros to whole groups."""
    reorder = _shuffle_nibbles if parse_format(str(weight.type.fmt)).bits == 4 else _shuffle_bytes
    stored = weight.parts["values"].view(torch.uint8).reshape(*weight.shape[:-1], -1)
    stored = F.pad(stored, (0, -stored.shape[-1] % GROUP)) if stored.shape[-1] % GROUP else stored
    values, at_once = torch.empty_like(stored), max(AT_ONCE // max(stored[0].numel(), 1), 1)
    for target, some in zip(torch.split(values, at_once), torch.split(stored, at_once), strict=True):
        target.copy_(reorder(some))
    return replace(weight, parts={**weight.parts, "values": values}, layout=LAYOUT)


def _shuffle_bytes(values: Tensor) -> Tensor:
    """Column 16 q + 8 h + 2 c + j of a group -> its byte 16 c + 4 q + 2 j + h."""
    q_h_c_j = values.view(*values.shape[:-1], -1, 4, 2, 4, 2)
    return q_h_c_j.permute(*range(values.dim()), -2, -4, -1, -3).reshape(values.shape)


def _shuffle_nibbles(values: Tensor) -> Tensor:
    """Column 32 q + 16 t + 8 h + 2 c + j of a group -> half h of its byte 16 c + 4 q + 2 j + t."""
    # columns 2 c and 2 c + 1 are the halves of a byte: q, t, h, c
    leading, dims = values.shape[:-1], values.dim()
    q_t_h_c = values.view(*leading, -1, 4, 2, 2, 4)
    low, high = q_t_h_c.select(-2, 0), q_t_h_c.select(-2, 1)  # q, t, c
    pairs = (low & 15 | high << 4, low >> 4 | high & 0xF0)  # of j = 0, of j = 1
    return torch.stack(pairs, -1).permute(*range(dims), -2, -4, -1, -3).reshape(values.shape)
