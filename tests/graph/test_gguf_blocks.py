"""Blocks of GGUF's types, against what the `gguf` package dequantizes."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf_files import draw_blocks

from atom.graph import PackedWeight, Type
from atom.graph.formats import num_bytes, parse_format, part_shape
from atom.graph.gguf_blocks import TYPES, fit_factors, take_apart, unpack_blocks


@pytest.mark.parametrize("fmt", TYPES)
def test_numbers_are_those_of_the_gguf_package(fmt: str):
    type, stored = Type("fp32", (6, 768), fmt), draw_blocks(fmt.upper(), 6, 768)
    truth = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[fmt.upper()]))
    values = torch.from_numpy(stored).view(part_shape(type, parse_format(fmt).parts["values"]))
    assert torch.equal(PackedWeight(type, {"values": values}).unpack(), truth)
    assert num_bytes(type) == stored.nbytes
    assert 0.02 < truth.abs().max() < 1, "the blocks are not nothing"


@pytest.mark.parametrize("fmt", TYPES)
def test_numbers_and_scales_have_no_more_bits_than_said(fmt: str):
    columns, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt.upper()]]
    for byte in (0, 0xFF):
        blocks, known = take_apart(fmt, torch.full((2, 3, num_bytes), byte, dtype=torch.uint8)), TYPES[fmt]
        assert blocks.numbers.shape == (2, 3, columns) and blocks.factors.shape == (2, 3)
        assert blocks.numbers.max() == (0 if byte == 0 else (1 << parse_format(fmt).bits) - 1)
        assert known.has_mins == (blocks.min_factors is not None)
        if blocks.scales is not None:
            assert blocks.scales.shape == (2, 3, columns // known.group)


@pytest.mark.parametrize("fmt", TYPES)
def test_random_bytes_become_numbers_of_a_size(fmt: str):
    torch.manual_seed(0)
    drawn = torch.randint(0, 256, (64, 4, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt.upper()]][1]))
    fitted = fit_factors(fmt, drawn.byte(), 0.02)
    numbers = gguf.quants.dequantize(fitted.flatten(1).numpy(), gguf.GGMLQuantizationType[fmt.upper()])
    assert numbers.std() == pytest.approx(0.02, rel=0.02) and abs(numbers.mean()) < 0.002
    assert torch.equal(unpack_blocks(fitted, fmt), torch.from_numpy(numbers))
