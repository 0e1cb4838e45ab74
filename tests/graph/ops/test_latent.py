from __future__ import annotations

import pytest
import torch
from graph.ops.checked import Cache, checked
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from atom.graph import KV, Batch, Type, ops

T, N, L, P, R, U = 7, 3, 10, 5, 6, 4
LAYER = KV("0", Type("fp32", (L + R,)))


def writes(slots: torch.Tensor) -> Batch:
    """A batch of tokens that are written and attend to nothing."""
    return Batch({}, {LAYER.kind: slots}, torch.tensor([0]), torch.tensor([]), 0)


def random_inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tokens)
    q_nope, q_rope = torch.randn(num_tokens, N, P + R).split([P, R], dim=-1)
    return q_nope, q_rope, torch.randn(num_tokens, L), torch.randn(num_tokens, 1, R)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("q_rank", [None, 9])
def test_latent_attention_is_that_of_deepseek_v3(interleaved: bool, q_rank: int | None):
    config = DeepseekV3Config(
        hidden_size=24, num_attention_heads=N, num_key_value_heads=N, q_lora_rank=q_rank, kv_lora_rank=L,
        qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=U, rope_interleave=interleaved, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0)
    for norm in [layer.kv_a_layernorm] + [layer.q_a_layernorm] * (q_rank is not None):
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(T, 24)
    with torch.no_grad():
        angles = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)(x, torch.arange(T).unsqueeze(0))
        mask = torch.full((T, T), float("-inf")).triu(1)
        expected = layer(x.unsqueeze(0), angles, mask)[0].squeeze(0)

    with torch.inference_mode():
        if q_rank is None:
            q = ops.linear(x, layer.q_proj.weight)
        else:
            low = ops.rms_norm(ops.linear(x, layer.q_a_proj.weight), layer.q_a_layernorm.weight, eps=1e-6)
            q = ops.linear(low, layer.q_b_proj.weight)
        q_nope, q_rope = ops.split(ops.split_heads(q, heads=N), sizes=[P, R])
        latent, k_rope = ops.split(ops.linear(x, layer.kv_a_proj_with_mqa.weight), sizes=[L, R])
        latent = ops.rms_norm(latent, layer.kv_a_layernorm.weight, eps=1e-6)
        cos, sin = ops.rotary(torch.arange(T), 10000.0 ** (-torch.arange(0, R, 2) / R))
        q_rope, k_rope = (
            ops.rope(part, cos, sin, interleaved=interleaved) for part in (q_rope, ops.split_heads(k_rope, heads=1))
        )
        out = checked(
            ops.mla_attention, q_nope, q_rope, latent, k_rope, layer.kv_b_proj.weight, Cache(LAYER, None),
            scale=(P + R) ** -0.5,
        )  # fmt: skip
        torch.testing.assert_close(ops.linear(ops.merge_heads(out), layer.o_proj.weight), expected)


def test_latent_attention_with_sinks_and_a_window_is_that_to_expanded_entries():
    q_nope, q_rope, latent, k_rope = random_inputs(T)
    kv_b, sinks = torch.randn(N * (P + U), L), torch.randn(N)
    keys, values = (latent @ kv_b.T).view(T, N, P + U).split([P, U], dim=-1)
    q, k = torch.cat((q_nope, q_rope), -1), torch.cat((keys, k_rope.expand(T, N, R)), -1)
    args = q_nope, q_rope, latent, k_rope, kv_b, Cache(KV("0", LAYER.type, 3), None), None, None, sinks
    out = checked(ops.mla_attention, *args, scale=0.5, window=3)
    torch.testing.assert_close(out, ops.attention(q, k, values, None, sinks, scale=0.5, window=3))


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_paged_latent_attention_over_scattered_blocks_is_latent_attention(block_size: int, query_len: int):
    lengths, chunks = [9, query_len, 7], [query_len, query_len, 4]  # others came in earlier steps
    width = -(-max(lengths) // block_size)
    cache = torch.full((64, block_size, L + R), float("nan"))
    table = (1 + torch.randperm(63)[: 3 * width]).view(3, width).int()
    kv_b = torch.randn(N * (P + U), L)
    queries, expected = [], []
    for row, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        q_nope, q_rope, latent, k_rope = random_inputs(length)
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        checked(
            ops.norm_rope_write_latent, q_rope, latent, k_rope, None, None, None, Cache(LAYER, cache), writes(slots)
        )
        expected.append(ops.mla_attention(q_nope, q_rope, latent, k_rope, kv_b, None, scale=0.5)[-chunk:])
        queries.append((q_nope[-chunk:], q_rope[-chunk:]))
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    batch = Batch({"full": table}, {}, starts, torch.tensor(lengths).int(), 2, query_len)
    q = map(torch.cat, zip(*queries, strict=True))
    out = checked(ops.paged_mla_attention, *q, kv_b, Cache(LAYER, cache), batch, scale=0.5)
    torch.testing.assert_close(out, torch.cat(expected))


@pytest.mark.parametrize("interleaved", [False, True])
def test_norm_rope_write_latent_is_norm_then_rope_then_write(interleaved: bool):
    _, q_rope, latent, k_rope = random_inputs(T)
    cos, sin = ops.rotary(torch.arange(T), torch.rand(R // 2))
    norm = torch.rand(L)
    cache = torch.zeros(2, 8, L + R)
    slots = torch.tensor([9, 3, 12, 0, 15, 1, 2])
    args = q_rope, latent, k_rope, cos, sin, norm, Cache(LAYER, cache), writes(slots)
    out = checked(ops.norm_rope_write_latent, *args, eps=1e-6, interleaved=interleaved)
    torch.testing.assert_close(out, ops.rope(q_rope, cos, sin, interleaved=interleaved))
    written = cache.view(16, L + R)[slots]
    torch.testing.assert_close(written[:, :L], ops.rms_norm(latent, norm, eps=1e-6))
    torch.testing.assert_close(written[:, L:], ops.rope(k_rope, cos, sin, interleaved=interleaved).squeeze(1))
    assert cache.count_nonzero() == T * (L + R)


def test_what_does_not_fit_is_refused():
    q_nope, q_rope = Type("fp32", ("T", N, P)), Type("fp32", ("T", N, R))
    latent, k_rope, kv_b = Type("fp32", ("T", L)), Type("fp32", ("T", 1, R)), Type("fp32", (N * (P + U), L))

    def infer(kv_b: Type = kv_b, k_rope: Type = k_rope, cache: KV = LAYER) -> Type:
        return ops.mla_attention.infer(q_nope, q_rope, latent, k_rope, kv_b, cache, scale=1.0)

    assert infer() == Type("fp32", ("T", N, U))
    with pytest.raises(ValueError, match="28 does not divide by 3"):
        infer(kv_b=Type("fp32", (28, L)))
    with pytest.raises(ValueError, match=r"kv_b is fp32\[15, 10\] for q fp32\[T, 3, 5\]"):
        infer(kv_b=Type("fp32", (N * P, L)))
    with pytest.raises(ValueError, match=r"the latent is fp32\[T, 10\], kv_b fp32\[27, 11\]"):
        infer(kv_b=Type("fp32", (N * (P + U), L + 1)))
    with pytest.raises(ValueError, match=r"q is fp32\[T, 3, 6\], its key fp32\[T, 3, 6\]"):
        infer(k_rope=q_rope)
    with pytest.raises(ValueError, match=r"the cache keeps fp32\[15\] of 10 latent dims"):
        infer(cache=KV("0", Type("fp32", (L + R - 1,))))
