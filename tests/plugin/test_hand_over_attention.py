from __future__ import annotations

import pytest
import torch
from passes.cases import context_of, text_of

from atom.errors import UnsupportedError
from atom.graph import ops, parse, verify
from atom.kernels import Target
from atom.plugin.vllm.hand_over_attention import hand_over_attention
from atom.plugin.vllm.ops import attention_layer, mla_attention_layer

GPU = context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference")
CPU = context_of(Target("cpu"), "torch", "reference")

ATTENTION = """\
def body(q: fp32[T, 4, 8], k: fp32[T, 2, 8], v: fp32[T, 2, 8], cos: fp32[T, 4], sin: fp32[T, 4]):
    q_1 = rms_norm(q, W("q_norm", fp32[8]), eps=1e-06)    # fp32[T, 4, 8]
    k_1 = rms_norm(k, W("k_norm", fp32[8]), eps=1e-06)    # fp32[T, 2, 8]
    q_2 = rope(q_1, cos, sin)    # fp32[T, 4, 8]
    k_2 = rope(k_1, cos, sin)    # fp32[T, 2, 8]
    a = attention(q_2, k_2, v, KV("layers.0", fp32[2, 2, 8], window=16), W("sinks", fp32[4]), scale=0.5, window=16)    # fp32[T, 4, 8]
    return a
"""

ON_A_GPU = """\
def body(q: fp32[T, 4, 8], k: fp32[T, 2, 8], v: fp32[T, 2, 8], cos: fp32[T, 4], sin: fp32[T, 4]):
    q_3, k_3 = norm_rope(q, k, cos, sin, W("q_norm", fp32[8]), W("k_norm", fp32[8]), eps=1e-06)
    a = attention_layer(q_3, k_3, v, W("sinks", fp32[4]), layer="layers.0", scale=0.5, window=16)
    return a"""

ON_A_CPU = """\
def body(q: fp32[T, 4, 8], k: fp32[T, 2, 8], v: fp32[T, 2, 8], cos: fp32[T, 4], sin: fp32[T, 4]):
    q_1 = rms_norm(q, W("q_norm", fp32[8]), eps=1e-06)
    k_1 = rms_norm(k, W("k_norm", fp32[8]), eps=1e-06)
    q_2 = rope(q_1, cos, sin)
    k_2 = rope(k_1, cos, sin)
    a = attention_layer(q_2, k_2, v, W("sinks", fp32[4]), layer="layers.0", scale=0.5, window=16)
    return a"""

FP8 = """\
def body(q: fp32[T, 4, 8], k: fp32[T, 2, 8], v: fp32[T, 2, 8]):
    a = attention(q, k, v, KV("layers.0", fp8_e4m3[2, 2, 8]), None, SCALES, scale=0.5)    # fp32[T, 4, 8]
    return a
"""

LATENT = """\
def body(q: fp32[T, 4, 6], q_rope: fp32[T, 4, 2], latent: fp32[T, 5], k_rope: fp32[T, 1, 2]):
    a = mla_attention(q, q_rope, latent, k_rope, W("kv_b", fp32[40, 5]), KV("layers.0", fp32[7]), scale=0.5)    # fp32[T, 4, 4]
    return a
"""


def test_layers_that_share_kv_are_refused():
    shared = ATTENTION.replace("return a", """\
b = attention(q_2, k_2, v, KV("layers.0", fp32[2, 2, 8], window=16), scale=0.5, window=16)
    return b""")  # fmt: skip
    with pytest.raises(UnsupportedError, match="2 layers read the KV of 1, which vLLM's layers do not share"):
        hand_over_attention(parse(shared), CPU)


def test_attention_to_what_an_indexer_chooses_is_refused():
    text = """\
def body(q: fp32[T, 2, 4], k: fp32[T, 4]):
    selected = index_blocks(q, k, KV("layers.0", fp32[4], part="index"), block=8, top_k=2)
    return selected
"""
    with pytest.raises(UnsupportedError, match="layers attend to what an indexer chooses"):
        hand_over_attention(parse(text), CPU)


def test_attention_whose_key_is_its_value_is_refused():
    text = """\
def body(q: fp32[T, 2, 4], kv: fp32[T, 4]):
    a = mqa_attention(q, kv, KV("layers.0", fp32[4], window=8), scale=0.5, window=8)
    return a
"""
    with pytest.raises(UnsupportedError, match="layers have one key that is its value, too"):
        hand_over_attention(parse(text), CPU)


@pytest.mark.parametrize(("context", "after"), [(GPU, ON_A_GPU), (CPU, ON_A_CPU)])
def test_attention_becomes_a_layer_of_another_engine(context, after):
    graph = hand_over_attention(parse(ATTENTION), context)
    verify(graph, ops.LOWERED)
    assert text_of(graph) == after
    assert graph.states() == []


@pytest.mark.parametrize(
    ("scales", "kept"),
    [
        ('W("k_scale", fp32[1]), W("v_scale", fp32[1])', ', None, W("k_scale", fp32[1]), W("v_scale", fp32[1])'),
        ('measured("layers.0.k_scale"), measured("layers.0.v_scale")', ""),
    ],
)
def test_scales_are_handed_over_where_the_checkpoint_has_them(scales: str, kept: str):
    graph = hand_over_attention(parse(FP8.replace("SCALES", scales)), CPU)
    assert text_of(graph).splitlines()[1] == f'    a = attention_layer(q, k, v{kept}, layer="layers.0", scale=0.5)'


def test_latent_attention_becomes_one_too():
    graph = hand_over_attention(parse(LATENT), CPU)
    expected = (
        '    a = mla_attention_layer(q, q_rope, latent, k_rope, W("kv_b", fp32[40, 5]), layer="layers.0", scale=0.5)'
    )
    assert text_of(graph).splitlines()[1] == expected
    verify(graph, ops.LOWERED)


def test_what_has_no_attention_is_left_unchanged():
    text = 'def body(x: fp32[T, 4]):\n    y = linear(x, W("y", fp32[4, 4]))\n    return y'
    assert text_of(hand_over_attention(parse(text), CPU)) == text


def test_a_layer_that_nobody_gives_has_no_body():
    x = torch.zeros(1, 2, 4)
    for call in (lambda: attention_layer(x, x, x, layer="layers.0", scale=1.0),
                 lambda: mla_attention_layer(x, x, x[0], x, x[0], layer="layers.0", scale=1.0)):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"^the attention of layers\.0 is another engine's"):
            call()
