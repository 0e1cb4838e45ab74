"""Split GGUF's blocks into the parts that linears load: numbers, scales, minima, factors.

    weight = split_blocks(packed)    # once, where the weight is: K-quants, and numbers of 5 bits

    values   u8[O, I / 2], of up to 4 bits: those of an even column and of the next, odd one, as in an int4 weight;
             i8[O, I], of 5 and 6 bits
    scales   i8[O, groups, 1 or 2], of 16 or 32 columns: a scale, and a minimum where the type has them
    spans    fp16[O, blocks, 1 or 2]: what the scales of a block's groups are multiplied by, and what its minima are

Where a block is a group, as in Q5_0 and Q5_1, there are no spans: scales are fp16[O, blocks], and so are mins.

No number is rounded. Q4_K takes 4.625 bits, Q2_K 5.125, Q3_K 4.5625, Q5_0 8.5, Q5_1 9, Q5_K 8.625 and Q6_K 8.5625.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from atom.graph.formats import parse_format
from atom.graph.gguf_blocks import SPLIT, TYPES, Blocks, take_apart
from atom.graph.packed import PackedWeight
from atom.kernels.triton.linear.weight_encoding import SPANS

AT_ONCE = 1 << 26  # numbers, of which some copies are made


def split_blocks(weight: PackedWeight) -> PackedWeight:
    """A weight [O, I] whose values are u8[O, blocks, bytes of a block]."""
    stored, made = weight.parts["values"], dict[str, Tensor]()
    out, inner = weight.shape
    step = max(AT_ONCE // max(inner, 1), 1)
    for first in range(0, out, step):
        for name, part in _parts_of(weight.kind, take_apart(weight.kind, stored[first : first + step])).items():
            if name not in made:
                made[name] = part.new_empty(out, *part.shape[1:])
            made[name][first : first + step] = part
    return replace(weight, parts=made, layout=SPLIT)


def _parts_of(kind: str, blocks: Blocks) -> dict[str, Tensor]:
    """The parts of some rows' blocks [R, B]."""
    numbers, middle = blocks.numbers.flatten(1), TYPES[kind].middle
    if parse_format(kind).bits <= 4:
        numbers = numbers + (8 - middle) if middle else numbers  # as 4 bits without minima: 8 larger
        values = numbers[:, ::2] | numbers[:, 1::2] << 4
    else:
        values = (numbers - middle).view(torch.int8)
    if blocks.scales is None:
        mins = {} if blocks.min_factors is None else {"mins": blocks.min_factors}
        return {"values": values, "scales": blocks.factors, **mins}
    scales = [each.flatten(1) for each in (blocks.scales, blocks.mins) if each is not None]
    factors = [each for each in (blocks.factors, blocks.min_factors) if each is not None]
    return {"values": values, "scales": torch.stack(scales, -1), SPANS: torch.stack(factors, -1)}
