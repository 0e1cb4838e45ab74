"""What tokens have together, and what chooses among it, against DeepSeek-V4 of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graph.ops.checked import Cache, checked
from graph.ops.runs import Pools, in_steps, leaves, led_by_padding
from torch import Tensor
from transformers import DeepseekV4Config, Glm5NextTextConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.glm5_next import modeling_glm5_next as glm5_next

from atom.graph import KV, Batch, PagedCache, Type, ops
from atom.graph.ops.attention import entries_of
from atom.kernels.torch.sparse import paged_index_topk

HIDDEN, D, INDEX_DIM, R, HEADS = 24, 16, 8, 4, 3  # hidden, head and index dims, rotated ones, heads of the indexer
THETA = 160000.0
CONFIG = DeepseekV4Config(
    hidden_size=HIDDEN, num_attention_heads=4, head_dim=D, q_lora_rank=12, o_groups=2, o_lora_rank=6, sliding_window=6,
    index_n_heads=HEADS, index_head_dim=INDEX_DIM, index_topk=2, num_hidden_layers=3, attn_implementation="eager",
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, partial_rotary_factor=R / D,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rope_theta=THETA, max_position_embeddings=256,
)  # fmt: skip
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


def compressor(kind: str) -> Any:
    torch.manual_seed(0)
    made = deepseek_v4.COMPRESSOR_CLASSES[kind](CONFIG)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return made.eval()


def rotate(x: Tensor, positions: Tensor, every: int = 1, theta: float = THETA, back: bool = False) -> Tensor:
    """x [T, N, D], the last R dims in pairs; back: by minus the angle"""
    cos, sin = ops.rotary(positions, theta ** (-torch.arange(0, R, 2) / R), every=every)
    sin = -sin if back else sin
    still, turned = ops.split(x, sizes=[x.shape[-1] - R, R])
    return torch.cat((still, ops.rope(turned, cos, sin, interleaved=True)), -1)


def finish(pooled: Tensor, norm: Any, positions: Tensor, every: int) -> Tensor:
    """What is pooled, normed and rotated"""
    normed = ops.rms_norm(pooled, norm.weight, eps=CONFIG.rms_norm_eps)
    return rotate(normed.unsqueeze(1), positions, every).squeeze(1)


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("num_tokens", [3, 8, 21])
def test_pooled_runs_are_those_of_deepseek_v4(kind: str, num_tokens: int):
    module, every, x = compressor(kind), RATES[kind], torch.randn(num_tokens, HIDDEN)
    positions, overlaps = torch.arange(num_tokens), kind == "compressed_sparse_attention"
    runs, _ = leaves(D, every, overlaps)
    with torch.inference_mode():
        expected, _ = module(x[None], torch.zeros(1, num_tokens, 12), positions[None], None, 1)
        kv, gate = module.kv_proj(x), module.gate_proj(x)
        pooled = checked(ops.compress, kv, gate, module.position_bias.data, Cache(runs, None), overlaps=overlaps)
        made = finish(pooled, module.kv_norm, positions, every)
    torch.testing.assert_close(made[every - 1 :: every], expected[0, 0])
    rest = positions % every != every - 1
    assert not pooled[rest].any(), "tokens that end no run have zeros"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("overlaps", "every"), [(True, 4), (False, 4), (False, 8), (True, 2)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_tokens", [1, 3, 30])
def test_runs_are_pooled_in_the_step_that_ends_them(overlaps: bool, every: int, block_size: int, max_tokens: int):
    torch.manual_seed(0)
    lengths, (runs, entries) = (37, 5, 50), leaves(D, every, overlaps)
    width, pools = (2 * D if overlaps else D), Pools(leaves(D, every, overlaps), block_size, 3)
    given = [torch.randn(2, length, width) for length in lengths]
    bias, q = torch.randn(every, width), torch.zeros(0)
    whole = [ops.compress(kv, gate, bias, None, overlaps=overlaps) for kv, gate in given]
    for chunks in in_steps(lengths, max_tokens):
        kv, gate = torch.cat([each[:, start:stop] for each, (start, stop) in zip(given, chunks, strict=True)], 1)
        batch = pools.batch(chunks)
        pooled = checked(ops.paged_compress, kv, gate, bias, pools.caches[runs], batch, overlaps=overlaps)
        expected = torch.cat([each[start:stop] for each, (start, stop) in zip(whole, chunks, strict=True)])
        torch.testing.assert_close(pooled, expected)
        ops.write_index(q, pooled, PagedCache(pools.caches[entries].tensor, entries.kind), batch, every=every)
    for row, each in enumerate(whole):
        kept = entries_of(
            PagedCache(pools.caches[entries].tensor, entries.kind),
            pools.batch([(0, length) for length in lengths]),
            row,
            every=every,
        )
        torch.testing.assert_close(kept, each[every - 1 :: every])


@pytest.mark.parametrize("max_tokens", [1, 30])
def test_runs_without_a_gate_have_the_mean_of_their_tokens(max_tokens: int):
    lengths, every = (37, 5, 50), 4
    runs = KV("0", Type("fp32", (1, D)), window=every, part="index_runs")
    pools, given = Pools([runs], 8, 3), [torch.randn(length, D) for length in lengths]
    means = [torch.zeros(length, D) for length in lengths]
    for each, mean in zip(given, means, strict=True):
        for end in range(every, len(each) + 1, every):
            mean[end - 1] = each[end - every : end].mean(0)
        torch.testing.assert_close(checked(ops.compress, each, None, None, Cache(runs, None), every=every), mean)
    for chunks in in_steps(lengths, max_tokens):
        kv, expected = (torch.cat([each[slice(*chunk)] for each, chunk in zip(of, chunks, strict=True)])
                        for of in (given, means))  # fmt: skip
        pooled = checked(ops.paged_compress, kv, None, None, pools.caches[runs], pools.batch(chunks), every=every)
        torch.testing.assert_close(pooled, expected)
    with pytest.raises(ValueError, match=r"the gate is fp32\[5, 16\], the bias None, every=4"):
        ops.compress.infer(Type("fp32", (5, D)), Type("fp32", (5, D)), None, runs, every=4)


def test_a_token_that_pads_a_step_ends_no_run():
    runs = KV("0", Type("fp32", (1, D)), window=4, part="index_runs")
    pools, kv = Pools([runs], 8, 1), torch.randn(9, D)
    pooled = checked(ops.paged_compress, kv, None, None, pools.caches[runs], led_by_padding(pools.batch([(0, 8)])),
                     every=4)  # fmt: skip
    assert pooled.any(1).nonzero().flatten().tolist() == [4, 8]
    torch.testing.assert_close(pooled[4], kv[1:5].mean(0))


@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("kernel", [ops.paged_index_topk, paged_index_topk], ids=["reference", "torch"])
def test_runs_are_chosen_as_by_the_indexer_of_deepseek_v4(kernel: Any, block_size: int):
    module, every = compressor("compressed_sparse_attention").indexer, 4
    lengths = (30, 7)
    xs = [torch.randn(length, HIDDEN) for length in lengths]
    latents = [torch.randn(length, 12) for length in lengths]
    runs, keys = leaves(INDEX_DIM, every, True)
    pools = Pools((runs, keys), block_size, 2)
    with torch.inference_mode():
        expected = [module(x[None], latent[None], torch.arange(len(x))[None], None, 1)[0]
                    for x, latent in zip(xs, latents, strict=True)]  # fmt: skip

        def choose(x: Tensor, latent: Tensor, positions: Tensor, batch: Batch | None) -> Tensor:
            q = rotate(module.q_b_proj(latent).view(-1, HEADS, INDEX_DIM), positions)
            kv, gate, bias = module.kv_proj(x), module.gate_proj(x), module.position_bias.data
            weights, more = module.scorer.weights_proj(x), {"top_k": CONFIG.index_topk, "every": every}
            if batch is None:
                k = finish(ops.compress(kv, gate, bias, None, overlaps=True), module.kv_norm, positions, every)
                return checked(ops.index_topk, q, k, weights, Cache(keys, None), **more)
            pooled = checked(ops.paged_compress, kv, gate, bias, pools.caches[runs], batch, overlaps=True)
            k = finish(pooled, module.kv_norm, positions, every)
            q = checked(ops.write_index, q, k, pools.caches[keys], batch, every=every)
            checked(ops.paged_index_topk, q, weights, pools.caches[keys], batch, **more)
            return kernel(q, weights, PagedCache(pools.caches[keys].tensor, keys.kind), batch, **more)

        whole = [choose(x, latent, torch.arange(len(x)), None) for x, latent in zip(xs, latents, strict=True)]
        for own, chosen in zip(whole, expected, strict=True):
            assert sets(own[:, 0]) == sets(chosen)
        for chunks in in_steps(lengths, 5):
            parts = [slice(*chunk) for chunk in chunks]
            x, latent, chosen = (torch.cat([each[part] for each, part in zip(of, parts, strict=True)])
                                 for of in (xs, latents, whole))  # fmt: skip
            positions = torch.cat([torch.arange(*chunk) for chunk in chunks])
            assert sets(choose(x, latent, positions, pools.batch(chunks))[:, 0]) == sets(chosen[:, 0])


def sets(ids: Tensor) -> list[set[int]]:
    return [{*each} - {-1} for each in ids.tolist()]


@pytest.mark.parametrize("layer", range(3), ids=CONFIG.layer_types)
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_attention_to_tokens_and_runs_is_that_of_deepseek_v4(layer: int, block_size: int):
    torch.manual_seed(layer)
    module = deepseek_v4.DeepseekV4Attention(CONFIG, layer).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    kind, lengths = CONFIG.layer_types[layer], (30, 3, 17)
    every, overlaps = RATES.get(kind, 1), kind == "compressed_sparse_attention"
    window, scale, theta = CONFIG.sliding_window, D**-0.5, THETA if kind in RATES else 10000.0
    xs = [torch.randn(length, HIDDEN) for length in lengths]
    with torch.inference_mode():
        expected = [attend_in_transformers(module, x) for x in xs]

    own = KV("0", Type("fp32", (D,)), window=window)
    runs, kept = (replace(each, name="main") for each in leaves(D, every, overlaps))
    index_runs, index_keys = leaves(INDEX_DIM, every, True)
    used = [own, *([runs, kept] if every > 1 else []), *([index_runs, index_keys] if overlaps else [])]
    pools = Pools(used, block_size, len(lengths))

    def compute(x: Tensor, positions: Tensor, batch: Batch | None) -> Tensor:
        """batch: None: as one whole sequence, by semantic ops"""

        def compress(of: Any, state: KV) -> Tensor:
            kv, gate, bias = of.kv_proj(x), of.gate_proj(x), of.position_bias.data
            wide = of is not module.compressor or overlaps
            if batch is None:
                pooled = ops.compress(kv, gate, bias, None, overlaps=wide)
            else:
                pooled = checked(ops.paged_compress, kv, gate, bias, pools.caches[state], batch, overlaps=wide)
            return finish(pooled, of.kv_norm, positions, every)

        latent = module.q_a_norm(module.q_a_proj(x))
        q = rotate(module.q_b_norm(module.q_b_proj(latent).view(len(x), -1, D)), positions, theta=theta)
        kv = rotate(module.kv_norm(module.kv_proj(x)).unsqueeze(1), positions, theta=theta).squeeze(1)
        pooled = compress(module.compressor, runs) if every > 1 else None
        selected, more = None, {"scale": scale, "window": window} | ({"every": every} if every > 1 else {})
        if overlaps:
            indexer = module.compressor.indexer
            index_q = rotate(indexer.q_b_proj(latent).view(-1, HEADS, INDEX_DIM), positions)
            k, by = compress(indexer, index_runs), {"top_k": CONFIG.index_topk, "every": every}
            weights = indexer.scorer.weights_proj(x)
            if batch is None:
                selected = ops.index_topk(index_q, k, weights, None, **by)
            else:
                index_q = ops.write_index(index_q, k, cached(index_keys), batch, every=every)
                selected = ops.paged_index_topk(index_q, weights, cached(index_keys), batch, **by)
        sinks = module.sinks.data
        if batch is None:
            caches = [Cache(own, None), sinks, None, pooled, Cache(kept, None) if every > 1 else None, selected]
            a = checked(ops.mqa_attention, q, kv, *caches, **more)
        else:
            q = checked(ops.write_mqa, q, kv, pools.caches[own], batch)
            if every > 1:
                q = checked(ops.write_mqa, q, pooled, pools.caches[kept], batch, every=every)
            caches = [sinks, None, pools.caches.get(kept), selected]
            a = checked(ops.paged_mqa_attention, q, pools.caches[own], batch, *caches, **more)
        a = rotate(a, positions, theta=theta, back=True)
        return module.o_b_proj(module.o_a_proj(a.reshape(len(x), CONFIG.o_groups, -1)).flatten(1))

    def cached(state: KV) -> PagedCache:
        return PagedCache(pools.caches[state].tensor, state.kind)

    with torch.inference_mode():
        for x, out in zip(xs, expected, strict=True):
            torch.testing.assert_close(compute(x, torch.arange(len(x)), None), out, rtol=1e-4, atol=1e-5)
        for chunks in in_steps(lengths, 5):
            parts = [slice(*chunk) for chunk in chunks]
            x, out = (torch.cat([each[part] for each, part in zip(of, parts, strict=True)]) for of in (xs, expected))
            positions = torch.cat([torch.arange(*chunk) for chunk in chunks])
            made = compute(x, positions, pools.batch(chunks))
            torch.testing.assert_close(made, out, rtol=1e-4, atol=1e-5)


def attend_in_transformers(module: Any, x: Tensor) -> Tensor:
    """The module's output of a whole sequence."""
    positions, far = torch.arange(len(x)), float("-inf")
    names = {"main", "compress"}
    ropes = {name: module_rope(x[None], positions[None], name) for name in names}
    near = positions[:, None] - positions
    mask = torch.zeros(len(x), len(x)).masked_fill((near < 0) | (near >= CONFIG.sliding_window), far)
    return module(x[None], ropes, positions[None], mask[None, None])[0][0]


def module_rope(x: Tensor, positions: Tensor, name: str) -> Any:
    return deepseek_v4.DeepseekV4RotaryEmbedding(CONFIG)(x, position_ids=positions, layer_type=name)


def glm5_next_indexer(every: int, num: int) -> Any:
    config = Glm5NextTextConfig(
        hidden_size=HIDDEN, index_n_heads=HEADS, index_head_dim=INDEX_DIM, index_kpool=every, q_lora_rank=12,
        num_hidden_layers=1, index_topk=num * every,
    )  # fmt: skip
    torch.manual_seed(0)
    module = glm5_next.Glm5NextTextIndexer(config, 0)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return module


def test_pooled_index_keys_are_those_of_glm5_next():
    every = 4
    module, k, gate = glm5_next_indexer(every, 2), torch.randn(15, INDEX_DIM), torch.randn(15, INDEX_DIM)
    with torch.inference_mode():
        expected, *_ = module.get_pooled_states(torch.cat((k, gate, torch.ones(15, 1)), -1)[None])
    made = ops.compress(k, gate, module.index_kpool_compress_ape.data, None)
    torch.testing.assert_close(made[every - 1 :: every], expected[0])


@pytest.mark.parametrize(("every", "num"), [(4, 2), (3, 5)])
@torch.inference_mode()
def test_the_tokens_of_chosen_runs_are_those_of_glm5_next(every: int, num: int):
    module, x, latent = glm5_next_indexer(every, num), torch.randn(30, HIDDEN), torch.randn(30, 12)
    expected = module(x[None], latent[None], torch.ones(1, 30).bool(), None)[0]
    k = module.k_norm(module.wk(x))
    pooled = ops.compress(k, x @ module.index_kpool_compress_gate.T, module.index_kpool_compress_ape.data, None)
    q, weights = module.wq_b(latent).view(-1, HEADS, INDEX_DIM), module.weights_proj(x)
    runs = ops.index_topk(q, pooled, weights, None, top_k=num, every=every)
    tokens = checked(ops.run_tokens, runs, torch.arange(30), every=every)[:, 0]
    assert tokens.shape == expected.shape == (30, num * every + every - 1)
    assert sets(tokens) == sets(expected)
    num_listed = (tokens >= 0).sum(1, keepdim=True)
    assert torch.equal(tokens >= 0, torch.arange(tokens.shape[1]) < num_listed), "what is not there comes last"
