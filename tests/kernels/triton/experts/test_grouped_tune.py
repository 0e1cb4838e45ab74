"""Tiles of grouped GEMMs: those that are tried fit and give the result, and measured ones go before the rule."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.checks import assert_as_near

pytest.importorskip("triton")

from atom.graph import PackedWeight, Type, ops, parse
from atom.kernels import tuned
from atom.kernels.triton.experts import grouped_tiles, moe
from atom.kernels.triton.experts.grouped_tiles import Shape, Tiles, finder, key_of, to_entry
from atom.kernels.triton.experts.grouped_tune import ExpertsTuner, Matmul, Recording, candidates, matmuls_of
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import tiles as linear_tiles
from atom.kernels.triton.linear import tune as linears
from atom.kernels.triton.linear.shuffled import BOX, Wgmma, box_bytes
from atom.kernels.triton.linear.weight_encoding import PLAIN, WeightEncoding
from atom.kernels.triton.search import Trial, agrees
from atom.weights.quantize import quantize

H200 = Gpu(132, 227 << 10, (9, 0), "NVIDIA H200")
SMALL = Gpu(128, 99 << 10, (8, 9), "small")
AMD = Gpu(304, 64 << 10, (0, 0), "amd")
INT4, MXFP4, FP8 = WeightEncoding("u4", 1, 128, "z"), WeightEncoding("e2m1", 1, 32), WeightEncoding("e4m3", 128, 128)
SHUFFLED = [encoding._replace(is_shuffled=True) for encoding in (INT4, MXFP4, FP8, WeightEncoding("e4m3", 1, None))]


@pytest.mark.parametrize("gpu", [H200, SMALL, AMD], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    "encoding", [PLAIN, INT4, MXFP4, FP8, WeightEncoding("e2m1", 1, 16)], ids=lambda encoding: encoding.name or "plain"
)
@pytest.mark.parametrize("rows", [1, 64, 2048, 65_536])
def test_what_is_tried_is_little_fits_and_can_be_kept(rows: int, encoding: WeightEncoding, gpu: Gpu):
    for experts, out, inner, gates in ((128, 1536, 2048, 2), (8, 4096, 14336, 1), (5, 7, 96, 1)):
        shape = Shape(rows, experts, out, inner, gates, 2, encoding)
        tried = candidates(shape, gpu)
        assert 1 < len(tried) == len(set(tried)) <= 64
        for tiles in tried:
            assert isinstance(tiles, Tiles)
            stage = tiles.inner * (tiles.rows * 2 + tiles.out * encoding.bits / 8)
            assert tiles.num_stages == 1 or tiles.num_stages * stage <= gpu.shared_memory
            assert (
                encoding.columns is None or encoding.columns % tiles.inner == 0 or tiles.inner % encoding.columns == 0
            )
            assert tuned.FITS["experts"](key_of(shape), to_entry(tiles))


@pytest.mark.parametrize("encoding", SHUFFLED, ids=lambda encoding: encoding.name)
def test_what_is_tried_of_shuffled_experts_fits_and_can_be_kept(encoding: WeightEncoding):
    for rows, experts, out in ((8, 32, 1024), (100, 32, 1024), (2048, 32, 1024), (128, 128, 2816), (256, 256, 7168)):
        shape = Shape(rows, experts, out, 2048, 2, 2, encoding)
        tried = candidates(shape, H200)
        assert grouped_tiles.choose(shape, H200) in tried and len(tried) == len(set(tried)) <= 64
        for tiles in tried:
            assert isinstance(tiles, Wgmma)
            assert tiles.stages * tiles.boxes * box_bytes(tiles.block_rows, encoding) < H200.shared_memory
            assert tiles.boxes * BOX * 8 // encoding.bits % (encoding.columns or 1) == 0
            assert tiles.splits == 1 or rows <= experts, "rows of an expert that share a tile"
            assert tiles.splits == 1 or rows * -(-out // 64) <= linear_tiles.MAX_TILES, "no counter for each"
            assert tuned.FITS["experts"](key_of(shape), to_entry(tiles))
            assert not tuned.FITS["experts"](key_of(shape._replace(encoding=PLAIN)), to_entry(tiles))


def test_what_comes_with_atom_is_among_what_is_tried():
    styles = {encoding.name: encoding for encoding in (PLAIN, *SHUFFLED, SHUFFLED[0]._replace(offset=""))}
    shipped = 0
    for file in Path(tuned.__file__).parent.glob("*.json"):
        for key, entry in json.loads(file.read_text()).get("experts", {}).items():
            sizes, name = re.fullmatch(r"((?:\d+[ x]?){5})(.*)", key).groups()  # type: ignore[union-attr]
            rows, experts, out, inner, gates = map(int, re.split("[ x]", sizes.strip()))
            shape = Shape(rows, experts, out, inner, gates, 2, styles[name])
            assert grouped_tiles.from_entry(entry) in candidates(shape, H200), (file.name, key)
            shipped += 1
    assert shipped


@pytest.mark.parametrize(
    "encoding", [PLAIN, INT4, *SHUFFLED, SHUFFLED[2]._replace(act="fp8")], ids=lambda encoding: encoding.name
)
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_what_is_tried_of_linears_can_be_kept(rows: int, encoding: WeightEncoding):
    for parameters in linears.candidates(linear_tiles.Shape(rows, 6144, 4096, encoding=encoding), H200):
        key = linear_tiles.key_of(linear_tiles.Shape(rows, 6144, 4096, encoding=encoding))
        assert tuned.FITS["linear"](key, linear_tiles.to_entry(parameters)), (key, parameters)


def make(fmt: str | None, counts: list[int], out: int, inner: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, plain or packed experts, and ends."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), inner, generator=random).to(dtype)
    weight: Any = torch.randn(len(counts), out, inner, generator=random) / inner**0.5
    if fmt is None:
        weight = weight.to(dtype)
    else:
        parts = quantize(fmt, weight)
        weight = PackedWeight(Type("fp16", tuple(weight.shape), fmt), parts)
    return x, weight, torch.tensor(counts).cumsum(0)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("fmt", [None, "int4[1, 32]", "fp8[128, 128]"])
def test_what_is_tried_gives_the_product(fmt: str | None, triton_device: str):
    x, weight, ends = make(fmt, [3, 0, 17], 70, 96, torch.float16)
    exact = None if fmt is None else PackedWeight(replace(weight.type, dtype="fp32"), weight.parts)
    truth = ops.grouped_linear.body(x.float(), weight.float() if fmt is None else exact, ends)
    expected = ops.grouped_linear.body(x, weight, ends)
    tried = candidates(moe.describe(x, weight), H200)
    moved = weight.to(triton_device) if fmt is None else PackedWeight(
        weight.type, {name: part.to(triton_device) for name, part in weight.parts.items()}
    )  # fmt: skip
    for tiles in tried if triton_device != "cpu" else {each._replace(num_warps=4, num_stages=1) for each in tried}:
        matmuls = moe.Experts(lambda *_, tiles=tiles: tiles)
        y = matmuls.grouped_linear(x.to(triton_device), moved, ends.to(triton_device))
        assert_as_near(y.cpu(), expected, truth.float())


def test_measured_tiles_hold_up_to_their_rows_and_go_before_the_rule():
    first, second = Tiles(32, 64, 128, 4, 3), Tiles(64, 64, 64, 4, 3)
    find = finder({"64 8x1536 2048 2": ["tiles", *first], "1024 8x1536 2048 2": ["tiles", *second]})
    shape = Shape(64, 8, 1536, 2048, 2, 2, PLAIN)
    for rows, tiles in ((64, first), (33, first), (9, first), (1024, second), (513, second), (200, second)):
        assert find(shape._replace(rows=rows), H200) == tiles, rows
    for other in (
        {"rows": 8},
        {"rows": 65},
        {"rows": 1025},
        {"experts": 9},
        {"gates": 1},
        {"element_size": 4},
        {"encoding": INT4},
    ):
        unmeasured = shape._replace(**other)
        assert find(unmeasured, H200) == grouped_tiles.choose(unmeasured, H200)
    trial = Trial(find, key_of)
    assert trial(shape, H200) == first
    trial.chosen[key_of(shape)] = second
    assert trial(shape._replace(rows=63), H200) == second


TEXT = """
def body(x: bf16[T, 2048], weights: fp32[T, 8], ids: i64[T, 8]):
    a = triton.experts(x, weights, ids, W("gu", bf16[128, 1536, 2048]), W("d", bf16[128, 2048, 768]), None, None, kind="silu")
    b = triton.experts(a, weights, ids, W("gu2", bf16[128, 1536, 2048]), W("d2", bf16[128, 2048, 768]), None, None, kind="silu")
    grouped, order, ends = triton.group(b, ids, experts=128)
    c = triton.grouped_linear(grouped, W("w", bf16[128, 64, 2048]), ends, None)
    d = torch.grouped_linear(grouped, W("v", bf16[128, 96, 2048]), ends, None)
    return c, d
"""


def test_a_text_s_gemms_are_those_of_its_kernels_the_largest_first():
    assert matmuls_of(parse(TEXT, "here")) == [
        Matmul(128, 1536, 2048, 2, 8, 2, PLAIN),
        Matmul(128, 2048, 768, 1, 8, 2, PLAIN),
        Matmul(128, 64, 2048, 1, 8, 1, PLAIN),
    ]


def test_calls_are_recorded_by_their_product_and_repeated_with_other_tiles(triton_device: str):
    x, weight, _ = make(None, [0, 0, 7], 24, 16, torch.float16)
    ends = torch.tensor([2, 2, 5])  # two rows after them are of no expert that is here
    recording = Recording()
    run = recording.kernels[ops.grouped_linear, "triton"]
    y = run(x.to(triton_device), weight.to(triton_device), ends.to(triton_device))
    (call,) = recording.calls_of(Matmul(3, 24, 16, 1, 2, 1, PLAIN))
    assert recording.calls_of(Matmul(3, 24, 16, 2, 2, 1, PLAIN)) == []
    asked: list[Any] = []

    def find(*given: Any) -> Tiles:
        asked.append(given)
        return Tiles(16, 32, 16, 4, 1)

    again = call(parameters=find)
    assert len(again) == 5 and asked
    assert torch.allclose(again, y[:5], atol=1e-3) and torch.equal(call(parameters=lambda *_: None), y[:5])
    assert agrees(call, Tiles(16, 32, 16, 4, 1))


def test_entries_are_read_as_they_are_written():
    for tiles in (Tiles(16, 64, 128, 4, 4), Wgmma(8, 4, 3, 2)):
        assert grouped_tiles.from_entry(to_entry(tiles)) == tiles
    assert to_entry(Tiles(16, 64, 128, 4, 4)) == ["tiles", 16, 64, 128, 4, 4]
    tuner = ExpertsTuner(torch.device("cpu")) if not torch.cuda.is_available() else ExpertsTuner(torch.device("cuda"))
    assert tuner.key(5, Matmul(128, 1536, 2048, 2, 8, 1, PLAIN)) == "64 128x1536 2048 2"
