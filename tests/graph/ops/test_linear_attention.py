from __future__ import annotations

from typing import Any

import pytest
import torch
from graph.ops.checked import Cache, checked
from graph.ops.recurrences import make_case, states_of
from torch import Tensor, nn
from transformers import KimiLinearConfig, MiniMaxConfig, Qwen3NextConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from atom.graph import BATCH, Batch, LatestState, Type, ops

LENGTHS = [1, 63, 64, 65, 130]


def zeros(*shape: int) -> Cache:
    return Cache(LatestState("0", Type("fp32", shape)), torch.zeros(*shape))


def randomize(layer: nn.Module) -> None:
    for name, weight in layer.named_parameters():
        nn.init.uniform_(weight, *((0.5, 1.5) if "norm" in name or "A_log" in name else (-0.5, 0.5)))


def by_transformers(rule: Any, values: tuple[Tensor, ...], **options: Any) -> Tensor:
    """values: q, k, v, decay, beta"""
    batched = [each.unsqueeze(0) for each in values]
    out: Tensor = rule(*batched, initial_state=None, output_final_state=False, **options)[0].squeeze(0)
    return out


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("key_heads", "heads"), [(1, 1), (3, 9), (5, 5)])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_delta_rule_is_that_of_qwen(tokens: int, key_heads: int, heads: int, normalize: bool):
    case = make_case("gated_delta", tokens, key_heads=key_heads, heads=heads, normalize=normalize)
    for rule in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        expected = by_transformers(rule, case.values, use_qk_l2norm_in_kernel=normalize)
        torch.testing.assert_close(case.run(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_delta_rule_with_a_decay_of_each_dim_is_that_of_kimi(tokens: int):
    case = make_case("gated_delta", tokens, key_heads=5, heads=5, by_dim=True)
    for rule in (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention):
        expected = by_transformers(rule, case.values, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(case.run(), expected, rtol=1e-4, atol=1e-5)


def test_a_rule_begins_with_a_state_and_leaves_one():
    case = make_case("gated_delta", 9)
    state = torch.randn(9, 20, 12)
    batched = [each.unsqueeze(0) for each in case.values]
    expected, last = qwen.torch_recurrent_gated_delta_rule(
        *batched, initial_state=state.unsqueeze(0), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    slots = states_of(state, 2)
    batch = Batch({}, {}, torch.tensor([0, 9]).int(), torch.tensor([12]).int(), 0, slots=torch.tensor([1]).int())
    out = ops.OPS["batched_gated_delta"](*case.values, slots, batch, **case.attributes)
    torch.testing.assert_close(out, expected.squeeze(0))
    torch.testing.assert_close(slots[1, 0], last.squeeze(0))
    assert torch.equal(slots[0, 0], state)


@pytest.mark.parametrize("tokens", [1, 65])
def test_a_gated_delta_net_is_that_of_qwen3_next(tokens: int):
    keys, heads, key_dim, value_dim = 2, 6, 12, 20
    config = Qwen3NextConfig(
        hidden_size=24, linear_num_key_heads=keys, linear_num_value_heads=heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    layer, x = qwen.Qwen3NextGatedDeltaNet(config, 0), torch.randn(tokens, 24)
    randomize(layer)
    channels, widths = 2 * keys * key_dim + heads * value_dim, [keys * key_dim, keys * key_dim, heads * value_dim]
    with torch.no_grad():
        expected = layer(x.unsqueeze(0)).squeeze(0)
        of_keys = [key_dim, key_dim, heads // keys * value_dim, heads // keys * value_dim]
        parts = ops.split(ops.split_heads(ops.linear(x, layer.in_proj_qkvz.weight), heads=keys), sizes=of_keys)
        q, k, v, z = (each.flatten(1) for each in parts)
        b, a = ops.linear(x, layer.in_proj_ba.weight).view(tokens, keys, 2, -1).unbind(2)
        weight = layer.conv1d.weight.squeeze(1)
        conv = checked(ops.causal_conv, ops.join(q, k, v), zeros(3, channels), weight, kind="silu")
        q, k, v = ops.split(conv, sizes=widths)
        q, k, v, z = (
            ops.split_heads(each, heads=n) for each, n in zip((q, k, v, z), (keys, keys, heads, heads), strict=True)
        )
        decay = checked(ops.ssm_decay, a.flatten(1), layer.A_log, layer.dt_bias)
        beta = ops.activate(b.flatten(1), kind="sigmoid")
        state = zeros(heads, key_dim, value_dim)
        o = checked(ops.gated_delta, q, k, v, decay, beta, state, scale=key_dim**-0.5, normalize=True)
        o = ops.mul(ops.rms_norm(o, layer.norm.weight, eps=1e-6), ops.activate(z, kind="silu"))
        out = ops.linear(ops.merge_heads(o), layer.out_proj.weight)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 65])
def test_kimi_delta_attention_is_that_of_kimi_linear(tokens: int):
    heads, dim = 3, 12
    config = KimiLinearConfig(
        hidden_size=24, linear_num_heads=heads, linear_head_dim=dim, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    layer, x = kimi.KimiLinearDeltaAttention(config, 0), torch.randn(tokens, 24)
    randomize(layer)
    gate = layer.forget_gate
    with torch.no_grad():
        expected = layer(x.unsqueeze(0)).squeeze(0)
        qkv = ops.join(*(ops.linear(x, each.weight) for each in (layer.q_proj, layer.k_proj, layer.v_proj)))
        weight = layer.conv1d.weight.squeeze(1)
        conv = checked(ops.causal_conv, qkv, zeros(3, 3 * heads * dim), weight, kind="silu")
        q, k, v = (ops.split_heads(each, heads=heads) for each in ops.split(conv, sizes=[heads * dim] * 3))
        a = ops.linear(ops.linear(x, gate.f_a_proj.weight), gate.f_b_proj.weight)
        decay = ops.split_heads(checked(ops.ssm_decay, a, gate.A_log.flatten(), gate.dt_bias), heads=heads)
        beta = ops.activate(ops.linear(x, layer.b_proj.weight), kind="sigmoid")
        state = zeros(heads, dim, dim)
        o = checked(ops.gated_delta, q, k, v, decay, beta, state, scale=dim**-0.5, normalize=True)
        z = ops.linear(ops.linear(x, layer.g_a_proj.weight), layer.g_b_proj.weight)
        o = ops.mul(
            ops.rms_norm(o, layer.o_norm.weight, eps=config.rms_norm_eps),
            ops.activate(ops.split_heads(z, heads=heads), kind="sigmoid"),
        )
        out = ops.linear(ops.merge_heads(o), layer.o_proj.weight)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_lightning_attention_is_that_of_minimax(tokens: int):
    heads, dim = 3, 8
    config = MiniMaxConfig(
        hidden_size=24, num_attention_heads=heads, head_dim=dim, num_hidden_layers=4, block_size=16,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    torch.manual_seed(0)
    layer, x = MiniMaxLightningAttention(config, 1), torch.randn(tokens, 24)
    randomize(layer)
    with torch.no_grad():
        expected = layer(x.unsqueeze(0), None, None)[0].squeeze(0)
        qkv = ops.activate(ops.linear(x, layer.qkv_proj.weight), kind="silu")
        q, k, v = ops.split(ops.split_heads(qkv, heads=heads), sizes=[dim] * 3)
        o = checked(ops.lightning, q, k, v, zeros(heads, dim, dim), layer.slope_rate.flatten())
        o = ops.rms_norm(ops.merge_heads(o), layer.norm.weight, eps=layer.norm.variance_epsilon)
        o = ops.mul(o, ops.activate(ops.linear(x, layer.output_gate.weight), kind="sigmoid"))
        out = ops.linear(o, layer.out_proj.weight)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_delta_rule_that_does_not_fit_is_refused():
    q, v = Type("bf16", ("T", 2, 8)), Type("bf16", ("T", 6, 4))
    decay, beta, state = Type("fp32", ("T", 6)), Type("bf16", ("T", 6)), LatestState("0", Type("fp32", (6, 8, 4)))

    def infer(k: Type = q, v: Type = v, decay: Type = decay, beta: Type = beta, state: LatestState = state) -> Type:
        made = ops.gated_delta.infer(q, k, v, decay, beta, state, scale=1.0)
        assert isinstance(made, Type)
        return made

    assert infer() == infer(decay=Type("fp32", ("T", 6, 8))) == v
    with pytest.raises(ValueError, match=r"q is bf16\[T, 2, 8\], k bf16\[T, 6, 4\], v bf16\[T, 6, 4\]"):
        infer(k=v)
    with pytest.raises(ValueError, match="5 does not divide by 2"):
        infer(v=Type("bf16", ("T", 5, 4)))
    with pytest.raises(ValueError, match=r"decay is fp32\[T, 2\], neither fp32\[T, 6\] nor fp32\[T, 6, 8\]"):
        infer(decay=Type("fp32", ("T", 2)))
    with pytest.raises(ValueError, match=r"decay is bf16\[T, 6\]"):
        infer(decay=beta)
    with pytest.raises(ValueError, match=r"beta is bf16\[T, 2\]"):
        infer(beta=Type("bf16", ("T", 2)))
    with pytest.raises(ValueError, match=r"the state is fp32\[6, 4, 8\] for q"):
        infer(state=LatestState("0", Type("fp32", (6, 4, 8))))
    with pytest.raises(ValueError, match="q and v have heads"):
        infer(v=Type("bf16", ("T", 24)))


def test_a_gated_delta_net_that_does_not_fit_is_refused():
    parts: dict[str, Any] = {
        "qkv": Type("bf16", ("T", 56)), "z": Type("bf16", ("T", 24)), "a": Type("bf16", ("T", 6)),
        "b": Type("bf16", ("T", 6)), "conv_state": LatestState("0", Type("bf16", (3, 56))),
        "state": LatestState("0", Type("fp32", (6, 8, 4))), "batch": BATCH, "conv": Type("bf16", (56, 4)),
        "a_log": Type("fp32", (6,)), "bias": Type("fp32", (6,)), "norm": Type("bf16", (4,)),
    }  # fmt: skip

    def infer(**other: Any) -> Any:
        kind, given = other.pop("kind", "silu"), {**parts, **other}
        return ops.gated_delta_net.infer(*given.values(), key_heads=2, scale=1.0, eps=1e-6, kind=kind)

    assert infer() == infer(a=Type("bf16", ("T", 48)), bias=Type("fp32", (48,))) == parts["z"]
    with pytest.raises(ValueError, match=r"48 channels are not q, k and v of fp32\[6, 8, 4\]"):
        infer(qkv=Type("bf16", ("T", 48)))
    with pytest.raises(ValueError, match=r"the gate is bf16\[T, 20\]"):
        infer(z=Type("bf16", ("T", 20)))
    with pytest.raises(ValueError, match=r"the decays are bf16\[T, 12\]"):
        infer(a=Type("bf16", ("T", 12)), bias=Type("fp32", (12,)))
    with pytest.raises(ValueError, match=r"beta is bf16\[T, 2\] for 6 heads"):
        infer(b=Type("bf16", ("T", 2)))
    with pytest.raises(ValueError, match=r"the state is bf16\[2, 56\] of 4 taps"):
        infer(conv_state=LatestState("0", Type("bf16", (2, 56))))
    with pytest.raises(ValueError, match=r"the norm is bf16\[8\]"):
        infer(norm=Type("bf16", (8,)))
    with pytest.raises(ValueError, match="shrug is no activation"):
        infer(kind="shrug")


def test_lightning_that_does_not_fit_is_refused():
    q, slopes, state = Type("bf16", ("T", 2, 8)), Type("fp32", (2,)), LatestState("0", Type("fp32", (2, 8, 8)))
    assert ops.lightning.infer(q, q, q, state, slopes) == q
    with pytest.raises(ValueError, match=r"the slopes are fp32\[3\]"):
        ops.lightning.infer(q, q, q, state, Type("fp32", (3,)))
    with pytest.raises(ValueError, match=r"v bf16\[T, 3, 8\]"):
        ops.lightning.infer(q, q, Type("bf16", ("T", 3, 8)), state, slopes)
    with pytest.raises(ValueError, match=r"the state is fp32\[2, 8, 4\]"):
        ops.lightning.infer(q, q, q, LatestState("0", Type("fp32", (2, 8, 4))), slopes)
