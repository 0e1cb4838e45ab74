from __future__ import annotations

import pytest
import torch
from graph.ops.checked import Cache, checked
from graph.ops.recurrences import make_case
from torch import nn
from torch.nn import functional as F
from transformers import Glm5NextTextConfig, Mamba2Config, MambaConfig, NemotronHConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from atom.graph import LatestState, Type, ops

LENGTHS = [1, 63, 64, 65, 130]


def zeros(*shape: int) -> Cache:
    return Cache(LatestState("0", Type("fp32", shape)), torch.zeros(*shape))


def randomize(layer: nn.Module) -> None:
    for name, weight in layer.named_parameters():
        nn.init.uniform_(weight, *((0.5, 1.5) if "norm" in name or "A_log" in name else (-0.5, 0.5)))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("groups", "heads"), [(1, 5), (3, 9), (4, 4)])
def test_ssd_is_that_of_mamba2(tokens: int, groups: int, heads: int):
    case = make_case("ssd", tokens, groups=groups, heads=heads)
    (x, dt, b, c), (a_log, d) = case.values, case.weights
    assert a_log is not None
    expected = mamba2.mamba2_chunk_scan(
        *(each.unsqueeze(0) for each in (x, dt)), -a_log.exp(), b.unsqueeze(0), c.unsqueeze(0), chunk_size=16, D=d
    )
    torch.testing.assert_close(case.run(), expected.squeeze(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_selective_scan_is_that_of_mamba(tokens: int):
    case = make_case("selective_scan", tokens)
    (x, dt, b, c), (a_log, d) = case.values, case.weights
    assert a_log is not None
    x, dt, b, c = (each.T.unsqueeze(0) for each in (x, dt, b, c))
    expected = mamba.mamba_selective_scan(x, dt, -a_log.exp(), b, c, D=d).squeeze(0).T
    torch.testing.assert_close(case.run(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_a_mamba2_mixer_is_that_of_transformers(tokens: int, groups: int, family: str):
    heads, dim, size = 6, 8, 20
    torch.manual_seed(0)
    if family == "mamba2":
        config = Mamba2Config(
            hidden_size=24, num_heads=heads, head_dim=dim, state_size=size, n_groups=groups, expand=2, chunk_size=16,
            time_step_limit=(0.3, 0.9), num_hidden_layers=1,
        )  # fmt: skip
        layer, low, high = mamba2.Mamba2Mixer(config, 0), 0.3, 0.9
    else:
        config = NemotronHConfig(
            hidden_size=24, mamba_num_heads=heads, mamba_head_dim=dim, ssm_state_size=size, n_groups=groups,
            chunk_size=16, layers_block_type=["mamba"], num_hidden_layers=1,
        )  # fmt: skip
        layer, low, high = NemotronHMamba2Mixer(config, 0), 0.0, None
    x, inner = torch.randn(tokens, 24), heads * dim
    randomize(layer)
    with torch.no_grad():
        expected = layer(x.unsqueeze(0)).squeeze(0)
        channels = inner + 2 * groups * size
        parts = ops.linear(x, layer.in_proj.weight, layer.in_proj.bias)
        z, xbc, dt = ops.split(parts, sizes=[inner, channels, heads])
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        conv = checked(ops.causal_conv, xbc, zeros(3, channels), weight, bias, kind="silu")
        parts = ops.split(conv, sizes=[inner, groups * size, groups * size])
        xs, b, c = (ops.split_heads(each, heads=n) for each, n in zip(parts, (heads, groups, groups), strict=True))
        dt = checked(ops.time_step, dt, layer.dt_bias, low=low, high=high)
        y = ops.merge_heads(checked(ops.ssd, xs, dt, b, c, zeros(heads, dim, size), layer.A_log, layer.D))
        y = ops.mul(y, ops.activate(z, kind="silu"))
        eps = layer.norm.variance_epsilon
        y = checked(ops.group_rms_norm, y, layer.norm.weight, eps=eps, groups=groups)
        out = ops.linear(y, layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 65])
def test_a_mamba_mixer_is_that_of_transformers(tokens: int):
    rank, size, inner = 5, 7, 48
    config = MambaConfig(hidden_size=24, state_size=size, time_step_rank=rank, expand=2, num_hidden_layers=1)
    torch.manual_seed(0)
    layer, x = mamba.MambaMixer(config, 0), torch.randn(tokens, 24)
    randomize(layer)
    with torch.no_grad():
        expected = layer(x.unsqueeze(0)).squeeze(0)
        xs, z = ops.split(ops.linear(x, layer.in_proj.weight), sizes=[inner, inner])
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        xs = checked(ops.causal_conv, xs, zeros(3, inner), weight, bias, kind="silu")
        dt, b, c = ops.split(ops.linear(xs, layer.x_proj.weight), sizes=[rank, size, size])
        dt = checked(ops.time_step, ops.linear(dt, layer.dt_proj.weight), layer.dt_proj.bias)
        y = checked(ops.selective_scan, xs, dt, b, c, zeros(inner, size), layer.A_log, layer.D)
        out = ops.linear(ops.mul(y, ops.activate(z, kind="silu")), layer.out_proj.weight)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("floor", [None, -5.0])
def test_a_decay_of_each_dim_is_that_of_glm(floor: float | None):
    config = Glm5NextTextConfig(hidden_size=24, linear_num_heads=3, linear_head_dim=8, linear_lower_bound=floor)
    torch.manual_seed(0)
    gate, x = Glm5NextTextForgetGate(config), torch.randn(7, 24)
    randomize(gate)
    with torch.no_grad():
        a = ops.linear(ops.linear(x, gate.f_a_proj.weight), gate.f_b_proj.weight)
        decay = checked(ops.ssm_decay, a, gate.A_log, gate.dt_bias, floor=floor)
        expected = gate(x.unsqueeze(0)).squeeze(0).flatten(1)
    torch.testing.assert_close(decay, expected)


def test_a_decay_of_each_head_is_that_of_its_formula():
    a, a_log, bias = torch.tensor([[0.0, 30.0]]), torch.tensor([0.0, 1.0]), torch.tensor([0.5, -1.0])
    expected = [[-1.0 * 0.9740769841801067, -2.718281828459045 * 29.0]]  # log(1 + exp(0.5)), and 29 of itself
    torch.testing.assert_close(checked(ops.ssm_decay, a, a_log, bias), torch.tensor(expected))
    small = checked(ops.ssm_decay, a.bfloat16(), a_log.bfloat16(), bias.bfloat16())
    assert small.dtype == torch.float32


def test_a_time_step_is_within_its_limits():
    dt = torch.tensor([[-9.0, 0.0, 3.0]])
    expected = F.softplus(dt + 1)
    assert torch.equal(checked(ops.time_step, dt, torch.ones(3)), expected)
    assert torch.equal(checked(ops.time_step, dt - 0.0), F.softplus(dt))
    limited = checked(ops.time_step, dt, torch.ones(3), low=0.5, high=2.0)
    assert limited.tolist() == [[0.5, float(expected[0, 1]), 2.0]]


def test_a_norm_of_groups_is_a_norm_of_each():
    x, weight = torch.randn(5, 12), torch.randn(12)
    parts = zip(x.chunk(3, -1), weight.chunk(3), strict=True)
    expected = torch.cat([ops.rms_norm(part, own, eps=1e-3) for part, own in parts], -1)
    torch.testing.assert_close(checked(ops.group_rms_norm, x, weight, eps=1e-3, groups=3), expected)
    with pytest.raises(ValueError, match="12 does not divide by 5"):
        ops.group_rms_norm.infer(Type("fp32", ("T", 12)), Type("fp32", (12,)), eps=1e-3, groups=5)
    with pytest.raises(ValueError, match=r"the weight is fp32\[4\] for fp32\[T, 12\]"):
        ops.group_rms_norm.infer(Type("fp32", ("T", 12)), Type("fp32", (4,)), eps=1e-3, groups=3)


def test_what_does_not_fit_is_refused():
    x, dt, b = Type("bf16", ("T", 6, 8)), Type("fp32", ("T", 6)), Type("bf16", ("T", 2, 4))
    of_heads, state = Type("fp32", (6,)), LatestState("0", Type("fp32", (6, 8, 4)))

    def infer(dt: Type = dt, b: Type = b, state: LatestState = state, d: Type = of_heads) -> Type:
        made = ops.ssd.infer(x, dt, b, b, state, of_heads, d)
        assert isinstance(made, Type)
        return made

    assert infer() == x
    with pytest.raises(ValueError, match=r"the steps are bf16\[T, 6\] for x"):
        infer(dt=Type("bf16", ("T", 6)))
    with pytest.raises(ValueError, match="6 does not divide by 4"):
        infer(b=Type("bf16", ("T", 4, 4)))
    with pytest.raises(ValueError, match=r"the state is fp32\[6, 4, 8\]"):
        infer(state=LatestState("0", Type("fp32", (6, 4, 8))))
    with pytest.raises(ValueError, match=r"A_log is fp32\[6\], D fp32\[8\]"):
        infer(d=Type("fp32", (8,)))
    with pytest.raises(ValueError, match="x and B have heads and groups"):
        infer(b=Type("bf16", ("T", 4)))

    x, dt, b = Type("bf16", ("T", 6)), Type("fp32", ("T", 6)), Type("bf16", ("T", 4))
    a_log, d, state = Type("fp32", (6, 4)), Type("fp32", (6,)), LatestState("0", Type("fp32", (6, 4)))
    assert ops.selective_scan.infer(x, dt, b, b, state, a_log, d) == x
    with pytest.raises(ValueError, match=r"A_log is fp32\[6\]"):
        ops.selective_scan.infer(x, dt, b, b, state, d, d)
    with pytest.raises(ValueError, match=r"the state is fp32\[4, 6\]"):
        ops.selective_scan.infer(x, dt, b, b, LatestState("0", Type("fp32", (4, 6))), a_log, d)
    with pytest.raises(ValueError, match=r"C fp32\[T, 6\]"):
        ops.selective_scan.infer(x, dt, b, dt, state, a_log, d)

    with pytest.raises(ValueError, match=r"the bias is fp32\[6\] for dt bf16\[T, 4\]"):
        ops.time_step.infer(b, d)
    with pytest.raises(ValueError, match=r"steps from 1\.0 to 0\.5"):
        ops.time_step.infer(x, d, low=1.0, high=0.5)
    with pytest.raises(ValueError, match="6 does not divide by 4"):
        ops.ssm_decay.infer(x, Type("fp32", (4,)), d)
    with pytest.raises(ValueError, match=r"the floor of a logarithm of decays is 5\.0"):
        ops.ssm_decay.infer(x, d, d, floor=5.0)
