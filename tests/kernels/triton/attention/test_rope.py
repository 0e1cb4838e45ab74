from typing import NamedTuple

import pytest
import torch
from kernels.checks import assert_as_near, assert_equal
from kernels.paged import KIND, cached, change, move, widen
from torch import Tensor

from atom.graph import Batch, PagedCache, ops
from atom.kernels.triton.attention.rope import norm_rope, norm_rope_write


class Case(NamedTuple):
    """The arguments of norm_rope_write."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cache: PagedCache
    batch: Batch


def make_case(tokens: int, heads: int, kv_heads: int, dim: int, turned: int, *, has_norm: bool = True,
              dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, block_size: int = 3) -> Case:  # fmt: skip
    """`turned` dims of `dim` turn; q, k and v are views of one output."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=random).to(dtype)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    positions = torch.randint(0, 1000, (tokens,), generator=random)
    cos, sin = ops.rotary.body(positions, torch.rand(turned // 2, generator=random)) if turned else (None, None)
    norms = torch.randn(2, dim, generator=random).to(dtype) if has_norm else (None, None)
    num_blocks = 2 + tokens // block_size
    blocks = torch.randn(num_blocks, block_size, 2, kv_heads, dim, generator=random).to(cache_dtype or dtype)
    slots = torch.randperm(num_blocks * block_size, generator=random)[:tokens]
    return Case(q, k, v, cos, sin, *norms, *cached(blocks, slots))


def run(case: Case, device: str, **attributes) -> tuple[Tensor, Tensor]:
    """q and the cache after it."""
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1).to(device)
    sizes = [x.shape[1] * x.shape[2] for x in case[:3]]
    views = (x.unflatten(1, (-1, case.q.shape[2])) for x in qkv.split(sizes, dim=1))
    own = move(change(case, case.cache.blocks.clone()), device)
    return norm_rope_write(*views, *own[3:], **attributes).cpu(), own.cache.blocks.cpu()


def reference(case: Case, **attributes) -> tuple[Tensor, Tensor]:
    """The op's own body; on float32 numbers, where no step rounds, for the truth of others."""
    blocks = case.cache.blocks.clone()
    return ops.norm_rope_write.body(*change(case, blocks), **attributes), blocks


@pytest.mark.sampled(4)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "turned"),
    [(1, 1, 1, 8, 8), (5, 6, 2, 20, 14), (7, 5, 5, 80, 80), (2, 3, 1, 256, 64), (3, 4, 2, 7, 2), (65, 9, 3, 16, 16)],
)
def test_norm_rotation_and_write_equal_the_reference(
    triton_device, tokens, heads, kv_heads, dim, turned, has_norm, interleaved
):
    case = make_case(tokens, heads, kv_heads, dim, turned, has_norm=has_norm)
    attributes = {"eps": 1e-3, "interleaved": interleaved}
    for out, expected in zip(run(case, triton_device, **attributes), reference(case, **attributes), strict=True):
        assert_equal(out, expected, 1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "turned", "has_norm"),
    [(1, 1, 1, 8, 8, True), (5, 6, 2, 20, 14, True), (3, 4, 2, 7, 2, False), (65, 9, 3, 16, 16, True), (4, 3, 1, 20, 0, True)],
)  # fmt: skip
def test_norm_and_rotation_without_a_cache_equal_the_reference(
    triton_device, tokens, heads, kv_heads, dim, turned, has_norm, interleaved
):
    case = make_case(tokens, heads, kv_heads, dim, turned, has_norm=has_norm)
    attributes = {"eps": 1e-3, "interleaved": interleaved}
    qkv = torch.cat((case.q, case.k, case.v), dim=1).to(triton_device)
    before, (q, k, _) = qkv.clone(), qkv.split([heads, kv_heads, kv_heads], dim=1)
    made = norm_rope(q, k, *move(case, triton_device)[3:7], **attributes)
    expected = ops.norm_rope.body(case.q, case.k, *case[3:7], **attributes)
    for out, reference in zip(made, expected, strict=True):
        assert out.is_contiguous()
        assert_equal(out.cpu(), reference, 1e-6)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("has_norm", [False, True])
def test_without_a_rotation_heads_are_normed_or_stay(triton_device, has_norm):
    case = make_case(4, 3, 1, 20, 0, has_norm=has_norm)
    for out, expected in zip(run(case, triton_device, eps=1e-6), reference(case, eps=1e-6), strict=True):
        assert_equal(out, expected, 1e-6)


def test_a_new_q_leaves_the_linears_output_unchanged(triton_device):
    case = make_case(3, 2, 1, 8, 8)
    qkv = torch.cat((case.q, case.k, case.v), dim=1).to(triton_device)
    before = qkv.clone()
    q = norm_rope_write(*qkv.split([2, 1, 1], dim=1), *move(case, triton_device)[3:], eps=1e-6)
    assert q.is_contiguous()
    assert torch.equal(qkv, before)


@pytest.mark.sampled(2, gpu=1)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [2, 100])
def test_half_precision_rounds_once(triton_device, dtype, tokens):
    if dtype is torch.bfloat16 and triton_device == "cpu":
        pytest.skip("Triton's interpreter has no bf16")
    case = make_case(tokens, 8, 2, 64, 64, dtype=dtype)
    (out, cache), (by_reference, _), (truth, _) = (
        run(case, triton_device, eps=1e-6), reference(case, eps=1e-6), reference(widen(case), eps=1e-6)
    )  # fmt: skip
    assert_as_near(out, by_reference, truth)
    slots = case.batch.slot_mappings[KIND]
    written, truth_written = cache.flatten(0, 1)[slots], reference(widen(case), eps=1e-6)[1].flatten(0, 1)[slots]
    assert_as_near(written, truth_written.to(dtype), truth_written)


def test_the_cache_may_have_another_dtype(triton_device):
    case = make_case(5, 4, 2, 20, 20, cache_dtype=torch.float16)
    (out, cache), (expected, expected_cache) = run(case, triton_device, eps=1e-6), reference(case, eps=1e-6)
    assert_equal(out, expected, 1e-6)
    assert cache.dtype == torch.float16
    assert_equal(cache, expected_cache, 1e-3)


def test_slots_beyond_two_to_the_31_elements_are_found(triton_device):
    if triton_device == "cpu":
        pytest.skip("needs the memory of a GPU")
    case = make_case(3, 4, 2, 128, 128, dtype=torch.float16, block_size=16)
    num_blocks = 2**31 // case.cache.blocks[0].numel() + 2
    blocks = torch.zeros(num_blocks, *case.cache.blocks.shape[1:], dtype=torch.float16, device=triton_device)
    slots = num_blocks * 16 - 1 - torch.arange(3)
    norm_rope_write(*change(move(change(case, slots=slots), triton_device), blocks), eps=1e-6)
    _, expected = reference(change(case, slots=torch.arange(3)), eps=1e-6)
    assert_equal(blocks[-1, -3:].flip(0).cpu(), expected[0, :3], 2e-3)
