"""The context of prompts, unpacked from fp8: what is there, where, and what is left out."""

from __future__ import annotations

import pytest
import torch

from atom.kernels.triton.attention.context import PIECE, Context

FP8 = torch.float8_e4m3fn
LENGTHS = [5, 130, 17, 63, 1]  # a decode, then sequences of 9, 2, 4 and 1 pieces


@pytest.mark.sampled(12, gpu=4)
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(2, 8, 16), (5, 104, 48)])
@pytest.mark.parametrize(("capacity", "num_there"), [(20, 4), (16, 4), (15, 3), (11, 2), (10, 1), (8, 0)])
def test_whole_sequences_are_unpacked_while_there_is_room(
    triton_device: str, kv_heads: int, dim: int, block_size: int, capacity: int, num_there: int
):
    torch.manual_seed(0)
    table, lengths = torch.randint(0, 40, (5, 9)).int(), torch.tensor(LENGTHS).int()
    cache = torch.randn(40, block_size, 2, kv_heads, dim).to(FP8)
    dtype = torch.float32 if triton_device == "cpu" else torch.bfloat16  # which the interpreter does not know
    context = Context(capacity * PIECE * 2 * kv_heads * dim * dtype.itemsize + 1)
    args = (cache.to(triton_device), table.to(triton_device), lengths.to(triton_device), 1, dtype)
    unpacked = context.unpack(*args)
    blocks, places, plan = unpacked
    assert len(blocks) == capacity
    assert (plan[1:5] >= 0).tolist() == [each < num_there for each in range(4)]
    assert plan[5] == 0, "tokens of no sequence are one more"
    for sequence in range(1, 1 + num_there):
        length, first = LENGTHS[sequence], int(plan[sequence])
        own = cache[table[sequence].long()].flatten(0, 1)[:length]
        there = blocks[places[0, first : first + -(-length // PIECE)].long()].flatten(0, 1).cpu()
        assert torch.equal(there[:length], own.to(dtype))
        assert not there[length:].any(), "after the end are zeros"
    assert context.unpack(*args).blocks is blocks
    few = context.unpack(args[0][:2], args[1] % 2, args[2].clamp(max=9), *args[3:])
    assert few.blocks is blocks, "as large for few blocks, with which a start measures a step"
    assert context.unpack(*args[:-1], torch.float16).blocks.dtype == torch.float16
