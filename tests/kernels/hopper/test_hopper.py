"""Weights laid out for Hopper: which are, what they hold, that the kernels compile, and on such a GPU what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.checks import poisoned
from kernels.compiling import compile_for_hopper

pytest.importorskip("triton")

from atom.graph import KV, PackedWeight, Type, W, ops
from atom.graph.quantize_rows import round_rows, round_weight
from atom.graph.recipes import Shuffle, Stack
from atom.kernels import Target, find_kernel
from atom.kernels.backend import LoadContext
from atom.kernels.hopper.experts import Experts, unpack_experts
from atom.kernels.hopper.linear import Linears
from atom.kernels.hopper.shuffle import GROUP, LAYOUT, shuffle
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts import grouped_tune
from atom.kernels.triton.experts.grouped_tune import ExpertsTuner, Matmul, Recording
from atom.kernels.triton.gpu import Gpu, find_gpu
from atom.kernels.triton.linear import packed, row_kernels, shuffled, tiles
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.tune import candidates
from atom.kernels.triton.linear.weight_encoding import encoding_of
from atom.runtime.tune import compile_options
from atom.weights import load_dummy
from atom.weights.quantize import part_types

H200 = Gpu(132, 227 << 10, (9, 0), "NVIDIA H200")
HOPPER = Target("cuda", frozenset({"nvidia", "sm_90", "gluon"}))
FORMATS = ("fp8[1, *]", "fp8[128, 128]", "int4[1, 128]", "awq_int4[1, 128]", "mxfp4")  # awq's have zeros
EPS = 0.01


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def draw(fmt: str, *shape: int, dtype: str = "bf16", device: str = "cpu") -> PackedWeight:
    """A weight of random bytes, with scales of about 1 that rows or blocks do not share."""
    parts = {}
    for name, type in part_types(Type("fp32", shape, fmt)).items():
        dims = [int(dim) for dim in type.shape]
        if name == "values":
            made = torch.randint(0, 256, dims, dtype=torch.uint8)
            if type.dtype == "fp8_e4m3":
                made = made.where(made % 128 != 127, 0).view(torch.float8_e4m3fn)  # no NaN
        elif name == "zeros":
            made = torch.randint(0, 16, dims, dtype=torch.uint8)
        elif type.dtype == "u8":
            made = torch.randint(124, 130, dims, dtype=torch.uint8)  # exponents
        else:
            made = (torch.rand(dims) + 0.5).to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(type.dtype))
        parts[name] = made.to(device)
    return PackedWeight(Type(dtype, shape, fmt), parts)


class TestLayout:
    @pytest.mark.parametrize("shape", [(3, 128), (2, 5, 256)])
    def test_a_thread_finds_its_columns_of_fp8_in_16_neighbours(self, shape: tuple[int, ...]):
        """By PTX's table of the left operand of wgmma.m64nNk16: thread c of four has the columns 2 c and 2 c + 1 of
        each 8."""
        weight = draw("fp8[1, *]", *shape)
        stored = weight.parts["values"].view(torch.uint8).reshape(-1, shape[-1])
        moved = shuffle(weight).parts["values"].view(-1, shape[-1])
        for column in range(shape[-1]):
            group, within = divmod(column, 64)
            product, eighth, thread, turn = within // 16, within // 8 % 2, within % 8 // 2, within % 2
            byte = 64 * group + 16 * thread + 4 * product + 2 * turn + eighth
            assert torch.equal(moved[:, byte], stored[:, column])

    def test_a_thread_finds_its_columns_of_int4_in_16_neighbours(self):
        inner = 256
        weight = draw("int4[1, 128]", 3, inner)
        stored = weight.parts["values"].reshape(3, -1)
        numbers = torch.stack((stored & 15, stored >> 4), -1).view(3, inner)
        moved = shuffle(weight).parts["values"]
        assert moved.shape == (3, -(-inner // 128) * GROUP)
        halves = torch.stack((moved & 15, moved >> 4), -1)
        seen = torch.zeros_like(halves)
        for column in range(inner):
            group, within = divmod(column, 128)
            products, second, eighth = within // 32, within // 16 % 2, within // 8 % 2
            byte = 64 * group + within % 8 // 2 * 16 + 4 * products + within % 2 * 2 + second
            assert torch.equal(halves[:, byte, eighth], numbers[:, column])
            seen[:, byte, eighth] = 1
        assert not halves[seen == 0].any(), "what fills up a row is zero"

    def test_words_of_e2m1_hold_bits_of_bf16(self):
        """Where int4's have a number, shifts, one rotation and masks find it as bf16, 2^126 times too small."""
        inner = 160
        weight = draw("mxfp4", 3, inner)
        stored = weight.parts["values"].reshape(3, -1)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.stack((stored & 7, stored >> 4 & 7), -1).long()]
        numbers = numbers.where(torch.stack((stored & 8, stored & 128), -1) == 0, -numbers).view(3, inner)
        words = shuffle(weight).parts["values"].view(torch.int32).long() & 0xFFFFFFFF
        found = (
            words << 6 & 0x81C081C0,
            words << 2 & 0x81C081C0,
            (words << 28 | words >> 4) & 0x81C081C0,
            words >> 8 & 0x00400040 | words & 0x81808180,
        )
        as_bf16 = torch.stack(found, -1).to(torch.uint32).view(torch.bfloat16).view(3, -1, 4, 2).double() * 2.0**126
        for column in range(inner):
            group, within = divmod(column, 128)
            word = 16 * group + within % 8 // 2 * 4 + within // 32
            assert torch.equal(as_bf16[:, word, within // 8 % 4, within % 2], numbers[:, column].double())

    @pytest.mark.sampled(3, gpu=1)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_unpacked_by_the_kernel_it_is_what_it_was(self, triton_device: str, fmt: str):
        weight = draw(fmt, 38 if "128, " not in fmt else 256, 2176, dtype="fp32", device=triton_device)
        assert torch.equal(packed.unpack(shuffle(weight), torch.float32), packed.unpack(weight, torch.float32))
        with pytest.raises(AssertionError, match="layout wgmma"):
            shuffle(weight).unpack()

    @pytest.mark.parametrize("fmt", ["int4[1, 128]", "awq_int4[1, 128]", "mxfp4"])
    @pytest.mark.parametrize("shape", [(38, 2176), (3, 16, 128)])
    def test_rounded_by_the_kernel_it_is_what_activations_in_fp8_multiply(
        self, triton_device: str, fmt: str, shape: tuple[int, ...]
    ):
        weight = draw(fmt, *shape, dtype="fp32", device=triton_device)
        made = packed.round_to_fp8(shuffle(weight))
        rounded, exact = round_weight(weight, "fp8[1, *]"), weight.unpack()
        step, is_sure = 0.0, rounded.abs() >= rounded.abs().amax(-1, keepdim=True) * 2.0**-8
        if triton_device == "cpu":  # the interpreter halves what it should round up to a power of 2, and rounds ties up
            step, is_sure = 1 / 8, is_sure & (rounded.frexp().exponent == exact.frexp().exponent)
        assert made.type.fmt == "fp8[1, *]" and is_sure.float().mean() > 0.8
        assert ((made.unpack() - rounded).abs() <= step * rounded.abs())[is_sure].all()
        assert (made.parts["scales"].frexp().mantissa == 0.5).all(), "powers of 2"

    @pytest.mark.parametrize(("fmt", "inner"), [("mxfp4", 96), ("fp8[1, *]", 1088), ("fp8[*, *]", 192)])
    def test_experts_unpacked_are_what_they_were(self, triton_device: str, fmt: str, inner: int):
        weight = draw(fmt, 3, 16, inner, dtype="fp32", device=triton_device)
        for each in (weight, shuffle(weight)):
            assert torch.equal(unpack_experts(each, torch.float32), weight.unpack())

    @pytest.mark.parametrize("span", [128, 384])
    def test_rows_are_quantized_in_the_order_of_the_weight(self, triton_device: str, span: int):
        x = torch.randn(5, 384, device=triton_device)
        plain, scales, *_ = row_kernels.quantize_rows(x, span, torch.float8_e4m3fn)
        moved, same, *_ = row_kernels.quantize_rows(x, span, torch.float8_e4m3fn, is_shuffled=True)
        assert torch.equal(same, scales)
        weight = PackedWeight(Type("bf16", (8, 384), "fp8[1, *]"), {"values": plain})
        assert torch.equal(moved.view(torch.uint8), shuffle(weight).parts["values"])

    def test_experts_are_loaded_as_one_tensor(self):
        weights = Stack(W("experts.{expert}", Type("bf16", (32, 128), "fp8[1, *]")), 0, 3)
        recipe = Shuffle(weights, LAYOUT)
        made = load_dummy([recipe], 0)[recipe]
        assert isinstance(made, PackedWeight) and made.layout == LAYOUT
        assert made.parts["values"].shape == (3, 32, 128) and made.parts["scales"].shape == (3, 32, 1)


class TestChoice:
    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("op", [ops.linear, ops.gated_linear, ops.norm_linear, ops.grouped_linear])
    def test_it_takes(self, op: Any, fmt: str):
        x, weight = (
            Type("bf16", ("T", 256)),
            Type("bf16", (3, 256, 256) if op is ops.grouped_linear else (256, 256), fmt),
        )
        args = (x, weight) if op is not ops.norm_linear else (x, Type("bf16", (256,)), weight)
        kernel = find_kernel(op, "hopper")
        assert kernel.accepts(HOPPER, *args) is None and kernel.layout_of(weight) == LAYOUT

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({"target": Target("cuda", frozenset({"nvidia", "sm_90"}))}, "on NVIDIA's Hopper only"),
            ({"target": Target("cuda", frozenset({"nvidia", "sm_100"}))}, "on NVIDIA's Hopper only"),
            ({"target": Target("cpu")}, "runs on cuda, not on cpu"),
            ({"dtype": "fp16"}, "multiplies in bf16, not in fp16"),
            ({"fmt": "int4[1, 64]"}, "has no layout of int4"),
            ({"fmt": "int8[1, *]"}, "has no layout of int8"),
            ({"fmt": "fp8[64, 96]"}, "has no layout of fp8"),
            ({"fmt": "fp8[1, 256]"}, "has no layout of fp8"),
            ({"fmt": "ct_nvfp4"}, "its weight is stored as ct_nvfp4"),
            ({"fmt": "gptq_int4_ordered[1, 128]"}, "has no layout of gptq_int4_ordered"),
            ({"out": 40}, "has no layout of 40 x 256"),
            ({"inner": 96}, "has no layout of 256 x 96"),
            ({"fmt": None}, "has no layout of plain weights"),
            ({"op": ops.grouped_linear, "fmt": None, "out": 36}, "has no kernel for experts of 36 x 256"),
        ],
    )
    def test_it_refuses(self, given: dict[str, Any], reason: str):
        given = {"fmt": "fp8[1, *]", "dtype": "bf16", "op": ops.linear} | given
        dtype, experts = given["dtype"], (3,) if given["op"] is ops.grouped_linear else ()
        weight = Type(dtype, (*experts, given.get("out", 256), given.get("inner", 256)), given["fmt"])
        accepts = find_kernel(given["op"], "hopper").accepts
        assert reason in str(accepts(given.get("target", HOPPER), Type(dtype, ("T", weight.shape[-1])), weight))

    @pytest.mark.parametrize(
        ("fmt", "layout"),
        [
            (None, None),
            ("int8[1, *]", None),
            ("ct_nvfp4", None),
            ("q3_k", "parts"),
            ("q4_k", LAYOUT),
            ("int4[1, 128]", LAYOUT),
        ],
    )
    def test_silu_gates_are_taken_by_any_weight(self, fmt: str | None, layout: str | None):
        """Many rows go to a Gluon kernel, by the weight unpacked."""
        weight, kernel = Type("bf16", (512, 256), fmt), find_kernel(ops.gated_linear, "hopper")
        assert kernel.accepts(HOPPER, Type("bf16", ("T", 256)), weight, kind="silu") is None
        assert kernel.layout_of(weight) == layout

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({"kind": "gelu"}, "takes plain weights with a silu gate and without a bias only"),
            ({"kind": None}, "takes plain weights with a silu gate and without a bias only"),
            ({"bias": Type("bf16", (512,))}, "takes plain weights with a silu gate and without a bias only"),
            ({"dtype": "fp16"}, "multiplies in bf16, not in fp16"),
            ({"out": 520}, "has no silu gate of 520 x 256"),
            ({"inner": 64}, "has no silu gate of 512 x 64"),
        ],
    )
    def test_other_gates_by_plain_weights_are_left_to_triton(self, given: dict[str, Any], reason: str):
        given = {"kind": "silu", "bias": None, "dtype": "bf16", "out": 512, "inner": 256} | given
        dtype, out, inner = given["dtype"], given["out"], given["inner"]
        types = Type(dtype, ("T", inner)), Type(dtype, (inner,)), Type(dtype, (out, inner)), given["bias"]
        accepts = find_kernel(ops.norm_linear, "hopper").accepts
        assert accepts(HOPPER, *types, eps=EPS, kind=given["kind"]) == reason

    @pytest.mark.parametrize(
        ("dtype", "dim", "kept", "reason"),
        [
            ("bf16", 128, "bf16", None), ("fp16", 64, "fp16", None), ("bf16", 256, "fp8_e4m3", None),
            ("bf16", 96, "bf16", "heads have 96 dims, not 64, 128, 256"),
            ("fp32", 128, "fp32", "multiplies in bf16 and fp16, not in fp32"),
            ("bf16", 128, "fp16", "the cache is in fp16, not in bf16 or fp8_e4m3"),
        ],
    )  # fmt: skip
    def test_attention_of_some_heads(self, dtype: str, dim: int, kept: str, reason: str | None):
        q, cache = Type(dtype, ("T", 8, dim)), KV("0", Type(kept, (2, 2, dim)))
        for op in (ops.paged_attention, ops.norm_rope_attention):
            assert find_kernel(op, "hopper").accepts(HOPPER, q, cache, scale=0.1) == reason

    @pytest.mark.parametrize(("plain", "rotated", "value"), [(128, 64, 128), (128, 64, 192), (96, 64, 128)])
    def test_latents_of_deepseek_s_heads(self, plain: int, rotated: int, value: int):
        types = Type("bf16", ("T", 4, plain)), Type("bf16", ("T", 4, rotated)), Type("bf16", (4 * (plain + value), 512))
        refused = find_kernel(ops.paged_mla_attention, "hopper").accepts(HOPPER, *types, KV("0", Type("bf16", (576,))))
        assert (refused is None) == ((plain, rotated, value) == (128, 64, 128))

    @pytest.mark.parametrize(
        ("fmt", "out", "reason"),
        [
            (None, 48, None), (None, 40, None), ("int8[1, *]", 48, None), ("fp8[1, *]", 64, None),
            (None, 36, "has no layout of plain weights"), ("ct_nvfp4", 48, "has no layout of ct_nvfp4"),
        ],
    )  # fmt: skip
    def test_experts_of_some_sizes(self, fmt: str | None, out: int, reason: str | None):
        """With 40 outputs, of which 20 are gates, only the down projection has a kernel."""
        x, ids = Type("bf16", ("T", 64)), Type("i64", ("T", 2))
        down = Type("bf16", (4, 64 if out != 36 else 36, out // 2 if out != 40 else 64), fmt)
        accepts = find_kernel(ops.experts, "hopper").accepts
        assert (
            accepts(HOPPER, x, Type("fp32", ("T", 2)), ids, Type("bf16", (4, out, 64), fmt), down, kind="silu")
            == reason
        )

    def test_adapters_of_experts(self):
        x, ends = Type("bf16", ("T", 64)), Type("i64", (8,))
        kernel, types = (
            find_kernel(ops.grouped_lora, "hopper"),
            (Type("bf16", (4, 2, 16, 64)), Type("bf16", (4, 2, 48, 16))),
        )
        assert kernel.accepts(HOPPER, x, x, *types, ends) is None
        assert kernel.accepts(
            HOPPER, x, x.with_last(60), Type("bf16", (4, 2, 15, 60)), Type("bf16", (4, 2, 60, 15)), ends
        )

    def test_a_program_has_one_object_of_each_class(self):
        context = LoadContext()
        linears = [find_kernel(op, "hopper").load(context) for op in (ops.linear, ops.gated_linear)]
        assert linears[0].__self__ is linears[1].__self__ and type(linears[0].__self__) is Linears
        experts = [find_kernel(op, "hopper").load(context) for op in (ops.experts, ops.grouped_linear)]
        assert experts[0].__self__ is experts[1].__self__ and type(experts[0].__self__) is Experts
        attend = find_kernel(ops.paged_attention, "hopper")
        assert attend.load(context) is attend.load(context)

    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 128, 200, 256])
    def test_all_tiles_fit(self, fmt: str, rows: int):
        for out, inner in ((6144, 4096), (24576, 4096), (4096, 12288), (64, 128), (151936, 4096)):
            encoding = encoding_of(fmt, out, None, True)
            chosen = tiles.choose(tiles.Shape(rows, out, inner, 2 if rows == 1 else 1, encoding=encoding), H200)
            assert isinstance(chosen, Wgmma)
            tried = [
                each
                for each in candidates(tiles.Shape(rows, out, inner, encoding=encoding), H200)
                if isinstance(each, Wgmma)
            ]
            assert chosen in tried or out == 64
            for each in (chosen, *tried, shuffled.choose_grouped(rows, 8, out, inner, encoding, H200)):
                ring = each.stages * each.boxes * shuffled.box_bytes(each.block_rows, encoding)
                assert ring <= H200.shared_memory - shuffled.UNUSED_MEMORY and each.block_rows >= 8
                assert each.boxes * GROUP * 8 // encoding.bits % (encoding.columns or 1) == 0, (
                    "a stage has whole blocks"
                )

    def test_many_rows_of_quantized_activations_are_the_librarys(self):
        encoding = encoding_of("fp8[1, *]", 4096, "fp8", True)
        assert isinstance(tiles.choose(tiles.Shape(64, 4096, 4096, encoding=encoding), H200), Wgmma)
        assert tiles.choose(tiles.Shape(65, 8192, 4096, encoding=encoding), H200) is None

    @pytest.mark.parametrize(
        ("rows", "out", "inner", "library", "ours"),
        [
            (128, 2048, 4096, 16.9, 12.1),
            (192, 2048, 4096, 17.3, 15.3),
            (256, 2048, 4096, 17.4, 15.8),
            (128, 2112, 7168, 25.4, 16.3),
            (192, 2112, 7168, 25.7, 23.4),
            (256, 2112, 7168, 25.8, 23.8),
            (128, 2304, 4096, 17.0, 14.9),
            (192, 2304, 4096, 17.4, 15.4),
            (256, 2304, 4096, 17.5, 21.1),
            (128, 3072, 4096, 17.2, 15.5),
            (192, 3072, 4096, 17.4, 21.3),
            (256, 3072, 4096, 17.7, 21.5),
            (128, 4096, 2048, 11.6, 10.0),
            (192, 4096, 2048, 11.7, 12.3),
            (256, 4096, 2048, 11.9, 12.7),
            (128, 4096, 8192, 28.8, 27.7),
            (192, 4096, 8192, 29.7, 38.5),
            (256, 4096, 8192, 30.3, 46.9),
            (128, 5120, 2048, 11.7, 12.4),
            (192, 5120, 2048, 11.9, 12.7),
            (256, 5120, 2048, 12.0, 17.1),
            (128, 6144, 4096, 18.0, 22.9),
            (192, 6144, 4096, 18.0, 32.9),
            (256, 6144, 4096, 18.3, 33.2),
            (128, 7168, 2048, 12.0, 12.7),
            (192, 7168, 2048, 12.3, 17.2),
            (256, 7168, 2048, 12.4, 24.9),
            (128, 7168, 16384, 53.8, 92.6),
            (192, 7168, 16384, 57.7, 129.9),
            (256, 7168, 16384, 59.4, 192.7),
            (128, 9216, 4096, 19.3, 33.7),
            (192, 9216, 4096, 31.2, 51.1),
            (256, 9216, 4096, 31.4, 56.1),
            (128, 24576, 1536, 18.6, 28.0),
            (192, 24576, 1536, 25.8, 40.2),
            (256, 24576, 1536, 25.6, 52.7),
        ],
    )
    def test_many_rows_in_fp8_are_multiplied_by_what_is_not_much_slower_on_an_h200(
        self, rows: int, out: int, inner: int, library: float, ours: float
    ):
        """library and ours: µs of a linear in blocks of 128 x 128, with x quantized for the library; the one chosen is
        faster, or not much slower."""
        encoding = encoding_of("fp8[128, 128]", inner, "fp8[1, 128]", True)
        is_librarys = tiles.choose(tiles.Shape(rows, out, inner, encoding=encoding), H200) is None
        assert (library if is_librarys else ours) <= 1.15 * min(library, ours)


COMPILE = """
import itertools, sys, torch, triton
from kernels.compiling import use_hopper
from kernels.hopper.test_hopper import FORMATS, H200, draw
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.hopper import experts as moe, packed_linear as packed_hopper
from atom.kernels.hopper.linear import Linears
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear import linear

launches = itertools.count()

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def compile(*args, **options):
            fmt, place = divmod(next(launches), 6)
            if sys.argv[1] == "few" and (fmt + place) % 3:
                return  # of the launches of each format two, each time others
            made = self.kernel.warmup(*args, grid=grid, **options)
            assert made.metadata.shared <= H200.shared_memory
            ptx = made.asm["ptx"]
            assert ("wgmma.mma_async" in ptx) != ("mma.sync" in ptx) and ".local" not in ptx
            print("compiled")
        return compile

use_hopper()
linear.find_gpu = moe.find_gpu = lambda device: H200
linear.normalize = lambda a, b, norm, eps: (a, a)
packed_hopper._multiply = Compile(packed_hopper._multiply)
for fmt in FORMATS:
    weight, x = shuffle(draw(fmt, 256, 512)), torch.zeros(128, 512, dtype=torch.bfloat16)
    Linears().linear(x[:8], weight, x[0, :256])
    Linears().gated_linear(x[:32], weight, kind="silu")
    Linears().linear(x, weight)
    experts = shuffle(draw(fmt, 4, 256, 512))
    for rows in (3, 40):
        moe.Experts().grouped_linear(x[:rows], experts, torch.zeros(4, dtype=torch.int64))
    moe.Experts().multiply(x[:40], experts, torch.zeros(4, dtype=torch.int64), gate=Gate("swigluoai", 7.0, 1.7))
"""


@pytest.mark.parametrize("share", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_it_compiles_for_such_a_gpu(share: str):
    done = compile_for_hopper(COMPILE, share)
    assert done.stdout.count("compiled") == (2 if share == "few" else 6) * len(FORMATS)
    assert "serialized" not in done.stderr, "of wgmma: ptxas warns where products would wait for each other"


IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def make(*shape: int) -> torch.Tensor:
    return torch.randn(shape).cuda().bfloat16()


def assert_near(y: torch.Tensor, truth: torch.Tensor, share: float = 1e-4) -> None:
    """But for the rounding of y: sums are in float32, of products that are exact. share: of the largest"""
    assert y.shape == truth.shape and y.isfinite().all()
    assert ((y - truth).abs() <= 0.005 * truth.abs() + share * truth.abs().max()).all()


def share_of(fmt: str, rows: int) -> float:
    """`share` of `assert_near`: int4's numbers are rounded to bf16 with their scales in tiles of more than 8 rows."""
    return 4e-3 if "int4" in fmt and rows > 8 else 1e-4


def relative(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


CLAMPED = {"kind": "swigluoai", "limit": 7.0, "alpha": 1.702}


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
class TestOnHopper:
    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 33, 64, 100, 128, 129, 256, 300])
    @pytest.mark.parametrize(("out", "inner"), [(256, 384), (144, 1152), (4096, 4096)])
    def test_rows_are_multiplied_like_the_op(self, fmt: str, rows: int, out: int, inner: int):
        if fmt == "fp8[128, 128]" and out == 144:
            out = 128
        weight = draw(fmt, out, inner, device="cuda")
        x, bias = make(rows, inner + 8)[:, :inner], make(out)
        truth = x.double() @ packed.unpack(weight, torch.float32).double().t()
        linears = Linears()
        # of more rows the weight is unpacked, and rounded to bf16 with its scales
        share = 2e-3 if rows > 256 else share_of(fmt, rows)
        assert_near(linears.linear(x, shuffle(weight)).double(), truth, share)
        again = [linears.linear(x, shuffle(weight), bias) for _ in range(3)]
        assert_near(again[0].double(), truth + bias.double(), share)
        assert all(torch.equal(again[0], each) for each in again)

    @pytest.mark.parametrize("fmt", ["int4[1, 128]", "awq_int4[1, 128]", "mxfp4"])
    @pytest.mark.parametrize("rows", [257, 300, 1025])
    @pytest.mark.parametrize("kind", [None, "silu"])
    def test_many_rows_in_fp8_are_multiplied_by_4_bits_like_the_op(self, fmt: str, rows: int, kind: str | None):
        weight, x, linears, act = draw(fmt, 384, 1152, device="cuda"), make(rows, 1152), Linears(), "fp8[1, *]"
        weight.parts["scales"].copy_(weight.parts["scales"] - 6 if fmt == "mxfp4" else weight.parts["scales"] / 64)
        truth = round_rows(x, act).double() @ round_weight(weight, act).double().t()
        assert_near(linears.linear(x, shuffle(weight), act=act).double(), truth, 1e-3)
        if kind is not None:
            gated = ops.gated_activate(truth.bfloat16(), kind=kind)
            y = linears.gated_linear(x, shuffle(weight), kind=kind, act=act)
            assert relative(y, gated) <= 0.006
            given = linears.gated_linear(x, shuffle(weight), kind=kind, act=act, gives=act)
            down = draw("mxfp4", 256, 192, device="cuda")
            z = linears.linear(given, shuffle(down), act=act)
            assert relative(z, round_rows(y, act) @ round_weight(down, act).t()) <= 0.006

    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("rows", [2, 9, 40, 72, 200])
    @pytest.mark.parametrize("kind", [None, "silu"])
    def test_what_lies_past_the_rows_is_read_and_counts_for_nothing(
        self, fmt: str, rows: int, kind: str | None, monkeypatch: pytest.MonkeyPatch
    ):
        weight, x = shuffle(draw(fmt, 384, 512, device="cuda")), make(256, 512)
        x[rows:] = torch.nan
        from atom.kernels.hopper import packed_linear as packed_hopper  # imports what only NVIDIA's GPUs need

        read, find = list[int](), packed_hopper.readable_rows
        monkeypatch.setattr(packed_hopper, "readable_rows", lambda *args: read.append(find(*args)) or read[-1])

        def multiply(x: torch.Tensor) -> torch.Tensor:
            linears = Linears()
            return linears.linear(x, weight) if kind is None else linears.gated_linear(x, weight, kind=kind)

        assert torch.equal(multiply(x[:rows]), multiply(x[:rows].clone()))
        assert [each > rows for each in read] == [True, False]

    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("rows", [1, 5, 33, 128, 200])
    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
    def test_gates_are_applied_after_norms(self, fmt: str, rows: int, kind: str):
        out, inner = 384, 512
        weight, (a, b), norm = draw(fmt, out, inner, device="cuda"), make(2, rows, inner), make(inner)
        weight.parts["scales"].copy_(weight.parts["scales"] - 12 if fmt == "mxfp4" else weight.parts["scales"] / 1000)
        plain = packed.unpack(weight, torch.float32)
        y, total = Linears().add_norm_linear(a, b, norm, shuffle(weight), eps=EPS, kind=kind)
        assert torch.equal(total, a + b)
        x = ops.rms_norm.body(a + b, norm, eps=EPS)
        truth = ops.gated_activate.body((x.double() @ plain.double().t()).bfloat16(), kind=kind).double()
        assert (y.double() - truth).abs().max() <= 0.02 * truth.abs().max()
        bound = 0.004 if share_of(fmt, rows) < 1e-3 else 0.006
        assert (y.double() - truth).abs().mean() <= bound * truth.abs().mean()

    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize("tiles", [Wgmma(8, 4, 3, 8), Wgmma(16, 2, 6, 3), Wgmma(64, 2, 2), Wgmma(128, 2, 3, 2)])
    def test_any_tiles_give_the_same(self, fmt: str, tiles: Wgmma):
        weight, x = draw(fmt, 320 if "[128" not in fmt else 384, 4096, device="cuda"), make(70, 4096)
        truth = x.double() @ packed.unpack(weight, torch.float32).double().t()
        assert_near(Linears(lambda *_: tiles).linear(x, shuffle(weight)).double(), truth,
                    share_of(fmt, tiles.block_rows))  # fmt: skip

    @pytest.mark.parametrize("fmt", FORMATS)
    @pytest.mark.parametrize(
        ("counts", "inner"),
        [([1, 0, 0], 384), ([0, 3, 0], 384), ([0, 0, 9], 384), ([2, 0, 17], 384), ([200, 1, 55], 384),
         ([0, 300, 0], 384), ([0, 0, 0], 384), ([1, 0, 2], 4096), ([0, 12, 1], 4096), ([40, 0, 1], 4096)],
    )  # fmt: skip
    def test_each_expert_multiplies_its_rows(self, fmt: str, counts: list[int], inner: int):
        """And one without rows is not read."""
        experts, out = 24, 256
        counts = [*counts, *[0] * (experts - 3)]
        weight, bias = draw(fmt, experts, out, inner, device="cuda"), make(experts, out)
        plain = unpack_experts(weight, torch.float32).double()
        bad = poisoned(weight, torch.tensor(counts) == 0)
        ends = torch.tensor(counts).cumsum(0).cuda()
        x = make(sum(counts) + 3, inner)  # the last three are of no expert
        parts = x[: sum(counts)].split(counts)
        truth = torch.cat(
            [rows.double() @ plain[expert].t() + bias[expert].double() for expert, rows in enumerate(parts)]
        )
        y = Experts().grouped_linear(x, shuffle(bad), ends, bias)
        m = Experts().multiply(x, shuffle(bad), ends, bias, Gate(**CLAMPED))
        if sum(counts):
            assert_near(y[: sum(counts)].double(), truth, share_of(fmt, sum(counts)))
            expected = ops.gated_activate.body(truth.bfloat16(), **CLAMPED).double()
            assert (m[: sum(counts)].double() - expected).abs().max() <= 0.02 * expected.abs().max()

    def test_a_captured_chain_gives_what_its_kernels_give_one_by_one(self):
        """Each begins while the one ahead of it runs, and x is written by the one ahead."""
        linears, x = Linears(), make(5, 1024)
        weights = [shuffle(draw("int4[1, 128]", 1024, 1024, device="cuda")) for _ in range(4)]

        def run() -> torch.Tensor:
            y = x
            for weight in weights:
                y = linears.linear(y, weight)
                y = y / y.abs().amax()
            return y

        expected, graph = run(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        for _ in range(5):
            graph.replay()
            assert torch.equal(y, expected)

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_all_that_tuning_tries_of_experts_gives_the_product(self, fmt: str):
        """Tuning compiles on all cores, in threads that have not used the GPU before."""
        weight, counts = draw(fmt, 4, 256, 512, device="cuda"), [5, 0, 40, 3]
        x, ends = make(sum(counts), 512), torch.tensor(counts, device="cuda").cumsum(0)
        kinds = {"hopper": Experts}
        tuner, recording = ExpertsTuner(x.device, kinds), Recording(kinds)
        recording.kernels[ops.grouped_linear, "hopper"](x, shuffle(weight), ends)
        matmul = Matmul(4, 256, 512, 1, 1, 1, encoding_of(fmt, 256, None, True))
        calls = recording.calls_of(matmul)
        assert len(calls) == 1
        options = grouped_tune.candidates(matmul.shape(len(x)), find_gpu(x.device))
        fitting = compile_options(tuner, calls, options, lambda: None)
        assert not fitting.wrong and len(fitting.right) > len(options) // 2
