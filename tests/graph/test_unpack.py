"""Numbers of packed weights, against torch's own conversions and the formats' definitions."""

from __future__ import annotations

import pytest
import torch

from atom.graph.unpack import unpack


def test_every_fp8_is_what_torch_makes_of_it():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = values.float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    for stored in (values[is_number], values[:255], values[128:]):  # without NaN, with 0x7F, with 0xFF
        unpacked = unpack("ct_fp8[1, *]", {"values": stored.unsqueeze(0), "scales": torch.ones(1, 1)})[0]
        torch.testing.assert_close(unpacked, stored.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(unpacked.signbit(), stored.float().signbit()), "minus zero too"


@pytest.mark.parametrize("exponent", [0, 1, 126, 127, 128, 250])
def test_every_mxfp4_is_its_element_times_a_power_of_2(exponent: int):
    elements = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]  # OCP MX v1.0
    values = torch.tensor([low | high << 4 for low in range(16) for high in range(16)], dtype=torch.uint8).view(
        1, 16, 16
    )
    unpacked = unpack("mxfp4", {"values": values, "scales": torch.full((1, 16), exponent, dtype=torch.uint8)})
    expected = [
        elements[number] * 2.0 ** (exponent - 127) for low in range(16) for high in range(16) for number in (low, high)
    ]
    assert unpacked[0].tolist() == expected


def test_integers_are_of_the_middle_and_the_first_of_a_byte_is_its_lower_half():
    parts = {"values": torch.tensor([[[0x10, 0xF8]]], dtype=torch.uint8), "scales": torch.tensor([[2.0]])}
    assert unpack("int4[1, 4]", parts).tolist() == [[-16, -14, 0, 14]]  # 0, 1, 8 and 15, from 8
    parts = {"values": torch.tensor([[[0, 128, 255, 129]]], dtype=torch.uint8), "scales": torch.tensor([[2.0]])}
    assert unpack("ct_packed_int8[1, 4]", parts).tolist() == [[-256, 0, 254, 2]]


def test_rows_and_columns_of_a_block_that_is_not_full_have_its_scale():
    parts = {"values": torch.ones(3, 3).to(torch.float8_e4m3fn), "scales": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    assert unpack("fp8[2, 2]", parts).tolist() == [[1, 1, 2], [1, 1, 2], [3, 3, 4]]
