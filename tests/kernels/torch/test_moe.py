import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checks import assert_as_near, assert_equal, calls_of

from atom.graph import Type, ops
from atom.kernels import Target, find_kernel, shuffle
from atom.kernels.torch import combine, packed_grouped_linear
from atom.kernels.torch.linear import find_features


def packed(weight: torch.Tensor) -> list[torch.Tensor]:
    return [shuffle(expert, "onednn") for expert in weight]


DTYPES = [dtype for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
          if f"onednn_{name}" in find_features()]  # fmt: skip


@settings(max_examples=40)
@given(st.data())
def test_packed_experts_are_as_near_to_the_truth_as_plain_ones(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    counts = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 65]), min_size=1, max_size=9))
    out, inner = data.draw(st.sampled_from([(1, 1), (7, 5), (33, 17), (64, 48)]))
    x = torch.randn(sum(counts), inner).to(dtype)
    weight = torch.randn(len(counts), out, inner).to(dtype)
    bias = torch.randn(len(counts), out).to(dtype) if data.draw(st.booleans()) else None
    ends = torch.tensor(counts).cumsum(0)
    y = packed_grouped_linear(x, packed(weight), ends, bias)
    truth = ops.grouped_linear.body(x.float(), weight.float(), ends, None if bias is None else bias.float())
    expected = ops.grouped_linear.body(x, weight, ends, bias)
    if len(x):
        assert_as_near(y, expected, truth)
    assert y.shape == (len(x), out)


def test_an_expert_without_rows_is_not_read():
    x, weight, ends = torch.randn(5, 8), torch.randn(4, 6, 8), torch.tensor([0, 3, 3, 5])
    expected = packed_grouped_linear(x, packed(weight), ends)
    weight[[0, 2]] = float("nan")
    assert torch.equal(packed_grouped_linear(x, packed(weight), ends), expected)
    calls = calls_of(lambda: packed_grouped_linear(x, packed(weight), ends))
    assert calls.count("mkldnn::_linear_pointwise") == 2


def test_packed_experts_take_no_more_memory_than_plain_ones():
    weight = torch.randn(4, 64, 48)
    assert sum(expert.nbytes for expert in packed(weight)) == weight.nbytes


def test_packed_experts_are_refused_where_onednn_lacks_their_dtype():
    kernel = find_kernel(ops.grouped_linear, "torch")
    types = Type("bf16", ("P", 8)), Type("bf16", (4, 6, 8)), Type("i64", (4,))
    assert kernel.accepts(Target("cpu", frozenset({"onednn_bf16"})), *types) is None
    assert kernel.accepts(Target("cpu"), *types) == "oneDNN has no bf16 on this CPU"
    assert kernel.accepts(Target("cuda"), *types) == "runs on cpu, not on cuda"


@settings(max_examples=40)
@given(
    st.integers(1, 70), st.integers(1, 5), st.sampled_from([1, 7, 64]), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_combine_is_as_near_to_the_truth_as_the_reference(tokens, top_k, width, dtype):
    x, weights = torch.randn(tokens * top_k, width).to(dtype), torch.rand(tokens, top_k)
    order = torch.randperm(tokens * top_k)
    truth = ops.combine.body(x.float(), weights, order)
    assert_as_near(combine(x, weights, order), ops.combine.body(x, weights, order), truth)


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 65])
def test_combine_of_tokens_around_those_that_are_summed_at_a_time(tokens):
    x, weights, order = torch.randn(tokens * 3, 8), torch.rand(tokens, 3), torch.randperm(tokens * 3)
    assert_equal(combine(x, weights, order), ops.combine.body(x, weights, order))
