"""Mixture-of-experts ops: router, group, grouped linear, combine.

A router chooses k of E experts a token; lowered, the tokens are grouped by expert.

    weights, ids = router(h, W("gate"), top_k=2)                        # fp32[T, 2], i64[T, 2]
    grouped, order, ends = group(h, ids, experts=8)                     # rows by expert; the calls from here to
    gate_up = grouped_linear(grouped, cat([…], dim=1), ends)            # combine may run on other ranks
    m = gated_activate(gate_up, kind="silu")
    down = grouped_linear(m, stack(…), ends)
    y = combine(down, weights, order)

Shapes by letter: E experts, k of them a token, W width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.formats import check_act
from atom.graph.ops.base import LOWERED, divide, multiply, op
from atom.graph.ops.dense import ACTIVATIONS, activate, add_rms_norm, gated_activate, gated_activate_type
from atom.graph.packed import PackedWeight, plain
from atom.graph.quantize_rows import round_rows, round_weight
from atom.graph.types import Type, need

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
RANKS = ("scores", "logits")
SPARSE_MIXED = 2  # experts of a token that sparse_mixer chooses


def _router(x: Type, weight: Type, bias: Type | None = None, correction: Type | None = None, *, top_k: int,
            method: str = "greedy", score: str = "softmax", groups: int = 1, top_groups: int = 1,
            renormalize: bool = False, scale: float = 1.0, shared: int = 0, ranks: str = "scores",
            gated: bool = False) -> tuple[Type, Type]:  # fmt: skip
    rows, inner = weight.shape
    experts = int(rows) - gated
    need(x.shape[-1] == inner, f"x has {x.shape[-1]} columns, the weight {inner}")
    need(method in METHODS, f"there is no routing method '{method}'; methods: {', '.join(METHODS)}")
    need(score in SCORES, f"there is no score '{score}'; scores: {', '.join(SCORES)}")
    need(ranks in RANKS, f"experts are not chosen by '{ranks}'; choices: {', '.join(RANKS)}")
    need(all(each is None or each.shape == (experts,) for each in (bias, correction)), f"{bias}, {correction}")
    need(top_k > 0 and groups > 0, f"{top_k} experts of {groups} groups")
    candidates = experts if method == "greedy" else top_groups * divide(experts, groups)
    need(top_k <= candidates, f"{top_k} experts of the {candidates} that a token may choose from")
    need(isinstance(shared, int) and shared >= gated, f"there are {shared} shared experts{' with a gate' * gated}")
    chosen = (x.shape[0], top_k + shared)
    return Type("fp32", chosen), Type("i64", chosen)


@op(_router, weight=1)
def router(x: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Tensor | None = None, *, top_k: int,
           method: str = "greedy", score: str = "softmax", groups: int = 1, top_groups: int = 1,
           renormalize: bool = False, scale: float = 1.0, shared: int = 0, ranks: str = "scores",
           gated: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, H], weight [E, H], bias and correction [E] -> weights fp32[T, k] and ids i64[T, k] of each token's experts.

    Scores are what `score` says of x weight + bias, in float32. greedy takes the best; group_limited_greedy those of
    the top_groups groups that hold the best experts (DeepSeek-AI 2024, section 2.2.2); noaux_tc adds the correction for
    the choice only and takes the groups whose two best experts are best together (Wang et al. 2024). The weights are
    the chosen scores, brought to a sum of 1 by renormalize, times scale. Experts E to E + shared - 1, which are all
    tokens', come last with a weight of 1; there are k of both.

    ranks: what the correction is added to and the choice is by, scores or logits.
    gated: the weight is [E + 1, H], and a sigmoid of x by its last row is the weight of the shared experts, not 1.
    """
    experts = len(weight) - gated
    logits = F.linear(x.float(), weight[:experts].float(), None if bias is None else bias.float())
    scores = SCORES[score](logits)
    ranked = logits if ranks == "logits" else scores
    ranked = ranked if correction is None else ranked + correction.float()
    if groups > 1 and method != "greedy":
        grouped = ranked.view(len(x), groups, -1)
        best = (
            grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1) if method == "noaux_tc" else grouped.amax(-1)
        )
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups, dim=-1).indices, True)
        ranked = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = ranked.topk(top_k, dim=-1).indices
    weights = _sum_to_one(scores.gather(1, ids), renormalize)
    common = torch.arange(experts, experts + shared, device=ids.device).expand(len(ids), -1)
    share = F.linear(x.float(), weight[experts:].float()).sigmoid() if gated else weights.new_ones(len(ids), 1)
    return torch.cat((weights * scale, share.expand(-1, shared)), 1), torch.cat((ids, common), 1)


def _token_router(x: Type, weight: Type, tokens: Type, table: Type, *, score: str = "softmax",
                  renormalize: bool = False, scale: float = 1.0) -> tuple[Type, Type]:  # fmt: skip
    need(tokens == Type("i64", x.shape[:1]), f"the tokens are {tokens} for {x}")
    need(table.dtype == "i64" and len(table.shape) == 2, f"the table of experts is {table}")
    return _router(x, weight, top_k=int(table.shape[1]), score=score, renormalize=renormalize, scale=scale)


@op(_token_router, weight=1)
def token_router(x: Tensor, weight: Tensor, tokens: Tensor, table: Tensor, *, score: str = "softmax",
                 renormalize: bool = False, scale: float = 1.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`router` whose experts a table i64[V, k] lists by token (Roller et al. 2021); only the weights are of x.

    x [T, H], weight [E, H], tokens i64[T] -> weights fp32[T, k] and ids i64[T, k] of each token's experts
    """
    ids = table[tokens]
    weights = SCORES[score](F.linear(x.float(), weight.float())).gather(1, ids)
    return _sum_to_one(weights, renormalize) * scale, ids


def _sum_to_one(weights: Tensor, renormalize: bool) -> Tensor:
    """weights [T, k], over their sum if they are to add up to 1"""
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-20) if renormalize else weights


def _scale_by_expert(weights: Type, ids: Type, scales: Type) -> Type:
    need(ids.shape == weights.shape and len(scales.shape) == 1, f"weights are {weights}, ids {ids}, scales {scales}")
    return weights


@op(_scale_by_expert)
def scale_by_expert(weights: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """weights fp32[T, k], ids i64[T, k], scales [E] -> fp32[T, k], each weight times its expert's scale"""
    return weights * scales.float()[ids]


def _add_norm_router(a: Type, b: Type, norm: Type, weight: Type, bias: Type | None = None,
                     correction: Type | None = None, *, eps: float, **rule: Any) -> tuple[Type, ...]:  # fmt: skip
    normed, total = cast(tuple[Type, Type], add_rms_norm.infer(a, b, norm, eps=eps))
    return *_router(a, weight, bias, correction, **rule), normed, total


@op(_add_norm_router, level=LOWERED, weight=3)
def add_norm_router(
    a: Tensor, b: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Tensor | None = None,
    *, eps: float, top_k: int, method: str = "greedy", score: str = "softmax", groups: int = 1, top_groups: int = 1,
    renormalize: bool = False, scale: float = 1.0, shared: int = 0, ranks: str = "scores", gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """a and b [T, H], norm [H], the others as in router -> router(rms_norm(a + b)), rms_norm(a + b), a + b"""
    normed, total = add_rms_norm(a, b, norm, eps=eps)
    weights, ids = router(
        normed, weight, bias, correction, top_k=top_k, method=method, score=score, groups=groups,
        top_groups=top_groups, renormalize=renormalize, scale=scale, shared=shared, ranks=ranks, gated=gated,
    )  # fmt: skip
    return weights, ids, normed, total


def _sparse_mixer(x: Type, weight: Type, *, jitter: float) -> tuple[Type, Type]:
    return _router(x, weight, top_k=SPARSE_MIXED)


@op(_sparse_mixer, weight=1)
def sparse_mixer(x: Tensor, weight: Tensor, *, jitter: float) -> tuple[Tensor, Tensor]:
    """x [T, H], weight [E, H] -> weights fp32[T, 2] and ids i64[T, 2] of each token's experts (Liu et al. 2024)

    The best expert, then the best of the others. Each is weighted by a softmax over the logits, without those before
    it, that are below its own by at most 2 jitter of the larger one of their magnitude and its own.
    """
    logits = F.linear(x.float(), weight.float())
    left, weights, ids = logits, [], []
    for _ in range(SPARSE_MIXED):
        best, chosen = left.max(-1, keepdim=True)
        is_low = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(is_low, float("-inf")).softmax(-1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1)


def _weigh_inputs(x: Type, weights: Type) -> tuple[Type, Type]:
    need(weights == Type("fp32", (x.shape[0], 1)), f"the weights are {weights}, for one expert of each row of {x}")
    return x, weights


@op(_weigh_inputs)
def weigh_inputs(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H], weights fp32[T, 1] of each token's expert -> its input times its weight [T, H], and ones fp32[T, 1]"""
    return x * weights.to(x.dtype), torch.ones_like(weights)


def _identity_share(x: Type, weights: Type, ids: Type, *, experts: int) -> Type:
    need(weights.shape == ids.shape and ids.shape[0] == x.shape[0], f"{weights} and {ids} are the choice of {x}")
    return x.with_last(1)


@op(_identity_share)
def identity_share(x: Tensor, weights: Tensor, ids: Tensor, *, experts: int) -> Tensor:
    """x [T, H], weights fp32[T, k], ids i64[T, k] -> [T, 1] in the dtype of x, the weights of experts from number
    `experts` on, whose result is their input (Meituan LongCat Team 2025)"""
    return weights.masked_fill(ids < experts, 0.0).sum(-1, keepdim=True).to(x.dtype)


def _group(x: Type, ids: Type, first: Type | None = None, *, experts: int) -> tuple[Type, Type, Type]:
    need(isinstance(experts, int) and experts > 0, f"there are {experts} experts")
    need(first in (None, Type("i64", (1,))), f"the first expert is {first}")
    pairs = multiply(x.shape[0], int(ids.shape[1]))
    return Type(x.dtype, (pairs, *x.shape[1:])), Type("i64", (pairs,)), Type("i64", (experts,))


@op(_group)
def group(x: Tensor, ids: Tensor, first: Tensor | None = None, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], ids i64[T, k] -> rows [k T, H] of tokens, sorted by expert; order i64[k T]: the place in ids that each
    row stands for; ends i64[E]: where each expert's rows end

    first: i64[1], the first of the experts that are here; the rows of others come last
    """
    of = ids.flatten()
    if first is not None:
        of = of - first
        of = of.where((of >= 0) & (of < experts), experts)
    order = of.argsort(stable=True)
    ends = torch.bincount(of, minlength=experts)[:experts].cumsum(0)
    return x[order // ids.shape[1]], order, ends


def _grouped_linear(x: Type, weight: Type, ends: Type, bias: Type | None = None) -> Type:
    experts, out, inner = weight.shape
    need(x.shape[-1] == inner, f"x has {x.shape[-1]} columns, the weight {inner}")
    need(x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}")
    need(ends.shape == (experts,), f"{ends} are the ends of {experts} experts")
    need(bias is None or bias.shape == (experts, out), f"the bias is {bias}, for {out} outputs of {experts} experts")
    return x.with_last(out)


@op(_grouped_linear, weight=1)
def grouped_linear(x: Tensor, weight: Tensor | PackedWeight, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [P, I], sorted by expert, weight [E, O, I], ends i64[E], bias [E, O] -> [P, O]; an expert without rows is not
    read, rows of no expert come last and give zeros"""
    return multiply_by_expert(F.linear, x, plain(weight), int(weight.shape[1]), ends, bias)


def multiply_by_expert(
    linear: Callable[..., Tensor], x: Tensor, weight: Any, columns: int, ends: Tensor, bias: Tensor | None
) -> Tensor:
    """grouped_linear, as a linear of each expert's rows and weight.

    columns: O.
    """
    out, first = x.new_empty(len(x), columns), 0
    for expert, last in enumerate(ends.tolist()):
        if first < last:
            out[first:last] = linear(x[first:last], weight[expert], None if bias is None else bias[expert])
        first = last
    out[first:] = 0
    return out


def _combine(x: Type, weights: Type, order: Type) -> Type:
    return Type(x.dtype, (weights.shape[0], x.shape[-1]))


@op(_combine)
def combine(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """x [k T, H] in the order i64[k T] that group gave, weights fp32[T, k] -> the weighted sums [T, H], in float32"""
    by_token = torch.empty_like(x).index_copy_(0, order, x).view(*weights.shape, -1)
    return torch.einsum("tkh,tk->th", by_token.float(), weights).to(x.dtype)


def _experts(x: Type, weights: Type, ids: Type, gate_up: Type, down: Type, gate_up_bias: Type | None = None,
             down_bias: Type | None = None, first: Type | None = None, *, kind: str, limit: float | None = None,
             alpha: float | None = None, act: str | None = None) -> Type:  # fmt: skip
    if act is not None:
        check_act(act)
    _group(x, ids, first, experts=gate_up.shape[0])  # type: ignore[arg-type]
    ends = Type("i64", gate_up.shape[:1])
    pairs = Type(x.dtype, (multiply(x.shape[0], int(ids.shape[1])), *x.shape[1:]))
    m = gated_activate_type(_grouped_linear(pairs, gate_up, ends, gate_up_bias), kind=kind, limit=limit, alpha=alpha)
    return _combine(_grouped_linear(m, down, ends, down_bias), weights, ids)


@op(_experts, weight=(3, 4))
def experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, first: Tensor | None = None, *, kind: str,
    limit: float | None = None, alpha: float | None = None, act: str | None = None,
) -> Tensor:  # fmt: skip
    """Each token through the experts that it chose, summed by their weights (Shazeer et al. 2017).

    x [T, H], weights fp32[T, k], ids i64[T, k], gate_up [E, 2 W, H] with gate before up, down [E, H, W], their biases
    [E, 2 W] and [E, H] -> [T, H]; kind, limit and alpha as in gated_activate, act as in linear.

    first: i64[1], the rank's first expert; a token may choose others, which add nothing. None: all experts are here.
    """
    grouped, order, ends = group(x, ids, first, experts=gate_up.shape[0])
    m = gated_activate(_multiply(grouped, gate_up, ends, gate_up_bias, act), kind=kind, limit=limit, alpha=alpha)
    return combine(_multiply(m, down, ends, down_bias, act), weights, order)  # type: ignore[no-any-return]


def _plain_experts(x: Type, weights: Type, ids: Type, up: Type, down: Type, *, kind: str) -> Type:
    _group(x, ids, experts=up.shape[0])  # type: ignore[arg-type]
    need(kind in ACTIVATIONS, f"{kind} is no activation")
    ends = Type("i64", up.shape[:1])
    pairs = Type(x.dtype, (multiply(x.shape[0], int(ids.shape[1])), *x.shape[1:]))
    return _combine(_grouped_linear(_grouped_linear(pairs, up, ends), down, ends), weights, ids)


@op(_plain_experts, weight=(3, 4))
def plain_experts(
    x: Tensor, weights: Tensor, ids: Tensor, up: Tensor | PackedWeight, down: Tensor | PackedWeight, *, kind: str
) -> Tensor:
    """`experts` without a gate: down(act(up)).

    x [T, H], weights fp32[T, k], ids i64[T, k], up [E, W, H], down [E, H, W] -> [T, H]; kind as in activate.
    """
    grouped, order, ends = group(x, ids, experts=up.shape[0])
    m = activate(grouped_linear(grouped, up, ends), kind=kind)
    return combine(grouped_linear(m, down, ends), weights, order)  # type: ignore[no-any-return]


def _multiply(x: Tensor, weight: Tensor | PackedWeight, ends: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    """grouped_linear of x, rounded to `act`."""
    if act is None:
        return grouped_linear(x, weight, ends, bias)  # type: ignore[no-any-return]
    wide = None if bias is None else bias.float()
    y: Tensor = grouped_linear(round_rows(x, act), round_weight(weight, act), ends, wide)
    return y.to(x.dtype)
