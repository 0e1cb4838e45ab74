"""Repack a file's int32 words or blocks as bytes that kernels read.

values = repack(words, "awq", 4, (4096, 32, 64))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom.graph.formats import BLOCK_WORDS


def repack(words: Tensor, how: str, bits: int, shape: Sequence[int]) -> Tensor:
    """The numbers in int32 words or in blocks as u8 of this shape, exponents as fp32, see `graph.recipes.Repack`."""
    if how == "exponents":
        return torch.exp2(words.float() - 127)
    if how in BLOCK_WORDS:
        return _of_blocks(words, how).reshape(*shape)
    holds_values = len(shape) > words.dim()
    numbers = words.contiguous().view(torch.uint8)
    if how == "columns" and holds_values:
        return numbers[..., : shape[-2] * shape[-1]].reshape(*shape)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1)
    numbers = numbers.view(*words.shape, 32 // bits)
    if how == "awq":
        numbers = numbers.index_select(-1, torch.tensor(AWQ))
    along_rows = how == "rows" or (how.startswith("gptq") and holds_values)
    numbers = numbers.movedim(-1, -2).flatten(-3, -2) if along_rows else numbers.flatten(-2)
    if how == "gptq_minus_1":
        numbers = numbers + 1 & (1 << bits) - 1
    if how not in ("columns", "rows"):
        numbers = numbers.mT
    if not holds_values:
        return numbers[..., : shape[-2], : shape[-1]]
    numbers = numbers[..., : shape[-3], : shape[-2] * shape[-1] * 8 // bits]
    if bits == 4:
        numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
    return numbers.reshape(*shape)


def _of_blocks(blocks: Tensor, part: str) -> Tensor:
    """A part of blocks u8[..., B, bytes]: a scale fp16 and maybe a minimum fp16, or an exponent, then 16 bytes of pairs
    or 32 of numbers."""
    if part == "block_exponents":
        return blocks[..., :1]
    if part in ("block_scales", "block_mins"):
        first = 0 if part == "block_scales" else 2
        return blocks[..., first : first + 2].contiguous().view(torch.float16)
    if part == "block_bytes":
        return blocks[..., -32:] ^ 128  # i8 with its zero at 128
    low, high = (half.view(*half.shape[:-1], 8, 2) for half in (blocks[..., -16:] & 15, blocks[..., -16:] >> 4))
    return torch.cat((low[..., 0] | low[..., 1] << 4, high[..., 0] | high[..., 1] << 4), -1)


AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of 8 columns in a word
