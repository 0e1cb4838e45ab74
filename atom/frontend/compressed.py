"""Entries that runs of tokens have together (DeepSeek-AI 2026), and the choice among them.

runs = write_runs(writer, h, q_a, attention, rotary, layer)
a = writer.call(ops.mqa_attention, q, kv, cache, sinks, k_scale, *runs, every=attention.compress.every)
"""

from __future__ import annotations

from torch.fx import Node

from atom.config import AttentionConfig, CompressConfig, IndexConfig
from atom.frontend.rope import Rotary, rotate_last
from atom.frontend.writer import Writer, required
from atom.graph import KV, Type, W, ops
from atom.graph.ops.sparse import index_entry


def write_runs(
    writer: Writer, h: Node, q_a: Node, attention: AttentionConfig, rotary: Rotary | None, layer: int
) -> list[Node | KV]:
    """What attention reads besides tokens: entries of runs [T, D], their cache, and which of them, if some are chosen.

    q_a: what an indexer makes queries of
    """
    compress, dim = required(attention.compress), required(attention.head_dim)
    pooled = pool(writer, h, "", dim, compress, rotary, layer)
    found = [pooled, KV(writer.name("layer", layer), Type(writer.dtype, (dim,)), every=compress.every)]
    if attention.index is not None:
        found.append(choose_runs(writer, h, q_a, attention.index, compress, rotary, layer))
    return found


def pool(
    writer: Writer, h: Node, of: str, dim: int, compress: CompressConfig, rotary: Rotary | None, layer: int
) -> Node:
    """The entries [T, D] of runs, each in the row of its last token, normed and rotated as its first token is.

    of: "": of the attention; "index": of its indexer
    """
    width, role = dim * (2 if compress.overlaps else 1), f"{of}_run".lstrip("_")
    kv, gate = writer.linears(h, {f"{role}_kv": width, f"{role}_gate": width}, False, layer)
    pooled = pool_by_gate(writer, kv, gate, role, compress, layer)
    pooled = writer.norm(pooled, f"{role}_norm", layer, name=role)
    if rotary is None:
        return pooled
    pooled = writer.call(ops.split_heads, pooled, heads=1, name=role)
    pooled = rotate_last(writer, pooled, required(rotary.runs), rotary.interleaved, role)
    merged: Node = writer.call(ops.merge_heads, pooled, name=role)
    return merged


def pool_by_gate(writer: Writer, kv: Node, gate: Node, role: str, compress: CompressConfig, layer: int) -> Node:
    """kv and gate [T, C] -> what is pooled of runs [T, D], each in the row of its last token"""
    every, width = compress.every, int(kv.meta["type"].shape[-1])
    bias = W(writer.name(f"{role}_bias", layer), Type("fp32", (every, width)))
    window = every * (2 if compress.overlaps else 1)
    kept = KV(writer.name("layer", layer), Type(writer.dtype, (2, width)), window=window, part=f"{role}s")
    overlaps = {"overlaps": True} if compress.overlaps else {}
    pooled: Node = writer.call(ops.compress, kv, gate, bias, kept, **overlaps, name=role)
    return pooled


def choose_runs(
    writer: Writer, h: Node, q_a: Node, index: IndexConfig, compress: CompressConfig, rotary: Rotary | None, layer: int
) -> Node:
    """The numbers i32[T, 1, top_k] of the runs that queries attend to, by keys that are pooled as entries are."""
    q = writer.linear(q_a, "index_q", index.heads * index.dim, False, layer)
    q = writer.call(ops.split_heads, q, heads=index.heads, name="index_q")
    if rotary is not None:
        q = rotate_last(writer, q, rotary.queries, rotary.interleaved, "index_q")
    k = pool(writer, h, "index", index.dim, compress, rotary, layer)
    weights = writer.linear(h, "index_weights", index.heads, False, layer)
    entry = index_entry(writer.cache_dtype, index.dim)
    cache = KV(writer.name("layer", layer), entry, every=compress.every, part="index")
    by = {"top_k": index.top_k, "every": compress.every}
    chosen: Node = writer.call(ops.index_topk, q, k, weights, cache, **by, name="selected")
    return chosen
