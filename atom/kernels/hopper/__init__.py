"""The backend `hopper`: products by packed weights that are laid out for NVIDIA's Hopper.

It runs the same kernels as `triton`, which has others for weights in this layout, and for those that it refuses.

    y = hopper.linear(h, shuffle(W("y", …), "wgmma"))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from atom.graph import ops
from atom.graph.formats import act_of, parse_format
from atom.graph.types import Type
from atom.kernels.backend import Accepts, Backend, Kernel, Target, on_device
from atom.kernels.hopper.shuffle import LAYOUT, shuffle
from atom.kernels.triton import ACTS, GIVEN, SPAN, accepts_experts, accepts_grouped, accepts_linear, knows_gluon, loader

GLUON = "gluon"  # the feature of a GPU that runs our kernels in Gluon
PACKED = ("scaled", "int4", "mxfp4")  # kinds that are laid out
GATES = ("silu", "swigluoai")  # of experts whose activations are in fp8
SCALED_COLUMNS = {"int4": (128,), "mxfp4": (32,), "scaled": (None, 128)}  # that share a scale


def find_features() -> frozenset[str]:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return frozenset()
    return frozenset({GLUON} if torch.cuda.get_device_capability(0) == (9, 0) and knows_gluon() else ())


def _accepts_linear(target: Target, x: Type, *types: Any, **attributes: Any) -> str | None:
    weight = next((type for type in types if isinstance(type, Type) and type.fmt is not None), None)
    return _refuse(target, x, weight) or accepts_linear(target, x, *types, **attributes)


def _accepts_grouped(target: Target, x: Type, weight: Type, *types: Any) -> str | None:
    return _refuse(target, x, weight if weight.fmt else None) or accepts_grouped(target, x, weight, *types)


def _accepts_experts(
    target: Target, x: Type, weights: Type, ids: Type, gate_up: Type, down: Type, *more: Type | None,
    kind: str, act: str | None = None, **attributes: Any,
) -> str | None:  # fmt: skip
    refused = [_refuse(target, x, each if each.fmt else None) for each in (gate_up, down)]
    refused.append(accepts_experts(target, x, weights, ids, gate_up, down, *more, **attributes))
    if act is not None:
        refused += [_refuse_act(act, gate_up), _refuse_act(act, down)]
        is_known = kind in GATES and not any(each is not None for each in more[:2])
        refused.append(None if is_known else f"has no biases and no {kind} gate beside activations in {act}")
    return next(filter(None, refused), None)


def _refuse_act(act: str, weight: Type) -> str | None:
    """Why experts' activations in this format are not multiplied by this weight; None: they are."""
    out, inner = map(int, weight.shape[-2:])
    is_in_blocks = (
        weight.fmt is not None and parse_format(weight.fmt).block == (SPAN, SPAN) and act_of(weight.fmt) == act
    )
    is_taken = is_in_blocks and out % SPAN == inner % SPAN == 0
    return None if is_taken else f"activations in {act} are not multiplied by {weight}"


def _refuse(target: Target, x: Type, weight: Type | None) -> str | None:
    """Why a weight is not laid out; None: it is."""
    if weight is None:
        return "takes packed weights alone"
    if GLUON not in target.features:
        return "runs on NVIDIA's Hopper alone"
    known, (out, inner) = parse_format(str(weight.fmt)), map(int, weight.shape[-2:])
    rows, columns = known.block
    is_known = columns in SCALED_COLUMNS[known.kind]
    is_plain = known.parts.keys() <= {"values", "scales", "zeros"} and not known.has_order
    if not is_known or not is_plain or known.parts["values"].dtype == "i8" or (known.is_whole and rows != 1):
        return f"has no layout of {weight.fmt}"
    if x.dtype != "bf16":
        return f"multiplies in bf16, not in {x.dtype}"
    is_even = out % 16 == 0 and inner % (32 if known.bits == 4 else 64) == 0 and out % (rows or out) == 0
    return None if is_even else f"has no layout of {out} x {inner}"


def _kernels() -> Iterator[Kernel]:
    accepts: Accepts = on_device("cuda", _accepts_linear, packed=PACKED, acts=ACTS, gives=GIVEN)
    for op in (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear):
        load = loader("linear.linear", f"Products.{op.name}")
        yield Kernel(op, "hopper", accepts, load, packed_layout=LAYOUT, is_for_packed=True)
    for op, accepts, acts in ((ops.grouped_linear, _accepts_grouped, ()), (ops.experts, _accepts_experts, GIVEN)):
        accepts, load = (
            on_device("cuda", accepts, packed=PACKED, acts=acts),
            loader("experts.moe", f"ShuffledExperts.{op.name}"),
        )
        yield Kernel(op, "hopper", accepts, load, packed_layout=LAYOUT, is_for_packed=True)


BACKEND = Backend("hopper", tuple(_kernels()), layouts={LAYOUT: shuffle}, find_features=find_features)
