"""Measured parameters: every file can be used as it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom.kernels import tuned
from atom.kernels.triton import linear
from atom.kernels.triton.tiles import Gpu

FOLDER = Path(tuned.__file__).parent
H200 = Gpu(132, 227 << 10, (9, 0), "NVIDIA H200")


def test_what_was_measured_goes_before_the_rule_and_a_gpu_nobody_has_measured_has_none():
    measured = json.loads((FOLDER / "nvidia_h200.json").read_text())["linear"]["8 4096 4096 1"]
    assert linear.find(5, 4096, 4096, 2, 1, H200) == linear.Matrix(*measured[1:])
    assert linear.find(5, 4096, 4096, 2, 1, H200._replace(name="Other GPU")) == linear.choose(5, 4096, 4096, 2, 1, H200)
    assert linear.find(1, 4096, 4096, 4, 1, H200) == linear.choose(1, 4096, 4096, 4, 1, H200)  # fp32 was not measured
    assert tuned.parameters("Other GPU", "linear", "1 4096 4096 1") is None
    assert tuned.parameters("NVIDIA H200", "linear", "1 3 3 1") is None


def test_more_than_32_rows_are_the_librarys_where_nobody_has_measured():
    other = H200._replace(name="Other GPU")
    for rows in (33, 64, 65):
        assert isinstance(linear.find(rows, 4096, 1024, 2, 1, H200), linear.Matrix)
        assert linear.find(rows, 4096, 1024, 2, 1, other) is None
    assert isinstance(linear.find(32, 4096, 1024, 2, 1, other), linear.Matrix)
    assert linear.find(33, 6144, 4096, 2, 1, H200) is None, "measured, and the library was the fastest"
    assert linear.find(65, 4096, 4096, 2, 1, H200) is None


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_entry_is_of_a_product_that_the_kernels_take(file: Path):
    for key, (style, *numbers) in json.loads(file.read_text())["linear"].items():
        rows, out, inner, gates = map(int, key.split())
        assert rows in linear.BUCKETS and gates in (1, 2)
        found = linear.find(rows, out, inner, 2, gates, H200)
        if style == "library":
            assert found is None and not numbers
            continue
        assert isinstance(found, {"vector": linear.Vector, "matrix": linear.Matrix}[style]) and tuple(found)[
            : len(numbers)
        ] == tuple(numbers)
        assert not isinstance(found, linear.Vector) or rows == 1
