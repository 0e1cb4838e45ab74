"""The library multiplies fp8 by blocks whose scales are not a multiple of 4 a row; torch._scaled_mm is wrong by 20% there."""

from __future__ import annotations

import pytest
from gpu.scaled import COLUMNS, LARGEST_ERROR, relative_error

pytest.importorskip("triton")
from kernels.hopper.test_hopper import IS_HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")]


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_block_scales_that_are_no_multiple_of_4_a_row_are_multiplied_right(columns: int, is_shuffled: bool):
    assert relative_error(columns, is_shuffled=is_shuffled) <= LARGEST_ERROR
