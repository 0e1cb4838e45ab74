from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checks import assert_equal, calls_of
from kernels.paged import IndexCase, change, choices, make_index_case, make_latent_case, reference

from atom.graph import ops
from atom.kernels.torch import PagedLatentAttention, sparse
from atom.kernels.torch.sparse import paged_index_topk


def assert_chooses(case: IndexCase, top_k: int) -> None:
    """As the op's own body, up to the order of what a query chose."""
    clean = change(case, case.cache.blocks.view(torch.uint8) if case.cache.blocks.itemsize == 1 else
                   case.cache.blocks.nan_to_num())  # fmt: skip
    clean = change(clean, clean.cache.blocks.view(case.cache.blocks.dtype))
    expected = ops.paged_index_topk.body(*clean, top_k=top_k)
    assert torch.equal(paged_index_topk(*case, top_k=top_k).sort(-1)[0], expected.sort(-1)[0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[IndexCase, int]:
    decodes = draw(st.lists(st.integers(1, 90), max_size=5))
    prefills = draw(
        st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), min_size=0 if decodes else 1, max_size=3)
    )
    case = make_index_case(
        decodes, [(num, num + before) for num, before in prefills], dim=draw(st.sampled_from([2, 7, 16])),
        block_size=draw(st.sampled_from([1, 3, 16, 32])), seed=draw(st.integers(0, 9)),
    )  # fmt: skip
    return case, draw(st.sampled_from([1, 8, 33, 200]))


@settings(max_examples=60)
@given(cases())
def test_any_mix_of_decodes_and_prefills_chooses_as_the_op(case):
    assert_chooses(*case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_keys_may_have_another_dtype(dtype):
    assert_chooses(make_index_case([20, 5], [(7, 30)], cache_dtype=dtype), 6)


def test_lengths_around_the_choice_and_the_ends_of_blocks():
    prefills = [(num, num + before) for num in (1, 16, 31, 32, 33) for before in (0, 15, 16, 17)]
    case = make_index_case([1, 15, 16, 17, 31, 32, 33], prefills)
    for top_k in (16, 32):
        assert_chooses(case, top_k)


def test_queries_are_scored_as_many_at_a_time_as_the_budget_holds(monkeypatch):
    case = make_index_case([40], [(30, 70), (30, 30)])
    whole = paged_index_topk(*case, top_k=9)
    at_once = []
    monkeypatch.setattr(sparse, "SCORES_BYTES", 4 * 24 * 70 * 4)
    scores = sparse.index_scores
    monkeypatch.setattr(sparse, "index_scores", lambda q, *more: (at_once.append(len(q)), scores(q, *more))[1])
    assert torch.equal(paged_index_topk(*case, top_k=9), whole)
    assert at_once == [1] + [4] * 7 + [2] + [9] * 3 + [3]


@pytest.mark.parametrize("foreign", [math.inf, 1e30])
def test_what_lies_in_memory_of_others_changes_nothing(foreign):
    def run(foreign: float) -> torch.Tensor:
        return paged_index_topk(*make_index_case([3, 40], [(5, 21), (70, 70)], foreign=foreign), top_k=8)

    assert torch.equal(run(foreign), run(math.nan))


def test_a_step_of_no_sequence_and_sequences_without_positions_choose_nothing():
    case = make_index_case([20, 1, 40], [(5, 9)])
    padded = change(
        case, q=torch.cat((case.q, case.q[:2])), weights=torch.cat((case.weights, case.weights[:2])),
        lengths=case.batch.lengths.clone(),
    )  # fmt: skip
    padded.batch.lengths[1] = 0
    selected = paged_index_topk(*padded, top_k=8)
    assert (selected[[1, -2, -1]] == -1).all()
    others = [0, 2, 3, 4, 5, 6, 7]
    assert torch.equal(selected[others], paged_index_topk(*case, top_k=8)[others])
    empty = change(case, q=case.q[:0], weights=case.weights[:0], starts=torch.zeros(1).int(), lengths=torch.zeros(0).int(),
                   table=torch.zeros(0, 0).int(), num_decodes=0)  # fmt: skip
    assert paged_index_topk(*empty, top_k=8).shape == (0, 1, 8)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 90), max_size=4), st.sampled_from([1, 3, 16]), st.sampled_from([1, 8, 33, 89, 90]))
def test_attention_to_what_is_chosen_equals_the_reference(decodes, block_size, top_k):
    case = make_latent_case(decodes, [(7, 90), (40, 40), (1, 1)], heads=3, block_size=block_size)
    selected = choices(case, top_k)
    out = PagedLatentAttention()(*case, None, selected, scale=0.3)
    assert_equal(out, reference(case, selected=selected, scale=0.3), tolerance=1e-4)


def test_attention_of_verified_drafts_and_tokens_of_no_sequence():
    case = make_latent_case([], [(3, length) for length in (3, 4, 33, 70)] + [(9, 12)], heads=3)
    several = change(case, num_decodes=4, query_len=3)
    selected = choices(case, 8)
    expected = reference(several, selected=selected, scale=0.3)
    assert_equal(PagedLatentAttention()(*several, None, selected, scale=0.3), expected)
    q_nope, q_rope = (torch.cat((q, q[:2])) for q in case[:2])
    padded = change(several, q_nope=q_nope, q_rope=q_rope)
    out = PagedLatentAttention()(*padded, None, torch.cat((selected, selected[:2])), scale=0.3)
    assert_equal(out[:-2], expected)
    assert not out[-2:].any()


def test_entries_in_fp8_that_are_chosen_are_times_their_scale():
    case = make_latent_case([20, 70], [(7, 40)], heads=3)
    rank = case.kv_b.shape[1]
    latents, k_rope = case.cache.blocks.nan_to_num().split([rank, 6], dim=-1)
    rounded = (latents / 0.7).clamp(-448, 448).to(torch.float8_e4m3fn)
    entries = torch.cat((rounded.view(torch.uint8), k_rope.contiguous().view(torch.uint8)), -1).view(rounded.dtype)
    selected = choices(case, 8)
    out = PagedLatentAttention()(*change(case, entries), torch.tensor([0.7]), selected, scale=0.3)
    plain = change(case, torch.cat((rounded.float() * 0.7, k_rope), -1))
    assert_equal(out, reference(plain, selected=selected, scale=0.3))


def test_contexts_of_no_more_than_is_chosen_are_attended_to_whole():
    case = make_latent_case([20, 33], [(7, 33)], heads=3)
    attend = PagedLatentAttention()
    everything = choices(case, 33)
    assert torch.equal(attend(*case, None, everything, scale=0.3), attend(*case, scale=0.3))
    assert "aten::gather" not in calls_of(lambda: attend(*case, None, everything, scale=0.3))


@pytest.mark.parametrize("at_once", [1, 3])
def test_queries_gather_as_many_at_a_time_as_the_budget_holds(at_once):
    case = make_latent_case([50, 60], [(8, 90)], heads=3)
    selected = choices(case, 8)
    attend = PagedLatentAttention(expanded_bytes=4 * 8 * (12 + 6 + 3) * at_once)
    assert_equal(attend(*case, None, selected, scale=0.3), reference(case, selected=selected, scale=0.3))
    calls = calls_of(lambda: attend(*case, None, selected, scale=0.3))
    assert calls.count("aten::softmax") == -(-10 // at_once)
