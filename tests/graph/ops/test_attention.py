from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from graph.ops.checked import Cache, checked
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextSoftmaxScaling

from atom.graph import KV, Batch, Type, ops

T, N, K, D = 5, 6, 2, 4
LAYER = KV("0", Type("fp32", (2, K, D)))


@torch.inference_mode()
def test_queries_are_scaled_by_position_as_mistral_large_4_does():
    scaling = MistralLarge4TextSoftmaxScaling(N)
    torch.manual_seed(0)
    scaling.scale.data, scaling.bias.data = torch.randn(N), torch.randn(N)
    q, positions = torch.randn(T, N, D), torch.tensor([0, 1, 7, 4095, 1 << 20])
    made = checked(ops.scale_by_position, q, positions, scaling.scale, scaling.bias)
    torch.testing.assert_close(made, scaling(q[None], positions[None], head_dim_first=False)[0])


def random_qkv(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, N, D), torch.randn(num_tokens, K, D), torch.randn(num_tokens, K, D)


def writes(slots: torch.Tensor) -> Batch:
    """A batch of tokens that are written and attend to nothing."""
    return Batch({}, {LAYER.kind: slots}, torch.tensor([0]), torch.tensor([]), 0)


def visible(window: int | None) -> torch.Tensor:
    distance = torch.arange(T).unsqueeze(1) - torch.arange(T)
    return (distance >= 0) & (distance < (window or T + 1))


@pytest.mark.parametrize("window", [None, 1, 3, 64])
def test_attention_is_that_of_torch(window: int | None):
    q, k, v = random_qkv(T)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=visible(window), scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), scale=0.7, window=window)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_chunk_begins_at_a_multiple_of_the_window(window: int):
    q, k, v = random_qkv(T)
    chunks = torch.arange(T) // window
    seen = (chunks.unsqueeze(1) == chunks) & visible(None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), scale=0.7, window=window, chunked=True)
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="chunks have the size of the window, which is none"):
        checked(ops.attention, q, k, v, Cache(LAYER, None), scale=0.7, chunked=True)


def test_slopes_are_a_bias_by_distance():
    q, k, v = random_qkv(T)
    slopes = torch.linspace(0.1, 0.6, N)
    distances = torch.arange(T).unsqueeze(1) - torch.arange(T)
    bias = (-slopes.view(-1, 1, 1) * distances).masked_fill(distances < 0, float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=bias, scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), None, None, None, slopes, scale=0.7)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_queries_with_an_end_see_all_up_to_it(window: int | None):
    """As tokens of images that see all of their image do."""
    q, k, v = random_qkv(9)
    image = torch.tensor([0, 1, 1, 1, 1, 0, 2, 2, 0])
    ends = torch.tensor([-1, 4, 4, 4, 4, -1, 7, 7, -1]).int()
    queries, keys = torch.arange(9).unsqueeze(1), torch.arange(9)
    seen = (keys <= queries) | ((image.unsqueeze(1) == image) & (image > 0))
    if window is not None:
        seen &= keys > queries - window
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    more = None, None, None, None, ends
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), *more, scale=0.7, window=window)
    torch.testing.assert_close(out, expected)


def eager(modeling: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, **kwargs: object) -> torch.Tensor:  # fmt: skip
    """The attention of a model of transformers, over [1, N, T, D]."""
    module = SimpleNamespace(num_key_value_groups=N // K, training=False, sinks=kwargs.pop("sinks", None))
    mask = torch.zeros(T, T).masked_fill(~visible(window), float("-inf"))
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return modeling.eager_attention_forward(module, *heads_first, mask, scaling=0.7, **kwargs)[0].squeeze(0)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_attention_with_sinks_is_that_of_gpt_oss(window: int | None):
    q, k, v = random_qkv(T)
    sinks = torch.randn(N)
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), sinks, scale=0.7, window=window)
    torch.testing.assert_close(out, eager(modeling_gpt_oss, q, k, v, window, sinks=sinks))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_attention_with_a_softcap_is_that_of_gemma_2(window: int | None):
    q, k, v = random_qkv(T)
    out = checked(ops.attention, q, k, v, Cache(LAYER, None), scale=0.7, window=window, softcap=1.5)
    torch.testing.assert_close(out, eager(modeling_gemma2, q, k, v, window, softcap=1.5))


def test_a_sink_is_a_key_like_any_other_whose_value_is_zero():
    q, k, v = torch.tensor([[[2.0]]]), torch.tensor([[[3.0]]]), torch.tensor([[[10.0]]])
    out = ops.attention(q, k, v, None, torch.tensor([0.5]), scale=1.0, softcap=4.0)
    score = 4 * torch.tanh(torch.tensor(6.0 / 4))
    torch.testing.assert_close(out.squeeze(), 10 * score.exp() / (score.exp() + torch.tensor(0.5).exp()))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("query_len", [1, 3])
def test_paged_attention_over_scattered_blocks_is_attention(
    block_size: int, softcap: float | None, has_sinks: bool, query_len: int
):
    lengths, chunks = [9, query_len, 7], [query_len, query_len, 4]  # others came in earlier steps
    width = -(-max(lengths) // block_size)
    cache = torch.full((64, block_size, 2, K, D), float("nan"))
    table = (1 + torch.randperm(63)[: 3 * width]).view(3, width).int()
    sinks = torch.randn(N) if has_sinks else None
    attributes = {"scale": 0.5, "window": 4, "softcap": softcap}
    queries, expected = [], []
    for row, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        q, k, v = random_qkv(length)
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        checked(ops.norm_rope_write, q, k, v, None, None, None, None, Cache(LAYER, cache), writes(slots))
        expected.append(ops.attention(q, k, v, None, sinks, **attributes)[-chunk:])
        queries.append(q[-chunk:])
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    batch = Batch({"full": table}, {}, starts, torch.tensor(lengths).int(), 2, query_len)
    out = checked(ops.paged_attention, torch.cat(queries), Cache(LAYER, cache), batch, sinks, **attributes)
    torch.testing.assert_close(out, torch.cat(expected))


@pytest.mark.parametrize("scales", [(None, None), (0.5, 0.03)])
def test_in_fp8_what_is_written_is_divided_by_its_scale_and_what_is_read_multiplied(scales: tuple[float | None, ...]):
    layer, q, (_, k, v) = KV("0", Type("fp8_e4m3", (2, K, D))), random_qkv(3)[0][-1:], random_qkv(3)
    v[0, 0, 0] = 1e6  # beyond what fp8 holds, which has no inf
    table, slots = torch.tensor([[2, 0]]).int(), torch.tensor([4, 5, 0])
    cache = torch.zeros(3, 2, 2, K, D).to(torch.float8_e4m3fn)
    given = [None if scale is None else torch.tensor([scale]) for scale in scales]
    checked(
        ops.norm_rope_write, k.repeat(1, 3, 1), k, v, None, None, None, None, Cache(layer, cache), writes(slots), *given
    )
    batch = Batch({"full": table}, {}, torch.tensor([0, 1]).int(), torch.tensor([3]).int(), 1)
    out = checked(ops.paged_attention, q, Cache(layer, cache), batch, None, *given, scale=0.5)
    rounded = [
        (x / (scale or 1.0)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * (scale or 1.0)
        for x, scale in zip((k, v), scales, strict=True)
    ]
    assert rounded[1].max() == 448 * (scales[1] or 1.0)
    torch.testing.assert_close(out, ops.attention(q.repeat(3, 1, 1), *rounded, None, scale=0.5)[-1:])


def test_only_entries_in_fp8_have_scales_of_one_number():
    q, k, scale = Type("fp32", ("T", N, D)), Type("fp32", ("T", K, D)), Type("fp32", (1,))
    with pytest.raises(ValueError, match=r"a scale of entries in fp8_e4m3, the cache keeps fp32\[2, 2, 4\]"):
        ops.attention.infer(q, k, k, LAYER, None, scale, scale, scale=1.0)
    packed = KV("0", Type("fp8_e4m3", (2, K, D)))
    assert ops.attention.infer(q, k, k, packed, None, scale, scale, scale=1.0) == q
    with pytest.raises(ValueError, match=r"a scale of entries is fp32\[2\], not fp32\[1\]"):
        ops.attention.infer(q, k, k, packed, None, scale, Type("fp32", (2,)), scale=1.0)


def test_a_window_must_not_be_wider_than_what_the_cache_keeps():
    q, k, cache = Type("fp32", ("T", N, D)), Type("fp32", ("T", K, D)), KV("0", Type("fp32", (2, K, D)), window=8)
    assert ops.attention.infer(q, k, k, cache, scale=1.0, window=8) == q
    with pytest.raises(ValueError, match="a query sees all tokens, the cache keeps 8"):
        ops.attention.infer(q, k, k, cache, scale=1.0)
    with pytest.raises(ValueError, match="a query sees 9 tokens, the cache keeps 8"):
        ops.attention.infer(q, k, k, cache, scale=1.0, window=9)


def test_there_is_a_sink_for_each_head():
    q, k = Type("fp32", ("T", N, D)), Type("fp32", ("T", K, D))
    with pytest.raises(ValueError, match=r"the sinks are fp32\[2\] for q fp32\[T, 6, 4\]"):
        ops.attention.infer(q, k, k, LAYER, Type("fp32", (K,)), scale=1.0)


def test_rope_of_interleaved_dims_is_a_product_of_complex_numbers():
    q, k, _ = random_qkv(T)
    cos, sin = checked(ops.rotary, torch.arange(T) + 3, torch.tensor([1.0, 0.1]))
    expected = apply_rotary_emb(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), torch.complex(cos, sin).unsqueeze(0)
    )
    for x, turned in zip((q, k), expected, strict=True):
        out = checked(ops.rope, x, cos, sin, interleaved=True)
        torch.testing.assert_close(out, turned.squeeze(0).transpose(0, 1))


def test_rope_of_interleaved_dims_is_that_of_halves_up_to_the_order_of_dims():
    q, k, _ = random_qkv(T)
    cos, sin = ops.rotary(torch.arange(T) + 3, torch.tensor([1.0, 0.1]))
    halves = apply_rotary_pos_emb_interleave(q, k, *(torch.cat((x, x), dim=-1) for x in (cos, sin)))
    for x, turned in zip((q, k), halves, strict=True):
        out = ops.rope(x, cos, sin, interleaved=True)
        torch.testing.assert_close(torch.cat((out[..., ::2], out[..., 1::2]), dim=-1), turned)
        sorted_dims = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        torch.testing.assert_close(ops.rope(sorted_dims, cos, sin), turned)


@pytest.mark.parametrize(("interleaved", "expected"), [(False, [6, 3, 8, 4, 9]), (True, [6, 8, 3, 4, 9])])
def test_dims_turn_with_those_half_of_them_further_or_with_their_neighbours_and_the_others_stay(
    interleaved: bool, expected: list[float]
):
    x = torch.tensor([[[10.0, 3, 0, 4, 9]]]) if not interleaved else torch.tensor([[[10.0, 0, 3, 4, 9]]])
    cos, sin = torch.tensor([[0.6, 1.0]]), torch.tensor([[0.8, 0.0]])  # the first pair turns, the second does not
    torch.testing.assert_close(
        checked(ops.rope, x, cos, sin, interleaved=interleaved), torch.tensor([[expected]]).float()
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_norm_rope_write_is_norm_then_rope_then_write(interleaved: bool):
    q, k, v = random_qkv(T)
    cos, sin = ops.rotary(torch.arange(T), torch.tensor([1.0]))
    weight = torch.rand(D)
    cache = torch.zeros(2, 8, 2, K, D)
    slots = torch.tensor([9, 3, 12, 0, 15])
    args = q, k, v, cos, sin, weight, weight, Cache(LAYER, cache), writes(slots)
    out = checked(ops.norm_rope_write, *args, eps=1e-6, interleaved=interleaved)
    turned = [ops.rope(ops.rms_norm(x, weight, eps=1e-6), cos, sin, interleaved=interleaved) for x in (q, k)]
    torch.testing.assert_close(out, turned[0])
    torch.testing.assert_close(cache.view(16, 2, K, D)[slots, 0], turned[1])
    torch.testing.assert_close(cache.view(16, 2, K, D)[slots, 1], v)
    assert cache.count_nonzero() == T * 2 * K * D


@pytest.mark.parametrize("interleaved", [False, True])
def test_norm_rope_is_norm_then_rope(interleaved: bool):
    q, k, _ = random_qkv(T)
    cos, sin = ops.rotary(torch.arange(T), torch.tensor([1.0]))
    weight = torch.rand(D)
    out = checked(ops.norm_rope, q, k, cos, sin, weight, weight, eps=1e-6, interleaved=interleaved)
    for made, x in zip(out, (q, k), strict=True):
        torch.testing.assert_close(made, ops.rope(ops.rms_norm(x, weight, eps=1e-6), cos, sin, interleaved=interleaved))
    for made, x in zip(checked(ops.norm_rope, q, k, None, None, None, None), (q, k), strict=True):
        assert torch.equal(made, x)
