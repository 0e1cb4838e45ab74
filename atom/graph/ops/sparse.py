"""Ops that choose what a query attends to (DeepSeek-AI 2025, DeepSeek Sparse Attention).

An indexer scores the tokens before a query with few, small heads, and the query attends to the best of them only.

    q = write_index(q, k, KV("0", bf16[128], part="index"), batch)
    selected = paged_index_topk(q, weights, KV("0", bf16[128], part="index"), batch, top_k=2048)
    a = paged_mla_attention(q_nope, q_rope, W("kv_b"), KV("0", …), batch, None, selected, scale=…)

What is selected is i32[T, G, k]: of each query, for each of G groups of heads, its entries in any order, and then -1.
It is a value as any other, which later layers may read too. Entries are tokens, or runs of `every` tokens each. To
attend to the tokens of runs takes `run_tokens`, which adds those that no whole run has yet:

    runs = paged_index_topk(q, weights, KV("0", bf16[128], every=4, part="index"), batch, top_k=512, every=4)
    selected = run_tokens(runs, positions, every=4)

Shapes by letter: M heads of the indexer, D their dims, E of an entry: D, or in fp8 the D bytes of a key and those of
its scale in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import (
    FP8,
    FP8_MAX,
    entries_of,
    need_batch,
    need_every,
    queried,
    runs_mask,
    write_entries,
)
from atom.graph.ops.base import LOWERED, SEMANTIC, op
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need

SCALE_BYTES = 4  # of the scale past a key in fp8


def index_entry(cache_dtype: str, dim: int) -> Type:
    """The type of a token's entry."""
    return Type(cache_dtype, (dim + (SCALE_BYTES if cache_dtype == FP8 else 0),))


def to_index_entries(k: Tensor, dtype: torch.dtype) -> Tensor:
    """k [T, D] -> entries [T, E] as a cache of this dtype keeps them; in fp8 each key has a scale of its own"""
    if dtype is not torch.float8_e4m3fn:
        return k.to(dtype)
    wide = k.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / FP8_MAX
    keys = (wide / scales).clamp(-FP8_MAX, FP8_MAX).to(dtype)
    return torch.cat((keys.view(torch.uint8), scales.view(torch.uint8)), dim=-1).view(dtype)


def from_index_entries(entries: Tensor) -> Tensor:
    """Entries [C, E] -> keys [C, D], of entries in fp8 in float32"""
    if entries.dtype is not torch.float8_e4m3fn:
        return entries
    stored = entries.view(torch.uint8)
    scales = stored[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn).float() * scales


def index_scores(q: Tensor, k: Tensor, weights: Tensor | None) -> Tensor:
    """q [Q, M, D], k [C, D], weights [Q, M], None: 1 -> fp32[Q, C], the sum over heads of weight * relu(q . k)"""
    scores = torch.einsum("qmd,cd->qmc", q.float(), k.float()).relu()
    return scores.sum(1) if weights is None else torch.einsum("qm,qmc->qc", weights.float(), scores)


def choose(scores: Tensor, top_k: int) -> Tensor:
    """scores fp32[Q, C], -inf of what is out of sight -> i32[Q, top_k], the best first, then -1"""
    best = scores.topk(min(top_k, scores.shape[1]))
    ids = best.indices.masked_fill(best.values == float("-inf"), -1)
    return F.pad(ids, (0, top_k - ids.shape[1]), value=-1).int()


def _choose_last(q: Tensor, k: Tensor, weights: Tensor | None, top_k: int, length: int, every: int) -> Tensor:
    """What queries at the last Q of `length` positions choose of the entries k [C, D]: i32[Q, 1, top_k]"""
    sees = runs_mask(len(q), length, every, q.device)
    return choose(index_scores(q, k, weights).masked_fill(~sees, float("-inf")), top_k).unsqueeze(1)


def _chosen(q: Type, weights: Type | None, cache: KV, top_k: int, every: int) -> Type:
    """The type of what is selected."""
    need_every(cache, every)
    tokens, heads, dim = q.shape
    need(weights is None or weights.shape == (tokens, heads), f"the weights are {weights} for q {q}")
    need(cache.window is None, f"an indexer reads all tokens, the cache keeps {cache.window}")
    entry = index_entry(cache.type.dtype, int(dim))
    need(cache.type == entry, f"the cache keeps {cache.type} of keys for q {q}, not {entry}")
    need(top_k > 0, f"top_k={top_k} chooses nothing")
    return Type("i32", (tokens, 1, top_k))


def _index_topk(q: Type, k: Type, weights: Type | None, cache: KV, *, top_k: int, every: int = 1) -> Type:
    need(k.shape == (q.shape[0], q.shape[2]), f"q is {q}, k {k}")
    return _chosen(q, weights, cache, top_k, every)


@op(_index_topk, level=SEMANTIC)
def index_topk(q: Tensor, k: Tensor, weights: Tensor | None, cache: PagedCache | None, *, top_k: int,
               every: int = 1) -> Tensor:  # fmt: skip
    """The tokens up to its own that score best for each query; the T tokens are one whole sequence.

    q [T, M, D], k [T, D], weights [T, M], None: 1 -> i32[T, 1, top_k]; a score is the sum over heads of weight *
    relu(q . k), of which no positive factor changes the choice. The cache, where a lowered graph keeps k, is not
    touched.

    every: tokens of a run that is chosen as one, of which k has a row at the last token, see `compress`
    """
    return _choose_last(q, k[every - 1 :: every], weights, top_k, len(k), every)


def _write_index(q: Type, k: Type, cache: KV, batch: BatchType, *, every: int = 1) -> Type:
    need_batch(batch)
    need_every(cache, every)
    entry = index_entry(cache.type.dtype, int(k.shape[-1]))
    need(cache.type == entry, f"the cache keeps {cache.type} of {k}, not {entry}")
    return q


@op(_write_index, level=LOWERED, state=True)
def write_index(q: Tensor, k: Tensor, cache: PagedCache, batch: Batch, *, every: int = 1) -> Tensor:
    """Write k to the cache, give q.

    q [T, M, D], k [T, D], of the last token of each run, cache [blocks, entries of a block, E] -> q [T, M, D]
    """
    write_entries(cache, batch, to_index_entries(k, cache.blocks.dtype), every)
    return q


def _paged_index_topk(q: Type, weights: Type | None, cache: KV, batch: BatchType, *, top_k: int,
                      every: int = 1) -> Type:  # fmt: skip
    need_batch(batch)
    return _chosen(q, weights, cache, top_k, every)


@op(_paged_index_topk, level=LOWERED)
def paged_index_topk(q: Tensor, weights: Tensor | None, cache: PagedCache, batch: Batch, *, top_k: int,
                     every: int = 1) -> Tensor:  # fmt: skip
    """`index_topk` of a batch's sequences over the blocks that their rows of the table list.

    q [T, M, D], weights [T, M], cache [blocks, entries of a block, E] -> i32[T, 1, top_k], positions in the sequence,
    or numbers of runs
    """
    out = torch.full((len(q), 1, top_k), -1, dtype=torch.int32, device=q.device)
    for row, own in queried(batch):
        keys = from_index_entries(entries_of(cache, batch, row, every=every))
        weighs = None if weights is None else weights[own]
        out[own] = _choose_last(q[own], keys, weighs, top_k, int(batch.lengths[row]), every)
    return out


def _run_tokens(selected: Type, positions: Type, *, every: int) -> Type:
    need(selected.dtype == "i32" and len(selected.shape) == 3, f"the runs that are selected are {selected}")
    need(positions == Type("i64", selected.shape[:1]), f"positions are {positions} for runs {selected}")
    need(every > 1, f"a run of {every} tokens")
    return selected.with_last(int(selected.shape[-1]) * every + every - 1)


@op(_run_tokens)
def run_tokens(selected: Tensor, positions: Tensor, *, every: int) -> Tensor:
    """The tokens of the runs that are selected for each query, and of those after the last whole run up to its own.

    selected i32[T, G, k], numbers of runs and then -1, positions i64[T] -> i32[T, G, k * every + every - 1], positions
    and then -1: first of the tokens that no whole run has, which are fewer than a run's
    """
    num = selected.shape[2] * every + every - 1
    ended = (positions + 1) // every * every  # the tokens that whole runs have
    num_rest = (positions + 1 - ended).view(-1, 1, 1)
    numbers = positions.new_ones(num).cumsum(0) - 1  # an arange that a compiler can trace
    places = numbers - num_rest  # among the tokens of runs; below 0: of the rest
    runs = selected.gather(2, (places.clamp(0, num - every) // every).expand(-1, selected.shape[1], -1))
    tokens = (runs * every + places % every).masked_fill((runs < 0) | (places > num - every), -1)
    return torch.where(places < 0, ended.view(-1, 1, 1) + places + num_rest, tokens).int()
