"""Dtypes, and the formats of packed weights: the one table of each; no torch.

    DTYPES["bf16"]                       # Dtype(bits=16, name="bfloat16", safetensors="BF16")
    FORMATS["mxfp4"]                     # Format(bits=4, scale_bits=8, block=(1, 32), parts=…)

Configuration, checkpoints, texts and kernels take their names from here. `atom.graph.formats` counts bytes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


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
# that a text may name
GRAPH_DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e8m0", "i64", "i32", "i8", "u8", "bool")
FLOAT_DTYPES = ("fp64", "fp32", "fp16", "bf16", "fp8_e8m0")  # that are numbers without a scale
BYTES = ("i8", "fp8_e8m0")  # that files have where a format has u8: pairs of numbers, and exponents
BY_SAFETENSORS = {dtype.safetensors: ours for ours, dtype in DTYPES.items()}
BY_NAME = {DTYPES[ours].name: ours for ours in MODEL_DTYPES} | {"half": "fp16", "float": "fp32"}


class Part(NamedTuple):
    """A tensor [..., O, I] that a packed weight is stored in, among others."""

    suffix: str  # appended to the weight's name; one that begins with a dot is put in place of .weight
    dtype: str
    holds: str = "blocks"  # one entry per: blocks, elements, bytes of a block, columns, tensor
    words: str = ""  # how the file packs them into words or blocks, see `atom.graph.recipes.Repack`; "": as they are
    is_transposed: bool = False  # the file has [..., I, O]


class Format(NamedTuple):
    """How a weight [..., O, I] is packed."""

    bits: int  # an element
    scale_bits: int  # a block's scale, and its zero point if it has one
    block: tuple[int | None, int | None]  # rows and columns; None: all
    kind: str = ""  # how its parts become numbers, see `atom.graph.unpack`; "": it cannot be run yet
    parts: Mapping[str, Part] = MappingProxyType({})  # values, scales, zeros, mins; none: their names are not known yet

    @property
    def is_whole(self) -> bool:
        """Whether a row is a whole number of blocks."""
        return any(part.holds == "bytes" for part in self.parts.values())

    @property
    def has_order(self) -> bool:
        """Whether the columns of a block are not neighbours: `groups` says which block a column is of."""
        return "groups" in self.parts


def _format(bits: int, scale_bits: int, block: tuple[int | None, int | None], kind: str, **parts: Part) -> Format:
    return Format(bits, scale_bits, block, kind, MappingProxyType(parts))


# what `quant.fmt` and the like may name, and the format that it means; a block may follow the name
ONLINE = {
    "fp8": "fp8[1, *]",
    "fp8_block": "fp8[128, 128]",
    "int8": "int8[1, *]",
    "int4": "int4[1, 128]",
    "mxfp4": "mxfp4",
}
FOUR_BITS = ("int4", "mxfp4")  # of these, those that are calibrated if no text is named
FP8, INT8 = Part("", "fp8_e4m3", "elements"), Part("", "i8", "elements")
SCALE = Part("_scale", "fp32")
CT_VALUES, CT_ZEROS = Part("_packed", "u8", "bytes", "columns"), Part("_zero_point", "u8", words="rows")
AWQ = {"values": Part(".qweight", "u8", "bytes", "awq"), "zeros": Part(".qzeros", "u8", words="awq"),
       "scales": Part(".scales", "fp32", is_transposed=True)}  # fmt: skip
GPTQ_V2 = {"values": Part(".qweight", "u8", "bytes", "gptq"), "zeros": Part(".qzeros", "u8", words="gptq"),
           "scales": AWQ["scales"]}  # fmt: skip
GPTQ = {**GPTQ_V2, "zeros": Part(".qzeros", "u8", words="gptq_minus_1")}
CT_INTS, CT_INTS_Z = {"values": CT_VALUES, "scales": SCALE}, {"values": CT_VALUES, "scales": SCALE, "zeros": CT_ZEROS}
GPTQ_ORDER, CT_ORDER = {"groups": Part(".g_idx", "i32", "columns")}, {"groups": Part("_g_idx", "i32", "columns")}
GGUF_EXPONENT = Part("", "u8", words="block_exponents")
GGUF_SCALE, GGUF_MIN = Part("", "fp16", words="block_scales"), Part("", "fp16", words="block_mins")
GGUF_PAIRS, GGUF_BYTES = Part("", "u8", "bytes", "block_pairs"), Part("", "u8", "bytes", "block_bytes")
GGUF_BLOCKS = Part("", "u8", "bytes")
FP4_VALUES, FP4_SCALE = Part("", "u8", "bytes"), Part("_scale", "fp8_e4m3")

# name -> bits of an element, bits of a scale, block if none is given, kind, parts. Formats without parts can be
# counted, not run. Names of parts are those of DeepSeek-V3 (fp8) and V4 (ds_…), compressed-tensors and others of its
# names (ct_…), gpt-oss (mxfp4), AWQ's gemm, GPTQ, and the types of GGUF, whose parts are in one tensor of blocks
FORMATS: dict[str, Format] = {
    "fp8": _format(8, 32, (None, None), "scaled", values=FP8, scales=Part("_scale_inv", "fp32")),
    "ds_fp8": _format(8, 32, (None, None), "scaled", values=FP8, scales=Part(".scale", "fp32")),
    "ct_fp8": _format(8, 32, (None, None), "scaled", values=FP8, scales=SCALE),
    "ct_mxfp8": _format(8, 8, (1, 32), "scaled", values=FP8, scales=SCALE._replace(words="exponents")),
    "int8": _format(8, 32, (1, None), "scaled", values=INT8, scales=SCALE),
    "int8z": Format(8, 24, (1, 128)),  # with a zero point a block
    "ct_int8": _format(8, 32, (1, None), "scaled", values=INT8, scales=SCALE),
    "ct_packed_int8": _format(8, 16, (1, None), "int8", **CT_INTS),
    "ct_packed_int8z": _format(8, 24, (1, None), "int8", **CT_INTS_Z),
    "gptq_int8": _format(8, 24, (1, 128), "int8", **GPTQ),
    "gptq_v2_int8": _format(8, 24, (1, 128), "int8", **GPTQ_V2),
    "int4": _format(4, 16, (1, 128), "int4", values=CT_VALUES._replace(words=""), scales=Part("_scale", "fp16")),
    "int4z": Format(4, 20, (1, 128)),
    "ct_packed_int4": _format(4, 16, (1, 128), "int4", **CT_INTS),
    "ct_packed_int4z": _format(4, 20, (1, 128), "int4", **CT_INTS_Z),
    "awq_int4": _format(4, 20, (1, 128), "int4", **AWQ),
    "gptq_int4": _format(4, 20, (1, 128), "int4", **GPTQ),
    "gptq_v2_int4": _format(4, 20, (1, 128), "int4", **GPTQ_V2),
    "ct_packed_int4_ordered": _format(4, 16, (1, 128), "int4", **CT_INTS, **CT_ORDER),
    "ct_packed_int4z_ordered": _format(4, 20, (1, 128), "int4", **CT_INTS_Z, **CT_ORDER),
    "ct_packed_int8_ordered": _format(8, 16, (1, 128), "int8", **CT_INTS, **CT_ORDER),
    "ct_packed_int8z_ordered": _format(8, 24, (1, 128), "int8", **CT_INTS_Z, **CT_ORDER),
    "gptq_int4_ordered": _format(4, 20, (1, 128), "int4", **GPTQ, **GPTQ_ORDER),
    "gptq_v2_int4_ordered": _format(4, 20, (1, 128), "int4", **GPTQ_V2, **GPTQ_ORDER),
    "gptq_int8_ordered": _format(8, 24, (1, 128), "int8", **GPTQ, **GPTQ_ORDER),
    "gptq_v2_int8_ordered": _format(8, 24, (1, 128), "int8", **GPTQ_V2, **GPTQ_ORDER),
    "q4_0": _format(4, 16, (1, 32), "int4", values=GGUF_PAIRS, scales=GGUF_SCALE),
    "q4_1": _format(4, 32, (1, 32), "int4", values=GGUF_PAIRS, scales=GGUF_SCALE, mins=GGUF_MIN),
    "q8_0": _format(8, 16, (1, 32), "int8", values=GGUF_BYTES, scales=GGUF_SCALE),
    **{  # whole blocks with their scales, which `atom.graph.gguf_blocks` takes apart
        name: _format(bits, scale_bits, (1, columns), name, values=GGUF_BLOCKS)
        for name, bits, scale_bits, columns in (
            ("q5_0", 5, 16, 32), ("q5_1", 5, 32, 32), ("q2_k", 2, 160, 256), ("q3_k", 3, 112, 256),
            ("q4_k", 4, 128, 256), ("q5_k", 5, 128, 256), ("q6_k", 6, 144, 256),
        )
    },
    "gguf_mxfp4": _format(4, 8, (1, 32), "mxfp4", values=GGUF_PAIRS, scales=GGUF_EXPONENT),
    "mxfp4": _format(4, 8, (1, 32), "mxfp4", values=Part("_blocks", "u8", "bytes"), scales=Part("_scales", "u8")),
    "ct_mxfp4": _format(4, 8, (1, 32), "mxfp4", values=Part("_packed", "u8", "bytes"), scales=Part("_scale", "u8")),
    "ds_mxfp4": _format(4, 8, (1, 32), "mxfp4", values=FP4_VALUES, scales=Part(".scale", "u8")),
    "quark_mxfp4": _format(4, 8, (1, 32), "mxfp4", values=FP4_VALUES, scales=Part("_scale", "u8")),
    "ct_nvfp4": _format(4, 8, (1, 16), "nvfp4", values=Part("_packed", "u8", "bytes"), scales=FP4_SCALE,
                        divisor=Part("_global_scale", "fp32", "tensor")),
    "modelopt_nvfp4": _format(4, 8, (1, 16), "nvfp4", values=FP4_VALUES, scales=FP4_SCALE,
                              factor=Part("_scale_2", "fp32", "tensor")),
}  # fmt: skip
GGUF_FORMATS = {  # by a tensor's type
    **{name.upper(): name for name in ("q4_0", "q4_1", "q8_0", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")},
    "MXFP4": "gguf_mxfp4",
}
