"""Blocks that queries choose on a GPU: long contexts, in the shape of MiniMax-M3, and tiny models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import set_depth
from gpu.test_models import assert_greedy
from kernels.paged import KIND

from atom import LLMEngine
from atom.graph import Batch, PagedCache, ops
from atom.graph.ops.attention import attend
from atom.graph.ops.block_sparse import block_scores, choose_blocks
from atom.kernels import LoadContext, find_kernel

pytestmark = pytest.mark.gpu

Open = Callable[..., LLMEngine]
RULES = {"block": 128, "top_k": 16}
GROUPS, KV_HEADS, HEADS, DIM = 4, 4, 64, 128


def make_batch(lengths: list[int], counts: list[int], num_decodes: int, block_size: int) -> Batch:
    """Sequences whose blocks are scattered."""
    widths = [-(-length // block_size) for length in lengths]
    numbers = (1 + torch.randperm(sum(widths))).split(widths)
    table = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    for row, own in enumerate(numbers):
        table[row, : len(own)] = own
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    return Batch({KIND: table.cuda()}, {}, starts, torch.tensor(lengths).int().cuda(), num_decodes)


def entries_of(cache: torch.Tensor, batch: Batch, row: int) -> torch.Tensor:
    return cache[batch.tables[KIND][row].long()].flatten(0, 1)[: int(batch.lengths[row])]


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("lengths", "counts", "num_decodes"),
    [([40000, 129, 1, 5000], [1, 1, 1, 1], 4), ([3000, 20000, 9000], [1, 300, 4000], 1)],
)
@torch.inference_mode()
def test_long_contexts_in_the_shape_of_minimax_m3(
    lengths: list[int], counts: list[int], num_decodes: int, block_size: int
):
    torch.manual_seed(0)
    batch = make_batch(lengths, counts, num_decodes, block_size)
    num_blocks, num_tokens = 1 + sum(-(-length // block_size) for length in lengths), sum(counts)
    keys = torch.randn(num_blocks, block_size, DIM, device="cuda").bfloat16()
    cache = torch.randn(num_blocks, block_size, 2, KV_HEADS, DIM, device="cuda").bfloat16()
    index_q = torch.randn(num_tokens, GROUPS, DIM, device="cuda").bfloat16()
    q = torch.randn(num_tokens, HEADS, DIM, device="cuda").bfloat16()
    choosing, attending = (
        find_kernel(op, "triton").load(LoadContext()) for op in (ops.paged_index_blocks, ops.paged_attention)
    )
    selected = choosing(index_q, PagedCache(keys, KIND), batch, **RULES)
    args = q, PagedCache(cache, KIND), batch, None, None, None, None, None, selected
    out = attending(*args, scale=DIM**-0.5, block=RULES["block"])
    for row, (first, last) in enumerate(zip(batch.starts.tolist(), batch.starts.tolist()[1:], strict=False)):
        some = slice(max(first, last - 40), last)
        positions = torch.arange(lengths[row] - (last - some.start), lengths[row], device="cuda")
        own_keys, own = entries_of(keys, batch, row), positions // RULES["block"]
        sees = torch.arange(lengths[row], device="cuda") <= positions.unsqueeze(1)
        scores = block_scores(index_q[some], own_keys, sees, RULES["block"])
        expected = choose_blocks(scores, own, RULES["top_k"], 1)
        chosen = selected[some]
        # those that are chosen by rounding only have scores as near as that
        assert (chosen != expected).float().mean() < 1e-3
        assert torch.equal((chosen >= 0).sum(2), (expected >= 0).sum(2))
        entries = entries_of(cache, batch, row)
        truth = attend(q[some].float(), *entries.float().unbind(1), DIM**-0.5, selected=chosen, block=RULES["block"])
        error = (out[some].float() - truth).norm() / truth.norm()
        assert error < 4e-3, f"sequence {row}: {error}"


@pytest.mark.parametrize("budget", [7, 33])
def test_chunks_mixed_with_decodes_change_nothing(budget: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (3, 61, 20, 50)]
    engine = open_engine("minimax_m3", level=3, max_num_batched_tokens=budget, max_num_seqs=4, block_size=3,
                         cudagraph_capture_sizes=[1, 4])  # fmt: skip
    assert_greedy(engine, prompts, references("minimax_m3"))
    assert engine.metrics.scheduler.num_chunks > (10 if budget == 7 else 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_preemption_prefixes_and_depths_together_change_nothing(depth: int, open_engine: Open, references: Any):
    engine = open_engine("minimax_m3", level=3, num_kvcache_blocks=30, block_size=4, max_model_len=106,
                         max_num_batched_tokens=16, enable_prefix_caching=True)  # fmt: skip
    set_depth(engine, depth)
    shared = tiny.prompt(30)
    prompts = [shared, tiny.prompt(25, seed=1), shared[:17] + tiny.prompt(24, seed=2)]
    for batch in (prompts, prompts[::-1]):
        assert_greedy(engine, batch, references("minimax_m3"))
    stats = engine.metrics.scheduler
    assert stats.num_chunks > 0 and stats.num_prefix_hit_tokens > 0 and stats.num_preemptions > 0
