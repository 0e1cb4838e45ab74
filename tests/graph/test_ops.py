from __future__ import annotations

import pytest
import torch

from atom.errors import PassError
from atom.graph import TORCH_DTYPES, Graph, Type, ops, parse, verify

T = 5

# op -> (types of its tensors, attributes)
CALLS = [
    (ops.embedding, ("i64[T]", "fp32[9, 24]"), {}),
    (ops.linear, ("fp32[T, 24]", "fp32[7, 24]"), {}),
    (ops.linear, ("bf16[T, 24]", "bf16[7, 24]", "bf16[7]"), {}),
    (ops.rms_norm, ("bf16[T, 24]", "bf16[24]"), {"eps": 1e-6}),
    (ops.rms_norm, ("bf16[T, 24]", "fp32[24]"), {"eps": 1e-6}),
    (ops.rms_norm, ("fp32[T, 6, 4]", "fp32[4]"), {"eps": 1e-6}),
    (ops.layer_norm, ("bf16[T, 24]", "bf16[24]", "bf16[24]"), {"eps": 1e-6}),
    (ops.layer_norm, ("fp32[T, 24]", "fp32[24]"), {"eps": 1e-6}),
    (ops.layer_norm, ("bf16[T, 6, 4]", "bf16[6, 4]"), {"eps": 1e-6}),
    (ops.add, ("bf16[T, 24]", "bf16[T, 24]"), {}),
    (ops.add, ("bf16[T, 24]", "bf16[24]"), {}),
    (ops.mul, ("bf16[T, 24]", "bf16[T, 24]"), {}),
    (ops.mul, ("bf16[T, 24]", "bf16[T, 1]"), {}),
    (ops.mul, ("bf16[T, 24]", "fp32[24]"), {}),
    (ops.mul, ("bf16[T, 3, 8]", "bf16[8]"), {}),
    (ops.scale, ("bf16[T, 24]",), {"by": 0.5}),
    (ops.softcap, ("bf16[T, 24]",), {"cap": 30.0}),
    (ops.clamp, ("bf16[T, 24]",), {"limit": 0.5}),
    (ops.xielu, ("bf16[T, 24]", "bf16[1]", "bf16[1]"), {}),
    *((ops.activate, ("bf16[T, 24]",), {"kind": kind}) for kind in ops.ACTIVATIONS),
    *((ops.gated_activate, ("bf16[T, 24]",), {"kind": kind}) for kind in ops.ACTIVATIONS),
    (ops.gated_activate, ("bf16[T, 24]",), {"kind": "swigluoai", "limit": 7.0, "alpha": 1.702}),
    (ops.gated_activate, ("bf16[T, 24]",), {"kind": "situ", "alpha": 4.0}),
    (ops.attend_residuals, ("bf16[24]", "bf16[1, 24]", "bf16[T, 24]", "bf16[T, 24]"), {"eps": 1e-6}),
    (ops.gumbel_argmax, ("fp32[T, 24]", "i64[T]", "fp32[T]", "fp32[T]"), {}),
    (ops.gumbel_argmax, ("bf16[T, 9]", "i64[T]", "fp32[T]", "fp32[T]", "i64[9]"), {}),
    (ops.join, ("bf16[T, 24]", "bf16[T, 7]", "bf16[T, 24]"), {}),
    (ops.split, ("bf16[T, 24]",), {"sizes": [16, 6, 2]}),
    (ops.pad, ("bf16[T, 6, 4]",), {"size": 7}),
    (ops.split_heads, ("bf16[T, 24]",), {"heads": 6}),
    (ops.merge_heads, ("bf16[T, 6, 4]",), {}),
    (ops.rotary, ("i64[T]", "fp32[2]"), {}),
    (ops.rotary, ("i64[T]", "fp32[2]"), {"growth": 0.1, "period": 16, "offset": 1}),
    (ops.rotary, ("i64[T]", "fp32[2]"), {"growth": 0.1, "period": 16, "power": True}),
    (ops.rope, ("bf16[T, 6, 4]", "fp32[T, 1]", "fp32[T, 1]"), {}),
    (ops.rope, ("bf16[T, 6, 4]", "fp32[T, 2]", "fp32[T, 2]"), {"interleaved": True}),
    (ops.sparse_mixer, ("bf16[T, 24]", "bf16[8, 24]"), {"jitter": 0.01}),
    (ops.weigh_inputs, ("bf16[T, 24]", "fp32[T, 1]"), {}),
    (ops.identity_share, ("bf16[T, 24]", "fp32[T, 2]", "i64[T, 2]"), {"experts": 4}),
    (ops.router, ("bf16[T, 24]", "bf16[8, 24]", "bf16[8]", "fp32[8]"), {"top_k": 2, "groups": 4, "top_groups": 2}),
    (ops.token_router, ("bf16[T, 24]", "bf16[9, 24]", "i64[T]", "i64[9, 2]"), {"renormalize": True}),
    (ops.scale_by_expert, ("fp32[T, 2]", "i64[T, 2]", "bf16[9]"), {}),
    (ops.add_norm_router, ("bf16[T, 24]", "bf16[T, 24]", "bf16[24]", "bf16[8, 24]"), {"eps": 1e-6, "top_k": 2}),
    (ops.add_rms_norm, ("bf16[T, 24]", "bf16[T, 24]", "bf16[24]"), {"eps": 1e-6}),
    (ops.local_tokens, ("i64[T]", "i64[1]"), {"size": 4}),
    (ops.mask_rows, ("bf16[T, 24]", "i64[T]"), {}),
    (ops.sum_squares, ("bf16[T, 24]",), {}),
    (ops.sum_squares, ("bf16[T, 24]", "i64[1]"), {"columns": 48, "groups": 3}),
    (ops.scale_by_rms, ("bf16[T, 24]", "fp32[T, 1]", "bf16[24]"), {"columns": 48, "eps": 1e-6}),
    (ops.scale_by_rms, ("bf16[T, 24]", "fp32[T, 3]", "bf16[24]", "i64[1]"), {"columns": 48, "eps": 1e-6}),
    (ops.gated_linear, ("bf16[T, 24]", "bf16[14, 24]"), {"kind": "silu"}),
    (ops.linear_activate, ("bf16[T, 24]", "bf16[14, 24]", "bf16[14]"), {"kind": "gelu_tanh"}),
    (ops.norm_linear, ("bf16[T, 24]", "bf16[24]", "bf16[14, 24]"), {"eps": 1e-6}),
    (ops.norm_linear, ("bf16[T, 24]", "bf16[24]", "bf16[14, 24]", "bf16[14]"), {"eps": 1e-6, "kind": "silu"}),
    (ops.add_norm_linear, ("bf16[T, 24]", "bf16[T, 24]", "bf16[24]", "bf16[14, 24]"), {"eps": 1e-6}),
    (ops.add_norm_linear, ("bf16[T, 24]", "bf16[T, 24]", "bf16[24]", "bf16[14, 24]"), {"eps": 1e-6, "kind": "gelu"}),
    (ops.lora, ("bf16[T, 12]", "bf16[T, 24]", "bf16[36, 24]", "bf16[12, 18]", "i64[T]"), {"rank": 2, "sizes": [8, 4]}),
    (ops.pair_adapters, ("i64[T, 4]", "i64[T]"), {"loras": 3}),
    (ops.grouped_lora, ("bf16[T, 12]", "bf16[T, 24]", "bf16[3, 4, 2, 24]", "bf16[3, 4, 12, 2]", "i64[12]"), {}),
    (ops.expand_lora, ("bf16[T, 30]", "bf16[12, 18]", "i64[T]"), {"rank": 2, "sizes": [12]}),
    (ops.expand_lora, ("bf16[T, 48]", "bf16[12, 18]", "i64[T]"), {"rank": 2, "sizes": [6, 6], "kind": "silu"}),
    (ops.time_step, ("bf16[T, 24]", "fp32[24]"), {"low": 0.01}),
    (ops.ssm_decay, ("bf16[T, 24]", "bf16[6]", "fp32[24]"), {}),
    (ops.mul, ("bf16[T, 24]", "bf16[24]"), {}),
    (ops.mul, ("bf16[T, 4, 6]", "bf16[4, 1]"), {}),
    (ops.affine, ("bf16[T, 24]", "bf16[24]", "bf16[24]"), {}),
    (ops.steer, ("bf16[T, 24]", "fp32[T, 3]", "bf16[24]"), {"index": 1}),
    (ops.scale_by_position, ("bf16[T, 4, 6]", "i64[T]", "fp32[4]", "fp32[4]"), {}),
    (ops.linear_by_head, ("bf16[T, 24]", "bf16[10, 12]", "bf16[10]"), {"heads": 2}),
    (ops.linear_by_head, ("bf16[T, 24]", "bf16[9, 4, 2]"), {"heads": 3}),
    (ops.mix_streams, ("bf16[T, 4, 6]", "bf16[6]"), {"streams": 3}),
    (ops.mix_streams, ("bf16[T, 24]", "bf16[T, 6]"), {"streams": 3}),
    (ops.mix_streams, ("bf16[T, 24]", "fp32[4]"), {"streams": 1}),
    (ops.stream_logits, ("bf16[T, 24]", "fp32[8, 24]", "fp32[8]", "fp32[8]"), {"eps": 1e-6}),
    (ops.sinkhorn, ("fp32[T, 9]",), {"streams": 3, "rounds": 2, "eps": 1e-6}),
    (ops.match_rms, ("bf16[T, 24]", "bf16[T, 24]"), {"eps": 1e-5}),
    (ops.gaussian_topk, ("bf16[T, 24]",), {"sparsity": 0.9}),
    (ops.gaussian_topk, ("bf16[T, 24]", "fp32[T, 2]"), {"sparsity": 0.9, "columns": 48}),
    (ops.sum_moments, ("bf16[T, 24]",), {}),
    (ops.group_rms_norm, ("bf16[T, 24]", "bf16[24]"), {"eps": 1e-6, "groups": 6}),
]


def type_of(text: str) -> Type:
    return parse(f"def f(x: {text}):\n    return x\n").program("f").inputs[0].meta["type"]


def make(of: Type) -> torch.Tensor:
    shape = [T if dim == "T" else dim for dim in of.shape]
    if of.dtype == "i64":
        return torch.randint(0, 9, shape)
    return torch.randn(shape).to(TORCH_DTYPES[of.dtype])


def symbolic(tensor: torch.Tensor) -> Type:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    return Type(names[tensor.dtype], ("T", *tensor.shape[1:]))


@pytest.mark.parametrize(("op", "texts", "attributes"), CALLS, ids=lambda value: getattr(value, "name", None))
def test_the_shape_rule_gives_the_shapes_of_the_body(op: ops.Op, texts: tuple[str, ...], attributes: dict[str, object]):
    types = [type_of(text) for text in texts]
    result = op(*map(make, types), **attributes)
    inferred = op.infer(*types, **attributes)
    if isinstance(result, tuple):
        assert tuple(map(symbolic, result)) == inferred
    else:
        assert symbolic(result) == inferred


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_collectives_are_bodies_over_all_ranks(ranks: int):
    xs = [torch.randn(T, 6) for _ in range(ranks)]
    sums = ops.all_reduce(xs, axis="tensor")
    assert len(sums) == ranks and all(torch.equal(total, sums[0]) for total in sums)
    assert torch.allclose(sums[0], torch.stack(xs).sum(0), atol=1e-6)
    assert symbolic(sums[0]) == ops.all_reduce.infer(symbolic(xs[0]), axis="tensor")
    size = max(6 * ranks - 1, 6)
    gathered = ops.all_gather(xs, axis="tensor", size=size)
    assert all(torch.equal(each, torch.hstack(xs)[:, :size]) for each in gathered)
    assert symbolic(gathered[0]) == ops.all_gather.infer(symbolic(xs[0]), axis="tensor", size=size)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_tokens_that_are_gathered_are_scattered_again(ranks: int):
    tensors = [(torch.randn(T, 6), torch.randn(T, 2), torch.randint(9, (T, 2))) for _ in range(ranks)]
    gathered = ops.gather_tokens(*zip(*tensors, strict=True), axis="data", ranks=ranks)
    inferred = ops.gather_tokens.infer(*map(symbolic, tensors[0]), axis="data", ranks=ranks)
    for found, type, parts in zip(gathered[0], inferred, zip(*tensors, strict=True), strict=True):
        assert torch.equal(found, torch.vstack(parts)) and type.shape == (f"{ranks}*T", *found.shape[1:])
        assert type.dtype == symbolic(found).dtype
    xs = [torch.randn(ranks * T, 6) for _ in range(ranks)]
    scattered = ops.reduce_scatter(xs, axis="data", ranks=ranks)
    assert torch.allclose(torch.vstack(scattered), torch.stack(xs).sum(0), atol=1e-6)
    assert ops.reduce_scatter.infer(inferred[0], axis="data", ranks=ranks) == symbolic(tensors[0][0])
    with pytest.raises(ValueError, match="1 does not divide by 3"):
        ops.reduce_scatter.infer(symbolic(xs[0]), axis="data", ranks=3)
    with pytest.raises(ValueError, match="not along 'width'"):
        ops.all_reduce.infer(symbolic(xs[0]), axis="width")


def test_tokens_go_to_the_ranks_of_their_experts_and_come_back_as_sums():
    firsts = [torch.tensor([first]) for first in (0, 2, 4)]  # of two experts each
    ids = [torch.tensor(each) for each in ([[0, 1], [0, 3]], [[2, 3], [2, 2]], [[3, 5], [1, 4]])]
    xs = [torch.full((2, 3), float(rank + 1)) for rank in range(3)]
    weights = [torch.rand(2, 2) for _ in range(3)]
    meeting = {"axis": "data", "ranks": 3, "experts": 2}
    found = ops.dispatch(xs, weights, ids, firsts, **meeting)
    wanted = [[1, 1, 0, 0, 0, 3], [0, 1, 2, 2, 3, 0], [0, 0, 0, 0, 3, 3]]  # tokens by rank, those that it needs
    for (rows, *chosen), values in zip(found, wanted, strict=True):
        assert rows.tolist() == [[value] * 3 for value in values]
        assert torch.equal(chosen[0], torch.cat(weights)) and torch.equal(chosen[1], torch.cat(ids))
    types = (*map(symbolic, (xs[0], weights[0], ids[0])), Type("i64", (1,)))
    gathered = ops.gather_tokens.infer(*types[:3], axis="data", ranks=3)
    assert ops.dispatch.infer(*types, **meeting) == gathered
    ys = [torch.full((6, 3), 10.0**rank) for rank in range(3)]
    sums = ops.collect(ys, [torch.cat(ids)] * 3, firsts, **meeting)
    assert [each[:, 0].tolist() for each in sums] == [[1, 11], [10, 10], [110, 101]]
    assert ops.collect.infer(gathered[0], gathered[2], types[3], **meeting) == types[0]
    with pytest.raises(ValueError, match="the first expert is"):
        ops.dispatch.infer(*types[:3], types[2], **meeting)
    with pytest.raises(ValueError, match="there are 0 experts"):
        ops.collect.infer(gathered[0], gathered[2], types[3], axis="data", ranks=3, experts=0)


def test_parts_of_an_embedding_add_up():
    table, tokens = torch.randn(11, 8), torch.tensor([0, 3, 4, 10, 7])
    table[5] = torch.nan  # which nobody asks for
    total = torch.zeros(5, 8)
    for first in (0, 4, 8):
        rows, kept = ops.local_tokens(tokens, torch.tensor([first]), size=4)
        part = torch.cat((table, torch.zeros(1, 8)))[first : first + 4]
        total += ops.mask_rows(ops.embedding(rows, part), kept)
    assert torch.equal(total, table[tokens])


def test_a_norm_in_parts_is_that_of_the_row():
    x, weight = torch.randn(T, 12), torch.randn(12)
    squares = sum(ops.sum_squares(part) for part in x.split(4, -1))
    parts = zip(x.split(4, -1), weight.split(4), strict=True)
    made = [ops.scale_by_rms(part, squares, own, columns=12, eps=1e-3) for part, own in parts]
    assert torch.allclose(torch.hstack(made), ops.rms_norm(x, weight, eps=1e-3), atol=1e-6)


def test_a_norm_by_groups_in_parts_of_these_is_that_of_the_row():
    x, weight = torch.randn(T, 12), torch.randn(12)
    parts = [(x[:, at : at + 3], weight[at : at + 3], torch.tensor([at])) for at in range(0, 12, 3)]
    squares = sum(ops.sum_squares(part, first, columns=6, groups=2) for part, _, first in parts)
    made = [ops.scale_by_rms(part, squares, own, first, columns=6, eps=1e-3) for part, own, first in parts]
    assert torch.allclose(torch.hstack(made), ops.group_rms_norm(x, weight, eps=1e-3, groups=2), atol=1e-6)


def test_a_linear_by_head_of_values_side_by_side_is_a_convolution_within_heads():
    x, before = torch.randn(T, 24), torch.randn(1, 24)
    weight, bias = torch.randn(6, 8, 2), torch.randn(6)
    pair = torch.cat((torch.cat((before, x[:-1])), x), 1)
    expected = torch.nn.functional.conv1d(torch.cat((before, x)).T, weight, bias, groups=3).T
    assert torch.allclose(ops.linear_by_head(pair, weight, bias, heads=3), expected, atol=1e-5)
    whole = torch.block_diag(*weight[..., 0].split(2))
    assert torch.allclose(ops.linear_by_head(x, weight[..., 0], heads=3), x @ whole.T, atol=1e-5)


def test_streams_are_mixed_by_the_weights_of_each_token_or_of_all():
    x, weights = torch.randn(T, 3, 8), torch.randn(T, 2, 3)
    mixed = ops.mix_streams(x.flatten(1), weights.flatten(1), streams=3)
    assert torch.allclose(mixed.unflatten(1, (2, 8)), torch.einsum("tms,tsh->tmh", weights, x), atol=1e-6)
    y = torch.randn(T, 8)
    assert torch.equal(ops.mix_streams(y, torch.tensor([0.0, 1.0, 2.0]), streams=1), torch.hstack((0 * y, y, 2 * y)))


def test_mixing_matrices_become_doubly_stochastic_and_send_each_stream_where_its_row_says():
    logits = torch.randn(T, 9)
    weights = ops.sinkhorn(logits, streams=3, rounds=50, eps=1e-9).view(T, 3, 3)
    assert torch.allclose(weights.sum(1), torch.ones(T, 3)) and torch.allclose(weights.sum(2), torch.ones(T, 3))
    logits = torch.full((1, 3, 3), -30.0)
    logits[0, [0, 1, 2], [1, 2, 0]] = 30.0  # stream 0 goes to 1, 1 to 2, 2 to 0
    weights, x = ops.sinkhorn(logits.flatten(1), streams=3, rounds=1, eps=1e-9), torch.tensor([[5.0, 6.0, 7.0]])
    assert torch.allclose(ops.mix_streams(x, weights, streams=3), torch.tensor([[7.0, 5.0, 6.0]]))


def test_logits_of_streams_are_a_linear_of_their_norm():
    x, weight, scale, bias = torch.randn(T, 24), torch.randn(8, 24), torch.randn(8), torch.randn(8)
    normed = torch.nn.functional.rms_norm(x, (24,), eps=1e-3)
    made = ops.stream_logits(x, weight, scale, bias, eps=1e-3)
    assert torch.allclose(made, normed @ weight.T * scale + bias, atol=1e-5)


def test_a_table_chooses_experts_by_token_and_scores_of_x_weigh_them():
    x, weight, table = torch.randn(3, 8), torch.randn(4, 8), torch.tensor([[0, 1], [3, 2], [1, 3]])
    weights, ids = ops.token_router(x, weight, torch.tensor([2, 0, 2]), table, score="sqrtsoftplus", scale=2.0)
    assert ids.tolist() == [[1, 3], [0, 1], [1, 3]]
    scores = torch.log1p((x @ weight.T).exp()).sqrt()
    assert torch.allclose(weights, 2 * torch.stack([scores[row, ids[row]] for row in range(3)]), atol=1e-6)


def test_a_row_takes_the_length_of_another_and_a_row_of_zeros_stays():
    x, like = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]]), torch.tensor([[6.0, 8.0], [1.0, 1.0], [1.0, 1.0]])
    expected = torch.tensor([[6.0, 8.0], [0.0, 0.0], [1e-3 / 1e-5**0.5, 0.0]])  # whose mean square is below eps
    assert torch.allclose(ops.match_rms(x, like, eps=1e-5), expected)


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_what_a_share_of_a_normal_row_stays_below_is_cut_off_in_parts_as_in_the_row(shift: float):
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(0)) * 2 + shift
    cut = ops.gaussian_topk(x, sparsity=0.95)
    assert torch.allclose((cut > 0).float().mean(-1), torch.tensor(0.05), atol=3e-3)
    assert torch.allclose(
        cut.amax(-1), x.amax(-1) - (shift + 2 * 1.6449), atol=0.1
    )  # 95% are within so many deviations
    moments = sum(ops.sum_moments(part) for part in x.split(10_000, -1))
    parts = [ops.gaussian_topk(part, moments, sparsity=0.95, columns=40_000) for part in x.split(10_000, -1)]
    assert torch.allclose(torch.hstack(parts), cut, atol=1e-3)
    assert not ops.gaussian_topk(torch.full((1, 8), 2.0), sparsity=0.5).any()


OWN = [
    op for op in ops.OPS.values() if op.body.__module__.startswith(ops.__name__)
]  # those of plug-ins come in addition


def test_every_op_documents_its_shapes():
    # their rules are held in graph/ops
    collectives = {each for each in OWN if each.is_collective}
    in_steps = {ops.attention, ops.norm_rope, ops.norm_rope_write, ops.paged_attention, ops.norm_rope_attention}
    latent = {ops.mla_attention, ops.norm_rope_write_latent, ops.paged_mla_attention}
    latent |= {ops.mqa_attention, ops.write_mqa, ops.paged_mqa_attention}
    recurrent = {each for op in OWN if op.lowered is not None for each in (op, op.lowered)} | {ops.gated_delta_net}
    mixtures = {ops.experts, ops.plain_experts, ops.group, ops.grouped_linear, ops.combine, ops.ends_of_experts}
    vision = {op for op in OWN if op.body.__module__ == "atom.graph.ops.vision"} | {ops.clip}
    modules = {f"atom.graph.ops.{name}" for name in ("sparse", "block_sparse", "compressed", "mqa", "ngrams")}
    chosen = {op for op in OWN if op.body.__module__ in modules}
    held = in_steps | latent | mixtures | recurrent | collectives | vision | chosen
    assert {op for op, _, _ in CALLS} | held == set(OWN)
    assert all("[" in (op.body.__doc__ or "") for op in OWN)


def test_which_arguments_are_weights():
    found = {op.name: [list(op.signature.parameters)[place] for place in op.weights] for op in OWN}
    linears = ("linear", "linear_by_head", "gated_linear", "linear_activate", "norm_linear", "add_norm_linear", "grouped_linear", "router", "sparse_mixer", "embedding",
               "add_norm_router", "token_router")  # fmt: skip
    expected = {name: ["weight"] for name in linears} | {
        "mla_attention": ["kv_b"],
        "paged_mla_attention": ["kv_b"],
        "experts": ["gate_up", "down"],
        "plain_experts": ["up", "down"],
    }
    assert {name: names for name, names in found.items() if names} == expected
    assert (ops.linear.weight, ops.add_norm_linear.weight) == (1, 3)


def test_a_call_that_does_not_fit_names_its_types():
    graph = Graph()
    body = graph.program("body")
    x = body.input("x", Type("bf16", ("T", 8)))
    with pytest.raises(PassError, match=r"split\(bf16\[T, 8\], sizes=\[3\]\): sizes \[3\] do not add up to 8"):
        body.call(ops.split, x, sizes=[3])
    with pytest.raises(PassError, match=r"sparsity=1\.0 is no share between 0 and 1"):
        body.call(ops.gaussian_topk, x, sparsity=1.0)
    with pytest.raises(PassError, match=r"the weights are bf16\[T, 8, 1\] for bf16\[T, 8\]"):
        body.call(ops.mix_streams, x, body.input("w", Type("bf16", ("T", 8, 1))), streams=1)
    with pytest.raises(PassError, match="there is no activation 'swish'"):
        body.call(ops.activate, x, kind="swish")


def test_the_verifier_holds_the_level():
    text = 'def f(q: bf16[T, 2, 8], k: bf16[T, 1, 8]):\n    a = attention(q, k, k, KV("0", bf16[2, 1, 8]), scale=1.0)\n    return a\n'
    graph = parse(text)
    verify(graph, ops.SEMANTIC)
    with pytest.raises(PassError, match="f: a attention is not legal in a lowered graph"):
        verify(graph, ops.LOWERED)


def test_the_verifier_sees_a_use_before_its_definition():
    graph = parse("def f(x: bf16[T, 8]):\n    y = add(x, x)\n    z = mul(y, x)\n    return z\n")
    y, z = graph.program("f").nodes
    z.append(y)
    with pytest.raises(PassError, match="f: z uses y before it is set"):
        verify(graph, ops.SEMANTIC)


def test_the_verifier_infers_types_again():
    graph = parse("def f(x: bf16[T, 8]):\n    y = add(x, x)\n    return y\n")
    graph.program("f").nodes[0].meta["type"] = Type("bf16", ("T", 9))
    with pytest.raises(PassError, match=r"f: y is bf16\[T, 8\], but was made as bf16\[T, 9\]"):
        verify(graph, ops.SEMANTIC)


def test_replace_erases_what_nobody_uses_and_keeps_the_name():
    graph = parse(
        "def f(x: bf16[T, 8]):\n    a = add(x, x)\n    b, c = split(a, sizes=[4, 4])\n    d = add(b, c)\n    return d\n"
    )
    (d,) = [node for node in graph.find(ops.add) if node.name == "d"]
    graph.replace({d: graph.insert(d, ops.split, graph.program("f").inputs[0], sizes=[4, 4])[0]})
    assert [node.target.name for node in graph.program("f").nodes] == ["split"]
    assert graph.program("f").results[0].name == "d"


def test_a_weight_is_scaled_by_the_number_of_its_expert():
    weights, ids = torch.tensor([[0.5, 0.25], [1.0, 2.0]]), torch.tensor([[2, 0], [1, 2]])
    scales = torch.tensor([4.0, 3.0, 10.0])
    assert ops.scale_by_expert(weights, ids, scales).tolist() == [[5.0, 1.0], [3.0, 20.0]]
