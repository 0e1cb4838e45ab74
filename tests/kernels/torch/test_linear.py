from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import torch
from atom.kernels.torch.linear import pack, packed_linear

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(1)
weight = pack(torch.ones(64, 64))
for rows in range(1, 151):
    packed_linear(torch.ones(rows, 64), weight)
before = resident()
for rows in range(151, 351):
    packed_linear(torch.ones(rows, 64), weight)
print(resident() - before)
"""


@pytest.mark.slow
def test_matmuls_of_ever_new_numbers_of_rows_take_no_more_memory():
    grown = int(subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True).stdout)
    assert grown < 48 << 20  # 10 MB; 120 MB where each is kept
