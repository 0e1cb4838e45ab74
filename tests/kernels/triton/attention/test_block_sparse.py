"""Blocks that queries choose, and attention to them, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.checks import BF16, assert_as_near, assert_equal
from kernels.chosen import choose, make_index_case
from kernels.paged import Case, change, make_case, move, widen

from atom.graph import ops
from atom.kernels.triton.attention import block_sparse
from atom.kernels.triton.attention.paged import PagedAttention

SEQUENCES: dict[str, Any] = {"decodes": [1, 15, 70], "prefills": [(1, 1), (5, 21), (12, 40)]}


def run(case: Case, device: str, selected: torch.Tensor, *scales: float, **attributes: Any) -> torch.Tensor:
    *moved, chosen = move((*case, selected), device)
    more = [torch.tensor([each], device=device) for each in scales] or [None, None]
    return PagedAttention()(*moved, *more, None, None, chosen, **attributes).cpu()


def reference(case: Case, selected: torch.Tensor, *scales: float, **attributes: Any) -> torch.Tensor:
    more = [torch.tensor([each]) for each in scales] or [None, None]
    finite = change(case, case.cache.blocks.float().nan_to_num().to(case.cache.blocks.dtype))
    return ops.paged_attention.body(*finite, *more, None, None, selected, **attributes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "groups", "block_size", "block"),
    [(8, 1, 1, 1, 16, 16), (20, 2, 3, 2, 3, 8), (64, 4, 16, 4, 16, 128), (128, 2, 4, 1, 16, 64), (256, 3, 5, 3, 32, 5)],
)
@pytest.mark.parametrize("units", [2, 100])
def test_attention_reads_chosen_blocks_only(
    triton_device: str, monkeypatch: pytest.MonkeyPatch, units: int, dim: int, kv_heads: int, group: int, groups: int,
    block_size: int, block: int,
):  # fmt: skip
    """units: of the GPU; with many, a query's blocks are in parts"""
    gpu = block_sparse.find_gpu(torch.device(triton_device))
    monkeypatch.setattr(block_sparse, "find_gpu", lambda _: gpu._replace(units=units))
    more = {"decodes": [1, block, 3 * block + 2]} if block > 16 else {}
    case = make_case(**SEQUENCES | more, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, block_size=block_size)
    case, selected = choose(case, groups, block, 2)
    assert_equal(
        run(case, triton_device, selected, scale=0.1, block=block), reference(case, selected, scale=0.1, block=block)
    )


@pytest.mark.parametrize("units", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_single_tokens_are_attended_to_by_tiles(triton_device: str, monkeypatch: pytest.MonkeyPatch, units: int):
    gpu = block_sparse.find_gpu(torch.device(triton_device))
    monkeypatch.setattr(block_sparse, "find_gpu", lambda _: gpu._replace(units=units))
    case, selected = choose(make_case([90], [(2, 80)], kv_heads=2, heads=6, dim=20), 1, 1, 71)
    assert_equal(run(case, triton_device, selected, scale=0.3, block=1), reference(case, selected, scale=0.3, block=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("units", [2, 100])
def test_sinks_and_soft_caps_equal_the_reference(
    triton_device: str, monkeypatch: pytest.MonkeyPatch, units: int, softcap: float | None
):
    gpu = block_sparse.find_gpu(torch.device(triton_device))
    monkeypatch.setattr(block_sparse, "find_gpu", lambda _: gpu._replace(units=units))
    case, selected = choose(make_case([3, 70], [(25, 50)], kv_heads=2, heads=6, dim=20, has_sinks=True), 2, 8, 3)
    attributes = {"scale": 0.3, "softcap": softcap, "block": 8}
    assert_equal(run(case, triton_device, selected, **attributes), reference(case, selected, **attributes))


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_half_precision_and_caches_in_fp8_are_as_near_to_the_truth(
    triton_device: str, dtype: torch.dtype, is_fp8: bool
):
    case = make_case(**SEQUENCES, kv_heads=2, heads=8, dim=64, dtype=dtype)
    case, selected = choose(case, 2, 8, 3)
    scales = (0.5, 3.0) if is_fp8 else ()
    case = change(case, case.cache.blocks.to(torch.float8_e4m3fn)) if is_fp8 else case
    truth = reference(widen(change(case, case.cache.blocks.float())), selected, *scales, scale=0.1, block=8)
    out = run(case, triton_device, selected, *scales, scale=0.1, block=8)
    assert_as_near(out, reference(case, selected, *scales, scale=0.1, block=8), truth, 2.0)


@pytest.mark.sampled(4, gpu=2)
@pytest.mark.parametrize(("max_union", "top_k"), [(1, 1), (1, 3), (2, 3), (8, 3)])
def test_queries_that_choose_few_different_blocks_are_attended_together(
    triton_device: str, monkeypatch: pytest.MonkeyPatch, max_union: int, top_k: int
):
    """8 with 3 heads each are a tile of fp32, which may have tokens of two sequences, or of none."""
    monkeypatch.setattr(block_sparse, "MAX_UNION", max_union)
    gpu = block_sparse.find_gpu(torch.device(triton_device))
    monkeypatch.setattr(block_sparse, "find_gpu", lambda _: gpu._replace(units=2))
    case = make_case([9], [(21, 60), (2, 30), (9, 9)], kv_heads=2, heads=6, dim=20, block_size=3, has_sinks=True)
    case, selected = choose(case, 2, 8, top_k)
    case = case._replace(q=torch.cat((case.q, case.q[:3])))
    selected = torch.cat((selected, selected[:3]))
    out = run(case, triton_device, selected, scale=0.3, block=8)
    assert_equal(out, reference(case, selected, scale=0.3, block=8))
    assert not out[-3:].any(), "tokens of no sequence"


def test_decodes_of_several_queries_equal_the_reference(triton_device: str):
    case, selected = choose(make_case([], [(3, 20), (3, 33), (3, 3), (9, 12)], kv_heads=2, heads=6), 2, 8, 2)
    case = change(case, num_decodes=3, query_len=3)
    assert_equal(run(case, triton_device, selected, scale=0.3, block=8), reference(case, selected, scale=0.3, block=8))


def test_where_all_blocks_are_chosen_attention_is_dense(triton_device: str, monkeypatch: pytest.MonkeyPatch):
    case = make_case([20, 30], [(9, 31)], kv_heads=2, heads=4)
    _, selected = choose(case, 2, 8, 4)
    monkeypatch.delattr(block_sparse, "attend_blocks")
    assert_equal(run(case, triton_device, selected, scale=0.3, block=8), reference(case, selected, scale=0.3, block=8))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("block", "top_k", "local", "groups", "block_size"),
    [(4, 5, 1, 3, 16), (8, 1, 1, 1, 3), (8, 3, 2, 4, 16), (16, 2, 1, 2, 48), (16, 9, 1, 2, 16), (130, 1, 1, 2, 16)],
)
def test_blocks_are_those_of_the_reference(
    triton_device: str, block: int, top_k: int, local: int, groups: int, block_size: int, cache_dtype: torch.dtype
):
    sequences = {**SEQUENCES, "decodes": [1, 15, 300]} if block > 16 else SEQUENCES
    case = make_index_case(**sequences, groups=groups, dim=12, block_size=block_size, cache_dtype=cache_dtype)
    rules = {"block": block, "top_k": top_k, "local": local}
    chosen = block_sparse.paged_index_blocks(*move(case, triton_device), **rules).cpu()
    assert torch.equal(chosen, ops.paged_index_blocks.body(*case, **rules))


def test_prompts_whose_scores_are_many_choose_some_tokens_at_a_time(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(block_sparse, "SCORES_BYTES", 7 * 2 * 6 * 4)  # of 7 tokens
    case = make_index_case([3, 40], [(5, 21), (25, 47)], groups=2, dim=12)
    rules = {"block": 8, "top_k": 3}
    chosen = block_sparse.paged_index_blocks(*move(case, triton_device), **rules).cpu()
    assert torch.equal(chosen, ops.paged_index_blocks.body(*case, **rules))


def test_tokens_of_no_sequence_choose_nothing_and_give_zeros(triton_device: str):
    q, keys, batch = make_index_case([40, 1], groups=2, dim=12)
    batch = batch._replace(lengths=torch.tensor([40, 0]).int())
    padded = torch.cat((q, q))
    chosen = block_sparse.paged_index_blocks(*move((padded, keys, batch), triton_device), block=8, top_k=3).cpu()
    assert [(row >= 0).all().item() for row in chosen] == [True, False, False, False]
    assert (chosen[1:] == -1).all()
    case = change(make_case([40, 1], kv_heads=2, heads=4), lengths=batch.lengths)
    out = run(case._replace(q=torch.cat((case.q, case.q))), triton_device, chosen, scale=0.3, block=8)
    assert [row.any().item() for row in out] == [True, False, False, False]
