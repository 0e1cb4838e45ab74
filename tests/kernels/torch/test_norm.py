import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checks import assert_as_near
from kernels.paged import cached

from atom.graph import ops
from atom.kernels.torch import add_rms_norm, norm_rope_write, norm_rope_write_latent, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [8, 20, 36, 64]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from(DTYPES), st.floats(1e-2, 1e2))
def test_norms_are_as_near_to_the_truth_as_the_reference(tokens, width, dtype, size):
    a, b = (torch.randn(2, tokens, width) * size).to(dtype)
    weight = torch.randn(width).to(dtype)
    given_a = a.clone()
    truth = ops.rms_norm.body(a.float(), weight.float(), eps=1e-5)
    assert_as_near(rms_norm(a, weight, eps=1e-5), ops.rms_norm.body(a, weight, eps=1e-5), truth)

    out, total = add_rms_norm(a, b, weight, eps=1e-5)
    assert torch.equal(total, a + b)
    truth = ops.rms_norm.body(total.float(), weight.float(), eps=1e-5)
    assert_as_near(out, ops.rms_norm.body(total, weight, eps=1e-5), truth)
    assert torch.equal(a, given_a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_float32_norms_any_dtype(dtype):
    a, b = torch.randn(2, 5, 40).to(dtype)
    weight = torch.randn(40)
    truth = ops.rms_norm.body(a.float(), weight, eps=1e-5)
    assert_as_near(rms_norm(a, weight, eps=1e-5), truth.to(dtype), truth)
    truth = ops.rms_norm.body((a + b).float(), weight, eps=1e-5)
    assert_as_near(add_rms_norm(a, b, weight, eps=1e-5)[0], truth.to(dtype), truth)


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), eps=1e-5), torch.zeros(2, 8))


@settings(max_examples=60)
@given(st.data())
def test_norm_rope_write_is_as_near_to_the_truth_as_the_reference(data):
    tokens, dim = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(HEAD_DIMS))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 5), (3, 3)]))
    dtype, cache_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    turned = data.draw(st.sampled_from([0, 2, dim // 2 // 2 * 2, dim]))  # dims that turn; 0: no rotary position
    has_norm, interleaved = data.draw(st.booleans()), data.draw(st.booleans())

    heads = kv_heads * group
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = torch.randn(tokens, sum(sizes)).to(dtype)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split(sizes, dim=-1))
    cos, sin = ops.rotary.body(torch.arange(tokens) + 7, torch.rand(turned // 2)) if turned else (None, None)
    norms = torch.randn(2, dim).to(dtype) if has_norm else (None, None)
    slots = torch.randperm((tokens // block_size + 2) * block_size)[:tokens]

    def run(op, q, k, v, norms, cache_dtype):
        cache = torch.full((tokens // block_size + 2, block_size, 2, kv_heads, dim), -1.0, dtype=cache_dtype)
        return op(q, k, v, cos, sin, *norms, *cached(cache, slots), eps=1e-5, interleaved=interleaved), cache

    given_qkv = qkv.clone()
    out, cache = run(norm_rope_write, q, k, v, norms, cache_dtype)
    wide_norms = [None if norm is None else norm.float() for norm in norms]
    truth, true_cache = run(ops.norm_rope_write.body, q.float(), k.float(), v.float(), wide_norms, torch.float32)
    expected, expected_cache = run(ops.norm_rope_write.body, q, k, v, norms, cache_dtype)
    assert_as_near(out, expected, truth)
    assert_as_near(cache, expected_cache, true_cache)
    assert torch.equal(cache[:, :, 1], expected_cache[:, :, 1])
    untouched = torch.ones(cache.shape[0] * block_size, dtype=torch.bool).index_fill(0, slots, False)
    assert (cache.flatten(0, 1)[untouched] == -1).all()
    assert torch.equal(qkv, given_qkv)


@settings(max_examples=60)
@given(st.data())
def test_norm_rope_write_latent_is_as_near_to_the_truth_as_the_reference(data):
    tokens, heads = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 3, 16]))
    rank, rotated, plain = data.draw(st.sampled_from([(1, 2, 1), (12, 6, 8), (35, 10, 7), (64, 32, 16)]))
    dtype, cache_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    has_norm, has_rope, interleaved = (data.draw(st.booleans()) for _ in range(3))

    q_rope = torch.randn(tokens, heads, plain + rotated).to(dtype)[..., plain:]  # views of outputs, as in a model
    latent, k_rope = torch.randn(tokens, rank + rotated).to(dtype).split([rank, rotated], dim=1)
    cos, sin = ops.rotary.body(torch.arange(tokens) + 7, torch.rand(rotated // 2)) if has_rope else (None, None)
    norm = torch.randn(rank).to(dtype) if has_norm else None
    slots = torch.randperm((tokens // block_size + 2) * block_size)[:tokens]

    def run(op, q_rope, latent, k_rope, norm, cache_dtype):
        cache = torch.full((tokens // block_size + 2, block_size, rank + rotated), -1.0, dtype=cache_dtype)
        k_rope = k_rope.unsqueeze(1)
        args = (q_rope, latent, k_rope, cos, sin, norm, *cached(cache, slots))
        return op(*args, eps=1e-5, interleaved=interleaved), cache

    given_inputs = q_rope.clone(), latent.clone(), k_rope.clone()
    out, cache = run(norm_rope_write_latent, q_rope, latent, k_rope, norm, cache_dtype)
    wide = [None if x is None else x.float() for x in (q_rope, latent, k_rope, norm)]
    truth, true_cache = run(ops.norm_rope_write_latent.body, *wide, torch.float32)
    expected, expected_cache = run(ops.norm_rope_write_latent.body, q_rope, latent, k_rope, norm, cache_dtype)
    assert_as_near(out, expected, truth)
    assert_as_near(cache, expected_cache, true_cache)
    untouched = torch.ones(cache.shape[0] * block_size, dtype=torch.bool).index_fill(0, slots, False)
    assert (cache.flatten(0, 1)[untouched] == -1).all()
    assert all(map(torch.equal, (q_rope, latent, k_rope), given_inputs))
