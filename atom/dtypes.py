"""Dtypes, and the formats of packed weights: the one table of each; no torch.

    DTYPES["bf16"]                       # Dtype(bits=16, name="bfloat16", safetensors="BF16")
    FORMATS["mxfp4"]                     # Format(bits=4, scale_bits=8, block=(1, 32), parts=…)

Configuration, checkpoints, texts and kernels take their names from here. `atom.graph.formats` counts bytes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Dtype(NamedTuple):
    bits: int  # an element
    name: str  # in torch, Triton and config.json
    safetensors: str


DTYPES = {
    "fp64": Dtype(64, "float64", "F64"),
    "fp32": Dtype(32, "float32", "F32"),
    "fp16": Dtype(16, "float16", "F16"),
    "bf16": Dtype(16, "bfloat16", "BF16"),
    "fp8_e4m3": Dtype(8, "float8_e4m3fn", "F8_E4M3"),
    "fp8_e5m2": Dtype(8, "float8_e5m2", "F8_E5M2"),
    "fp8_e8m0": Dtype(8, "float8_e8m0fnu", "F8_E8M0"),
    "fp4": Dtype(4, "float4_e2m1fn_x2", "F4"),
    "i64": Dtype(64, "int64", "I64"),
    "i32": Dtype(32, "int32", "I32"),
    "i16": Dtype(16, "int16", "I16"),
    "i8": Dtype(8, "int8", "I8"),
    "u64": Dtype(64, "uint64", "U64"),
    "u32": Dtype(32, "uint32", "U32"),
    "u16": Dtype(16, "uint16", "U16"),
    "u8": Dtype(8, "uint8", "U8"),
    "bool": Dtype(8, "bool", "BOOL"),
}
MODEL_DTYPES = ("bf16", "fp16", "fp32")  # that a model computes in
GRAPH_DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "i64", "i32", "i8", "u8", "bool")  # that a text may name
BY_SAFETENSORS = {dtype.safetensors: ours for ours, dtype in DTYPES.items()}
BY_NAME = {DTYPES[ours].name: ours for ours in MODEL_DTYPES} | {"half": "fp16", "float": "fp32"}


class Part(NamedTuple):
    """A tensor [..., O, I] that a packed weight is stored in, beside others: of a number a block, unless stated."""

    suffix: str  # put behind the weight's name
    dtype: str
    holds: str = "blocks"  # blocks: one number of each; elements: each by itself; bytes: a block's, in a last dim


class Format(NamedTuple):
    """How a weight [..., O, I] is packed."""

    bits: int  # an element
    scale_bits: int  # a block's scale, and its zero point if it has one
    block: tuple[int | None, int | None]  # rows and columns; None: all
    kind: str = ""  # how its parts become numbers, see `atom.weights.dequantize`; "": it cannot be run yet
    parts: Mapping[str, Part] = MappingProxyType({})  # values, scales, zeros; none: their names are not known yet


def _scaled(kind: str, values: Part, scales: Part) -> Mapping[str, Any]:
    return {"kind": kind, "parts": MappingProxyType({"values": values, "scales": scales})}


FP8, INT8 = Part("", "fp8_e4m3", "elements"), Part("", "i8", "elements")
SCALE = Part("_scale", "fp32")

# name -> bits of an element, bits of a scale, block where none is stated; the names of parts are those of
# fp8: DeepSeek-V3 and transformers; ct_…: compressed-tensors, and others of these names; mxfp4: gpt-oss
FORMATS: dict[str, Format] = {
    "fp8": Format(8, 32, (None, None), **_scaled("fp8", FP8, Part("_scale_inv", "fp32"))),
    "ct_fp8": Format(8, 32, (None, None), **_scaled("fp8", FP8, SCALE)),
    "int8": Format(8, 16, (1, None)),
    "ct_int8": Format(8, 32, (1, None), **_scaled("int8", INT8, SCALE)),
    "int4": Format(4, 16, (1, 128)),
    "int4z": Format(4, 20, (1, 128)),  # with a zero point a block
    "int8z": Format(8, 24, (1, 128)),
    "mxfp4": Format(4, 8, (1, 32), **_scaled("mxfp4", Part("_blocks", "u8", "bytes"), Part("_scales", "u8"))),
}
