from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from graph.ops.checked import Cache, checked
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from atom.graph import KV, Batch, Type, ops

T, G, D, BLOCK = 23, 2, 6, 4
KEYS = KV("0", Type("fp32", (D,)), part="index")
LAYER = KV("0", Type("fp32", (2, 4, D)))


def indexer(top_k: int, local: int) -> MiniMaxM3VLIndexer:
    """transformers' own, of q and k as they come: its linears give them, and its norms give what they read."""
    sizes = {"index_head_dim": D, "index_n_heads": G, "index_block_size": BLOCK, "index_topk_blocks": top_k}
    config = SimpleNamespace(**sizes, index_local_blocks=local, hidden_size=(G + 1) * D, rms_norm_eps=0.0)
    made = MiniMaxM3VLIndexer(config, 0)
    made.q_proj = torch.nn.Linear((G + 1) * D, G * D, bias=False)
    made.k_proj = torch.nn.Linear((G + 1) * D, D, bias=False)
    with torch.no_grad():
        made.q_proj.weight.copy_(torch.eye((G + 1) * D)[: G * D])
        made.k_proj.weight.copy_(torch.eye((G + 1) * D)[G * D :])
    made.q_norm = made.k_norm = torch.nn.Identity()
    return made


def random_qk(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, G, D), torch.randn(num_tokens, D)


@pytest.mark.parametrize(("top_k", "local"), [(1, 1), (3, 1), (3, 2), (4, 4), (9, 1)])
def test_blocks_are_those_that_transformers_chooses(top_k: int, local: int):
    q, k = random_qk(T)
    x = torch.cat((q.flatten(1), k), dim=1).unsqueeze(0)
    still = torch.ones(1, T, D), torch.zeros(1, T, D)
    with torch.no_grad():
        expected = indexer(top_k, local)(x, still, None, torch.arange(T).unsqueeze(0))[0].transpose(0, 1)
    selected = checked(ops.index_blocks, q, k, Cache(KEYS, None), block=BLOCK, top_k=top_k, local=local)
    found = [sorted(row.tolist()) for row in expected.flatten(0, 1)]
    chosen = selected.flatten(0, 1).tolist()
    assert [sorted(x for x in row if x >= 0) for row in chosen] == [[x for x in row if x >= 0] for row in found]
    assert all(row == sorted(row, key=lambda x: x if x >= 0 else T) for row in chosen), "ascending, then -1"
    assert all(row[sum(x >= 0 for x in row) - 1] == t // BLOCK for t in range(T) for row in selected[t].tolist())


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_of_scattered_caches_are_those_of_whole_sequences(block_size: int):
    lengths, chunks = [9, 23, 17], [1, 1, 6]
    width = -(-max(lengths) // block_size)
    cache = torch.full((100, block_size, D), float("nan"))
    table = (1 + torch.randperm(99)[: 3 * width]).view(3, width).int()
    queries, expected = [], []
    for row, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        q, k = random_qk(length)
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        writes = Batch({}, {KEYS.kind: slots}, torch.tensor([0]), torch.tensor([]), 0)
        checked(ops.write_index, q, k, Cache(KEYS, cache), writes)
        expected.append(ops.index_blocks(q, k, None, block=BLOCK, top_k=3)[-chunk:])
        queries.append(q[-chunk:])
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    batch = Batch({KEYS.kind: table}, {}, starts, torch.tensor(lengths).int(), 2)
    padded = torch.cat([*queries, torch.zeros(2, G, D)])
    selected = checked(ops.paged_index_blocks, padded, Cache(KEYS, cache), batch, block=BLOCK, top_k=3)
    assert torch.equal(selected[:-2], torch.cat(expected))
    assert (selected[-2:] == -1).all(), "tokens of no sequence"


def test_heads_attend_to_the_blocks_of_their_index_head():
    torch.manual_seed(0)
    q, k, v = torch.randn(T, 8, D), torch.randn(T, 4, D), torch.randn(T, 4, D)
    selected = ops.index_blocks(*random_qk(T), None, block=BLOCK, top_k=3)
    mask = torch.zeros(8, T, T, dtype=torch.bool)
    for head in range(8):
        for query in range(T):
            for number in selected[query, head // 4].tolist():
                if number >= 0:
                    mask[head, query, number * BLOCK : (number + 1) * BLOCK] = True
    mask &= torch.ones(T, T, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    more = (None,) * 5
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), *more, selected, scale=0.7, block=BLOCK)
    torch.testing.assert_close(out, expected)
    whole = ops.index_blocks(*random_qk(T), None, block=BLOCK, top_k=6)
    out = ops.attention(q, k, v, None, *more, whole, scale=0.7, block=BLOCK)
    torch.testing.assert_close(out, ops.attention(q, k, v, None, scale=0.7), msg="all blocks are chosen")


def test_what_does_not_fit_is_an_error():
    q, k = random_qk(3)
    with pytest.raises(ValueError, match="of 2 blocks of 4, 3 are the nearest"):
        checked(ops.index_blocks, q, k, Cache(KEYS, None), block=BLOCK, top_k=2, local=3)
    a, kv = torch.randn(3, 8, D), torch.randn(3, 4, D)
    selected = torch.zeros(3, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="have no window, slopes and ends"):
        checked(ops.attention, a, kv, kv, Cache(LAYER, None), *(None,) * 5, selected, scale=1.0, window=4, block=4)
    with pytest.raises(ValueError, match="4 does not divide by 8"):
        checked(
            ops.attention, a, kv, kv, Cache(LAYER, None), *(None,) * 5, selected.repeat(1, 4, 1), scale=1.0, block=4
        )
