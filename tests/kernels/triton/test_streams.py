from __future__ import annotations

import pytest
import torch

from atom.graph import ops
from atom.kernels.triton import streams


@pytest.mark.parametrize(("num", "rounds", "eps"), [(4, 20, 1e-6), (3, 1, 1e-6), (2, 4, 0.0)])
def test_sinkhorn_is_that_of_the_op(num: int, rounds: int, eps: float, triton_device: str):
    logits = torch.randn(7, 2 * num + num * num, generator=torch.Generator().manual_seed(num)).to(triton_device)
    _, mixed = ops.split(logits, sizes=[2 * num, num * num])  # rows apart
    rule = {"streams": num, "rounds": rounds, "eps": eps}
    torch.testing.assert_close(streams.sinkhorn(mixed, **rule), ops.sinkhorn.body(mixed, **rule))
    assert streams.sinkhorn(mixed[:0], **rule).shape == (0, num * num)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "width", "num"), [(1, 4 * 1056, 24), (5, 96, 3), (streams.FEW_TOKENS + 1, 64, 8), (0, 64, 8)]
)
def test_logits_of_streams_are_those_of_the_op(
    tokens: int, width: int, num: int, dtype: torch.dtype, triton_device: str
):
    random = torch.Generator().manual_seed(width)
    x = torch.randn(tokens, width + 8, generator=random).to(dtype).to(triton_device)[:, :width]
    weight = (torch.randn(num, width, generator=random) / width**0.5).to(triton_device)
    scale, bias = torch.randn(2, num, generator=random).to(triton_device)
    args = x, weight, scale, bias
    torch.testing.assert_close(streams.stream_logits(*args, eps=1e-3), ops.stream_logits.body(*args, eps=1e-3))
