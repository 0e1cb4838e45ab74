"""Cases of the op `gated_delta_net`.

args, attributes = make([1, 1, 70], [9, 4, 70], num_decodes=2, heads=4)
out, conv_state, state = run_on("cpu", ops.gated_delta_net, args, attributes)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atom.graph import Batch

BATCH = 6  # its place among the arguments


def make(counts: list[int], lengths: list[int], num_decodes: int, query_len: int = 1, kept: int = 1, *,
         key_heads: int = 2, heads: int = 4, key_dim: int = 20, value_dim: int = 20, taps: int = 4, by_dim: bool = False,
         dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32,
         **attributes: Any) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """Arguments of the op for sequences of these lengths, which have so many tokens in the step."""
    random = torch.Generator().manual_seed(len(counts))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    num_tokens, channels = sum(counts) + 2, 2 * key_heads * key_dim + heads * value_dim  # two of padding
    decays = heads * key_dim if by_dim else heads
    widths = [channels, heads * value_dim, decays, heads]
    values = list(numbers(num_tokens, sum(widths)).to(dtype).split(widths, 1))  # columns of one product
    conv_state = numbers(len(counts) + 1, kept, taps - 1, channels).to(dtype)
    state = numbers(len(counts) + 1, kept, heads, key_dim, value_dim).to(state_dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    slots = torch.randperm(len(counts), generator=random).int()
    batch = Batch({}, {}, starts, torch.tensor(lengths).int(), num_decodes, query_len, slots)
    weights = [numbers(channels, taps).to(dtype), numbers(heads), numbers(decays), numbers(value_dim).to(dtype)]
    given = {"key_heads": key_heads, "scale": key_dim**-0.5, "eps": 1e-6, "normalize": True, **attributes}
    return [*values, conv_state, state, batch, *weights], given


def run_on(device: str, run: Callable[..., Tensor], args: list[Any], attributes: dict[str, Any]) -> tuple[Tensor, ...]:
    """The output of a kernel or of the op itself, and the states that it leaves."""
    batch: Batch = args[BATCH]
    there = [each.clone().to(device) if isinstance(each, Tensor) else each for each in args]
    for place in range(4):  # columns of wider rows stay so
        there[place] = args[place].to(device)
    names = "starts", "lengths", "slots"
    there[BATCH] = batch._replace(**{name: getattr(batch, name).to(device) for name in names})
    out = run(*there, **attributes)
    return tuple(each.cpu() for each in (out[: batch.starts[-1]], there[4], there[5]))
