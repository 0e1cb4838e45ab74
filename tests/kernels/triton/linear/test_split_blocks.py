"""GGUF's blocks split for a GPU's linears: no number is lost, and they take as many bytes as is said."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf_files import draw_blocks

from atom.graph import PackedWeight, Shuffle, Type, W
from atom.graph.formats import parse_format, part_shape
from atom.graph.gguf_blocks import TYPES
from atom.graph.recipe_contents import held_by_format, held_bytes
from atom.kernels import shuffle
from atom.kernels.triton.linear import split_blocks
from atom.weights import load_dummy
from atom.weights.evaluate import tensors_in

pytestmark = pytest.mark.early
BITS = {"q5_0": 8.5, "q5_1": 9, "q2_k": 5.125, "q3_k": 4.5625, "q4_k": 4.625, "q5_k": 8.625, "q6_k": 8.5625}


def split(fmt: str, out: int, inner: int) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight, split, and the numbers that the package `gguf` has of it."""
    type, stored = Type("fp32", (out, inner), fmt), draw_blocks(fmt.upper(), out, inner)
    truth = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[fmt.upper()]))
    values = torch.from_numpy(stored).view(part_shape(type, parse_format(fmt).parts["values"]))
    return shuffle(PackedWeight(type, {"values": values}), "parts"), truth


def plain(weight: PackedWeight) -> torch.Tensor:
    """What the parts say that the numbers are."""
    values, (out, inner) = weight.parts["values"], weight.shape
    has_spans, scales = "spans" in weight.parts, weight.parts["scales"].float()
    mins = weight.parts["mins"].float() if "mins" in weight.parts else torch.zeros_like(scales)
    if has_spans:
        factors = weight.parts["spans"].float().repeat_interleave(scales.shape[1] // (inner // 256), 1)
        scales = scales * factors
        mins = scales[..., 1] if scales.shape[2] == 2 else torch.zeros_like(scales[..., 0])
        scales = scales[..., 0]
    numbers = values.float()
    if values.dtype == torch.uint8:
        numbers = torch.stack((values & 15, values >> 4), -1).flatten(1).float()
        numbers -= 0 if weight.kind in ("q2_k", "q4_k") else 8
    groups = numbers.view(out, scales.shape[1], -1) * scales[..., None] + mins[..., None]
    return groups.view(out, inner)


@pytest.mark.parametrize("fmt", TYPES)
def test_parts_are_exactly_the_numbers_of_the_gguf_package(fmt: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(split_blocks, "AT_ONCE", 4 * 768)  # 4 rows, of 6
    weight, truth = split(fmt, 6, 768)
    assert torch.equal(plain(weight), truth)


@pytest.mark.parametrize("fmt", TYPES)
def test_a_plan_counts_the_bytes_of_the_parts(fmt: str):
    weight, _ = split(fmt, 6, 768)
    recipe = Shuffle(W("q", weight.type), "parts")
    assert sum(part.nbytes for part in weight.parts.values()) == BITS[fmt] * 6 * 768 / 8 == held_bytes(recipe)
    assert held_by_format(recipe) == {fmt: held_bytes(recipe)}


@pytest.mark.parametrize("layout", ["parts", "panels"])
@pytest.mark.parametrize("fmt", TYPES)
def test_random_weights_have_blocks_too(fmt: str, layout: str):
    recipe = Shuffle(W("q", Type("bf16", (64, 768), fmt)), layout)
    (weight,) = load_dummy([recipe], seed=0).values()
    (again,) = load_dummy([recipe], seed=0).values()
    tensors, others = tensors_in(weight), tensors_in(again)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    if layout == "parts":
        numbers = plain(weight)
        assert numbers.std() == pytest.approx(0.02, rel=0.1) and numbers.mean().abs() < 0.005
