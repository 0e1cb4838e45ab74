"""Blocks that queries choose, and attention to them, in torch and C++, against the reference bodies of their ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checks import assert_equal, relative_error
from kernels.chosen import choose, make_index_case
from kernels.paged import change, make_case

from atom.graph import ops
from atom.kernels import LoadContext, find_kernel
from atom.kernels.torch import block_sparse
from atom.kernels.torch.attention import PagedAttention

BACKENDS = ["torch", "cpp"]


def load(backend: str) -> Any:
    return find_kernel(ops.paged_attention, backend).load(LoadContext())


@pytest.mark.parametrize(("backend", "is_decoding"), [("torch", False), ("torch", True), ("cpp", True)])
@settings(max_examples=20, deadline=None)
@given(drawn=st.data())
def test_attention_reads_chosen_blocks_only(backend: str, is_decoding: bool, drawn: st.DataObject):
    kv_heads, group, groups = drawn.draw(st.sampled_from([(1, 1, 1), (2, 3, 2), (4, 1, 2), (3, 2, 1)]))
    decodes = drawn.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    prefills = [] if is_decoding else [(num, num + 5) for num in drawn.draw(st.lists(st.integers(1, 90), max_size=2))]
    case = make_case(
        decodes, prefills, kv_heads=kv_heads, heads=kv_heads * group, dim=drawn.draw(st.sampled_from([8, 20])),
        block_size=drawn.draw(st.sampled_from([1, 3, 8, 16])), has_sinks=drawn.draw(st.booleans()),
    )  # fmt: skip
    block = drawn.draw(st.sampled_from([4, 8, 16]))
    case, selected = choose(case, groups, block, drawn.draw(st.integers(1, 4)))
    attributes = {"scale": 0.3, "block": block, "softcap": drawn.draw(st.sampled_from([None, 1.5]))}
    args = None, None, None, None, selected
    expected = ops.paged_attention.body(*change(case, case.cache.blocks.nan_to_num()), *args, **attributes)
    assert_equal(load(backend)(*case, *args, **attributes), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_at_the_end_of_a_block_sees_all_of_it(backend: str):
    case, selected = choose(make_case([31, 32, 33], kv_heads=2, heads=4, block_size=4), 2, 8, 2)
    args = None, None, None, None, selected
    expected = ops.paged_attention.body(*change(case, case.cache.blocks.nan_to_num()), *args, scale=0.3, block=8)
    assert_equal(load(backend)(*case, *args, scale=0.3, block=8), expected)


def test_where_all_blocks_are_chosen_attention_is_dense(monkeypatch: pytest.MonkeyPatch):
    case, selected = choose(make_case([20, 30], [(9, 31)], kv_heads=2, heads=4), 2, 8, 4)
    monkeypatch.setattr("atom.kernels.torch.attention.attend_blocks", None)
    args = None, None, None, None, selected
    assert_equal(PagedAttention()(*case, *args, scale=0.3, block=8), ops.paged_attention.body(*case, scale=0.3))
    with pytest.raises(TypeError):
        PagedAttention()(*case, *args, scale=0.3, block=7)


def test_tiles_shrink_where_the_context_is_very_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_sparse, "MAX_SCORES", 500)
    case, selected = choose(make_case([], [(40, 90)], kv_heads=2, heads=6), 2, 8, 3)
    args = None, None, None, None, selected
    expected = ops.paged_attention.body(*change(case, case.cache.blocks.nan_to_num()), *args, scale=0.3, block=8)
    assert_equal(PagedAttention()(*case, *args, scale=0.3, block=8), expected)
    q, keys, batch = make_index_case([33], [(40, 90)], groups=2, dim=8)
    rules = {"block": 8, "top_k": 3}
    finite = keys._replace(blocks=keys.blocks.nan_to_num())
    chosen = block_sparse.paged_index_blocks(q, keys, batch, **rules)
    assert torch.equal(chosen, ops.paged_index_blocks.body(q, finite, batch, **rules))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefills", [[], [(9, 30)]])
def test_a_cache_in_fp8_is_multiplied_by_its_scales(backend: str, prefills: list[tuple[int, int]]):
    case, selected = choose(make_case([5, 40], prefills, kv_heads=2, heads=6), 2, 16, 2)
    stored, finite = (change(case, each.to(torch.float8_e4m3fn))
                      for each in (case.cache.blocks, case.cache.blocks.nan_to_num()))  # fmt: skip
    args = torch.tensor([0.5]), torch.tensor([3.0]), None, None, selected
    out = load(backend)(*stored, *args, scale=0.3, block=16)
    assert relative_error(out, ops.paged_attention.body(*finite, *args, scale=0.3, block=16)) < 1e-5


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("block", "top_k", "local"), [(1, 5, 1), (8, 1, 1), (8, 3, 2), (16, 9, 1), (5, 4, 4)])
def test_blocks_are_those_of_the_reference(block: int, top_k: int, local: int, cache_dtype: torch.dtype):
    q, keys, batch = make_index_case([1, 15, 70], [(1, 1), (5, 21), (40, 40)], groups=3, dim=8, cache_dtype=cache_dtype)
    rules = {"block": block, "top_k": top_k, "local": local}
    chosen = block_sparse.paged_index_blocks(q, keys, batch, **rules)
    assert torch.equal(chosen, ops.paged_index_blocks.body(q, keys, batch, **rules))
    assert (chosen >= 0).sum(2).unique().tolist() == sorted({min(position // block + 1, top_k) for position in
                                                             [0, 14, 69, 0, *range(16, 21), *range(40)]})  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_without_positions_chooses_nothing_and_gives_zeros(backend: str):
    q, keys, batch = make_index_case([20, 1], groups=2, dim=8)
    batch = batch._replace(lengths=torch.tensor([20, 0]).int())
    for choosing in (ops.paged_index_blocks.body, block_sparse.paged_index_blocks):
        chosen = choosing(q, keys, batch, block=8, top_k=3)
        assert [(row >= 0).any().item() for row in chosen] == [True, False]
    case = change(make_case([20, 1], kv_heads=2, heads=4), lengths=batch.lengths)
    out = load(backend)(*case, None, None, None, None, chosen, scale=0.3, block=8)
    assert [row.any().item() for row in out] == [True, False]
