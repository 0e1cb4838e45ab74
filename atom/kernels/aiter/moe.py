"""Routers and experts by AITER's functions.

weights, ids = router(aiter, h, gate, top_k=8, renormalize=True)
y = experts(aiter, h, weights, ids, gate_up, down, kind="silu")     # both weights in tiles
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.aiter.functions import MXFP4, Aiter
from atom.kernels.aiter.linear import add_rms_norm
from atom.kernels.aiter.mxfp4 import mxfp4_experts
from atom.kernels.triton.activations import Gate


def router(aiter: Aiter, x: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Tensor | None = None, *,
           top_k: int, method: str = "greedy", score: str = "softmax", groups: int = 1, top_groups: int = 1,
           renormalize: bool = False, scale: float = 1.0, shared: int = 0,
           ranks: str = "scores") -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits are torch's GEMM in float32: AITER's rounds to the dtype of x, which would choose other experts."""
    logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    weights = logits.new_empty(len(x), top_k)
    ids = torch.empty_like(weights, dtype=torch.int32)
    if method == "greedy":
        groups = top_groups = 1
    if correction is not None:
        chosen = logits, correction.float(), weights, ids
        aiter["topk_with_correction"](*chosen, groups, top_groups, renormalize, scale)
    elif score == "softmax" and groups == 1:
        aiter["topk_softmax"](weights, ids, torch.empty_like(ids), logits, renormalize)
        weights.mul_(scale)
    else:
        aiter["topk_of_groups"](logits, weights, ids, groups, top_groups, renormalize, score == "softmax", scale)
    common = torch.arange(len(weight), len(weight) + shared, device=x.device).expand(len(x), -1)
    return torch.cat((weights, weights.new_ones(common.shape)), 1), torch.cat((ids.long(), common), 1)


def add_norm_router(aiter: Aiter, a: Tensor, b: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None,
                    correction: Tensor | None = None, *, eps: float,
                    **rule: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    normed, total = add_rms_norm(aiter, a, b, norm, eps=eps)
    return *router(aiter, normed, weight, bias, correction, **rule), normed, total


def experts(
    aiter: Aiter, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor | PackedWeight,
    down: Tensor | PackedWeight, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    first: Tensor | None = None, *, kind: str, limit: float | None = None, alpha: float | None = None,
    act: str | None = None,
) -> Tensor:  # fmt: skip
    """kind is silu and biases are None, except with weights in MXFP4. A rank may have no rows."""
    if not len(x):
        return torch.empty_like(x)
    if is_mxfp4(gate_up) and is_mxfp4(down):
        biases = gate_up_bias, down_bias
        return mxfp4_experts(aiter, x, weights, ids, gate_up, down, *biases, first, Gate(kind, limit, alpha))
    quant = {None: "No", "fp8[1, *]": "per_Token"}.get(act, "per_128x128")
    (w1, w1_scale), (w2, w2_scale) = map(_parts, (gate_up, down))
    mask = None
    if first is not None:
        ids, mask = _find_local(ids - first, len(w1))
    return aiter["experts"](  # type: ignore[no-any-return]
        x.contiguous(), w1, w2, weights.contiguous(), ids.int().contiguous(), expert_mask=mask,
        quant_type=aiter.quant_type(quant), w1_scale=w1_scale, w2_scale=w2_scale,
    )  # fmt: skip


def is_mxfp4(weight: Tensor | PackedWeight) -> TypeGuard[PackedWeight]:
    return isinstance(weight, PackedWeight) and weight.type.fmt in MXFP4


def _parts(weight: Tensor | PackedWeight) -> tuple[Tensor, Tensor | None]:
    values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.parts["values"], weight.parts["scales"])
    values.is_shuffled = True  # type: ignore[attr-defined]  # AITER's own shuffle sets this, and newer versions check it
    return values, scales


def _find_local(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Ids, of which 0 to experts - 1 are local -> the same, with `experts` for all others, and AITER's mask of ids."""
    mask = torch.arange(experts + 1, device=ids.device) < experts
    return ids.where((ids >= 0) & (ids < experts), experts), mask.int()
