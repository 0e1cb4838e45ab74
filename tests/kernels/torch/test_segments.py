import pytest
import torch
from kernels.checks import assert_as_near

from atom.graph import ops
from atom.kernels.torch.segments import segment_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [20, 64, 72, 88])
def test_segments_are_as_near_to_the_truth_as_the_reference(dim, dtype):
    starts = torch.tensor([0, 40, 56, 72, 88, 89, 150, 150, 150], dtype=torch.int32)
    q, k, v = torch.randn(150, 3, 3, dim).to(dtype).unbind(1)
    truth = ops.segment_attention.body(q.float(), k.float(), v.float(), starts, scale=0.2)
    by_reference = ops.segment_attention.body(q, k, v, starts, scale=0.2)
    assert_as_near(segment_attention(q, k, v, starts, scale=0.2), by_reference, truth, 2.0)
