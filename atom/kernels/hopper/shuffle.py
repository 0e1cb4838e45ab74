"""Lay packed weights out for the tensor cores of NVIDIA's Hopper.

    weight = shuffle(packed)    # once: the same parts, the values' columns in another order, in groups of 64 bytes

A thread of four that share a row of an MMA's left operand takes 16 consecutive bytes of each group; they hold its
columns for all MMAs of 16 columns that the group is made of. So it loads them at once, and what it unpacks from them
is where the tensor cores want it. Scales and zeros stay as they are, but for MXFP4's exponents: a word has those of 128
columns of a row, and words of 8 rows lie next to each other, so that one copy brings those of a box.

GGUF's K-quants are split into parts first; of numbers of 5 and 6 bits, the values have four.

Numbers of e2m1 become bf16, 2^126 times too small, once their sign is bit 15 and their other bits are 8 to 6. So each
four in 16 bits are stored such that a shift and a mask put the first two there, and a rotation of 32 bits the third,
whose sign is in the other half. Of the fourth only the mantissa has to be moved.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph import PackedWeight
from atom.graph.formats import parse_format
from atom.graph.gguf_blocks import TYPES
from atom.kernels.triton.linear.split_blocks import split_blocks

LAYOUT = "wgmma"
GROUP = 64  # bytes of a row
# of each of four numbers in 16 bits: where its mantissa, its exponent and its sign go; from 16 on into the other half
E2M1_BITS = (0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 3 + 16), (14, 7, 8, 15)
AT_ONCE = 1 << 26  # bytes, of which some copies are made


def shuffle(weight: PackedWeight) -> PackedWeight:
    """A weight [..., O, I] whose values are u8[..., O, bytes], filled up with zeros to whole groups."""
    fmt = parse_format(str(weight.type.fmt))
    if fmt.kind in TYPES:
        return _shuffle_kquants(weight, fmt.bits)
    reorder = _shuffle_bytes if fmt.bits == 8 else _shuffle_e2m1 if fmt.kind == "mxfp4" else _shuffle_nibbles
    stored = weight.parts["values"].view(torch.uint8).reshape(*weight.shape[:-1], -1)
    stored = F.pad(stored, (0, -stored.shape[-1] % GROUP)) if stored.shape[-1] % GROUP else stored
    values, at_once = torch.empty_like(stored), max(AT_ONCE // max(stored[0].numel(), 1), 1)
    for target, some in zip(torch.split(values, at_once), torch.split(stored, at_once), strict=True):
        target.copy_(reorder(some))
    parts = {**weight.parts, "values": values}
    if fmt.kind == "mxfp4":
        parts["scales"] = _shuffle_exponents(parts["scales"])
    return replace(weight, parts=parts, layout=LAYOUT)


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


def _shuffle_e2m1(values: Tensor) -> Tensor:
    """`_shuffle_nibbles`, then the bits of each four numbers."""
    words = _shuffle_nibbles(values).view(torch.int32)
    shuffled = torch.zeros_like(words)
    for number, places in enumerate(E2M1_BITS):
        for bit, place in enumerate(places):
            for half in (0, 16):
                shuffled |= (words >> (half + 4 * number + bit) & 1) << (half ^ place)
    return shuffled.view(torch.uint8)


def _shuffle_exponents(scales: Tensor) -> Tensor:
    """u8[..., O, I / 32] -> u8[..., O / 8, bytes]: words of 128 columns of 8 rows each, filled up with zeros"""
    words = F.pad(scales, (0, -scales.shape[-1] % 4, 0, -scales.shape[-2] % 8)).view(torch.int32)
    by_octet: Tensor = words.unflatten(-2, (-1, 8)).transpose(-1, -2).flatten(-2)
    return by_octet.contiguous().view(torch.uint8)


def _shuffle_kquants(weight: PackedWeight, bits: int) -> PackedWeight:
    """Parts of K-quants, with what their numbers have beyond 4 bits in a part of its own, `high`."""
    split = split_blocks(weight)
    stored, middle = split.parts["values"].view(torch.uint8), TYPES[weight.kind].middle
    parts = [
        {"values": _shuffle_nibbles(some)} if bits == 4 else _split_planes(some + middle, bits - 4)
        for some in torch.split(stored, max((AT_ONCE >> 2) // stored.shape[-1], 1))
    ]
    made = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    return replace(split, parts={**split.parts, **made}, layout=LAYOUT)


def _split_planes(numbers: Tensor, more: int) -> dict[str, Tensor]:
    """Numbers u8[O, I] of 4 bits and some more -> values u8[O, I / 2], high i32[O, I / 32 * more]

    A number's column is 32 q + 16 t + 8 h + 2 c + j of a group, see `_shuffle_nibbles`. The values have its lower 4
    bits if h is 0, else its upper 4. A thread has the others of its columns c in as many words as there are of them:
    rotated by 2 more * (2 q + t), a word has those of q and t next to the 4 bits, once these are in the lower byte of a
    half.
    """
    q_t_h_c_j = numbers.view(len(numbers), -1, 4, 2, 2, 4, 2)
    low, high = q_t_h_c_j.unbind(4)
    nibbles = (low & 15 | high >> more << 4).permute(0, 1, 4, 2, 5, 3).reshape(len(numbers), -1)
    rest = torch.stack((low >> 4, high & (1 << more) - 1), 4).to(torch.int32)  # q, t, h, c, j
    words = rest.new_zeros(*rest.shape[:2], 4, more)
    for q, t, h, j in itertools.product(range(4), range(2), range(2), range(2)):
        word, place = divmod(q, 4 // more)
        bit = 16 * j + 4 - more * h + 2 * more * (2 * place + t)
        words[..., word] |= rest[:, :, q, t, h, :, j] << bit % 32
    return {"values": nibbles, "high": words.view(len(numbers), -1)}
