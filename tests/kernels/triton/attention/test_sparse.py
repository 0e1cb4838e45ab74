import functools
from typing import Any

import pytest
import torch
from kernels.checks import assert_equal
from kernels.paged import Case, change, make_case, make_latent_case, move, reference

from atom.graph import ops
from atom.graph.ops.attention import cached_entries
from atom.graph.ops.sparse import from_index_entries, index_scores, to_index_entries
from atom.kernels.triton.attention import chosen, latent
from atom.kernels.triton.attention import top_k as top_k_module
from atom.kernels.triton.attention.index_scores import write_index
from atom.kernels.triton.attention.latent import PagedLatentAttention
from atom.kernels.triton.attention.top_k import paged_index_topk
from atom.kernels.triton.gpu import find_gpu

FP8 = torch.float8_e4m3fn
PROMPTS = [(5, 30), (12, 12), (3, 100)]


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of scores are chosen from by several launches, some queries at a time."""
    monkeypatch.setattr(top_k_module, "SEGMENT", 16)
    monkeypatch.setattr(top_k_module, "LAST_SEGMENT", 32)
    monkeypatch.setattr(top_k_module, "SCRATCH_BYTES", 4 * 200 * 13)


def index_case(decodes: list[int], prompts: list[tuple[int, int]], heads: int = 24, dim: int = 12,
               block_size: int = 16, cache_dtype: torch.dtype = torch.float32, query_len: int = 1) -> Case:  # fmt: skip
    """Queries and keys of an indexer; what no query sees is NaN, but for fp8. query_len: of the decodes"""
    counts = [(query_len, length) for length in decodes]
    case = make_case([], [*counts, *prompts], heads=heads, dim=dim, block_size=block_size)
    blocks = case.cache.blocks[:, :, 0, 0]
    if cache_dtype is FP8:
        blocks = to_index_entries(blocks.nan_to_num().flatten(0, 1), FP8).view(*blocks.shape[:2], -1)
    return change(case, blocks.contiguous(), num_decodes=len(decodes), query_len=query_len)


def check_choice(case: Case, top_k: int, device: str) -> None:
    """As many as the op's body chooses, each once, of the same scores."""
    weights = torch.randn(len(case.q), case.q.shape[1])
    q, cache, batch, *_ = move(case, device)
    selected = paged_index_topk(q, weights.to(device), cache, batch, top_k=top_k).cpu()
    whole = case if case.cache.blocks.dtype is FP8 else change(case, case.cache.blocks.nan_to_num())
    expected = ops.paged_index_topk.body(whole.q, weights, whole.cache, whole.batch, top_k=top_k)
    assert ((selected >= 0) == (expected >= 0)).all()
    for own, entries in cached_entries(whole.cache, whole.batch):
        scores = index_scores(whole.q[own], from_index_entries(entries), weights[own])
        for each, best, row in zip(selected[own, 0], expected[own, 0], scores, strict=True):
            each, best = each[each >= 0].long(), best[best >= 0].long()
            assert (each[1:] > each[:-1]).all()
            torch.testing.assert_close(row[each].sort().values, row[best].sort().values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 33, 170])
def test_decodes_choose_the_best_of_what_they_see(length, short_segments, triton_device):
    check_choice(index_case([length, 40], []), 8, triton_device)


@pytest.mark.parametrize("top_k", [5, 8])
@pytest.mark.parametrize("decodes", [[], [1, 33, 170, 16, 17]])
def test_prompts_choose_too(decodes, top_k, short_segments, triton_device):
    check_choice(index_case(decodes, PROMPTS), top_k, triton_device)


@pytest.mark.sampled(2, gpu=1)
@pytest.mark.parametrize("top_k", [4, 5])
def test_many_rows_are_read_step_by_step(top_k, monkeypatch, triton_device):
    monkeypatch.setattr(top_k_module, "KEPT", 16)
    monkeypatch.setattr(top_k_module, "find_gpu", lambda device: find_gpu(device)._replace(units=1))
    check_choice(index_case([33], [(5, 5), (6, 7), (9, 170)]), top_k, triton_device)


def test_one_segment_holds_a_short_row(triton_device):
    check_choice(index_case([1, 33, 70], PROMPTS, heads=3, dim=16, block_size=24), 8, triton_device)


def test_all_are_chosen_of_a_short_table(triton_device):
    check_choice(index_case([4, 8], [(3, 3)], block_size=1), 8, triton_device)


def test_leading_sequences_of_several_queries_each(short_segments, triton_device):
    check_choice(index_case([100, 4, 3], [(7, 30)], query_len=3), 5, triton_device)


@pytest.mark.usefixtures("exact_fp8")
def test_keys_in_fp8_have_scales_of_their_own(short_segments, triton_device):
    case = index_case([33, 170], [(7, 30)], dim=16, cache_dtype=FP8)
    check_choice(case, 5, triton_device)
    k, slots = torch.randn(6, 16), torch.tensor([5, 3, 40, 41, 9, 100])
    k[2] = 0
    case = change(case, torch.zeros_like(case.cache.blocks), slots=slots)
    written = move(case, triton_device)
    write_index(written.q, k.to(triton_device), written.cache, written.batch)
    ops.write_index.body(case.q, k, case.cache, case.batch)
    assert torch.equal(written.cache.blocks.cpu().view(torch.uint8), case.cache.blocks.view(torch.uint8))


def test_keys_are_written_to_their_slots(triton_device):
    case = change(index_case([33], []), torch.zeros(3, 16, 12), slots=torch.tensor([5, 3, 40]))
    k, written = torch.randn(3, 12), move(case, triton_device)
    assert write_index(written.q, k.to(triton_device), written.cache, written.batch) is written.q
    ops.write_index.body(case.q, k, case.cache, case.batch)
    assert torch.equal(written.cache.blocks.cpu(), case.cache.blocks)


@pytest.mark.parametrize("every", [4, 32])
def test_keys_of_runs_are_written_by_their_last_tokens(every, triton_device):
    slots = torch.tensor([*range(16, 48)])
    case = change(index_case([33], []), torch.zeros(3, max(1, 16 // every), 12), slots=slots, block_size=16)
    k, written = torch.randn(len(slots), 12), move(case, triton_device)
    write_index(written.q, k.to(triton_device), written.cache, written.batch, every=every)
    ops.write_index.body(case.q, k, case.cache, case.batch, every=every)
    assert case.cache.blocks[1:].any()
    assert torch.equal(written.cache.blocks[1:].cpu(), case.cache.blocks[1:])  # block 0 is padding's


def test_of_equal_scores_the_first_are_chosen(short_segments, triton_device):
    case = index_case([100], [])  # of whole numbers, which no order of a sum rounds
    q, cache, batch, *_ = move(change(case, torch.ones(9, 16, 12), q=case.q.round()), triton_device)
    weights = torch.ones(1, q.shape[1], device=triton_device)
    assert paged_index_topk(q, weights, cache, batch, top_k=8)[0, 0].tolist() == [*range(8)]


@pytest.fixture(params=[False, True])
def parts(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a split of what each token chose."""
    if request.param:
        monkeypatch.setattr(chosen, "MIN_PART", 1)
        for module in (latent, chosen):
            monkeypatch.setattr(module, "find_gpu", lambda device: find_gpu(device)._replace(units=40))


def choose(case: Any, top_k: int) -> torch.Tensor:
    """Some of what each query sees, in any order."""
    selected, batch = torch.full((len(case.q_nope), 1, top_k), -1, dtype=torch.int32), case.batch
    for start, end, length in zip(batch.starts[:-1], batch.starts[1:], batch.lengths, strict=True):
        for token in range(start, end):
            some = torch.randperm(int(length - (end - token) + 1))[:top_k]
            selected[token, 0, : len(some)] = some.int()
    return selected


@pytest.mark.parametrize(("decodes", "prompts", "query_len", "rotated"), [
    ([1, 33, 70, 16, 17], [], 1, 8), ([33, 20], [(7, 30), (23, 23)], 1, 8), ([60, 3, 20], [(7, 30)], 3, 8),
    ([33, 20], [(7, 30)], 1, 0),
])  # fmt: skip
def test_queries_attend_to_what_they_chose(decodes, prompts, query_len, rotated, parts, monkeypatch, triton_device):
    monkeypatch.setattr(latent, "ABSORBED_BYTES", 3 * 18 * 4 * 11)
    counts = [(query_len, length) for length in decodes]
    case = make_latent_case([], [*counts, *prompts], heads=3, rank=18, rotated=rotated, plain=12, value=10)
    case = change(case, num_decodes=len(decodes), query_len=query_len)
    selected, attention = choose(case, 20), PagedLatentAttention()
    body = functools.partial(ops.paged_mla_attention.body, *change(case, case.cache.blocks.nan_to_num()))
    for sinks in (None, torch.tensor([-2.0, 0.5, 3.0])):
        out = attention(*move((*case, None, selected, sinks), triton_device), scale=0.3).cpu()
        assert_equal(out, body(None, selected, sinks, scale=0.3))


def test_a_sequence_of_no_tokens_gives_zeros(parts, triton_device):
    case = make_latent_case([70, 0], heads=3)
    out = PagedLatentAttention()(*move(case, triton_device), None, choose(case, 20).to(triton_device), scale=0.3).cpu()
    assert (out[1] == 0).all() and out[0].isfinite().all()


def test_a_short_table_is_attended_to_whole(monkeypatch, triton_device):
    monkeypatch.setattr(chosen, "attend_chosen", None)
    case = make_latent_case([30, 5], [(4, 9)], heads=3)
    selected = torch.full((len(case.q_nope), 1, 32), -1, dtype=torch.int32)
    out = PagedLatentAttention()(*move(case, triton_device), None, selected.to(triton_device), scale=0.3).cpu()
    assert_equal(out, reference(case, scale=0.3))
