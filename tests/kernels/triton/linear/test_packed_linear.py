"""Linears over packed weights give what the ops' bodies give, which unpack all of the weight first."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.checks import relative_error

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from atom.graph import ops
from atom.graph.formats import act_of, parse_format, part_shape
from atom.graph.gguf_blocks import TYPES, fit_factors
from atom.graph.packed import PackedWeight
from atom.graph.types import Type
from atom.kernels import Target, find_target
from atom.kernels.triton import KERNELS
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import linear as kernels
from atom.kernels.triton.linear import matrix, packed, quantized, row_kernels, tiles, vector
from atom.kernels.triton.linear.split_blocks import split_blocks
from atom.kernels.triton.linear.tiles import Matrix, Shape, Vector
from atom.kernels.triton.linear.tune import Matmul, candidates
from atom.kernels.triton.linear.weight_encoding import encoding_of
from atom.kernels.triton.search import Trial, agrees, is_unfit
from atom.weights.quantize import quantize

pytestmark = pytest.mark.early

H200 = Gpu(132, 227 << 10, (9, 0), "NVIDIA H200")
SMALL = Gpu(128, 99 << 10, (8, 9), "small")
AMD = Gpu(304, 64 << 10, (0, 0), "amd")
EPS = 0.01
FORMATS = {  # each with the columns of a weight in it
    "ct_fp8[1, *]": 77,
    "fp8[128, 128]": 576,
    "fp8[64, 96]": 384,
    "fp8[16, 32]": 96,
    "int8[1, *]": 96,
    "ct_int8[1, 64]": 192,
    "int4[1, 128]": 384,
    "ct_packed_int4[1, 32]": 96,
    "ct_packed_int4[1, *]": 576,
    "awq_int4[1, 128]": 384,
    "ct_packed_int4z[1, 32]": 96,
    "gptq_int4[1, 96]": 576,
    "ct_packed_int8[1, *]": 96,
    "gptq_int8[1, 128]": 384,
    "q4_0": 96,
    "q4_1": 96,
    "q8_0": 96,
    "q5_0": 96,
    "q5_1": 96,
    "q2_k": 768,
    "q3_k": 256,
    "q4_k": 768,
    "q5_k": 256,
    "q6_k": 768,
    "mxfp4": 576,
    "quark_mxfp4": 96,
    "ct_nvfp4": 96,
    "modelopt_nvfp4": 576,
}
VECTORS = [Vector(2, 4, stages=2, programs=3), Vector(8, 8, stages=3, programs=1)]
MATRICES = [
    Matrix(16, 64, warps=4, stages=2),
    Matrix(16, 128, warps=2, stages=3, splits=2, prefetch=2, block_rows=32),
    Matrix(16, 64, warps=4, stages=2, groups=4, splits=2, block_rows=16),
]
WORDS = 5e-5  # of the largest result, by numbers that are parts of a mantissa (kquant_gemv.py)
PARAMETERS = [VECTORS[0], MATRICES[1], None]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_weight(device: str, fmt: str, out: int, inner: int, dtype: str = "fp32") -> PackedWeight:
    """A random weight, with zero points and factors of its own where the format has them, as a file has it."""
    if fmt in TYPES:
        return make_blocks(device, fmt, out, inner, dtype)
    parts = quantize(fmt, torch.randn(out, inner))
    if "zeros" in parts:
        parts["zeros"].random_(0, 16 if "int4" in fmt else 256)
    if "mins" in parts:
        parts["mins"].normal_()
        parts["scales"][0] = 0  # as where all numbers of a block are equal
    for name in {"factor", "divisor"} & parts.keys():  # of rows, as those that were joined have them
        parts[name] = parts[name] * (1 + torch.rand(out)) if inner == 576 else parts[name]
    return PackedWeight(Type(dtype, (out, inner), fmt), {name: part.to(device) for name, part in parts.items()})


def make_blocks(device: str, fmt: str, out: int, inner: int, dtype: str) -> PackedWeight:
    """Random blocks of a type of GGUF; the first is 0."""
    type = Type(dtype, (out, inner), fmt)
    drawn = torch.randint(0, 256, part_shape(type, parse_format(fmt).parts["values"]), dtype=torch.uint8)
    stored = fit_factors(fmt, drawn, 1.0)
    stored[0, 0] = 0
    return PackedWeight(type, {"values": stored.to(device)})


def laid_out(weight: PackedWeight) -> PackedWeight:
    """A weight as kernels take it: GGUF's blocks split."""
    return split_blocks(weight) if weight.kind in TYPES else weight


def expected(a, b, norm, weight, bias, kind):
    """The ops' own bodies in float32, one after the other, over the weight unpacked in float32."""
    a, b, norm, bias = (None if x is None else x.float() for x in (a, b, norm, bias))
    wide = PackedWeight(Type("fp32", weight.type.shape, weight.type.fmt), weight.parts)
    x = a if b is None else ops.add.body(a, b)
    x = x if norm is None else ops.rms_norm.body(x, norm, eps=EPS)
    y = ops.linear.body(x, wide, bias)
    return y if kind is None else ops.gated_activate.body(y, kind=kind)


def assert_near(y, expected, tolerance=1e-5):
    assert y.shape == expected.shape
    assert (y.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.sampled(24, gpu=8)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("turn", "rows"), [*enumerate([1, 8, 9, 33])])
def test_rows_are_multiplied_like_the_op(triton_device, turn, rows, fmt):
    out, inner = 19, FORMATS[fmt]
    weight = make_weight(triton_device, fmt, out, inner)
    x = torch.randn(rows, inner + 1, device=triton_device)[:, :inner]  # rows lie apart, by an odd number
    bias = torch.randn(out, device=triton_device)
    truth = expected(x, None, None, weight, bias, None)
    turn += list(FORMATS).index(fmt)  # each format has all tiles, one for each number of rows
    counters = matrix.make_counters(x.device)
    weight = laid_out(weight)
    try:
        y = matrix.multiply_matrix(x, weight, bias, None, counters, MATRICES[turn % 3])
    except OutOfResources:  # float32 takes twice the shared memory that bf16 does
        assert triton_device != "cpu" and turn % 3
        y = matrix.multiply_matrix(x, weight, bias, None, counters, MATRICES[0])
    assert_near(y, truth)
    for parameters in VECTORS if rows == 1 else []:
        if "96]" in fmt:
            with pytest.raises(tiles.TileError, match="96 columns share a scale"):
                vector.multiply_vector(x, None, None, weight, bias, EPS, None, parameters)
            continue
        y, _ = vector.multiply_vector(x, None, None, weight, bias, EPS, None, parameters)
        assert_near(y, truth, WORDS if fmt in TYPES else 1e-5)


def all_calls(products, a, b, norm, weight, bias, act=None, turn=None):
    """Each op with each of its arguments, or every third one: what it gives, and what it is given."""
    taken = laid_out(weight)

    def add_norm_linear():
        y, total = products.add_norm_linear(a, b, norm, taken, bias, eps=EPS, kind="silu", act=act)
        assert torch.equal(total, a + b)
        return y

    norms = {"eps": EPS, "act": act}
    calls = [
        (lambda: products.linear(a, taken, act=act), (a, None, None, weight, None, None)),
        (lambda: products.linear(a, taken, bias, act=act), (a, None, None, weight, bias, None)),
        (lambda: products.gated_linear(a, taken, kind="gelu", act=act), (a, None, None, weight, None, "gelu")),
        (lambda: products.norm_linear(a, norm, taken, bias, **norms), (a, None, norm, weight, bias, None)),
        (lambda: products.norm_linear(a, norm, taken, kind="relu", **norms), (a, None, norm, weight, None, "relu")),
        (add_norm_linear, (a, b, norm, weight, bias, "silu")),
    ]
    for call, arguments in calls if turn is None else calls[turn % 3 :: 3]:
        yield call(), arguments


@pytest.mark.sampled(18, gpu=6)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("parameters", PARAMETERS, ids=["vector", "matrix", "library"])
def test_every_op_gives_what_its_body_gives(triton_device, fmt, parameters):
    if isinstance(parameters, Vector) and "96]" in fmt:
        pytest.skip("columns that share a scale are no power of 2")
    inner, rows = FORMATS[fmt], 1 if isinstance(parameters, Vector) else 5
    weight = make_weight(triton_device, fmt, 38, inner)
    a, b = torch.randn(2, rows, inner, device=triton_device)
    norm, bias = torch.randn(inner, device=triton_device), torch.randn(38, device=triton_device)
    products = kernels.Linears(lambda *_: parameters)
    # each format has all ops, by one of the parameters each
    turn = list(FORMATS).index(fmt) + PARAMETERS.index(parameters) if "96]" not in fmt else None
    tolerance = WORDS if fmt in TYPES and isinstance(parameters, Vector) else 1e-5
    for y, arguments in all_calls(products, a, b, norm, weight, bias, turn=turn):
        assert_near(y, expected(*arguments), tolerance)


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_of_a_weight_is_unpacked_like_the_reference(triton_device, fmt):
    for out, inner in ((19, FORMATS[fmt]), (9, 6 * FORMATS[fmt])):
        weight = make_weight(triton_device, fmt, out, inner)
        y = packed.unpack(laid_out(weight), torch.float32)
        assert_near(y, weight.unpack(), 1e-6)
        if fmt in TYPES:
            assert torch.equal(y, weight.unpack())


def test_numbers_at_the_ends_of_a_format_are_exact(triton_device):
    """Every fp8 and every fp4, subnormal ones too, by a row of ones, in float16 and as far as scales reach."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()].repeat(3)[: 16 * 47].view(16, 47)
    for size in (1.0, 2.0**-20, 2.0**20):
        parts = {"values": numbers.to(triton_device), "scales": torch.full((16, 1), size, device=triton_device)}
        weight = PackedWeight(Type("fp32", (16, 47), "fp8[1, *]"), parts)
        x = torch.eye(47, device=triton_device)
        y = matrix.multiply_matrix(x, weight, None, None, matrix.make_counters(x.device), MATRICES[0])
        assert torch.equal(y, numbers.float().mT.to(triton_device) * size)
        row, _ = vector.multiply_vector(x[7:8], None, None, weight, None, EPS, None, VECTORS[0])
        assert torch.equal(row, y[7:8])
    halves = torch.arange(16, dtype=torch.uint8).repeat(2)
    for exponent in (100, 127, 140):
        values, scales = (halves[::2] | halves[1::2] << 4).view(1, 1, 16), torch.full((1, 1), exponent).byte()
        parts = {"values": values.to(triton_device), "scales": scales.to(triton_device)}
        weight = PackedWeight(Type("fp32", (1, 32), "mxfp4"), parts)
        x = torch.eye(32, device=triton_device)
        y = matrix.multiply_matrix(x, weight, None, None, matrix.make_counters(x.device), MATRICES[0])
        assert torch.equal(y.mT, weight.unpack())
        half = matrix.multiply_matrix(x.half(), weight, None, None, matrix.make_counters(x.device), MATRICES[0])
        assert torch.equal(half.mT, weight.unpack().half()) or exponent == 100


# of the result's norm, in bf16: x and the result are rounded, and by the library in fp8 x to 3 bits
BF16, FP8 = 6e-3, 4e-2


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("turn", "rows"), [*enumerate([1, 2, 8, 9, 33, 64, 200, 300, 1025])])
def test_bf16_is_within_the_bound_of_its_format(turn, rows, fmt):
    inner, out = 768 if FORMATS[fmt] == 77 else 12 * FORMATS[fmt], 1280
    weight = make_weight("cuda", fmt, out, inner, "bf16")
    a, b = torch.randn(2, rows, inner).to("cuda", torch.bfloat16)
    norm, bias = torch.randn(inner).to("cuda", torch.bfloat16), torch.randn(out).to("cuda", torch.bfloat16)
    (accepts,) = (kernel.accepts for kernel in KERNELS if kernel.op is ops.linear)
    act = act_of(fmt)
    refusal = accepts(find_target("cuda"), Type("bf16", ("T", inner)), weight.type, act=act)
    act = act if refusal is None else None
    for y, arguments in all_calls(kernels.Linears(), a, b, norm, weight, bias, act, turn):
        bound = FP8 if act and rows > 16 else BF16
        assert y.dtype == torch.bfloat16
        assert relative_error(y, expected(*arguments)) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 40, 256])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_tried_gives_the_product_in_bf16(every, rows, fmt):
    """All, or every eighth, of formats that follow each other not the same ones; others where none of those fits."""
    inner, out = 768 if FORMATS[fmt] == 77 else 12 * FORMATS[fmt], 1280
    weight = make_weight("cuda", fmt, out, inner, "bf16")
    x = torch.randn(rows, inner).to("cuda", torch.bfloat16)
    truth, gpu = expected(x, None, None, weight, None, None), kernels.find_gpu(x.device)
    tried = [
        each for each in candidates(Shape(rows, out, inner, encoding=encoding_of(fmt, out)), gpu) if each is not None
    ]
    chosen = tried[list(FORMATS).index(fmt) % min(every, len(tried)) :: every]
    num_run = 0
    for at, each in enumerate([*chosen, *(each for each in tried if each not in chosen)]):
        if at >= len(chosen) and num_run:
            break
        try:
            y = kernels.Linears(lambda *_, chosen=each: chosen).linear(x, laid_out(weight))
        except Exception as error:
            if is_unfit(error):
                continue
            raise
        assert relative_error(y, truth) <= BF16, each
        num_run += 1
    assert num_run


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gpu", [H200, SMALL, AMD], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_chosen_and_tried_reads_at_least_32_bytes_of_one_scale_or_two(fmt, gpu):
    for rows, (out, inner), gates in itertools.product(
        (1, 8, 32, 64, 256), ((4096, 4096), (24576, 4096), (4096, 12288)), (1, 2)
    ):
        encoding = encoding_of(fmt, out)
        tried = [tiles.choose(Shape(rows, out, inner, gates, encoding=encoding), gpu)]
        tried += candidates(Shape(rows, out, inner, gates, encoding=encoding), gpu)
        assert len(tried) <= 80
        for each in tried:
            if isinstance(each, Matrix):
                each = each.as_run(rows, gpu, encoding)
                assert each.num_sums(encoding) <= 128
                assert each.block_inner >= 32 * encoding.per_byte
                if encoding.factor == "spans":
                    assert 256 % each.block_inner == 0 and each.groups == 1
                elif encoding.columns is not None:
                    unit = encoding.columns & -encoding.columns
                    assert unit % each.block_inner == 0 or each.block_inner <= 4 * unit
                assert each.splits == 1 or -(-out // each.block_out) <= tiles.MAX_TILES
            elif isinstance(each, Vector):
                assert "96]" not in fmt


def test_a_key_says_how_a_packed_weight_holds_numbers():
    def key(fmt):
        return tiles.key_of(Shape(5, 6144, 4096, encoding=encoding_of(fmt, 6144)))

    assert tiles.key_of(Shape(5, 6144, 4096)) == "8 6144 4096 1"
    assert key("ct_fp8[1, *]") == key("fp8[1, *]") == "8 6144 4096 1 e4m3[1,*]"
    assert key("int4[1, 128]") == key("ct_packed_int4") == "8 6144 4096 1 u4[1,128]"
    assert key("awq_int4[1, 128]") == "8 6144 4096 1 u4z[1,128]"
    assert (key("q4_k"), key("q6_k")) == ("8 6144 4096 1 u4m[1,32] k", "8 6144 4096 1 i8[1,16] k")
    assert (key("q5_1"), key("q3_k")) == ("8 6144 4096 1 i8m[1,32]", "8 6144 4096 1 u4[1,16] k")
    assert (key("q4_0"), key("q4_1")) == ("8 6144 4096 1 u4[1,32]", "8 6144 4096 1 u4m[1,32]")
    by_fp8 = encoding_of("fp8[1, *]", 6144, "fp8[1, *]")
    assert tiles.key_of(Shape(5, 6144, 4096, encoding=by_fp8)) == "8 6144 4096 1 e4m3[1,*] fp8"
    assert key("mxfp4") == key("quark_mxfp4") == "8 6144 4096 1 e2m1[1,32]"
    find = tiles.finder({"8 6144 4096 1": ["library"], "8 6144 4096 1 e4m3[1,*]": ["matrix", 16, 64, 4, 2]})
    assert find(Shape(5, 6144, 4096), H200) is None
    assert find(Shape(5, 6144, 4096, encoding=encoding_of("fp8[1, *]", 6144)), H200) == Matrix(16, 64, 4, 2)
    blocks = encoding_of("fp8[128, 128]", 6144)
    assert find(Shape(5, 6144, 4096, encoding=blocks), H200) == tiles.choose(
        Shape(5, 6144, 4096, encoding=blocks), H200
    )
    trial = Trial(find, tiles.key_of)
    trial.chosen["8 6144 4096 1 e4m3[128,128]"] = Matrix(32, 64, 4, 2)
    assert trial(Shape(5, 6144, 4096, encoding=blocks), H200) == Matrix(32, 64, 4, 2)
    assert trial(Shape(5, 6144, 4096), H200) is None


def test_a_product_of_a_packed_weight_agrees_with_the_library_s(triton_device):
    from functools import partial

    products = kernels.Linears()
    weight = make_weight(triton_device, "int4[1, 128]", 38, 384, "fp16")
    x = torch.randn(3, 384).to(triton_device, torch.float16)
    assert agrees(partial(products.linear, x, weight), MATRICES[0])
    matmul = Matmul(38, 384, 1, 2, encoding_of("int4[1, 128]", 38))
    assert matmul.num_elements == 38 * 384 * 2


def test_what_is_chosen_for_k_quants_keeps_a_gpu_busy():
    def chosen(fmt, rows, out, inner, gates=1):
        return tiles.choose(Shape(rows, out, inner, gates, encoding=encoding_of(fmt, out)), H200)

    assert chosen("q4_k", 1, 4096, 4096) == Vector(8, 4, stages=1, programs=4)
    assert chosen("q4_k", 1, 1024, 4096) == Vector(2, 4, stages=1, programs=4)
    assert chosen("q4_k", 1, 1024, 4096, gates=2) == Vector(2, 4, stages=1, programs=4)
    assert chosen("q4_k", 1, 4096, 14336) == Vector(4, 16, stages=1, programs=1)
    assert chosen("q6_k", 1, 4096, 4096) == Vector(4, 4, stages=1, programs=4)
    assert chosen("q6_k", 1, 4096, 53248) == chosen("q6_k", 2, 4096, 53248) == Matrix(64, 128, 4, 4, 1, 8, 4)
    assert chosen("q4_k", 32, 28672, 4096) == Matrix(64, 128, 4, 4, 1, 1, 4)
    assert chosen("q4_k", 65, 4096, 4096) == Matrix(128, 128, 8, 3, 1, 8, 4)
    assert chosen("q4_k", 129, 4096, 4096) is None
    wide = Shape(1, 4096, 4096, element_size=4, encoding=encoding_of("q4_k", 4096))
    assert tiles.choose(wide, H200) is None


def test_tiles_of_k_quants_have_fewer_stages_where_a_program_has_less_memory():
    shape = Shape(65, 4096, 4096, encoding=encoding_of("q4_k", 4096))
    for gpu in (Gpu(58, 99 << 10, (8, 9)), Gpu(170, 99 << 10, (12, 0))):
        assert tiles.choose(shape, gpu).stages == 2
        assert tiles.choose(shape._replace(rows=64), gpu).stages == 4


REASONS = {
    "ct_packed_int4_ordered[1, 32]": "columns are not in the order of their blocks",
    "fp8[128, 48]": "no multiple of 32 columns",
    "ct_packed_int4[1, 16]": "no multiple of 32 columns",
    "mxfp4[32, 1]": "have several rows",
}


@pytest.mark.parametrize(
    "op", [ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear], ids=lambda op: op.name
)
def test_kernels_take_every_kind_and_say_what_they_do_not(op):
    (accepts,) = (kernel.accepts for kernel in KERNELS if kernel.op is op)
    x, norm = Type("bf16", ("T", 192)), Type("bf16", (192,))
    before = {1: [x], 2: [x, norm], 3: [x, x, norm]}[op.weight]
    for fmt in FORMATS:
        assert accepts(Target("cuda"), *before, Type("bf16", (64, 192), fmt)) is None, fmt
        assert "runs on cuda" in accepts(Target("cpu"), *before, Type("bf16", (64, 192), fmt))
    for fmt, reason in REASONS.items():
        assert reason in accepts(Target("cuda"), *before, Type("bf16", (64, 192), fmt))


HOPPER = Target("cuda", frozenset({"nvidia", "sm_90"}))


def test_the_library_multiplies_activations_of_8_bits_where_it_can():
    (accepts,) = (kernel.accepts for kernel in KERNELS if kernel.op is ops.linear)

    def refusal(fmt, out=256, inner=512, dtype="bf16", target=HOPPER, act=None):
        types = Type(dtype, ("T", inner)), Type(dtype, (out, inner), fmt)
        return accepts(target, *types, act=act or act_of(fmt))

    for fmt in ("fp8[1, *]", "ct_fp8[1, 512]", "ct_fp8[128, 128]", "int8[1, *]", "ct_int8[1, *]"):
        assert refusal(fmt) is None, fmt
    for dtype in ("fp16", "fp32"):
        assert refusal("int8[1, *]", dtype=dtype) is None
        assert "are multiplied in bf16" in refusal("fp8[1, *]", dtype=dtype)
    for fmt, sizes in {"fp8[1, *]": (264, 512), "fp8[128, 128]": (256, 576), "int8[1, *]": (256, 508)}.items():
        assert "are not multiplied by" in refusal(fmt, *sizes)
    assert "are not multiplied by" in refusal("fp8[64, 64]") and "are not" in refusal("ct_int8[1, 64]")
    assert "are not multiplied by weights in fp8[1, *]" in refusal("fp8[1, *]", act="int8[1, *]")
    for features, kept in (({"nvidia", "sm_89"}, "int8[1, *]"), ({"amd", "gfx942"}, "")):
        for fmt in ("fp8[1, *]", "fp8[128, 128]", "int8[1, *]"):
            reason = refusal(fmt, target=Target("cuda", frozenset(features)))
            assert reason is None if fmt == kept else "only" in reason
    assert "by packed weights only" in accepts(HOPPER, Type("bf16", ("T", 64)), Type("bf16", (64, 64)), act="fp8[1, *]")


@pytest.mark.sampled(0, gpu=1)
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_the_library_multiplies_rows_of_integers(triton_device, rows, monkeypatch):
    monkeypatch.setattr(quantized, "INT8_ROWS", 40)
    weight = make_weight(triton_device, "int8[1, *]", 48, 96)
    x, bias = torch.randn(rows, 96, device=triton_device), torch.randn(48, device=triton_device)
    scales = x.abs().amax(1, keepdim=True) / 127
    sums = (x / scales).round().long().cpu() @ weight.parts["values"].long().cpu().T
    exact = sums.double() * (scales * weight.parts["scales"].T).double().cpu()
    products = kernels.Linears(lambda *_: None)
    assert relative_error(products.linear(x, weight, act="int8[1, *]").cpu(), exact) < 1e-6
    y = products.linear(x, weight, bias, act="int8[1, *]")
    assert relative_error(y.cpu(), exact + bias.double().cpu()) < 1e-6
    gates, ups = exact.chunk(2, 1)
    y = products.gated_linear(x, weight, kind="relu", act="int8[1, *]")
    assert relative_error(y.cpu(), gates.relu() * ups) < 1e-6
    x[0, 3] = float("nan")
    assert products.linear(x, weight, act="int8[1, *]")[0].isnan().all()


def test_rows_are_rounded_to_the_nearest_integer(triton_device):
    torch.manual_seed(0)
    x = torch.cat((torch.full((9, 1), 127.0), torch.arange(-127, 127).repeat(9, 1) + torch.rand(9, 254)), 1)
    x[0, 1:] = x[0, 1:].floor() + 0.5  # of two whole numbers the even one
    x[3] = 0
    q, scales, *_ = row_kernels.quantize_rows(x.to(triton_device), 255, torch.int8, 32)
    assert (q.shape, scales.shape, q.dtype) == ((32, 255), (32, 1), torch.int8)
    assert torch.equal(q[:9].cpu(), x.round().to(torch.int8)) and not q[9:].any()


@pytest.mark.parametrize(("rows", "made"), [(1, 4), (127, 128), (128, 128), (129, 256), (1024, 1024), (1025, 1028)])
def test_whole_tiles_are_made_of_rows_in_fp8_on_hopper(rows, made):
    hopper, others = Gpu(132, 0, (9, 0)), -(-rows // 4) * 4
    assert row_kernels.rows_made(rows, torch.float8_e4m3fn, hopper) == made
    assert row_kernels.rows_made(rows, torch.int8, hopper) == others
    for capability in ((10, 0), (0, 0)):
        assert row_kernels.rows_made(rows, torch.float8_e4m3fn, Gpu(132, 0, capability)) == others


@pytest.mark.parametrize(("rows", "made"), [(5, 8), (9, 128)])
@pytest.mark.parametrize("norm", [False, True])
def test_rows_that_are_made_are_zeros(triton_device, rows, made, norm, monkeypatch):
    monkeypatch.setattr(row_kernels, "rows_made", lambda *args: made)
    x = torch.randn(rows, 32, device=triton_device).bfloat16()
    if norm:
        quantized, _ = row_kernels.quantize_normalized(x, None, torch.ones_like(x[0]), 1e-6, 32)
    else:
        quantized = row_kernels.quantize_rows(x, 32, torch.float8_e4m3fn)
    values, scales = quantized.values.float(), quantized.scales
    assert values.shape == (made, 32) and scales.shape == (made, 1) and quantized.rows == rows
    assert values[:rows].any(1).all() and not values[rows:].any() and scales.isfinite().all()


@pytest.mark.parametrize("span", [384, 128])
def test_rows_are_quantized_with_the_scale_of_their_largest(triton_device, span):
    x = torch.randn(5, 400, device=triton_device)[:, :384] * torch.tensor([[1e-3], [1], [30], [0], [1]]).to(
        triton_device
    )
    x = x if triton_device == "cpu" else x.bfloat16()
    q, scales, *_ = row_kernels.quantize_rows(x, span, torch.float8_e4m3fn)
    assert q.shape == (8, 384) and scales.shape == (8, 384 // span)
    assert scales.stride(0) == 1
    spans = x.float().view(5, -1, span)
    allowed = spans.abs().amax(-1).clamp(min=1e-4) / 448
    assert torch.allclose(scales[:5], allowed, rtol=1e-6)
    restored = q[:5].float().view_as(spans) * scales[:5, :, None]
    # 3 bits of mantissa, and beneath 2^-6 steps of 2^-9
    is_right = (restored - spans).abs() <= spans.abs() / 16 + allowed[..., None] * 2**-10
    if triton_device == "cpu":  # the interpreter halves what is rounded up to a power of 2
        is_right |= (2 * restored - spans).abs() <= spans.abs() / 16
    assert is_right.all()
    assert q[5:].float().abs().max() == 0
