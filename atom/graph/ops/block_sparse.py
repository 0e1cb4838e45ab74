"""Ops that choose blocks of keys for each query (MiniMax-M3's sparse attention).

    q = write_index(q, k, KV("0", bf16[128], part="index"), batch)
    selected = paged_index_blocks(q, KV("0", bf16[128], part="index"), batch, block=128, top_k=16)
    a = paged_attention(q, KV("0", …), batch, None, None, None, None, None, selected, scale=0.1, block=128)

Each index head scores a block by the best of its keys, and chooses for its part of the key/value heads and their query
heads. Keys are kept as those of `index_topk`.

Shapes by letter: G index heads, D their dims, E of an entry.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import cached_entries, causal_mask, need_batch
from atom.graph.ops.base import LOWERED, SEMANTIC, op
from atom.graph.ops.sparse import from_index_entries, index_entry
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need


def block_scores(q: Tensor, k: Tensor, sees: Tensor, block: int) -> Tensor:
    """q [Q, G, D], k [L, D], sees bool[Q, L] -> fp32[Q, G, blocks], the largest q k of a block; -inf: it sees none"""
    scores, blocks = torch.einsum("qgd,ld->qgl", q.float(), k.float()), -(-len(k) // block)
    scores = F.pad(scores.masked_fill_(~sees.unsqueeze(1), float("-inf")), (0, -len(k) % block), value=float("-inf"))
    return scores.view(*scores.shape[:2], blocks, block).amax(3)


def choose_blocks(scores: Tensor, own: Tensor, top_k: int, local: int) -> Tensor:
    """The best blocks of scores fp32[Q, G, blocks], ascending, then -1: i32[Q, G, top_k]

    own: i64[Q], the block of each query, which sees the `local` blocks that end with it, whatever their scores are
    """
    before = own.unsqueeze(1) - torch.arange(scores.shape[2], device=scores.device)
    is_near = (before >= 0) & (before < local)
    best = scores.masked_fill(is_near.unsqueeze(1), float("inf")).topk(min(top_k, scores.shape[2]))
    last = torch.iinfo(torch.int32).max
    chosen = best.indices.masked_fill(best.values == float("-inf"), last).sort().values
    chosen = F.pad(chosen, (0, top_k - chosen.shape[2]), value=last)
    return chosen.masked_fill_(chosen == last, -1).int()


def chooses_all(selected: Tensor, cache: PagedCache, batch: Batch, block: int) -> bool:
    """Whether no sequence can have more blocks than a query chooses, as the host knows: attention is then to all."""
    return batch.tables[cache.kind].shape[1] * cache.blocks.shape[1] <= selected.shape[2] * block


def _choose_last(q: Tensor, k: Tensor, block: int, top_k: int, local: int) -> Tensor:
    """What the last Q of L positions choose: i32[Q, G, top_k]"""
    sees = causal_mask(len(q), len(k), None, q.device)
    own = torch.arange(len(k) - len(q), len(k), device=q.device) // block
    return choose_blocks(block_scores(q, k, sees, block), own, top_k, local)


def _chosen(q: Type, cache: KV, block: int, top_k: int, local: int) -> Type:
    """The type of what is selected."""
    tokens, heads, dim = q.shape
    need(cache.window is None, f"an indexer reads all tokens, the cache keeps {cache.window}")
    entry = index_entry(cache.type.dtype, int(dim))
    need(cache.type == entry, f"the cache keeps {cache.type} of keys for q {q}, not {entry}")
    need(block >= 1 and 1 <= local <= top_k, f"of {top_k} blocks of {block}, {local} are the nearest")
    return Type("i32", (tokens, heads, top_k))


def _index_blocks(q: Type, k: Type, cache: KV, *, block: int, top_k: int, local: int = 1) -> Type:
    need(k.shape == (q.shape[0], q.shape[2]), f"q is {q}, k {k}")
    return _chosen(q, cache, block, top_k, local)


@op(_index_blocks, level=SEMANTIC, heads={"q": 1})
def index_blocks(q: Tensor, k: Tensor, cache: PagedCache | None, *, block: int, top_k: int,
                 local: int = 1) -> Tensor:  # fmt: skip
    """The blocks of `block` tokens up to its own that score best for each query; the T tokens are one whole sequence.

    q [T, G, D], k [T, D] -> i32[T, G, top_k], ascending, then -1; the score is the largest q . k of a block's keys, of
    which no positive factor changes the choice. The cache, where a lowered graph keeps k, is not touched.

    local: the query's own block and those before it that are always chosen, in all
    """
    return _choose_last(q, k, block, top_k, local)


def _paged_index_blocks(q: Type, cache: KV, batch: BatchType, *, block: int, top_k: int, local: int = 1) -> Type:
    need_batch(batch)
    return _chosen(q, cache, block, top_k, local)


@op(_paged_index_blocks, level=LOWERED)
def paged_index_blocks(q: Tensor, cache: PagedCache, batch: Batch, *, block: int, top_k: int,
                       local: int = 1) -> Tensor:  # fmt: skip
    """`index_blocks` of a batch's sequences over the blocks that their rows of the table list.

    q [T, G, D], cache [blocks, block size, E] -> i32[T, G, top_k], all -1 of tokens of no sequence
    """
    selected = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32, device=q.device)
    for own, entries in cached_entries(cache, batch):
        selected[own] = _choose_last(q[own], from_index_entries(entries), block, top_k, local)
    return selected
