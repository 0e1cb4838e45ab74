"""The backend `int8`: int8 GEMMs on a CPU, by oneDNN.

    y = int8_linear(x, weight, bias, act="int8[1, *]")     # x [T, I], weight [O, I] in panels of `cpp`

Many rows are quantized, each with its own scale, and multiplied by the weight's integers, which takes at most half the
time. Few rows go through `cpp.linear`, which multiplies x itself. Integers are summed in int32, so exactly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, library

from atom.graph import LaidOut, ops
from atom.graph.formats import act_of
from atom.graph.quantize_rows import quantize_rows
from atom.graph.types import Type
from atom.kernels.backend import Backend, Kernel, Target, kinds_in, on_device
from atom.kernels.cpp.linear import accepts, build_for
from atom.kernels.cpp.panels import ROWS, Panels, packed_type
from atom.kernels.cpu import instruction_set

ACT = "int8[1, *]"
FEATURE = "int8_products"
INSTRUCTIONS = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")  # without which the sums of oneDNN may overflow
MIN_ROWS = 33  # with fewer, reading the weight takes most of the time
CHUNK_ROWS = 512  # at a time: sums take 4 bytes each
CHUNK = torch.complex128  # a dtype of 16 bytes: a panel's column


def find_features() -> frozenset[str]:
    """Whether this CPU multiplies 8-bit integers."""
    return frozenset({FEATURE} if any(each in instruction_set().split() for each in INSTRUCTIONS) else ())


def accepts_int8(target: Target, x: Type, weight: Type, *types: Type | None, act: str | None = None) -> str | None:
    """rows of activations in int8, on a CPU with 8-bit dot products"""
    if act is None:
        return "multiplies only quantized activations"
    if FEATURE not in target.features:
        return "this CPU has no int8 dot products"
    if weight.fmt is not None and (act_of(weight.fmt), act) != (ACT, ACT):
        return f"activations in {act} are not multiplied by weights in {weight.fmt}"
    return accepts(target, x, weight, *types)


def _linear(x: Tensor, panels: Tensor, bias: Tensor | None, layout: list[int]) -> Tensor:
    if len(x) < MIN_ROWS or panels.dtype != torch.uint8:  # or not packed, for lack of a compiler
        return torch.ops.atom.panel_linear(x.contiguous(), panels, bias, layout)  # type: ignore[no-any-return]
    weight = Panels(*layout)  # type: ignore[arg-type]  # numbers in place of bools
    first = ROWS * weight.scale_dtype.itemsize  # bytes of a panel's scales
    scales = panels[:, :first].contiguous().view(weight.scale_dtype).view(1, -1)
    scales, bias = scales[:, : weight.out].float(), None if bias is None else bias.float()
    columns = panels.new_empty(weight.inner, len(panels), dtype=CHUNK)
    columns.copy_(panels.view(CHUNK)[:, first // CHUNK.itemsize :].t())
    values = columns.view(torch.int8)[:, : weight.out]
    y = x.new_empty(len(x), weight.out)
    for some, part in zip(torch.split(x, CHUNK_ROWS), torch.split(y, CHUNK_ROWS), strict=True):
        numbers, row_scales = quantize_rows(some, ACT)
        sums = torch.mul(torch._int_mm(numbers, values), row_scales).mul_(scales)
        part.copy_(sums if bias is None else sums.add_(bias))
    return y


LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("int8_linear(Tensor x, Tensor panels, Tensor? bias, int[] layout) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("int8_linear", _linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _shape(x: Tensor, panels: Tensor, bias: Tensor | None, layout: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], layout[1])


LIBRARY.impl("int8_linear", _shape, "Meta")  # type: ignore[no-untyped-call]


@cache
def _numbers_of(weight: Type) -> list[int]:
    return Panels.of(weight).numbers


def int8_linear(x: Tensor, weight: LaidOut, bias: Tensor | None = None, *, act: str) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]"""
    return torch.ops.atom.int8_linear(x, weight.tensor, bias, _numbers_of(weight.type))  # type: ignore[no-any-return]


KERNELS = (
    Kernel(
        ops.linear, "int8", on_device("cpu", accepts_int8, packed=("scaled",), acts=("int8",)), lambda _: int8_linear,
        packed_layout=kinds_in("panels"), packed_type=packed_type, is_for_packed=True, trace=int8_linear,
        build=build_for,
    ),
)  # fmt: skip

BACKEND = Backend("int8", KERNELS, find_features=find_features)
