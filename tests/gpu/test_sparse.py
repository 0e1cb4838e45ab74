"""Sparse attention's kernels on a GPU against the ops' own bodies in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from atom.graph import Batch, PagedCache, ops
from atom.graph.ops.attention import cached_entries
from atom.graph.ops.latent import join_entries
from atom.graph.ops.sparse import from_index_entries, index_scores, to_index_entries
from atom.kernels.hopper import index_scores as hopper_scores
from atom.kernels.hopper.latent import PagedLatentAttention as HopperAttention
from atom.kernels.triton.attention import top_k as top_k_module
from atom.kernels.triton.attention.index_scores import write_index
from atom.kernels.triton.attention.latent import PagedLatentAttention

pytestmark = pytest.mark.gpu

KIND, TOP_K = "full", 2048
FP8 = torch.float8_e4m3fn
DECODES = [1, TOP_K - 1, TOP_K, TOP_K + 1, 63, 64, 65, 4095, 4096, 4097, 9000, 20_000]
PROMPTS = [(1, 3000), (70, 70), (130, TOP_K + 1), (300, TOP_K + 100), (200, 9000)]


class Shape(NamedTuple):
    """Heads of attention and of its indexer."""

    heads: int = 128
    rank: int = 512
    plain: int = 128
    rotated: int = 64
    value: int = 128
    index_heads: int = 64
    index_dim: int = 128


DEEPSEEK = Shape()


class Case(NamedTuple):
    """What a layer gives to its ops."""

    q: Tensor
    weights: Tensor
    keys: PagedCache
    q_nope: Tensor
    q_rope: Tensor
    kv_b: Tensor
    cache: PagedCache
    batch: Batch


def make_case(decodes: Sequence[int], prompts: Sequence[tuple[int, int]], *, query_len: int = 1, block_size: int = 64,
              dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None, shape: Shape = DEEPSEEK,
              extra_tokens: int = 0, seed: int = 0) -> Case:  # fmt: skip
    """Decodes by their lengths, prompts by (queries, length); blocks are scattered, and NaN is in those of nobody."""
    torch.manual_seed(seed)
    kept = cache_dtype or dtype
    counts = [query_len] * len(decodes) + [num for num, _ in prompts]
    lengths = [*decodes, *(length for _, length in prompts)]
    widths = [-(-length // block_size) for length in lengths]
    order = (1 + torch.randperm(sum(widths))).split(widths)
    table = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    for row, own in enumerate(order):
        table[row, : len(own)] = own
    slots = torch.cat(
        [own.repeat_interleave(block_size)[:length] * block_size + torch.arange(length) % block_size
         for own, length in zip(order, lengths, strict=True)]
    ).cuda()  # fmt: skip
    tokens, total = sum(counts) + extra_tokens, len(slots)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda").to(dtype)

    def keep(entries: Tensor) -> PagedCache:
        blocks = torch.full(((1 + sum(widths)) * block_size, entries.shape[1]), float("nan"), device="cuda").to(kept)
        raw = (lambda x: x.view(torch.uint8)) if kept is FP8 else (lambda x: x)
        raw(blocks)[slots] = raw(entries)
        return PagedCache(blocks.view(-1, block_size, entries.shape[1]), KIND)

    keys = keep(to_index_entries(draw(total, shape.index_dim), kept))
    cache = keep(join_entries(draw(total, shape.rank), draw(total, shape.rotated), kept))
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    batch = Batch(
        {KIND: table.cuda()}, {KIND: slots}, starts, torch.tensor(lengths).int().cuda(), len(decodes), query_len
    )
    q_nope, q_rope = draw(tokens, shape.heads, shape.plain + shape.rotated).split([shape.plain, shape.rotated], 2)
    kv_b = draw(shape.heads * (shape.plain + shape.value), shape.rank) / shape.rank**0.5
    weights = torch.randn(tokens, shape.index_heads, device="cuda")
    return Case(draw(tokens, shape.index_heads, shape.index_dim), weights, keys, q_nope, q_rope, kv_b, cache, batch)


def choose(case: Case, top_k: int = TOP_K) -> Tensor:
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    run = hopper_scores.paged_index_topk if is_hopper else top_k_module.paged_index_topk
    return run(case.q, case.weights, case.keys, case.batch, top_k=top_k)


def check_choice(case: Case, top_k: int) -> Tensor:
    """Each query chose as many as it may, each once, and their true scores are those of the best, up to rounding."""
    selected = choose(case, top_k)
    assert selected.shape == (len(case.q), 1, top_k) and selected.dtype == torch.int32
    assert (selected[int(case.batch.starts[-1]) :] == -1).all()
    for own, entries in cached_entries(case.keys, case.batch):
        keys, first = from_index_entries(entries).float(), len(entries) - (own.stop - own.start)
        for token in range(own.start, own.stop):
            seen = first + token - own.start + 1
            chosen, num = selected[token, 0], min(top_k, seen)
            assert (chosen[num:] == -1).all() and (chosen[:num] >= 0).all() and (chosen[:num] < seen).all()
            assert len(chosen[:num].unique()) == num
            scores = index_scores(case.q[token : token + 1], keys[:seen], case.weights[token : token + 1])[0]
            best, own_scores = scores.topk(num).values, scores[chosen[:num].long()].sort(descending=True).values
            torch.testing.assert_close(own_scores, best, rtol=1e-3, atol=2e-3 * float(best.abs().max()))
    return selected


def attend(case: Case, selected: Tensor, k_scale: Tensor | None = None, kind: Any = None) -> Tensor:
    kind = kind or (HopperAttention if torch.cuda.get_device_capability() == (9, 0) else PagedLatentAttention)
    return kind()(case.q_nope, case.q_rope, case.kv_b, case.cache, case.batch, k_scale, selected, scale=0.06)


def check_attention(case: Case, selected: Tensor, k_scale: Tensor | None = None, kind: Any = None) -> None:
    """As near to the op's body in float32 as rounding to the case's dtype leaves it."""
    out = attend(case, selected, k_scale, kind)
    assert (out[int(case.batch.starts[-1]) :] == 0).all()
    wide = [x.float() for x in (case.q_nope, case.q_rope, case.kv_b)]
    (table,), blocks = case.batch.tables.values(), case.cache.blocks
    for row, (first, last) in enumerate(
        zip(case.batch.starts[:-1].tolist(), case.batch.starts[1:].tolist(), strict=True)
    ):
        length = int(case.batch.lengths[row])
        raw = (
            blocks.view(torch.uint8)[table[row, : -(-length // blocks.shape[1])].long()]
            .view(blocks.dtype)
            .flatten(0, 1)
        )
        latent, k_rope = ops.latent.split_entries(raw[:length], case.kv_b.shape[1], case.q_rope.dtype, k_scale)
        expanded = (latent.float() @ wide[2].T).view(length, case.q_nope.shape[1], -1)
        plain = case.q_nope.shape[2]
        for token in range(first, last, max(1, (last - first) // 8)):
            chosen = selected[token, 0][selected[token, 0] >= 0].long()
            keys = expanded[chosen, :, :plain]
            scores = torch.einsum("np,knp->nk", wide[0][token], keys)
            scores += torch.einsum("nr,kr->nk", wide[1][token], k_rope[chosen].float())
            expected = torch.einsum("nk,knu->nu", (scores * 0.06).softmax(-1), expanded[chosen, :, plain:])
            error = (out[token].float() - expected).norm() / expected.norm()
            assert error < (2e-2 if case.q.dtype != torch.float32 else 1e-4), (row, token, float(error))


@pytest.fixture(autouse=True)
def inference() -> Any:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("decodes", "prompts"), [(DECODES, []), ([], PROMPTS), (DECODES, PROMPTS), ([70_000], [])])
def test_decodes_and_prompts_choose_the_best_and_attend_to_them(decodes: list[int], prompts: list[tuple[int, int]]):
    case = make_case(decodes, prompts)
    selected = check_choice(case, TOP_K)
    check_attention(case, selected)
    check_attention(case, selected, kind=PagedLatentAttention)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_in_other_dtypes(dtype: torch.dtype):
    case = make_case([1, 2049, 3000], [(5, 2100)], dtype=dtype)
    check_attention(case, check_choice(case, TOP_K))


@pytest.mark.parametrize("query_len", [2, 3, 4])
def test_verify_steps_of_several_queries(query_len: int):
    case = make_case([query_len, TOP_K, TOP_K + 1, 5000], [(40, 2100)], query_len=query_len)
    check_attention(case, check_choice(case, TOP_K))


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("top_k", [1, 100, 512])
def test_other_sizes_of_blocks_and_choices(block_size: int, top_k: int):
    shape = Shape(heads=20, index_heads=3, index_dim=24)
    case = make_case([1, 99, 100, 101, 3000], [(50, 600)], block_size=block_size, shape=shape)
    check_attention(case, check_choice(case, top_k))


def test_heads_of_glm():
    case = make_case([1, 3000], [(20, 2500)], shape=Shape(heads=64, plain=192, value=256, index_heads=32))
    check_attention(case, check_choice(case, TOP_K))


@pytest.mark.parametrize("decodes", [[], [3000]])
def test_many_prompts_and_queries_in_runs_that_part_sequences(decodes: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(top_k_module, "SCRATCH_BYTES", 4 * 4032 * 150)
    prompts = [(1, 1), (2, 2500), (149, 3000), (1, 4000), (150, 2200), (3, 3), (301, 2600), (5, 2051)]
    case = make_case(decodes, prompts)
    check_attention(case, check_choice(case, TOP_K))


def test_ascending_scores_replace_all_that_is_kept():
    case = make_case([], [(150, 30_000)])
    slope = torch.linspace(0, 1, 30_000, device="cuda").unsqueeze(1).expand(-1, 128)
    case.keys.blocks.flatten(0, 1)[case.batch.slot_mappings[KIND]] = slope.to(torch.bfloat16)
    case.q.abs_(), case.weights.abs_()
    check_choice(case, TOP_K)


def test_a_cache_in_fp8():
    case = make_case([1, 3000, 9000], [(70, 2500)], cache_dtype=FP8)
    check_attention(case, check_choice(case, TOP_K), torch.tensor([0.7], device="cuda"))


def test_keys_are_written_as_the_op_writes_them():
    for kept in (torch.bfloat16, FP8):
        case = make_case([100], [], cache_dtype=kept)
        k = torch.randn(7, 128, device="cuda", dtype=torch.bfloat16)
        k[3] = 0
        slots = torch.tensor([5, 3, 70, 71, 9, 1, 100], device="cuda")
        batch = case.batch._replace(slot_mappings={KIND: slots})
        caches = [PagedCache(torch.zeros_like(case.keys.blocks), KIND) for _ in range(2)]
        write_index(case.q, k, caches[0], batch)
        ops.write_index.body(case.q, k, caches[1], batch)
        stored = [each.blocks.view(torch.uint8).flatten(0, 1)[slots].view(kept) for each in caches]
        own, expected = (from_index_entries(each).float() for each in stored)
        torch.testing.assert_close(own, expected, rtol=0.07 if kept is FP8 else 0, atol=1e-6 if kept is FP8 else 0)
        assert kept is FP8 or torch.equal(caches[0].blocks, caches[1].blocks)


def test_equal_scores_are_chosen_as_often_as_others():
    case = make_case([9000], [(3, 20_000)])
    case.keys.blocks.copy_(torch.ones_like(case.keys.blocks))  # all tie
    check_choice(case, TOP_K)
    case.weights.fill_(-1.0)
    check_choice(case._replace(weights=-case.weights.abs()), TOP_K)


def test_tokens_of_no_sequence_and_sequences_of_no_tokens():
    case = make_case([], [(100, 3000)], extra_tokens=28)
    check_attention(case, check_choice(case, TOP_K))
    case = make_case([3000, 64], [])
    lengths = case.batch.lengths.clone()
    lengths[1] = 0
    case = case._replace(batch=case.batch._replace(lengths=lengths))
    selected = choose(case)
    assert (selected[1] == -1).all() and (attend(case, selected)[1] == 0).all()


def test_prompts_in_several_runs_of_scratch(monkeypatch: pytest.MonkeyPatch):
    case = make_case(DECODES, PROMPTS)
    whole = choose(case)
    monkeypatch.setattr(top_k_module, "SCRATCH_BYTES", 4 * 20_032 * 37)
    parts = choose(case)
    assert torch.equal(whole, parts)


def test_decodes_in_a_cuda_graph_follow_lengths():
    case = make_case([5000] * 8, [])

    def run() -> Tensor:
        return attend(case, choose(case))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in ([5000] * 8, [1, 2047, 2048, 2049, 4999, 64, 65, 3000]):
        case.batch.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(out, run(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decodes", "prompts"), [([3000], []), (DECODES, PROMPTS), ([], PROMPTS)])
def test_heads_of_one_and_two_programs(decodes: list[int], prompts: list[tuple[int, int]], dtype: torch.dtype):
    for heads in (64, 128):
        case = make_case(decodes, prompts, dtype=dtype, shape=Shape(heads=heads))
        check_attention(case, choose(case))
