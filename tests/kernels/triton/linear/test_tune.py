"""What is tried for a matmul can be run and gives its result; a clock that a test makes up decides which is taken."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.checks import assert_as_near

pytest.importorskip("triton")

from triton.errors import TritonError

from atom.graph import ops, parse
from atom.kernels import tuned
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import linear, matrix, tiles
from atom.kernels.triton.linear.tiles import Matrix, Parameters, Shape, Vector
from atom.kernels.triton.linear.tune import Matmul, candidates, matmuls_of
from atom.kernels.triton.linear.weight_encoding import PLAIN, WeightEncoding
from atom.kernels.triton.search import MARGIN, Trial, agrees, search

H200 = Gpu(132, 227 << 10, (9, 0), "NVIDIA H200")
SMALL = Gpu(128, 99 << 10, (8, 9), "small")
AMD = Gpu(304, 64 << 10, (0, 0), "amd")
FEW_UNITS = Gpu(2, 227 << 10, (9, 0), "few units")  # so that small matmuls are split in several ways
FP8_BLOCKS = WeightEncoding("e4m3", 128, 128, act="fp8", is_shuffled=True)
OTHERS = WeightEncoding("e4m3", 1, None, act="fp8", is_shuffled=True), WeightEncoding("u4", 1, 128, is_shuffled=True)
STYLES = {each.name: each for each in (PLAIN, FP8_BLOCKS, *OTHERS)}  # of the matmuls that were measured
PACKAGED = json.loads((Path(tuned.__file__).parent / "nvidia_h200.json").read_text())["linear"]
SHAPES = [(64, 64), (1000, 77), (1024, 3072), (4096, 12288), (6144, 4096), (24576, 4096), (151936, 1024), (576, 1536),
          (1024, 2048), (4096, 2048)]  # fmt: skip


def with_rows(parameters: Parameters, rows: int) -> Parameters:
    """The same with no more rows for a program than there are."""
    if not isinstance(parameters, Matrix):
        return parameters
    return parameters._replace(block_rows=min(parameters.block_rows, max(8, rows)))


@pytest.mark.parametrize(("key", "entry"), PACKAGED.items(), ids=PACKAGED.keys())
def test_what_was_the_fastest_on_an_h200_is_tried(key: str, entry: list[Any]):
    *sizes, encoding = [*key.split(" ", 4), ""][:5]
    fastest = tiles.from_entry(entry)
    shape = Shape(*map(int, sizes), encoding=STYLES[encoding])
    rows = shape.rows
    assert tiles.key_of(shape) == key
    tried = [with_rows(each, rows) for each in (tiles.choose(shape, H200), *candidates(shape, H200))]
    assert with_rows(fastest, rows) in tried


@pytest.mark.parametrize("gpu", [H200, SMALL, AMD], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("rows", tuned.BUCKETS)
def test_what_is_tried_is_little_and_fits(rows: int, gpu: Gpu):
    for (out, inner), gates in itertools.product(SHAPES, (1, 2)):
        tried = candidates(Shape(rows, out, inner, gates), gpu)
        assert None in tried and len(set(tried)) == len(tried) <= 60
        for each in tried:
            if isinstance(each, Vector):
                row_size = 2 ** (inner - 1).bit_length() * 2
                assert rows == 1 and each.block_out % gates == 0 and 2 <= each.stages <= tiles.MAX_STAGES
                assert (each.stages - 1) * each.block_out * row_size * each.programs <= gpu.shared_memory
            elif isinstance(each, Matrix):
                step, block_rows = each.block_inner * each.groups, min(max(8, rows), each.block_rows)
                assert (each.stages - 1) * step * (each.block_out + block_rows) * 2 <= gpu.shared_memory
                assert inner > (each.splits - 1) * step, "no split without columns"
                assert each.splits == 1 or -(-rows // block_rows) * -(-out // each.block_out) <= tiles.MAX_TILES
                assert each.block_rows <= 128


class Launches:
    """Stands for a kernel: what it is launched with, but for its tensors."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, num_warps, **options: self.seen.append((*args[9:], num_warps))


@pytest.mark.parametrize("gpu", [H200, SMALL, AMD], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("rows", tuned.BUCKETS)
def test_no_two_that_are_tried_launch_the_same_and_what_they_launch_fits(
    rows: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
):
    launches = Launches()
    monkeypatch.setattr(torch.version, "hip", "7.0" if gpu is AMD else None)
    monkeypatch.setattr(matrix, "find_gpu", lambda device: gpu)
    monkeypatch.setattr(matrix, "_matrix_kernel", launches)
    for out, inner in SHAPES[:5]:
        launches.seen.clear()
        x, weight = (torch.empty(num, inner, dtype=torch.bfloat16, device="meta") for num in (rows, out))
        tried = [each for each in candidates(Shape(rows, out, inner), gpu) if isinstance(each, Matrix)]
        for each in tried:
            matrix.multiply_matrix(x, weight, None, None, x, each)
        assert len(set(launches.seen)) == len(launches.seen) == len(tried) > 0
        for _, _, _, _, block_rows, block_out, block_inner, stages, groups, _, prefetch, *_ in launches.seen:
            assert (stages - 1) * groups * block_inner * (block_out + block_rows) * 2 <= gpu.shared_memory
            assert gpu is H200 or not prefetch, "lines are sent for ahead of a kernel that was launched early"
            assert gpu is not AMD or (block_rows >= 16 and stages == 2)


@pytest.mark.sampled(0, gpu=4)
@pytest.mark.parametrize("kind", [None, "silu"])
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 34, 600), (1, 130, 77), (8, 70, 1030), (64, 130, 520), (256, 70, 264)])  # fmt: skip
def test_everything_that_is_tried_gives_the_product(triton_device: str, rows: int, out: int, inner: int, kind: Any):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if triton_device == "cuda" else torch.float16  # numpy has no bf16
    x = torch.randn(rows, inner).to(triton_device, dtype)
    weight = torch.randn(out, inner).to(triton_device, dtype)
    gpu = linear.find_gpu(x.device)._replace(units=2, shared_memory=H200.shared_memory)
    tried = [each for each in candidates(Shape(rows, out, inner, 1 if kind is None else 2), gpu) if each is not None]
    if triton_device == "cpu":  # the interpreter is slow: of each kind of splits, groups and heights one
        tried = list({(type(each), *each[-4:]) if isinstance(each, Matrix) else each: each for each in tried}.values())

    def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = ops.linear.body(x, weight)
        return y if kind is None else ops.gated_activate.body(y, kind=kind)

    expected, truth = matmul(x, weight), matmul(x.float(), weight.float())
    num_run = 0
    for each in tried:
        try:
            y, _ = linear.Linears(lambda *_, chosen=each: chosen).multiply(x, None, None, weight, None, 0.0, kind)
        except TritonError:
            assert triton_device == "cuda", "it has less memory than another one"
            continue
        assert_as_near(y, expected, truth, factor=1.5)
        num_run += 1
    assert num_run > 2
    styles = {type(each) for each in tried}
    assert styles == ({Vector, Matrix} if rows == 1 else {Matrix})


TEXT = """
def body(x: fp16[T, 8], r: fp16[T, 8]):
    a, s = triton.add_norm_linear(x, r, W("n", fp16[8]), W("a", fp16[32, 8]), eps=1e-06, kind="silu")
    b = triton.norm_linear(s, W("n", fp16[8]), W("b", fp16[24, 8]), eps=1e-06)
    c = triton.norm_linear(s, W("n", fp16[8]), W("c", fp16[24, 8]), eps=1e-06)
    d = torch.linear(s, W("d", fp16[48, 8]))
    e = triton.gated_linear(s, W("e", fp16[32, 8]), kind="silu")
    f = triton.linear(a, W("f", fp16[8, 16]))
    return b, c, d, e, f


def head(hidden: fp32[R, 8]):
    logits = triton.linear(hidden, W("head", fp32[100, 8]))
    return logits
"""


def test_a_text_s_gemms_are_those_of_its_kernels_with_16_bits_and_the_largest_is_first():
    assert matmuls_of(parse(TEXT, "here")) == [
        Matmul(32, 8, 2, num_calls=2),
        Matmul(24, 8, 1, num_calls=2),
        Matmul(8, 16, 1, num_calls=1),
    ]


def test_what_is_chosen_goes_before_what_is_known_and_that_before_the_rule():
    known = tiles.finder({"8 64 32 1": ["matrix", 16, 64, 4, 2], "8 64 32 2": ["library"]})
    trial = Trial(known, tiles.key_of)
    assert trial(Shape(5, 64, 32), H200) == Matrix(16, 64, 4, 2)
    assert trial(Shape(5, 64, 32, 2), H200) is None
    trial.chosen["8 64 32 1"] = Matrix(32, 64, 4, 2)
    assert trial(Shape(8, 64, 32), H200) == Matrix(32, 64, 4, 2)
    trial.chosen["8 64 32 1"] = None
    assert trial(Shape(8, 64, 32), H200) is None
    rule = tiles.choose(Shape(8, 64, 32, element_size=4), H200)
    assert trial(Shape(8, 64, 32, element_size=4), H200) == rule, "of 32 bits nothing is tried"
    assert trial(Shape(9, 64, 32), H200) == tiles.choose(Shape(9, 64, 32), H200) is not None


def test_parameters_are_read_as_they_are_written():
    for parameters in (None, Vector(4, 8, 5, 1), Matrix(64, 128, 4, 4, splits=2, block_rows=32)):
        assert tiles.from_entry(json.loads(json.dumps(tiles.to_entry(parameters)))) == parameters
    assert tiles.to_entry(None) == ["library"] and tiles.to_entry(Vector(4, 8, 5, 1)) == ["vector", 4, 8, 5, 1]
    assert tiles.from_entry(["matrix", 64, 128, 4, 4]) == Matrix(64, 128, 4, 4, 1, 1, 0, 128)


START, OTHER, THIRD = Matrix(16, 16, 1, 2), Matrix(32, 16, 1, 2), Matrix(64, 16, 1, 2)


class Clock:
    """Steps that take what a test says, times a factor that grows with every timing."""

    def __init__(
        self, seconds: dict[Parameters, float], drift: float = 1.0, error: type[Exception] = TritonError
    ) -> None:
        self.seconds, self.drift, self.factor, self.error = seconds, drift, 1.0, error
        self.num_timed: dict[Parameters, int] = {}

    def prepare(self, parameters: Parameters) -> Callable[[], float]:
        if parameters not in self.seconds:
            raise self.error("out of resources")

        def time() -> float:
            self.num_timed[parameters] = self.num_timed.get(parameters, 0) + 1
            self.factor *= self.drift
            return self.seconds[parameters] * self.factor

        return time


def test_the_fastest_is_found():
    for order in itertools.permutations([OTHER, THIRD, None]):
        assert search(START, order, Clock({START: 1.0, OTHER: 0.95, THIRD: 0.9, None: 1.1}).prepare) == THIRD


def test_within_the_margin_the_current_one_stays():
    almost, enough = 1 - 0.9 * MARGIN, 1 - 1.1 * MARGIN
    assert search(START, [OTHER], Clock({START: 1.0, OTHER: almost}).prepare) == START
    assert search(START, [OTHER], Clock({START: 1.0, OTHER: enough}).prepare) == OTHER
    assert search(START, [OTHER], Clock({START: 1.0, OTHER: 1.2}).prepare) == START
    steps = {START: 1.0, OTHER: almost, THIRD: almost - 0.9 * MARGIN}  # two small gains are one
    assert search(START, [OTHER, THIRD], Clock(steps).prepare) == THIRD


@pytest.mark.parametrize("error", [tiles.TileError, TritonError, torch.OutOfMemoryError])
def test_what_cannot_be_run_is_skipped_and_counted(error: type[Exception]):
    counted: list[None] = []
    clock = Clock({START: 1.0, THIRD: 0.5}, error=error)
    assert search(START, [OTHER, THIRD, None], clock.prepare, lambda: counted.append(None)) == THIRD
    assert len(counted) == 3
    with pytest.raises(error):
        search(OTHER, [START], clock.prepare)


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, MemoryError])
def test_an_error_that_is_not_an_option_s_own_ends_the_search(error: type[Exception]):
    with pytest.raises(error):
        search(START, [OTHER], Clock({START: 1.0}, error=error).prepare)


@pytest.mark.parametrize("drift", [0.999, 1.001])
def test_a_clock_that_drifts_does_not_decide(drift: float):
    options = [OTHER, THIRD, None]
    equal = search(START, options, Clock(dict.fromkeys([START, *options], 1.0), drift).prepare)
    assert equal == START
    better = search(START, options, Clock({START: 1.0, OTHER: 1.0, THIRD: 0.98, None: 1.0}, drift).prepare)
    assert better == THIRD


def test_the_hopeless_is_timed_once():
    clock = Clock({START: 1.0, OTHER: 1.5, THIRD: 0.9})
    search(START, [OTHER, THIRD], clock.prepare)
    assert clock.num_timed[OTHER] == 1 and clock.num_timed[THIRD] > 3


def call_of(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., Any]:
    def call(*, parameters: tiles.Find) -> torch.Tensor:
        y = x @ weight.T
        if parameters(Shape(len(x), *weight.shape), H200) == OTHER:
            y[-1, 3] += 0.1 * y[-1].abs().max()
        if parameters(Shape(len(x), *weight.shape), H200) == THIRD:
            y[0, 0] = torch.nan
        return y

    return call


@pytest.mark.slow
def test_another_result_than_the_library_s_is_noticed_wherever_it_is():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).half(), torch.randn(300, 64).half()
    x[0] *= 100  # a row whose numbers are large does not hide another's
    assert agrees(call_of(x, weight), START)
    assert not agrees(call_of(x, weight), OTHER)
    assert not agrees(call_of(x, weight), THIRD)
    spoilt = x.clone()
    spoilt[2, 7] = torch.inf
    assert agrees(call_of(spoilt, weight), None), "the library with itself"
    assert agrees(call_of(spoilt, weight), START)
    assert not agrees(call_of(spoilt, weight), OTHER), "in a row of numbers"
    assert not agrees(call_of(spoilt, weight), THIRD)
    spoilt[0] = torch.nan
    assert agrees(call_of(spoilt, weight), THIRD), "the library has no number there either"
    norm = torch.ones(64).half()
    for parameters, rows in ((Matrix(16, 16, 4, 2), 5), (Vector(2, 4, 2, 1), 1)):

        def run(*, parameters: tiles.Find, rows: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
            return linear.Linears().add_norm_linear(x[-rows:], x[-rows:], norm, weight, eps=1e-6, parameters=parameters)

        if not torch.cuda.is_available():
            assert agrees(run, parameters)
