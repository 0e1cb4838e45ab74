"""The ops of the text. Each is a reference body in plain torch, a shape rule in plain Python, and a docstring.

    ops.rms_norm(x, weight, eps=1e-6)                      # the reference body
    ops.rms_norm.infer(Type("bf16", ("T", 576)), …)        # its result's type
    OPS["rms_norm"]                                        # by the name that the text uses

Tensors are positional, attributes keyword-only. A `state` op writes a cache, so it is never dead. Shapes by letter:
T tokens, R rows, S sequences, H hidden, V vocabulary, N query heads, K key/value heads, D head dim, M blocks of the
longest sequence.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.recipes import KV
from atom.graph.types import Dim, Type

SEMANTIC, LOWERED = "semantic", "lowered"
BOTH = frozenset({SEMANTIC, LOWERED})


@dataclass(frozen=True, eq=False)
class Op:
    name: str
    body: Callable[..., Any]
    infer: Callable[
        ..., Type | tuple[Type, ...]
    ]  # over the types of the tensors; raises ValueError where they do not fit
    levels: frozenset[str]  # where it is legal
    is_state: bool
    signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name


OPS: dict[str, Op] = {}


def op(
    infer: Callable[..., Type | tuple[Type, ...]], *, levels: frozenset[str] = BOTH, state: bool = False
) -> Callable[[Callable[..., Any]], Op]:
    """Make an op of a reference body and a shape rule."""

    def register(body: Callable[..., Any]) -> Op:
        made = Op(body.__name__, body, infer, levels, state, inspect.signature(body))
        OPS[made.name] = made
        return made

    return register


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _linear(x: Type, weight: Type, bias: Type | None = None) -> Type:
    out, inner = weight.shape
    _need(x.shape[-1] == inner, f"x has {x.shape[-1]} columns, the weight {inner}")
    _need(x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}")
    _need(bias is None or bias.shape == (out,), f"the bias is {bias}, for {out} outputs")
    return x.with_last(out)


def _norm(x: Type, weight: Type, bias: Type | None = None, *, eps: float) -> Type:
    _need(weight.shape == x.shape[-1:], f"the weight is {weight} for {x}")
    _need(bias is None or bias.shape == weight.shape, f"the bias is {bias} for {x}")
    return x


def _same(a: Type, b: Type) -> Type:
    _need(a == b, f"{a} and {b} differ")
    return a


def _split(x: Type, *, sizes: Sequence[int]) -> tuple[Type, ...]:
    _need(sum(sizes) == x.shape[-1], f"sizes {list(sizes)} do not add up to {x.shape[-1]}")
    return tuple(x.with_last(size) for size in sizes)


def _divide(dim: Dim, parts: int) -> int:
    _need(isinstance(dim, int) and dim % parts == 0, f"{dim} does not divide by {parts}")
    return int(dim) // parts


def _rope(x: Type, cos: Type, sin: Type) -> Type:
    _need(cos == sin, f"cos is {cos}, sin {sin}")
    _need(
        2 * int(cos.shape[-1]) <= int(x.shape[-1]), f"{2 * int(cos.shape[-1])} rotated dims in heads of {x.shape[-1]}"
    )
    return x


def _window(cache: KV, window: int | None) -> None:
    _need(cache.window is None or (window is not None and window <= cache.window),
          f"a query sees {window or 'all'} tokens, the cache keeps {cache.window}")  # fmt: skip


def _attention(q: Type, k: Type, v: Type, cache: KV, *, scale: float, window: int | None = None) -> Type:
    _window(cache, window)
    tokens, heads, dim = q.shape
    _need(k == v and k.shape[0] == tokens and k.shape[2] == dim, f"q is {q}, k {k}, v {v}")
    _divide(heads, int(k.shape[1]))
    _need(cache.type.shape == (2, *k.shape[1:]), f"the cache keeps {cache.type} of k {k}")
    return q


def _norm_rope_write(q: Type, k: Type, v: Type, cos: Type | None, sin: Type | None, q_norm: Type | None,
                     k_norm: Type | None, cache: KV, slots: Type, *, eps: float = 0.0) -> Type:  # fmt: skip
    _need(cache.type.shape == (2, *k.shape[1:]), f"the cache keeps {cache.type} of k {k}")
    return q


def _paged_attention(q: Type, cache: KV, table: Type, starts: Type, lengths: Type, num_decodes: Type, *,
                     scale: float, window: int | None = None) -> Type:  # fmt: skip
    _window(cache, window)
    _need(len(q.shape) == 3 and q.shape[2] == cache.type.shape[2], f"q is {q}, the cache keeps {cache.type}")
    return q


@op(lambda tokens, weight: Type(weight.dtype, (*tokens.shape, weight.shape[1])))
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens i64[T], weight [V, H] -> [T, H]"""
    return F.embedding(tokens, weight)


@op(_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]"""
    return F.linear(x, weight, bias)


@op(_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]; in float32 up to the weight (Zhang and Sennrich 2019)"""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@op(_norm)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """x [..., H], weight [H], bias [H] -> [..., H] (Ba et al. 2016)"""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@op(_same)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a [...], b [...] -> [...]"""
    return a + b


@op(_same)
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a [...], b [...] -> [...]"""
    return a * b


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _activate(x: Type, *, kind: str) -> Type:
    _need(kind in ACTIVATIONS, f"there is no activation '{kind}'; kinds: {', '.join(ACTIVATIONS)}")
    return x


def _gated_activate(x: Type, *, kind: str) -> Type:
    return _activate(x.with_last(_divide(x.shape[-1], 2)), kind=kind)


@op(_activate)
def activate(x: Tensor, *, kind: str) -> Tensor:
    """x [...] -> [...]; kind is a key of ACTIVATIONS"""
    return ACTIVATIONS[kind](x)


@op(_split)
def split(x: Tensor, *, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x [..., sum(sizes)] -> views [..., size], one a size"""
    return torch.split(x, list(sizes), dim=-1)


@op(lambda x, *, heads: x.with_last(heads, _divide(x.shape[-1], heads)))
def split_heads(x: Tensor, *, heads: int) -> Tensor:
    """x [T, N * D] -> a view [T, N, D]"""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


@op(lambda x: Type(x.dtype, (x.shape[0], x.shape[1] * x.shape[2])))
def merge_heads(x: Tensor) -> Tensor:
    """x [T, N, D] -> [T, N * D]"""
    return x.flatten(1)


@op(lambda positions, freqs, *, scale=1.0: (Type("fp32", (*positions.shape, *freqs.shape)),) * 2)
def rotary(positions: Tensor, freqs: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """positions i64[T], freqs fp32[D / 2] -> cos, sin fp32[T, D / 2], both times scale"""
    angles = positions.float().unsqueeze(-1) * freqs
    return angles.cos() * scale, angles.sin() * scale


@op(_rope)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, N, D], cos and sin fp32[T, P] -> [T, N, D]: dim i turns with i + P, the rest stays (Su et al. 2021)"""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool[num_queries, num_keys], the last query at the last key; true where the query sees the key."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One sequence: q [Q, N, D] at the last Q of L positions, k and v [L, K, D] -> [Q, N, D], in float32."""
    num_queries, heads, dim = q.shape
    grouped = q.float().view(num_queries, k.shape[1], -1, dim)  # N / K query heads share a key/value head
    scores = torch.einsum("qkgd,lkd->kgql", grouped, k.float()) * scale
    scores.masked_fill_(~causal_mask(num_queries, k.shape[0], window, q.device), float("-inf"))
    return torch.einsum("kgql,lkd->qkgd", scores.softmax(-1), v.float()).reshape(num_queries, heads, dim).to(q.dtype)


@op(_attention, levels=frozenset({SEMANTIC}))
def attention(q: Tensor, k: Tensor, v: Tensor, cache: Tensor | None, *, scale: float,
              window: int | None = None) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D] -> [T, N, D], causal: the T tokens are one whole sequence.

    A query sees the window's tokens up to its own. The cache, where a lowered graph keeps k and v, is not touched.
    """
    return attend(q, k, v, scale, window)


@op(lambda a, b, weight, *, eps: (_norm(_same(a, b), weight, eps=eps), a))
def add_rms_norm(a: Tensor, b: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """a and b [T, H], weight [H] -> rms_norm(a + b), a + b"""
    total = a + b
    return rms_norm(total, weight, eps=eps), total


@op(_gated_activate)
def gated_activate(x: Tensor, *, kind: str) -> Tensor:
    """x [T, 2 W], gate before up -> activate(gate) * up, [T, W]"""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


@op(_norm_rope_write, levels=frozenset({LOWERED}), state=True)
def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: Tensor, slots: Tensor, *, eps: float = 0.0) -> Tensor:  # fmt: skip
    """Norm and turn q and k, write k and v to the cache, give q.

    q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D] -> q [T, N, D];
    cache [blocks, block size, 2, K, D], slots i64[T]: block number * block size + place in the block.
    """
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps=eps), rms_norm(k, k_norm, eps=eps)
    if cos is not None and sin is not None:
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, torch.stack((k, v), dim=1).to(cache.dtype))
    return q


@op(_paged_attention, levels=frozenset({LOWERED}))
def paged_attention(q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int, *,
                    scale: float, window: int | None = None) -> Tensor:  # fmt: skip
    """Attention of S sequences over the blocks that each one's row of the table lists.

    q [T, N, D], cache [blocks, block size, 2, K, D], table i32[S, M], starts i32[S + 1], lengths i32[S] -> [T, N, D];
    sequence s has queries starts[s] to starts[s + 1], the last of its lengths[s] positions; the first num_decodes
    sequences have one query each.
    """
    out = torch.zeros_like(q)
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        keys, values = cache[table[row]].flatten(0, 1)[: int(lengths[row])].unbind(1)
        out[first:last] = attend(q[first:last], keys, values, scale, window)
    return out
