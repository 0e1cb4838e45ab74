from __future__ import annotations

import pytest
import torch
from graph.ops.checked import Cache, checked
from torch import Tensor
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from atom.graph import KV, Batch, Type, ops
from atom.graph.ops.sparse import from_index_entries, index_entry, to_index_entries

M, D, R, TOP_K = 24, 10, 6, 5  # of few heads many scores would be 0 and tie
LAYER = KV("0", Type("fp32", (D,)), part="index")


def random_inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, M, D), torch.randn(num_tokens, D), torch.randn(num_tokens, M)


def sets(selected: Tensor) -> list[set[int]]:
    """What each query chose, all of which is listed before -1 and once."""
    rows = selected[:, 0].tolist()
    chosen = [[each for each in row if each >= 0] for row in rows]
    assert all(row[: len(own)] == own and len({*own}) == len(own) for row, own in zip(rows, chosen, strict=True))
    return [{*own} for own in chosen]


@pytest.mark.parametrize("interleaved", [False, True])
@torch.inference_mode()
def test_a_query_chooses_as_the_indexer_of_deepseek_v32_and_glm(interleaved: bool):
    config = DeepseekV32Config(
        hidden_size=24, q_lora_rank=9, qk_rope_head_dim=R, index_n_heads=M, index_head_dim=D, index_topk=TOP_K
    )
    torch.manual_seed(0)
    layer = (GlmMoeDsaIndexer if interleaved else DeepseekV32Indexer)(config, 0)
    torch.nn.init.uniform_(layer.k_norm.weight, 0.5, 2.0)
    torch.nn.init.normal_(layer.k_norm.bias)
    x, low, num = torch.randn(17, 24), torch.randn(17, 9), 17
    angles = DeepseekV32RotaryEmbedding(config)(x, torch.arange(num).unsqueeze(0))
    mask = torch.full((1, num, num), float("-inf")).triu(1)
    expected = layer(x.unsqueeze(0), low.unsqueeze(0), angles, mask, None)[0]

    cos, sin = ops.rotary(torch.arange(num), 10000.0 ** (-torch.arange(0, R, 2) / R))
    q = ops.split_heads(ops.linear(low, layer.wq_b.weight), heads=M)
    k = ops.layer_norm(ops.linear(x, layer.wk.weight), layer.k_norm.weight, layer.k_norm.bias, eps=1e-6)
    q, k = (ops.rope(each, cos, sin, interleaved=interleaved) for each in (q, ops.split_heads(k, heads=1)))
    weights = ops.linear(x, layer.weights_proj.weight)
    selected = checked(ops.index_topk, q, ops.merge_heads(k), weights, Cache(LAYER, None), top_k=TOP_K)
    assert sets(selected) == [{*row[: at + 1]} if at < TOP_K else {*row} for at, row in enumerate(expected.tolist())]


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_choosing_among_scattered_blocks_is_choosing_in_a_sequence(block_size: int, query_len: int):
    lengths = [TOP_K - 1, TOP_K, TOP_K + 1, 23, 0, query_len, 16, 17]
    chunks = [min(query_len, length) for length in lengths]  # others came in earlier steps
    width = -(-max(lengths) // block_size)
    cache = torch.full((len(lengths) * width + 1, block_size, D), float("nan"))
    table = (1 + torch.randperm(len(cache) - 1)).view(len(lengths), width).int()
    queries, expected = [], []
    for row, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        q, k, weights = random_inputs(length)
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        batch = Batch({}, {LAYER.kind: slots}, torch.tensor([0]), torch.tensor([]), 0)
        assert checked(ops.write_index, q, k, Cache(LAYER, cache), batch) is q
        expected += sets(ops.index_topk(q, k, weights, None, top_k=TOP_K))[length - chunk :]
        queries.append((q[length - chunk :], weights[length - chunk :]))
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    batch = Batch({LAYER.kind: table}, {}, starts, torch.tensor(lengths).int(), len(lengths), query_len)
    q, weights = map(torch.cat, zip(*queries, strict=True))
    padded = [torch.cat((each, each[:2])) for each in (q, weights)]  # by tokens of no sequence
    selected = checked(ops.paged_index_topk, *padded, Cache(LAYER, cache), batch, top_k=TOP_K)
    assert sets(selected) == [*expected, set(), set()]


def test_a_query_attends_to_what_is_selected_and_to_nothing_else():
    torch.manual_seed(0)
    heads, plain, rotated, rank, value, num = 3, 5, 6, 10, 4, 7
    layer = KV("0", Type("fp32", (rank + rotated,)))
    q_nope, q_rope = torch.randn(num, heads, plain), torch.randn(num, heads, rotated)
    latent, k_rope = torch.randn(num, rank), torch.randn(num, 1, rotated)
    kv_b = torch.randn(heads * (plain + value), rank)
    chosen = [[0], [1, 0], [0, 2], [3], [2, 1], [5, 0], [0, 6]]
    selected = torch.tensor([[*own, -1, -1][:3] for own in chosen], dtype=torch.int32).unsqueeze(1)
    args = q_nope, q_rope, latent, k_rope, kv_b, Cache(layer, None), None, selected
    out = checked(ops.mla_attention, *args, scale=0.3)
    for at, own in enumerate(chosen):
        expanded = (latent[own] @ kv_b.T).view(len(own), heads, plain + value)
        scores = torch.einsum("np,knp->nk", q_nope[at], expanded[..., :plain])
        scores = 0.3 * (scores + torch.einsum("nr,kr->nk", q_rope[at], k_rope[own, 0]))
        expected = torch.einsum("nk,knu->nu", scores.softmax(-1), expanded[..., plain:])
        torch.testing.assert_close(out[at], expected)


def test_a_key_in_fp8_has_a_scale_of_its_own():
    _, k, _ = random_inputs(9)
    k[2], k[4] = 0.0, 1e4 * k[4]
    entries = to_index_entries(k.bfloat16(), torch.float8_e4m3fn)
    assert index_entry("fp8_e4m3", D) == Type("fp8_e4m3", tuple(entries.shape[1:])) == Type("fp8_e4m3", (D + 4,))
    wide = k.bfloat16().float()
    largest = wide.abs().amax(-1, keepdim=True)
    assert ((from_index_entries(entries) - wide).abs() <= largest / 28).all(), "the step of 448 is 32, of which half"
    assert not from_index_entries(entries)[2].any()
    assert to_index_entries(k, torch.bfloat16).dtype == torch.bfloat16


def test_what_does_not_fit_is_refused():
    q, k, weights = Type("bf16", ("T", M, D)), Type("bf16", ("T", D)), Type("bf16", ("T", M))
    cache = KV("0", Type("bf16", (D,)), part="index")

    def infer(k: Type = k, weights: Type = weights, cache: KV = cache, top_k: int = TOP_K) -> Type:
        return ops.index_topk.infer(q, k, weights, cache, top_k=top_k)

    assert infer() == Type("i32", ("T", 1, TOP_K))
    with pytest.raises(ValueError, match=r"q is bf16\[T, 24, 10\], k bf16\[T, 11\]"):
        infer(k=Type("bf16", ("T", D + 1)))
    with pytest.raises(ValueError, match=r"the weights are bf16\[T, 10\] for q bf16\[T, 24, 10\]"):
        infer(weights=k)
    with pytest.raises(ValueError, match=r"the cache keeps fp8_e4m3\[10\] of keys for q .*, not fp8_e4m3\[14\]"):
        infer(cache=KV("0", Type("fp8_e4m3", (D,)), part="index"))
    with pytest.raises(ValueError, match="an indexer reads all tokens, the cache keeps 4"):
        infer(cache=KV("0", Type("bf16", (D,)), part="index", window=4))
    with pytest.raises(ValueError, match="top_k=0 chooses nothing"):
        infer(top_k=0)

    layer = KV("0", Type("bf16", (16,)))
    own = Type("bf16", ("T", 3, 5)), Type("bf16", ("T", 3, 6)), Type("bf16", ("T", 10)), Type("bf16", ("T", 1, 6))
    kv_b = Type("bf16", (27, 10))
    with pytest.raises(ValueError, match=r"what is selected is i64\[T, 1, 5\], not i32\[T, G, k\]"):
        ops.mla_attention.infer(*own, kv_b, layer, None, Type("i64", ("T", 1, TOP_K)), scale=1.0)
    with pytest.raises(ValueError, match="3 does not divide by 2"):
        ops.mla_attention.infer(*own, kv_b, layer, None, Type("i32", ("T", 2, TOP_K)), scale=1.0)


def test_tokens_of_chosen_runs_come_with_those_of_no_whole_run():
    runs = torch.tensor([[[-1, -1]], [[0, -1]], [[1, 0]], [[2, 0]]]).int()
    tokens = checked(ops.run_tokens, runs, torch.tensor([1, 4, 5, 9]), every=3)
    assert tokens[:, 0].tolist() == [
        [0, 1, -1, -1, -1, -1, -1, -1],
        [3, 4, 0, 1, 2, -1, -1, -1],
        [3, 4, 5, 0, 1, 2, -1, -1],
        [9, 6, 7, 8, 0, 1, 2, -1],
    ]
    with pytest.raises(ValueError, match="a run of 1 tokens"):
        ops.run_tokens.infer(Type("i32", ("T", 1, 2)), Type("i64", ("T",)), every=1)
