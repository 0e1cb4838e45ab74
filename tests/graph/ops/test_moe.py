from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph.ops.checked import checked
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from atom.graph import Type, ops

T, H, E, W = 9, 24, 8, 5

CONFIG = {
    "hidden_size": H, "num_experts": E, "num_local_experts": E, "n_group": 1, "topk_group": 1, "intermediate_size": W,
    "moe_intermediate_size": W, "hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "_experts_implementation": "eager",
}  # fmt: skip


def made(of: type[torch.nn.Module], **config: Any) -> Any:
    """A module of transformers with random weights."""
    torch.manual_seed(0)
    module = of(SimpleNamespace(**{**CONFIG, **config}))
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor)
    return module.requires_grad_(False)


def dense(weights: Tensor, ids: Tensor) -> Tensor:
    """Each token's weight of every expert, whatever the order in which they were chosen: [T, E]"""
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    return torch.zeros(len(ids), E).scatter(1, ids, weights)


def assert_routes_like(module: Any, *args: Tensor | None, **attributes: Any) -> None:
    x = torch.randn(T, H)
    _, weights, ids = module(x)
    torch.testing.assert_close(dense(*checked(ops.router, x, *args, **attributes)), dense(weights, ids))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, E])
def test_greedy_routing_is_that_of_qwen_3(top_k: int, renormalize: bool):
    module = made(Qwen3MoeTopKRouter, num_experts_per_tok=top_k, norm_topk_prob=renormalize)
    assert_routes_like(module, module.weight, top_k=top_k, renormalize=renormalize)


def test_a_softmax_over_the_chosen_logits_is_a_renormalized_softmax_over_all():
    module = made(GptOssTopKRouter, num_experts_per_tok=3)
    assert_routes_like(module, module.weight, module.bias, top_k=3, renormalize=True)


def test_greedy_routing_with_a_scale_is_that_of_deepseek_v2():
    config = {"num_experts_per_tok": 3, "topk_method": "greedy", "routed_scaling_factor": 2.5}
    module = made(DeepseekV2TopkRouter, **config)
    assert_routes_like(module, module.weight, top_k=3, scale=2.5)


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(4, 2, 3), (4, 2, 4), (2, 1, 4), (8, 3, 2), (2, 2, 5)])
def test_group_limited_routing_is_that_of_deepseek_v2(groups: int, top_groups: int, top_k: int):
    module = made(
        DeepseekV2TopkRouter, num_experts_per_tok=top_k, topk_method="group_limited_greedy", n_group=groups,
        topk_group=top_groups, routed_scaling_factor=16.0,
    )  # fmt: skip
    attributes = {"top_k": top_k, "method": "group_limited_greedy", "groups": groups, "top_groups": top_groups}
    assert_routes_like(module, module.weight, **attributes, scale=16.0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(1, 1, 3), (4, 2, 3), (4, 2, 4), (2, 1, 4), (2, 2, 5)])
def test_routing_with_a_correction_is_that_of_deepseek_v3(groups: int, top_groups: int, top_k: int, renormalize: bool):
    module = made(
        DeepseekV3TopkRouter, num_experts_per_tok=top_k, n_group=groups, topk_group=top_groups,
        norm_topk_prob=renormalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    assert_routes_like(
        module, module.weight, None, module.e_score_correction_bias, top_k=top_k, method="noaux_tc", score="sigmoid",
        groups=groups, top_groups=top_groups, renormalize=renormalize, scale=2.5,
    )  # fmt: skip


def test_scores_and_experts_by_token_are_those_of_deepseek_v4():
    config = {"num_experts_per_tok": 3, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "vocab_size": 11}
    module = made(DeepseekV4TopKRouter, **config)
    rule = {"score": "sqrtsoftplus", "renormalize": True, "scale": 1.5}
    assert_routes_like(module, module.weight, None, module.e_score_correction_bias, top_k=3, method="noaux_tc", **rule)
    module, x, tokens = made(DeepseekV4HashRouter, **config), torch.randn(T, H), torch.randint(11, (T,))
    module.tid2eid.copy_(torch.rand(11, E).argsort(1)[:, :3])
    _, weights, ids = module(x, tokens)
    found = checked(ops.token_router, x, module.weight, tokens, module.tid2eid, **rule)
    torch.testing.assert_close(found, (weights, ids))


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_choice_by_corrected_logits_is_that_of_kolibri(renormalize: bool):
    module = made(Kolibri1TopKRouter, num_experts_per_tok=3, norm_topk_prob=renormalize)
    assert_routes_like(
        module, module.weight, None, module.e_score_correction_bias, top_k=3, method="noaux_tc", score="sigmoid",
        ranks="logits", renormalize=renormalize,
    )  # fmt: skip


def test_sparse_mixing_is_that_of_phi_3_5_moe():
    module = made(PhimoeTopKRouter, num_experts_per_tok=2, router_jitter_noise=0.2, input_jitter_noise=0.0).eval()
    x = torch.randn(200, H)
    _, weights, ids = module(x)
    ours, chosen = checked(ops.sparse_mixer, x, module.weight, jitter=0.2)
    assert torch.equal(chosen, ids)
    torch.testing.assert_close(ours, weights)
    assert 0 < (weights == 1).sum() < weights.numel(), "some have no other expert near them"


def test_an_expert_of_weighed_inputs_is_that_of_llama_4():
    module = made(Llama4TextMoe, num_experts_per_tok=1)
    x = torch.randn(T, H)
    weights, ids = ops.router(x, module.router.weight, top_k=1, score="sigmoid")
    weighed, ones = checked(ops.weigh_inputs, x, weights)
    gate_up, down = module.experts.gate_up_proj.mT, module.experts.down_proj.mT
    y = ops.experts(weighed, ones, ids, gate_up, down, kind="silu") + module.shared_expert(x)
    torch.testing.assert_close(y, module(x)[0], rtol=1e-4, atol=1e-3)  # sums of thousands
    with pytest.raises(ValueError, match=r"the weights are fp32\[T, 2\], for one expert"):
        ops.weigh_inputs.infer(Type("bf16", ("T", H)), Type("fp32", ("T", 2)))


def test_experts_that_give_their_input_are_those_of_longcat():
    module = made(LongcatFlashMoE, moe_topk=2, num_experts_per_tok=2, n_routed_experts=E, zero_expert_num=3,
                  expert_ffn_hidden_size=W, routed_scaling_factor=1.5)  # fmt: skip
    x, router = torch.randn(5 * T, H), module.router
    router.e_score_correction_bias *= 0.05
    weights, ids = ops.router(
        x, router.classifier.weight, None, router.e_score_correction_bias, top_k=2, method="noaux_tc", score="softmax",
        scale=1.5,
    )  # fmt: skip
    here = module.experts.gate_up_proj[:E], module.experts.down_proj
    y = ops.experts(x, weights, ids, *here, None, None, torch.tensor([0]), kind="silu")
    share = checked(ops.identity_share, x, weights, ids, experts=E)
    assert 0 < (share > 0).sum() < 5 * T and set(range(E, E + 3)) <= set(ids.flatten().tolist())
    torch.testing.assert_close(y + x * share, module(x[None])[0], rtol=1e-5, atol=1e-3)  # sums of thousands


def test_a_correction_chooses_but_does_not_weigh():
    x, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    weights, ids = ops.router(
        x, weight, None, torch.tensor([-9.0, 0.0, 0.0]), top_k=1, method="noaux_tc", score="sigmoid"
    )
    assert ids.tolist() == [[1]]
    torch.testing.assert_close(weights, torch.tensor([[0.7310586]]))


def test_a_group_counts_by_its_best_expert_or_by_its_two_best_together():
    x, weight = torch.ones(1, 1), torch.tensor([[2.0], [-9.0], [1.5], [1.4]])
    attributes = {"top_k": 1, "score": "sigmoid", "groups": 2, "top_groups": 1}
    assert ops.router(x, weight, method="group_limited_greedy", **attributes)[1].tolist() == [[0]]
    assert ops.router(x, weight, method="noaux_tc", **attributes)[1].tolist() == [[2]]


def test_routing_is_in_float32_whatever_x_is():
    x, weight = torch.randn(T, H).bfloat16(), torch.randn(E, H).bfloat16()
    weights, ids = checked(ops.router, x, weight, top_k=3)
    expected = torch.softmax(x.double() @ weight.double().T, dim=-1).topk(3)
    torch.testing.assert_close(weights.double(), expected.values, rtol=1e-5, atol=1e-7)
    assert torch.equal(ids, expected.indices)


def test_what_does_not_route_is_refused():
    x, weight = Type("fp32", ("T", H)), Type("fp32", (E, H))
    with pytest.raises(ValueError, match="8 does not divide by 3"):
        ops.router.infer(x, weight, top_k=2, method="noaux_tc", groups=3)
    with pytest.raises(ValueError, match="5 experts of the 4 that a token may choose from"):
        ops.router.infer(x, weight, top_k=5, method="noaux_tc", groups=4, top_groups=2)
    with pytest.raises(ValueError, match="9 experts of the 8 that a token may choose from"):
        ops.router.infer(x, weight, top_k=9)
    with pytest.raises(ValueError, match="there is no routing method 'random'; methods: greedy, group_limited_greedy"):
        ops.router.infer(x, weight, top_k=2, method="random")
    with pytest.raises(ValueError, match="there is no score 'relu'; scores: softmax, sigmoid"):
        ops.router.infer(x, weight, top_k=2, score="relu")
    with pytest.raises(ValueError, match="experts are not chosen by 'ids'; choices: scores, logits"):
        ops.router.infer(x, weight, top_k=2, ranks="ids")
    with pytest.raises(ValueError, match=r"None, fp32\[7\]"):
        ops.router.infer(x, weight, None, Type("fp32", (7,)), top_k=2)
    with pytest.raises(ValueError, match="x has 24 columns, the weight 23"):
        ops.router.infer(x, Type("fp32", (E, 23)), top_k=2)


def test_group_sorts_tokens_by_expert_and_combine_puts_them_back():
    x, ids = torch.tensor([[10.0], [20.0], [30.0]]), torch.tensor([[2, 0], [2, 3], [0, 2]])
    rows, order, ends = checked(ops.group, x, ids, experts=5)
    assert rows.squeeze(1).tolist() == [10, 30, 10, 20, 30, 20]
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert ends.tolist() == [2, 2, 5, 6, 6]
    weights = torch.tensor([[1.0, 0.5], [2.0, 3.0], [0.0, 4.0]])
    by_expert = torch.tensor([[1.0], [1.0], [100.0], [100.0], [100.0], [1000.0]])  # what experts 0, 2 and 3 make of any
    assert checked(ops.combine, by_expert, weights, order).tolist() == [[100.5], [3200.0], [400.0]]


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_grouped_linear_is_one_linear_for_each_expert(has_bias: bool):
    x, weight = torch.randn(6, H), torch.randn(4, 7, H)
    bias = torch.randn(4, 7) if has_bias else None
    out = checked(ops.grouped_linear, x, weight, torch.tensor([2, 2, 5, 6]), bias)
    expert_of_row = torch.tensor([0, 0, 2, 2, 2, 3])
    expected = torch.einsum("ph,poh->po", x, weight[expert_of_row]) + (0 if bias is None else bias[expert_of_row])
    torch.testing.assert_close(out, expected)


def test_grouped_linears_that_do_not_fit_are_refused():
    x, weight, ends = Type("bf16", ("P", H)), Type("bf16", (E, W, H)), Type("i64", (E,))
    assert ops.grouped_linear.infer(x, weight, ends) == Type("bf16", ("P", W))
    with pytest.raises(ValueError, match=r"i64\[7\] are the ends of 8 experts"):
        ops.grouped_linear.infer(x, weight, Type("i64", (7,)))
    with pytest.raises(ValueError, match=r"the bias is bf16\[5\], for 5 outputs of 8 experts"):
        ops.grouped_linear.infer(x, weight, ends, Type("bf16", (W,)))
    with pytest.raises(ValueError, match="x has 24 columns, the weight 23"):
        ops.grouped_linear.infer(x, Type("bf16", (E, W, 23)), ends)
    with pytest.raises(ValueError, match="x is bf16, the weight fp32"):
        ops.grouped_linear.infer(x, Type("fp32", (E, W, H)), ends)


def test_types_of_a_batch_of_any_size_are_inferred():
    x, ids = Type("bf16", ("T", H)), Type("i64", ("T", 2))
    rows, order, ends = ops.group.infer(x, ids, experts=E)
    assert list(map(str, (rows, order, ends))) == ["bf16[2*T, 24]", "i64[2*T]", "i64[8]"]
    assert ops.combine.infer(rows, Type("fp32", ("T", 2)), order) == x


def random_choice(top_k: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(top_k)
    return torch.rand(T, top_k), torch.rand(T, E).argsort(dim=-1)[:, :top_k]


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_experts_are_those_of_deepseek_v3(top_k: int):
    module = made(DeepseekV3Experts)
    x, (weights, ids) = torch.randn(T, H), random_choice(top_k)
    out = checked(ops.experts, x, weights, ids, module.gate_up_proj, module.down_proj, kind="silu")
    torch.testing.assert_close(out, module(x, ids, weights))


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_experts_with_biases_and_clamps_are_those_of_gpt_oss(top_k: int):
    module = made(GptOssExperts)
    x, (weights, ids) = torch.randn(T, H), random_choice(top_k)
    gate_first = torch.arange(2 * W).view(W, 2).T.flatten()  # theirs alternates gate and up, and is transposed
    out = checked(
        ops.experts, x, weights, ids, module.gate_up_proj.mT[:, gate_first], module.down_proj.mT,
        module.gate_up_proj_bias[:, gate_first], module.down_proj_bias, kind="swigluoai", limit=7.0, alpha=1.702,
    )  # fmt: skip
    torch.testing.assert_close(out, module(x, ids, weights), rtol=1e-5, atol=1e-4)  # sums of hundreds


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_plain_experts_are_those_of_nemotron_h(top_k: int):
    module = made(NemotronHExperts, n_routed_experts=E, moe_latent_size=None, mlp_hidden_act="relu2")
    x, (weights, ids) = torch.randn(T, H), random_choice(top_k)
    out = checked(ops.plain_experts, x, weights, ids, module.up_proj, module.down_proj, kind="relu2")
    torch.testing.assert_close(out, module(x, ids, weights), rtol=1e-5, atol=1e-3)  # sums of thousands


def test_experts_that_no_token_chose_change_nothing():
    x, weights, ids = torch.randn(T, H), torch.rand(T, 2), torch.tensor([[1, 4]] * (T - 1) + [[4, 6]])
    tensors = torch.randn(E, 2 * W, H), torch.randn(E, H, W), torch.randn(E, 2 * W), torch.randn(E, H)
    expected = ops.experts(x, weights, ids, *tensors, kind="silu")
    for tensor in tensors:
        tensor[[0, 2, 3, 5, 7]] = float("nan")
    assert torch.equal(ops.experts(x, weights, ids, *tensors, kind="silu"), expected)
    assert not expected.isnan().any()


def test_experts_may_round_their_activations_by_columns():
    """Ahead of both matmuls, each 4 columns by their largest number."""

    def rounded(row: Tensor) -> Tensor:
        spans = row.view(-1, 4)
        scales = spans.abs().amax(1, keepdim=True) / 448
        return ((spans / scales).to(torch.float8_e4m3fn).float() * scales).flatten()

    x, gate_up, down = torch.randn(3, 8), torch.randn(2, 16, 8), torch.randn(2, 8, 8)
    ids, weights = torch.tensor([[1, 0], [0, 1], [1, 0]]), torch.rand(3, 2)
    expected = torch.zeros(3, 8)
    for token, choice in itertools.product(range(3), range(2)):
        expert = ids[token, choice]
        gate, up = (gate_up[expert] @ rounded(x[token])).chunk(2)
        m = torch.nn.functional.silu(gate) * up
        expected[token] += weights[token, choice] * (down[expert] @ rounded(m))
    y = checked(ops.experts, x, weights, ids, gate_up, down, kind="silu", act="fp8[1, 4]")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert (y - ops.experts(x, weights, ids, gate_up, down, kind="silu")).abs().max() > 1e-3
