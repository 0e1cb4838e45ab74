"""Bytes of weights by stored format, against numbers computed by hand."""

from __future__ import annotations

import pytest

from atom.dtypes import FORMATS
from atom.errors import UnsupportedError
from atom.graph import Type, W
from atom.graph.formats import parse_format, transpose


@pytest.mark.parametrize(
    ("shape", "fmt", "expected"),
    [
        ((7168, 2048), None, 7168 * 2048 * 2),
        ((7168, 2048), "fp8[128, 128]", 7168 * 2048 + 56 * 16 * 4),
        ((576, 7168), "fp8[128, 128]", 576 * 7168 + 5 * 56 * 4),  # the last block of rows is half full
        ((4, 576, 7168), "fp8[128, 128]", 4 * (576 * 7168 + 5 * 56 * 4)),
        ((64, 96), "fp8", 64 * 96 + 4),
        ((64, 96), "fp8[*, *]", 64 * 96 + 4),
        ((64, 96), "fp8[1, *]", 64 * 96 + 64 * 4),
        ((576, 7168), "ct_fp8[1, *]", 576 * 7168 + 576 * 4),
        ((64, 96), "ct_int8", 64 * 96 + 64 * 4),
        ((64, 96), "int8", 64 * 96 + 64 * 4),
        ((64, 256), "int8[1, 128]", 64 * 256 + 64 * 2 * 4),
        ((64, 256), "int8z", 64 * 256 + 64 * 2 * 3),
        ((64, 256), "int4", 64 * 256 // 2 + 64 * 2 * 2),
        ((64, 256), "int4[1, 32]", 64 * 256 // 2 + 64 * 8 * 2),
        ((64, 256), "int4z", 64 * 256 // 2 + 64 * 2 * 5 // 2),
        ((3, 5), "int4z", 8 + 8),  # 7.5 bytes of elements, 7.5 of scales and zero points
        ((2880, 2880), "mxfp4", 2880 * 2880 // 2 + 2880 * 90),
        ((32, 5760, 2880), "mxfp4", 32 * 5760 * 90 * 17),
    ],
)
def test_bytes_of_a_weight(shape: tuple[int, ...], fmt: str | None, expected: int):
    assert Type("bf16", shape, fmt).num_bytes == expected
    assert Type("fp32", shape, fmt).num_bytes == (expected if fmt else 2 * expected)


def test_a_block_may_be_explicit():
    assert parse_format("int4").block == (1, 128)
    assert parse_format("int4[16, *]").block == (16, None)
    assert parse_format("int4[16, *]")._replace(block=(1, 128)) == FORMATS["int4"]


@pytest.mark.parametrize(
    "fmt", ["fp9", "int3z[1, 128]", "fp8[128]", "fp8[128,128]", "fp8[a, 1]", "fp8[0, 0]", "nvfp4", ""]
)
def test_an_unknown_format_lists_the_known(fmt: str):
    with pytest.raises(UnsupportedError, match=rf"not supported \(supported: {', '.join(FORMATS)}\)$"):
        parse_format(fmt)


def test_packed_rows_are_of_whole_blocks():
    with pytest.raises(ValueError, match=r"^w: bf16\[64, 33\] has 33 columns, mxfp4 stores multiples of 32;"):
        W("w", Type("bf16", (64, 33), "mxfp4"))
    with pytest.raises(
        ValueError, match=r"^w: bf16\[64, 96\] has 96 columns, awq_int4\[1, 64\] stores multiples of 64;"
    ):
        W("w", Type("bf16", (64, 96), "awq_int4[1, 64]"))
    assert W("w", Type("bf16", (64, 96), "fp8[128, 128]")).type.num_bytes == 64 * 96 + 4
    with pytest.raises(UnsupportedError, match=r"^w: bf16\[64\] has no columns, "):
        W("w", Type("bf16", (64,), "mxfp4"))


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [("mxfp4", "mxfp4[32, 1]"), ("mxfp4[32, 1]", "mxfp4"), ("fp8", "fp8"), ("fp8[1, *]", "fp8[*, 1]"),
     ("fp8[128, 128]", "fp8[128, 128]")],
)  # fmt: skip
def test_a_format_is_transposed_by_its_block(fmt: str, expected: str):
    assert transpose(fmt) == expected
