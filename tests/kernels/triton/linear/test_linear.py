import itertools

import pytest
import torch
from kernels.checks import assert_as_near

pytest.importorskip("triton")

from atom.graph import ops
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import linear as kernels
from atom.kernels.triton.linear import matrix, tiles, vector
from atom.kernels.triton.linear.tiles import Matrix, Vector

LARGE = Gpu(132, 227 << 10, (9, 0), "large")
SMALL = Gpu(128, 99 << 10, (8, 9), "small")
EPS = 0.01  # large enough to be missed
SHAPES = {  # by device: outputs, columns
    "cpu": [(17, 77)],
    "cuda": [(1, 77), (1025, 1000), (1536, 4100)],
}
VECTOR_PARAMETERS = [
    Vector(2, 4, stages=2, programs=3),
    Vector(2, 8, stages=4, programs=2),
    Vector(8, 4, stages=3, programs=1),
]
MATRIX_PARAMETERS = [
    Matrix(16, 16, warps=4, stages=2),
    Matrix(32, 32, warps=4, stages=2, splits=3, prefetch=2),
    Matrix(16, 16, warps=4, stages=3, groups=4, prefetch=8),
    Matrix(16, 16, warps=4, stages=2, groups=4, splits=2),
    Matrix(32, 16, warps=4, stages=2, block_rows=16),
    Matrix(16, 32, warps=4, stages=3, splits=2, prefetch=4, block_rows=32),
]


def dtypes(device):
    return [torch.float32, torch.bfloat16 if device == "cuda" else torch.float16]  # numpy has no bf16


def make(device, dtype, *shape, size=1.0):
    return (torch.randn(shape) * size).to(device, dtype)


def expected(a, b, norm, weight, bias, kind):
    """The ops' own bodies, one after the other."""
    x = a if b is None else ops.add.body(a, b)
    x = x if norm is None else ops.rms_norm.body(x, norm, eps=EPS)
    y = ops.linear.body(x, weight, bias)
    return y if kind is None else ops.gated_activate.body(y, kind=kind)


def assert_like_the_ops(y, a, b, norm, weight, bias, kind):
    wide = [None if x is None else x.float() for x in (a if b is None else a + b, None, norm, weight, bias)]
    # a row has few outputs: the error of each side is a chance of its own
    assert_as_near(y, expected(a, b, norm, weight, bias, kind), expected(*wide, kind), factor=1.5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [None, "silu"])
@pytest.mark.parametrize("ahead", ["nothing", "norm", "add and norm"])
def test_one_row_is_added_normed_multiplied_and_gated_like_the_ops(triton_device, ahead, kind):
    for dtype in dtypes(triton_device):
        for out, inner in SHAPES[triton_device]:
            for parameters in VECTOR_PARAMETERS:
                row_size = 2 ** (inner - 1).bit_length() * dtype.itemsize
                if (parameters.stages - 1) * parameters.block_out * row_size > tiles.MEMORY[0]:
                    continue
                a, b = make(triton_device, dtype, 2, 1, inner)
                b = b if ahead == "add and norm" else None
                norm = None if ahead == "nothing" else make(triton_device, dtype, inner)
                weight = make(triton_device, dtype, out * (1 if kind is None else 2), inner)
                bias = make(triton_device, dtype, len(weight))
                y, total = vector.multiply_vector(a, b, norm, weight, bias, EPS, kind, parameters)
                assert_like_the_ops(y, a, b, norm, weight, bias, kind)
                assert torch.equal(total, a if b is None else a + b)


@pytest.mark.sampled(24, gpu=4)
@pytest.mark.parametrize("kind", [None, "silu"])
@pytest.mark.parametrize("rows", [2, 16, 33, 65, 127, kernels.MAX_ROWS])
def test_rows_are_multiplied_and_gated_like_the_op(triton_device, rows, kind):
    for dtype in dtypes(triton_device):
        for out, inner in SHAPES[triton_device]:
            for parameters in MATRIX_PARAMETERS:
                x = make(triton_device, dtype, rows, inner + 8)[:, :inner]  # rows lie apart
                weight = make(triton_device, dtype, out * (1 if kind is None else 2), inner)
                bias = make(triton_device, dtype, len(weight))
                y = matrix.multiply_matrix(x, weight, bias, kind, matrix.make_counters(x.device), parameters)
                assert_like_the_ops(y, x, None, None, weight, bias, kind)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("rows", [1, 3, 17, 65])
def test_every_function_gives_what_its_ops_give(triton_device, rows):
    products = kernels.Linears()
    for dtype in dtypes(triton_device):
        a, b = make(triton_device, dtype, 2, rows, 96)
        norm = make(triton_device, torch.float32, 96)
        weight, bias = make(triton_device, dtype, 18, 96), make(triton_device, dtype, 18)

        def check(y, *args, dtype=dtype):
            assert y.dtype == dtype
            assert_like_the_ops(y, *args)

        check(products.linear(a, weight), a, None, None, weight, None, None)
        check(products.linear(a, weight, bias), a, None, None, weight, bias, None)
        check(products.norm_linear(a, norm, weight, bias, eps=EPS), a, None, norm, weight, bias, None)
        y, total = products.add_norm_linear(a, b, norm, weight, bias, eps=EPS)
        check(y, a, b, norm, weight, bias, None)
        assert torch.equal(total, a + b)
        check(products.gated_linear(a, weight, kind="gelu"), a, None, None, weight, None, "gelu")
        check(products.norm_linear(a, norm, weight, eps=EPS, kind="relu"), a, None, norm, weight, None, "relu")
        y, total = products.add_norm_linear(a, b, norm, weight, eps=EPS, kind="silu")
        check(y, a, b, norm, weight, None, "silu")
        assert torch.equal(total, a + b)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("rows", [1, 2, 17, kernels.MAX_ROWS + 1])
def test_rows_that_are_normed_may_be_parts_of_longer_ones(triton_device, rows):
    products = kernels.Linears()
    for dtype in dtypes(triton_device):
        a, b = make(triton_device, dtype, rows, 46).split([20, 26], dim=1)
        b, norm = b[:, 3:23], make(triton_device, dtype, 20)
        weight = make(triton_device, dtype, 18, 20)
        y = products.norm_linear(a, norm, weight, eps=EPS)
        assert_like_the_ops(y, a, None, norm, weight, None, None)
        y, total = products.add_norm_linear(a, b, norm, weight, eps=EPS)
        assert_like_the_ops(y, a, b, norm, weight, None, None)
        assert torch.equal(total, a + b)


@pytest.mark.parametrize("kind", ops.ACTIVATIONS)
def test_every_gate_is_activated_like_the_op(triton_device, kind):
    for dtype in dtypes(triton_device):
        x = make(triton_device, dtype, 3, 2 * 1025, size=2)
        assert_as_near(
            kernels.activate_gates(x, kind),
            ops.gated_activate.body(x, kind=kind),
            ops.gated_activate.body(x.float(), kind=kind),
        )
        weight, row = torch.eye(32, device=triton_device, dtype=dtype), x[:1, :32].contiguous()
        y, _ = vector.multiply_vector(row, None, None, weight, None, EPS, kind, Vector(4, 4, stages=2, programs=2))
        assert_as_near(y, ops.gated_activate.body(row, kind=kind), ops.gated_activate.body(row.float(), kind=kind))


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("parameters", MATRIX_PARAMETERS)
def test_a_row_is_the_same_next_to_any_others(triton_device, parameters):
    weight = make(triton_device, torch.float16, 50, 200)
    x = make(triton_device, torch.float16, 7, 200)
    counters = matrix.make_counters(x.device)
    together = matrix.multiply_matrix(x, weight, None, None, counters, parameters)
    assert torch.equal(matrix.multiply_matrix(x[2:4], weight, None, None, counters, parameters), together[2:4])

    x[3, 5] = float("nan")
    spoilt = matrix.multiply_matrix(x, weight, None, None, counters, parameters)
    others = [0, 1, 2, 4, 5, 6]
    assert spoilt[3].isnan().all()
    assert torch.equal(spoilt[others], together[others])


@pytest.mark.sampled(0, gpu=1)
def test_splits_add_up_the_same_each_time(triton_device):
    x, weight = make(triton_device, torch.float32, 9, 190), make(triton_device, torch.float32, 20, 190)
    parameters = Matrix(16, 16, warps=4, stages=2, splits=5, block_rows=8)
    counters = matrix.make_counters(x.device)
    first = matrix.multiply_matrix(x, weight, None, None, counters, parameters)
    for _ in range(3):
        assert torch.equal(matrix.multiply_matrix(x, weight, None, None, counters, parameters), first)
    assert counters.count_nonzero() == 0


def test_a_product_of_too_many_tiles_is_not_split():
    x, weight = (torch.empty(num, 64, device="meta") for num in (3, 16 * tiles.MAX_TILES + 1))
    with pytest.raises(tiles.TileError, match=f"1 x {tiles.MAX_TILES + 1} tiles"):
        matrix.multiply_matrix(x, weight, None, None, x, Matrix(16, 16, warps=4, stages=2, splits=2))


def test_the_way_of_one_row_is_not_taken_for_two(triton_device):
    products = kernels.Linears()
    x, weight = make(triton_device, torch.float16, 2, 64), make(triton_device, torch.float16, 32, 64)
    with pytest.raises(AssertionError, match="is for one row, not for 2"):
        products.linear(x, weight, parameters=lambda *_: Vector(2, 4, stages=2, programs=3))


def test_a_nan_stays_a_nan_after_relu(triton_device):
    x = torch.tensor([[float("nan"), -1.0, 2.0, 3.0]], device=triton_device)
    y = kernels.activate_gates(x, "relu")
    assert y[0, 0].isnan()
    assert y[0, 1] == 0


@pytest.mark.gpu
def test_gates_of_more_rows_than_a_grid_has_in_its_second_dim():
    x = torch.randn(70_000, 16, device="cuda")
    torch.testing.assert_close(kernels.activate_gates(x, "silu"), ops.gated_activate.body(x, kind="silu"))


@pytest.mark.parametrize("gpu", [LARGE, SMALL], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 32])
@pytest.mark.parametrize(
    "shape", [(64, 64), (1024, 2048), (4096, 12288), (6144, 1024), (25600, 5120), (151936, 4096), (1000, 8192)]
)
def test_what_is_chosen_fills_the_device_and_fits_into_its_memory(rows, shape, gpu):
    out, inner = shape
    for element_size, gates in itertools.product((2, 4), (1, 2)):
        chosen = tiles.choose(tiles.Shape(rows, out, inner, gates, element_size=element_size), gpu)
        if chosen is None:
            assert element_size == 4  # float32 has no tensor core that is exact
            continue
        if isinstance(chosen, tiles.Vector):
            size = 2 ** (inner - 1).bit_length() * element_size
            assert rows == 1
            assert chosen.block_out % gates == 0
            assert chosen.stages > 1
            assert (chosen.stages - 1) * chosen.block_out * size < gpu.shared_memory
            continue
        num_tiles, step = -(-out // chosen.block_out), chosen.block_inner * chosen.groups
        assert num_tiles * chosen.splits >= min(120, out * inner * element_size / 2**16)
        assert chosen.splits == 1 or num_tiles <= tiles.MAX_TILES
        assert chosen.stages * step * (chosen.block_out + 2 ** (rows - 1).bit_length()) * element_size <= 99 * 1024
        assert inner > (chosen.splits - 1) * step  # no split without columns


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_in_a_graph_give_the_same_on_every_replay(rows, dtype):
    products = kernels.Linears()
    layers, hidden, width = 6, 1024, 3072
    first = [make("cuda", dtype, 2048, hidden, size=0.03) for _ in range(layers)]
    second = [make("cuda", dtype, hidden, 1024, size=0.03) for _ in range(layers)]
    third = [make("cuda", dtype, 2 * width, hidden, size=0.03) for _ in range(layers)]
    fourth = [make("cuda", dtype, hidden, width, size=0.03) for _ in range(layers)]
    norm = make("cuda", dtype, hidden)
    x = make("cuda", dtype, rows, hidden)

    def run():
        a, b = x, x
        for w1, w2, w3, w4 in zip(first, second, third, fourth, strict=True):
            y, total = products.add_norm_linear(a, b, norm, w1, eps=EPS)
            y = products.linear(y[:, :1024], w2)
            m, total = products.add_norm_linear(y, total, norm, w3, eps=EPS, kind="silu")
            a, b = products.linear(m, w4), total
        return a + b

    def run_ops():
        total = x + x
        for w1, w2, w3, w4 in zip(first, second, third, fourth, strict=True):
            y = expected(total, None, norm, w1, None, None)
            total = total + expected(y[:, :1024], None, None, w2, None, None)
            m = expected(total, None, norm, w3, None, "silu")
            total = total + expected(m, None, None, w4, None, None)
        return total

    run()  # compiles, ahead of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        x.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())
        reference = run_ops()
        assert (replayed - reference).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * reference.norm()
