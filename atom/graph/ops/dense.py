"""Per-token ops: embeddings, linears, norms, activations, sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.formats import check_act
from atom.graph.noise import gumbel, hash_ids
from atom.graph.ops.base import divide, op
from atom.graph.packed import PackedWeight, plain
from atom.graph.quantize_rows import round_rows, round_weight
from atom.graph.types import Type, need


@op(lambda tokens, weight: Type(weight.dtype, (*tokens.shape, weight.shape[1])), weight=1)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens i64[T], weight [V, H] -> [T, H]"""
    return F.embedding(tokens, weight)


def linear_type(x: Type, weight: Type, bias: Type | None = None, *, act: str | None = None) -> Type:
    out, inner = weight.shape
    need(x.shape[-1] == inner, f"x has {x.shape[-1]} columns, the weight {inner}")
    need(x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}")
    need(bias is None or bias.shape == (out,), f"the bias is {bias}, for {out} outputs")
    if act is not None:
        need(len(x.shape) == 2, f"activations in {act} are rows, not {x}")
        check_act(act)
    return x.with_last(out)


@op(linear_type, weight=1)
def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, act: str | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]

    act: the format that x is rounded to, see `quantize_rows`, and a weight of 4 bits, see `round_weight`. Kernels for
    few rows may skip it, since it saves them nothing: their result is nearer to the matmul of x itself.
    """
    if act is None:
        return F.linear(x, plain(weight), bias)
    wide = None if bias is None else bias.float()
    return F.linear(round_rows(x, act), round_weight(weight, act), wide).to(x.dtype)


def _norm(x: Type, weight: Type, bias: Type | None = None, *, eps: float) -> Type:
    need(weight.shape == x.shape[-1:], f"the weight is {weight} for {x}")
    need(bias is None or bias.shape == weight.shape, f"the bias is {bias} for {x}")
    return x


@op(_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]; in float32, rounded once (Zhang and Sennrich 2019)"""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _layer_norm(x: Type, weight: Type, bias: Type | None = None, *, eps: float) -> Type:
    need(weight.shape in (x.shape[-1:], x.shape[1:]), f"the weight is {weight} for {x}")
    need(bias is None or bias.shape == weight.shape, f"the bias is {bias} for {x}")
    return x


@op(_layer_norm)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """x [..., H], weight and bias [H] -> [..., H]; in float32, rounded once (Ba et al. 2016)

    Heads x [T, N, H] may have a weight and bias each, [N, H].
    """
    wide = None if bias is None else bias.float()
    if weight.dim() == 1:
        return F.layer_norm(x.float(), weight.shape, weight.float(), wide, eps).to(x.dtype)
    y = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight
    return (y if wide is None else y + wide).to(x.dtype)


def _same(a: Type, b: Type) -> Type:
    need(a == b, f"{a} and {b} differ")
    return a


def _add(a: Type, b: Type) -> Type:
    need(a == b or b == Type(a.dtype, a.shape[-1:]), f"{a} and {b} differ")
    return a


@op(_add)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a [..., H], b [..., H] or [H] -> [..., H]"""
    return a + b


def _mul(a: Type, b: Type) -> Type:
    of_all = ((1,), (*a.shape[1:-1], 1))  # for all tokens the same
    is_of_rows = b in (a, a.with_last(1), *(Type(a.dtype, shape) for shape in of_all))
    need(is_of_rows or (b.shape == a.shape[-1:] and b.dtype in (a.dtype, "fp32")), f"{a} and {b} differ")
    return a


@op(_mul)
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., H], b [..., H], [..., 1], [H] or [1] -> [..., H]; heads a [T, N, D] also take b [N, 1]

    b [H] may be in fp32, for which the result is rounded once.
    """
    return (a * b).to(a.dtype)


def _affine(x: Type, factor: Type, offset: Type) -> Type:
    need(factor.shape == offset.shape == x.shape[-1:], f"factor {factor} and offset {offset} of {x}")
    return x


@op(_affine)
def affine(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """x [..., H], factor and offset [H] -> (x + offset) * factor, [..., H]; in float32, rounded once"""
    return ((x.float() + offset.float()) * factor.float()).to(x.dtype)


def _steer(x: Type, scales: Type, vector: Type, *, index: int) -> Type:
    need(vector.shape == x.shape[-1:], f"the vector is {vector}, of rows of {x}")
    need(scales.shape[:-1] == x.shape[:1] and scales.dtype == "fp32", f"scales are {scales}, of rows of {x}")
    need(isinstance(index, int) and 0 <= index < int(scales.shape[-1]), f"index={index} is no column of {scales}")
    return x


@op(_steer)
def steer(x: Tensor, scales: Tensor, vector: Tensor, *, index: int) -> Tensor:
    """x [T, H], scales fp32[T, K], vector [H] -> x + scales[:, index] vector, [T, H]; in float32, rounded once

    A steering vector (Turner et al. 2023), which each row takes by a scale of its own; of 0 it stays what it is.
    """
    return (x.float() + scales[:, index, None] * vector.float()).to(x.dtype)


@op(lambda x, *, by: x)
def scale(x: Tensor, *, by: float) -> Tensor:
    """x [...] -> [...]"""
    return x * by


def _gumbel_argmax(logits: Type, keys: Type, temperatures: Type, depths: Type, offsets: Type | None = None) -> Type:
    need(len(logits.shape) == 2, f"logits are rows, not {logits}")
    rows, columns = logits.shape[:1], logits.shape[1:]
    need(keys == Type("i64", rows), f"the keys are {keys}")
    need(temperatures == depths == Type("fp32", rows), f"temperatures and depths are {temperatures} and {depths}")
    need(offsets is None or (offsets.shape, offsets.dtype) == (columns, "i64"), f"the offsets are {offsets}")
    return Type("i64", rows)


@op(_gumbel_argmax)
def gumbel_argmax(
    logits: Tensor, keys: Tensor, temperatures: Tensor, depths: Tensor, offsets: Tensor | None = None
) -> Tensor:
    """logits [R, V], keys i64[R], temperatures and depths fp32[R], offsets i64[V] -> i64[R], a token drawn of each row

    From softmax(logits / temperature), with the noise of the keys (`noise`), among those at most a depth below the
    likeliest; at temperature 0 that one, the lowest of equals. A token is its column, and its offset added.
    """
    columns = torch.arange(logits.shape[-1], device=logits.device)
    tokens = columns if offsets is None else columns + offsets
    x = logits.float()
    is_kept = x >= x.amax(-1, keepdim=True) - depths[:, None]
    noisy = x + temperatures[:, None] * gumbel(hash_ids(keys, tokens))
    return tokens.index_select(0, noisy.masked_fill(~is_kept, -torch.inf).argmax(-1))


@op(lambda x, *, cap: x)
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """x [...] -> [...] within -cap to cap (Gemma Team 2024)"""
    return torch.tanh(x / cap) * cap


@op(lambda x, *, limit: x)
def clamp(x: Tensor, *, limit: float) -> Tensor:
    """x [...] -> [...] from -limit to limit"""
    return x.clamp(-limit, limit)


def _clip(x: Type, low: Type, high: Type) -> Type:
    need(low == high == Type(x.dtype, ()), f"bounds of {x} are {low} and {high}")
    return x


@op(_clip)
def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x [...] -> [...], from low [] to high []"""
    return x.clamp(low, high)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate_type(x: Type, *, kind: str) -> Type:
    need(kind in ACTIVATIONS, f"there is no activation '{kind}'; kinds: {', '.join(ACTIVATIONS)}")
    return x


@op(activate_type)
def activate(x: Tensor, *, kind: str) -> Tensor:
    """x [...] -> [...]; kind is a key of ACTIVATIONS"""
    return ACTIVATIONS[kind](x)


def _xielu(x: Type, alpha_p: Type, alpha_n: Type) -> Type:
    need(alpha_p.shape == alpha_n.shape == (1,), f"alpha_p is {alpha_p}, alpha_n {alpha_n}; each has one number")
    return x


@op(_xielu)
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """x [...], alpha_p and alpha_n [1] -> [...], an activation with two trained numbers (Huang & Schlag 2024)"""
    wide, beta = x.float(), 0.5
    grown = F.softplus(alpha_p.float()) * wide * wide
    bent = (beta + F.softplus(alpha_n.float())) * (torch.expm1(wide.clamp(max=-1e-6)) - wide)
    return (torch.where(wide > 0, grown, bent) + beta * wide).to(x.dtype)


def _join(*parts: Type) -> Type:
    need(len(parts) > 0, "there is nothing to join")
    for part in parts[1:]:
        need((part.dtype, part.shape[:-1]) == (parts[0].dtype, parts[0].shape[:-1]), f"{parts[0]} and {part} differ")
    return parts[0].with_last(sum(int(part.shape[-1]) for part in parts))


@op(_join)
def join(*parts: Tensor) -> Tensor:
    """[..., size] each -> [..., the sum of sizes], side by side"""
    return torch.cat(parts, -1)


def _pad(x: Type, *, size: int) -> Type:
    need(isinstance(size, int) and size >= int(x.shape[-1]), f"size={size!r} is less than that of {x}")
    return x.with_last(size)


@op(_pad, heads={"x": 1})
def pad(x: Tensor, *, size: int) -> Tensor:
    """x [T, N, D] -> [T, N, size], with zeros after x"""
    return torch.cat((x, x.new_zeros(*x.shape[:-1], size - x.shape[-1])), -1)  # F.pad compiles for one number of tokens


def _split(x: Type, *, sizes: Sequence[int]) -> tuple[Type, ...]:
    are_sizes = isinstance(sizes, list | tuple) and all(isinstance(size, int) and size >= 0 for size in sizes)
    need(are_sizes, f"sizes={sizes!r} is no list of whole numbers")
    need(sum(sizes) == x.shape[-1], f"sizes {list(sizes)} do not add up to {x.shape[-1]}")
    return tuple(x.with_last(size) for size in sizes)


@op(_split)
def split(x: Tensor, *, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x [..., sum(sizes)] -> views [..., size], one a size"""
    return x.split_with_sizes(list(sizes), -1)  # torch.split is Python around it


def _linear_by_head(x: Type, weight: Type, bias: Type | None = None, *, heads: int) -> Type:
    out, inner, *parts = weight.shape
    need(len(parts) <= 1, f"a weight of 2 or 3 dims, not {weight}")
    columns = heads * int(inner) * int(parts[0] if parts else 1)
    need(x.shape[-1] == columns, f"x has {x.shape[-1]} columns, {weight} of {heads} heads takes {columns}")
    divide(out, heads)
    need(bias is None or bias.shape == (out,), f"the bias is {bias}, for {out} outputs")
    return x.with_last(out)


@op(_linear_by_head, weight=1)
def linear_by_head(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, heads: int) -> Tensor:
    """x [T, N I], weight [N O, I], bias [N O] -> [T, N O], of N heads, each by itself

    With S values side by side, x [T, S N I], and a weight [N O, I, S] the sum over these.
    """
    weight = plain(weight)
    inner, num_parts = weight.shape[1], weight.shape[2] if weight.dim() > 2 else 1
    weights = weight.reshape(heads, -1, inner, num_parts)
    parts = x.reshape(len(x), num_parts, heads, inner)
    made = torch.einsum("tsni,nois->tno", parts, weights).flatten(1)
    return made if bias is None else made + bias


def _mix_streams(x: Type, weights: Type, *, streams: int) -> Type:
    size, rows = divide(x.shape[-1], streams), weights.shape[:-1]
    need(rows in ((), x.shape[:-1]), f"the weights are {weights} for {x}")
    return x.with_last(size * divide(weights.shape[-1], streams))


@op(_mix_streams)
def mix_streams(x: Tensor, weights: Tensor, *, streams: int) -> Tensor:
    """x [..., S H] of S streams side by side, weights [..., M S] or [M S] -> [..., M H], M sums of weighted streams

    The first S weights are of the first sum. In float32, rounded once.
    """
    parts = [part.float() for part in x.chunk(streams, -1)]
    made = []
    for first in range(0, weights.shape[-1], streams):
        total = weights[..., first : first + 1].float() * parts[0]
        for number in range(1, streams):
            total = total + weights[..., first + number : first + number + 1].float() * parts[number]
        made.append(total.to(x.dtype))
    return torch.cat(made, -1)


def _attend_residuals(norm: Type, query: Type, *sums: Type, eps: float) -> Type:
    need(len(sums) > 0, "there is nothing to attend to")
    for each in sums[1:]:
        need(each == sums[0], f"{sums[0]} and {each} differ")
    columns = sums[0].shape[-1:]
    need(norm.shape == columns and query.shape == (1, *columns), f"norm {norm} and query {query} for {sums[0]}")
    return sums[0]


@op(_attend_residuals)
def attend_residuals(norm: Tensor, query: Tensor, *sums: Tensor, eps: float) -> Tensor:
    """norm [H], query [1, H], S sums [T, H] -> [T, H]: attention residuals (Kimi Team 2026), weighted by token

    The weights are the softmax of query . rms_norm(sum, norm) over the sums. In float32, rounded once.
    """
    wide = torch.stack(sums, -2).float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scores = (normed * (norm.float() * query.float().squeeze(0))).sum(-1, keepdim=True)
    return (torch.softmax(scores, -2) * wide).sum(-2).to(sums[0].dtype)


@op(lambda x, like, *, eps: _same(x, like))
def match_rms(x: Tensor, like: Tensor, *, eps: float) -> Tensor:
    """x [..., H], like [..., H] -> x with the root mean square of like, [..., H]; in float32, rounded once

    eps: the mean square of x counts as this, at least.
    """
    wide = x.float()
    squares, target = wide.square().mean(-1, keepdim=True), like.float().square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(squares.clamp(min=eps)) * torch.sqrt(target)).to(x.dtype)


def deviations_of(sparsity: float) -> float:
    """By how many standard deviations a normal variable exceeds its mean in a share of 1 - sparsity."""
    return NormalDist().inv_cdf(sparsity)


def _gaussian_topk(x: Type, moments: Type | None = None, *, sparsity: float, columns: int | None = None) -> Type:
    need(isinstance(sparsity, float) and 0 < sparsity < 1, f"sparsity={sparsity!r} is no share between 0 and 1")
    need((moments is None) == (columns is None), f"moments {moments} of a row of {columns} columns")
    need(moments in (None, Type("fp32", (*x.shape[:-1], 2))), f"the moments are {moments} for {x}")
    return x


@op(_gaussian_topk)
def gaussian_topk(
    x: Tensor, moments: Tensor | None = None, *, sparsity: float, columns: int | None = None
) -> Tensor:  # fmt: skip
    """x [..., W] -> [..., W]: by how much each exceeds the quantile of a normal row, else 0 (You et al. 2025)

    sparsity: that quantile, so the share of a row that becomes 0 if it is normally distributed.
    moments: fp32[..., 2], the sums of a row of this many columns and of its squares, of which x is a part; None: x is
        the row. In float32, rounded once.
    """
    wide = x.float()
    if moments is None or columns is None:
        deviation, mean = torch.std_mean(wide, -1, unbiased=False, keepdim=True)
    else:
        mean, squares = (moments / columns).chunk(2, -1)
        deviation = torch.sqrt((squares - mean * mean).clamp(min=0))
    return F.relu(wide - (mean + deviations_of(sparsity) * deviation)).to(x.dtype)


@op(lambda a, b, weight, *, eps: (_norm(_same(a, b), weight, eps=eps), a))
def add_rms_norm(a: Tensor, b: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """a and b [T, H], weight [H] -> rms_norm(a + b), a + b"""
    total = a + b
    return rms_norm(total, weight, eps=eps), total


GATED_ACTIVATIONS = (*ACTIVATIONS, "swigluoai", "swiglustep", "situ")


def gated_activate_type(x: Type, *, kind: str, limit: float | None = None, alpha: float | None = None) -> Type:
    need(kind in GATED_ACTIVATIONS, f"there is no activation '{kind}'; kinds: {', '.join(GATED_ACTIVATIONS)}")
    given = f"limit={limit} and alpha={alpha} for {kind}"
    need(limit is not None or kind in (*ACTIVATIONS, "situ"), f"{given}: it takes a limit")
    need((alpha is not None) == (kind in ("swigluoai", "situ")), f"{given}: only swigluoai and situ take alpha")
    return x.with_last(divide(x.shape[-1], 2))


@op(gated_activate_type)
def gated_activate(x: Tensor, *, kind: str, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """x [T, 2 W], gate before up -> activate(gate) * up, [T, W]

    limit: gate is clamped from above, up from both sides; None: neither is.
    swigluoai: gate sigmoid(alpha gate) (up + 1) (Agarwal et al. 2025).
    swiglustep: silu, of which the activated gate is clamped and not the gate (StepFun 2026).
    situ: c(gate, alpha) sigmoid(gate) c(up, limit), c(x, y) = y tanh(x / y), in float32, rounded once (Kimi Team 2026).
    """
    gate, up = x.chunk(2, dim=-1)
    if kind == "situ":
        wide, up = gate.float(), up.float() if limit is None else softcap(up.float(), cap=limit)
        made: Tensor = softcap(wide, cap=alpha) * torch.sigmoid(wide) * up
        return made.to(x.dtype)
    if limit is None:
        return ACTIVATIONS[kind](gate) * up
    up = up.clamp(-limit, limit)
    if kind == "swiglustep":
        return F.silu(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return ACTIVATIONS[kind](gate) * up if alpha is None else gate * torch.sigmoid(alpha * gate) * (up + 1)
