"""The backend `fixed_cpp`: CPU kernels whose bits do not depend on the batch.

    y = linear(x, weight, bias)                      # [T, I] by [O, I] -> [T, O]; a row has the same bits for any T
    out = paged_attention(q, cache, batch, scale=0.125)

torch multiplies by other code for other numbers of rows, and its loops treat the end of a tensor, or of a thread's
part, in another way than the rest. Here each number comes from one chain of operations (fixed.cpp): weights are read as
stored, whatever the number of rows; each token of a prompt attends as a decode does, its context in parts of 128
positions from the first that it sees. Ranks' sums are of what they gather, in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from atom.errors import UnsupportedError
from atom.graph import Batch, PagedCache, ops
from atom.graph.ops import Op
from atom.graph.ops.moe import multiply_by_expert
from atom.graph.types import Type
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, Target, accepts_all, on_device
from atom.kernels.cpp import attention
from atom.kernels.cpp.build import ATTENTION, FIXED, build_library, load_library
from atom.kernels.fixed import all_reduce_kernel, combine, sum_columns

KINDS = ("silu", "sigmoid", "softplus", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")  # as fixed.cpp numbers them
SCORES = ("softmax", "sigmoid")

LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
for signature in (
    "fixed_linear(Tensor x, Tensor weight, Tensor? bias, bool wide) -> Tensor",
    "fixed_norm(Tensor a, Tensor? b, Tensor weight, float eps) -> (Tensor, Tensor)",
    "fixed_activate(Tensor x, int kind, bool gated) -> Tensor",
    "fixed_softmax(Tensor logits) -> Tensor",
    "fixed_rotary(Tensor positions, Tensor freqs, float scale, int every) -> (Tensor, Tensor)",
):
    LIBRARY.define(signature)  # type: ignore[no-untyped-call]


def accepts_linear(_target: Target, x: Type, weight: Type, *_types: Type | None, act: str | None = None) -> str | None:
    """x of two dims, plain weights"""
    return "takes rows in two dims" if len(x.shape) != 2 else None


def accepts_kind(_target: Target, _x: Type, *, kind: str, **limits: float | None) -> str | None:
    """silu, sigmoid, softplus, gelu, gelu_tanh, quick_gelu, relu and relu2, without limits"""
    if any(each is not None for each in limits.values()):
        return "has no gates with limits"
    return None if kind in KINDS else f"has no {kind}"


def accepts_rotary(
    _target: Target, positions: Type, _freqs: Type, *, growth: float = 0.0, **_attributes: object
) -> str | None:
    """positions of one dim, whose cos and sin do not grow"""
    return "cos and sin grow with the position" if growth or len(positions.shape) != 1 else None


def accepts_router(
    _target: Target, *_types: Type | None, method: str = "greedy", score: str = "softmax", groups: int = 1,
    gated: bool = False, **_attributes: object,
) -> str | None:  # fmt: skip
    """softmax and sigmoid scores; no groups of experts; no gate of shared experts"""
    if score not in SCORES:
        return f"has no {score}"
    if groups > 1 and method != "greedy":
        return "chooses among all experts"
    return "has no gate of shared experts" if gated else None


def accepts_attention(
    _target: Target, q: Type, _cache: object, _batch: object, _sinks: Type | None = None, _k_scale: Type | None = None,
    _v_scale: Type | None = None, slopes: Type | None = None, ends: Type | None = None, selected: Type | None = None,
    *, chunked: bool = False, **_attributes: object,
) -> str | None:  # fmt: skip
    """heads of up to 512 dims, without slopes, ends, chunks, choice"""
    if int(q.shape[-1]) > attention.MAX_DIM:
        return f"heads have {q.shape[-1]} dims, more than {attention.MAX_DIM}"
    given = {"slopes": slopes, "ends": ends, "a choice": selected, "chunks": chunked or None}
    lacking = [name for name, value in given.items() if value is not None]
    return f"has no {lacking[0]}" if lacking else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]"""
    return _multiply(x, weight, bias, False)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [P, I], weight [E, O, I], ends i64[E], bias [E, O] -> [P, O]"""
    return multiply_by_expert(linear, x, weight, weight.shape[1], ends, bias)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]"""
    return torch.ops.atom.fixed_norm(x.contiguous(), None, weight.contiguous(), eps)[0]  # type: ignore[no-any-return]


def add_rms_norm(a: Tensor, b: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """a and b [T, H], weight [H] -> rms_norm(a + b), a + b"""
    normed, total = torch.ops.atom.fixed_norm(a.contiguous(), b.contiguous(), weight.contiguous(), eps)
    return normed, total


def activate(x: Tensor, *, kind: str) -> Tensor:
    """x [...] -> [...]"""
    return torch.ops.atom.fixed_activate(x.contiguous(), KINDS.index(kind), False)  # type: ignore[no-any-return]


def gated_activate(x: Tensor, *, kind: str, limit: None = None, alpha: None = None) -> Tensor:
    """x [T, 2 W] -> [T, W]"""
    return torch.ops.atom.fixed_activate(x.contiguous(), KINDS.index(kind), True)  # type: ignore[no-any-return]


def rotary(positions: Tensor, freqs: Tensor, *, scale: float = 1.0, every: int = 1, **_: object
           ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """positions i64[T], freqs fp32[P] -> cos, sin fp32[T, P]"""
    cos, sin = torch.ops.atom.fixed_rotary(positions.contiguous(), freqs.contiguous(), scale, every)
    return cos, sin


def router(x: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Tensor | None = None, *, top_k: int,
           score: str = "softmax", renormalize: bool = False, scale: float = 1.0, shared: int = 0,
           ranks: str = "scores", **_: object) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, H], weight [E, H], bias and correction [E] -> weights fp32[T, k] and ids i64[T, k]"""
    logits = _multiply(x, weight, bias, True)
    if score == "softmax":
        scores = torch.ops.atom.fixed_softmax(logits)
    else:
        scores = torch.ops.atom.fixed_activate(logits, KINDS.index("sigmoid"), False)
    ranked = logits if ranks == "logits" else scores
    ranked = ranked if correction is None else ranked + correction.float()
    ids = ranked.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / sum_columns(weights).unsqueeze(1).clamp(min=1e-20)
    common = torch.arange(len(weight), len(weight) + shared).expand(len(ids), -1)
    return torch.cat((weights * scale, weights.new_ones(len(ids), shared)), 1), torch.cat((ids, common), 1)


def paged_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                    k_scale: Tensor | None = None, v_scale: Tensor | None = None, *_: None, scale: float,
                    window: int | None = None, softcap: float | None = None, **__: object) -> Tensor:  # fmt: skip
    """Shapes as in the op. Each token is a sequence that ends with it."""
    lengths, starts = batch.lengths.long(), batch.starts.long()
    counts = starts[1 : len(lengths) + 1] - starts[: len(lengths)]
    rows = torch.repeat_interleave(counts)
    later = starts[1:][rows] - 1 - torch.arange(len(rows))  # tokens of its sequence after each
    own = (lengths[rows] - later).clamp_(min=0)
    if len(rows) < len(q):  # tokens of no sequence
        rows, own = (torch.cat((each, each.new_zeros(len(q) - len(rows)))) for each in (rows, own))
    of_keys, of_values = (1.0 if each is None else float(each) for each in (k_scale, v_scale))
    return torch.ops.atom.paged_decode(  # type: ignore[no-any-return]
        q.contiguous(), cache.blocks, batch.tables[cache.kind][rows], own.int(), sinks, scale * of_keys, of_values,
        window or 0, softcap or 0.0,
    )  # fmt: skip


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    return torch.ops.atom.fixed_linear(x.contiguous(), weight.contiguous(), bias, wide)  # type: ignore[no-any-return]


def _kernel(op: Op, run: object, accepts: Accepts = accepts_all, source: str = FIXED) -> Kernel:
    def load(_context: LoadContext) -> object:
        if not load_library(source):
            raise UnsupportedError(f"batch_invariant=true: {op.name} needs {source}, which cannot be compiled here")
        return run

    def build(*_types: Type) -> None:
        build_library(source)

    return Kernel(op, "fixed_cpp", on_device("cpu", accepts), load, build=build, batch_invariant=True)  # type: ignore[arg-type]


KERNELS = (
    _kernel(ops.linear, linear, accepts_linear),
    _kernel(ops.grouped_linear, grouped_linear),
    _kernel(ops.rms_norm, rms_norm),
    _kernel(ops.add_rms_norm, add_rms_norm),
    _kernel(ops.activate, activate, accepts_kind),
    _kernel(ops.gated_activate, gated_activate, accepts_kind),
    _kernel(ops.rotary, rotary, accepts_rotary),
    _kernel(ops.router, router, accepts_router),
    _kernel(ops.norm_rope_write, attention.norm_rope_write, source=ATTENTION),
    _kernel(ops.paged_attention, paged_attention, accepts_attention, ATTENTION),
    Kernel(ops.combine, "fixed_cpp", on_device("cpu"), lambda _: combine, batch_invariant=True),
    all_reduce_kernel("fixed_cpp", "cpu"),
)

BACKEND = Backend("fixed_cpp", KERNELS)
