"""Pooling of runs, and attention to tokens and runs, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph.ops.runs import Pools, in_steps, leaves, led_by_padding
from kernels.checks import BF16, assert_as_near, assert_equal
from torch import Tensor
from torch.utils._pytree import tree_map_only

from atom.graph import KV, Batch, PagedCache, Type, ops
from atom.graph.ops.attention import to_entry
from atom.kernels.triton.attention import compressed
from atom.kernels.triton.attention import top_k as top_k_module
from atom.kernels.triton.attention.compressed import paged_compress, paged_mqa_attention
from atom.kernels.triton.attention.latent import merge_sums as merge
from atom.kernels.triton.attention.top_k import paged_index_topk
from atom.kernels.triton.gpu import find_gpu


def cached(pools: Pools, state: KV) -> PagedCache:
    tensor = pools.caches[state].tensor
    assert tensor is not None, "lowered ops have a cache"
    return PagedCache(tensor, state.kind)


def moved(value: object, device: str, dtype: torch.dtype = torch.float32) -> object:
    """Tensors on a device, numbers with a point in this dtype."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), value)


def padded(batch: Batch, num_rows: int) -> Batch:
    """The batch with more rows, of no token."""
    more = {kind: torch.cat((table, table[:1].expand(num_rows, -1))) for kind, table in batch.tables.items()}
    starts = torch.cat((batch.starts, batch.starts[-1:].expand(num_rows)))
    return batch._replace(tables=more, starts=starts, lengths=torch.cat((batch.lengths, torch.ones(num_rows).int())))


@pytest.mark.parametrize(("overlaps", "every", "dim"), [(True, 4, 16), (False, 8, 12), (True, 16, 72)])
@pytest.mark.parametrize("block_size", [2, 16])
def test_runs_are_pooled_as_in_the_reference(triton_device, overlaps, every, dim, block_size):
    lengths, (runs, _) = (37, 5, 50), leaves(dim, every, overlaps)
    width, pools = dim * (2 if overlaps else 1), Pools([runs], block_size, 3)
    given, bias = [torch.randn(2, length, width) for length in lengths], torch.randn(every, width)
    cache = PagedCache(cached(pools, runs).blocks.to(triton_device), runs.kind)
    for chunks in in_steps(lengths, 21):
        kv, gate = torch.cat([each[:, start:stop] for each, (start, stop) in zip(given, chunks, strict=True)], 1)
        batch = pools.batch(chunks)
        expected = ops.paged_compress.body(kv, gate, bias, cached(pools, runs), batch, overlaps=overlaps)
        args = moved((kv, gate, bias), triton_device)
        made = paged_compress(*args, cache, moved(padded(batch, 2), triton_device), overlaps=overlaps)  # type: ignore[misc, arg-type]
        assert_equal(made.cpu(), expected)


@pytest.mark.parametrize(("every", "dim", "block_size"), [(4, 72, 16), (3, 12, 2)])
def test_runs_without_a_gate_have_their_mean(triton_device, every, dim, block_size):
    lengths = (37, 5, 50)
    runs = KV("0", Type("fp32", (1, dim)), window=every, part="index_runs")
    pools, given = Pools([runs], block_size, 3), [torch.randn(length, dim) for length in lengths]
    cache = PagedCache(cached(pools, runs).blocks.to(triton_device), runs.kind)
    for chunks in in_steps(lengths, 21):
        kv, batch = (
            torch.cat([each[slice(*chunk)] for each, chunk in zip(given, chunks, strict=True)]),
            pools.batch(chunks),
        )
        expected = ops.paged_compress.body(kv, None, None, cached(pools, runs), batch, every=every)
        kv, there = moved((kv, padded(batch, 2)), triton_device)  # type: ignore[misc]
        assert_equal(paged_compress(kv, None, None, cache, there, every=every).cpu(), expected)


def test_a_token_that_pads_a_step_ends_no_run(triton_device):
    runs = KV("0", Type("fp32", (1, 12)), window=4, part="index_runs")
    pools, kv = Pools([runs], 8, 1), torch.randn(9, 12)
    cache = PagedCache(cached(pools, runs).blocks.to(triton_device), runs.kind)
    batch = led_by_padding(pools.batch([(0, 8)]))
    expected = ops.paged_compress.body(kv, None, None, cached(pools, runs), batch, every=4)
    kv, there = moved((kv, batch), triton_device)  # type: ignore[misc]
    assert_equal(paged_compress(kv, None, None, cache, there, every=4).cpu(), expected)
    assert not expected[0].any()


def attention_case(every: int, dim: int, heads: int, block_size: int, top_k: int | None, lengths: tuple[int, ...],
                   chunks: list[tuple[int, int]], size: int | None = 6) -> tuple[list, dict]:  # fmt: skip
    """The arguments of paged_mqa_attention, with NaN in slots that nobody has written. size: of the window"""
    window = KV("0", Type("fp32", (dim,)), window=size)
    kept = KV("0", Type("fp32", (dim,)), every=every)
    pools = Pools([window, kept], block_size, len(lengths))
    whole = pools.batch([(0, stop) for _, stop in chunks])
    written = torch.randn(sum(stop for _, stop in chunks), dim)
    q = torch.zeros(0)
    ops.write_mqa.body(q, written, cached(pools, window), whole)
    ops.write_mqa.body(q, torch.randn_like(written), cached(pools, kept), whole, every=every)
    batch = pools.batch(chunks)
    tokens = int(batch.starts[-1])
    selected = None
    if top_k is not None:
        ended = torch.cat([(torch.arange(*chunk) + 1) // every for chunk in chunks])
        selected = torch.full((tokens, 1, top_k), -1, dtype=torch.int32)
        for token, num in enumerate(ended.tolist()):
            chosen = torch.randperm(num)[:top_k].int()
            selected[token, 0, : len(chosen)] = chosen
    args = [
        torch.randn(tokens, heads, dim),
        cached(pools, window),
        batch,
        torch.randn(heads),
        None,
        cached(pools, kept),
        selected,
    ]
    return args, {"scale": 0.3, "window": size, "every": every}


@pytest.fixture(params=[1, 3])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of what a token sees, of which some are empty, or one."""
    monkeypatch.setattr(compressed, "MIN_PART", 1)
    monkeypatch.setattr(compressed, "find_gpu", lambda device: find_gpu(device)._replace(units=1000))
    monkeypatch.setattr(compressed, "MAX_SPLITS", request.param)
    return int(request.param)


@pytest.mark.parametrize(("every", "top_k"), [(4, None), (4, 3), (32, None)])
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (20, 24)])
@pytest.mark.parametrize("block_size", [8, 16])
def test_tokens_and_runs_are_attended_to_as_in_the_reference(triton_device, splits, every, top_k, heads, dim,
                                                             block_size, monkeypatch):  # fmt: skip
    args, attributes = attention_case(every, dim, heads, block_size, top_k, (40, 1, 63), [(33, 40), (0, 1), (62, 63)])
    expected = ops.paged_mqa_attention.body(*args, **attributes)
    q, *rest = args
    longer = torch.cat((q, q[:2]))  # with padding
    given = moved((longer, *rest), triton_device)
    if top_k is not None:
        given = (*given[:-1], torch.cat((given[-1], given[-1][:2])))  # type: ignore[index]
    parts = []
    monkeypatch.setattr(
        compressed, "merge_sums", lambda sums, dtype: (parts.append(sums.weights), merge(sums, dtype))[1]
    )
    made = paged_mqa_attention(*given, **attributes).cpu()  # type: ignore[misc]
    assert_equal(made[: len(q)], expected)
    assert not made[len(q) :].any()
    (weights,) = parts
    assert (weights is None) == (splits == 1)
    assert weights is None or weights.shape == (splits, len(longer), heads)


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64])
@pytest.mark.parametrize("window", [None, 16])
def test_contexts_end_at_any_place_of_a_tile(triton_device, splits, length, window):
    args, attributes = attention_case(4, 16, 5, 16, None, (length,), [(length - 2, length)], window)
    expected = ops.paged_mqa_attention.body(*args, **attributes)
    assert_equal(paged_mqa_attention(*moved(args, triton_device), **attributes).cpu(), expected)  # type: ignore[misc]


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("top_k", [None, 3])
def test_a_window_in_fp8_has_a_scale_and_runs_have_none(triton_device, splits, top_k):
    args, attributes = attention_case(4, 24, 5, 16, top_k, (40, 63), [(33, 40), (62, 63)])
    q, cache, batch, sinks, _, runs, *selected = args
    k_scale = torch.tensor([0.02])
    kept = cache._replace(blocks=to_entry(cache.blocks.nan_to_num(), torch.float8_e4m3fn, k_scale))
    args = q, kept, batch, sinks, k_scale, runs, *selected
    expected = ops.paged_mqa_attention.body(*args, **attributes)
    moved_args = tree_map_only(Tensor, lambda x: x.to(triton_device), args)
    assert_equal(paged_mqa_attention(*moved_args, **attributes).cpu(), expected)


@pytest.mark.parametrize(("every", "top_k"), [(4, 3), (4, 40), (32, 2)])
@pytest.mark.parametrize(("heads", "dim", "is_weighted"), [(24, 12, True), (40, 32, True), (24, 12, False)])
def test_runs_are_chosen_as_in_the_reference(triton_device, every, top_k, heads, dim, is_weighted, monkeypatch):
    """Of few heads scores would be 0 and tie."""
    monkeypatch.setattr(top_k_module, "SCRATCH_BYTES", 4 * 40)  # several launches
    kept = KV("0", Type("fp32", (dim,)), every=every, part="index")
    pools, chunks = Pools([kept], 8, 3), [(33, 40), (0, 1), (62, 63)]
    whole = pools.batch([(0, stop) for _, stop in chunks])
    q, keys = torch.randn(9, heads, dim), torch.randn(sum(stop for _, stop in chunks), dim)
    ops.write_index.body(q, keys, cached(pools, kept), whole, every=every)
    args = q, torch.randn(9, heads) if is_weighted else None, cached(pools, kept), pools.batch(chunks)
    expected = ops.paged_index_topk.body(*args, top_k=top_k, every=every)
    made = paged_index_topk(*moved(args, triton_device), top_k=top_k, every=every).cpu()  # type: ignore[misc]
    assert torch.equal(made.sort(2).values, expected.sort(2).values)
    assert torch.equal(made < 0, expected < 0), "those chosen come first"


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("every", [4, 32])
def test_decodes_choose_runs_ahead_of_prompts(triton_device, query_len, every, monkeypatch):
    monkeypatch.setattr(top_k_module, "SEGMENT", 4)  # what is chosen of segments is chosen from again
    monkeypatch.setattr(top_k_module, "LAST_SEGMENT", 8)
    kept = KV("0", Type("fp32", (16,)), every=every, part="index")
    pools = Pools([kept], 8, 3)
    chunks = [(63 - query_len, 63), (40 - query_len, 40), (1, 64)]
    whole = pools.batch([(0, stop) for _, stop in chunks])
    tokens = 2 * query_len + 63
    q, keys = torch.randn(tokens, 24, 16), torch.randn(sum(stop for _, stop in chunks), 16)
    ops.write_index.body(q, keys, cached(pools, kept), whole, every=every)
    batch = pools.batch(chunks)._replace(num_decodes=2, query_len=query_len)
    args = q, torch.randn(tokens, 24), cached(pools, kept), batch
    expected = ops.paged_index_topk.body(*args, top_k=3, every=every)
    made = paged_index_topk(*moved(args, triton_device), top_k=3, every=every).cpu()  # type: ignore[misc]
    assert torch.equal(made.sort(2).values, expected.sort(2).values)


@pytest.mark.usefixtures("exact_fp8")
def test_keys_of_runs_in_fp8_have_scales_of_their_own(triton_device):
    case = KV("0", Type("fp8_e4m3", (20,)), every=4, part="index")
    pools = Pools([replace(case, type=Type("fp32", (20,)))], 8, 1)
    (state,) = pools.caches
    keys = torch.randn(2 * 60, 16)[::2]
    entries = torch.zeros(1 + pools.caches[state].tensor.shape[0], 2, 20).to(torch.float8_e4m3fn)
    cache = PagedCache(entries, state.kind)
    q = torch.randn(3, 24, 16)
    ops.write_index.body(q, keys, cache, pools.batch([(0, 60)]), every=4)
    args = q, torch.randn(3, 24), cache, pools.batch([(57, 60)])
    expected = ops.paged_index_topk.body(*args, top_k=5, every=4)
    there = tree_map_only(Tensor, lambda x: x.to(triton_device), args)
    made = paged_index_topk(*there, top_k=5, every=4).cpu()
    assert torch.equal(made.sort(2).values, expected.sort(2).values)


@pytest.mark.parametrize(("groups", "every"), [(1, 4), (2, 3)])
def test_the_tokens_of_runs_are_those_of_the_reference(triton_device, groups, every, monkeypatch):
    monkeypatch.setattr(compressed, "TOKENS", 16)  # of a program: of a row there are 20, or 29
    positions = torch.tensor([0, every - 1, every, 5 * every + 1, 40])
    runs = torch.tensor([[-1] * 4, [0, -1, -1, -1], [0, -1, -1, -1], [3, 0, 4, 2], [1, 7, -1, -1]]).int()
    selected = torch.stack([runs.roll(group, 0) for group in range(groups)], 1)
    made = compressed.run_tokens(selected.to(triton_device), positions.to(triton_device), every=every)
    assert torch.equal(made.cpu(), ops.run_tokens.body(selected, positions, every=every))


def test_a_layer_without_runs_attends_to_its_window(triton_device):
    args, _ = attention_case(4, 16, 5, 16, None, (30,), [(9, 30)])
    args, attributes = [*args[:3], None], {"scale": 0.3, "window": 6}
    expected = ops.paged_mqa_attention.body(*args, **attributes)
    assert_equal(paged_mqa_attention(*moved(args, triton_device), **attributes).cpu(), expected)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("every", "top_k"), [(4, 512), (4, None), (32, None)])
def test_half_precision_is_as_near_as_the_reference(triton_device, dtype, every, top_k):
    args, attributes = attention_case(every, 512, 64, 16, top_k, (64, 64), [(40, 64), (63, 64)])
    args = moved(args, triton_device, dtype)
    wide = moved(args, triton_device)
    by_reference = ops.paged_mqa_attention.body(*args, **attributes)
    truth = ops.paged_mqa_attention.body(*wide, **attributes)
    assert_as_near(paged_mqa_attention(*args, **attributes), by_reference, truth, 2.0)
