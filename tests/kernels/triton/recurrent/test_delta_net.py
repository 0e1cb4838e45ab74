"""The block with the gated delta rule as Triton computes it, against the reference body of its op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.checks import BF16, assert_as_near
from kernels.delta_nets import make, run_on
from torch import Tensor

from atom.graph import ops
from atom.kernels import LoadContext, find_kernel

NET = find_kernel(ops.gated_delta_net, "triton").load(LoadContext())
SIZES: list[dict[str, Any]] = [
    {"key_heads": 2, "heads": 4},
    {"key_heads": 1, "heads": 3, "key_dim": 8, "value_dim": 17, "taps": 2},
    {"key_heads": 2, "heads": 2, "by_dim": True, "kind": "sigmoid", "beta_scale": 2.0, "floor": -5.0},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("counts", "lengths", "num_decodes"),
    [([1, 1, 1], [9, 1, 2], 3), ([1, 1, 70, 3], [5, 1, 70, 40], 2), ([66], [80], 0)],
    ids=["decodes", "mixed", "prompt"],
)
def test_it_equals_the_reference(
    triton_device: str, counts: list[int], lengths: list[int], num_decodes: int, sizes: dict[str, Any]
):
    given = make(counts, lengths, num_decodes, **sizes)
    for ours, theirs in zip(
        run_on(triton_device, NET, *given), run_on("cpu", ops.gated_delta_net, *given), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("counts", "num_decodes"), [([3, 3], 2), ([3, 2, 65], 1)], ids=["decodes", "mixed"])
def test_slots_keep_the_states_after_each_draft(triton_device: str, counts: list[int], num_decodes: int):
    """A decode of a step with drafts has as many tokens as a slot keeps states, a prompt has any number."""
    given = make(counts, [count + 4 for count in counts], num_decodes, query_len=3, kept=3)
    for ours, theirs in zip(
        run_on(triton_device, NET, *given), run_on("cpu", ops.gated_delta_net, *given), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("count", "num_decodes"), [(1, 1), (70, 0)], ids=["decode", "prompt"])
def test_it_is_nearly_as_near_to_the_truth_as_the_reference(
    triton_device: str, dtype: torch.dtype, count: int, num_decodes: int
):
    if triton_device == "cpu" and dtype is BF16 and not num_decodes:
        pytest.skip("the interpreter multiplies no matrices in bf16")
    args, attributes = make([count], [count + 3], num_decodes, dtype=dtype)
    own = ops.gated_delta_net
    wide = [each.float() if isinstance(each, Tensor) else each for each in args]
    ours, theirs, truth = (
        run_on(device, run, given, attributes)[0]
        for device, run, given in ((triton_device, NET, args), ("cpu", own, args), ("cpu", own, wide))
    )
    assert_as_near(ours, theirs, truth, factor=1.1 if num_decodes else 2.0)  # products of chunks are rounded between
