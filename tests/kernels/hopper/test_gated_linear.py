"""Gates inside a product on Hopper: when they are chosen, that it compiles, and on such a GPU what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.checks import relative_error
from kernels.compiling import compile_for_hopper

from atom.kernels import hopper
from atom.kernels.hopper.gated_linear import MANY_ROWS, suits
from atom.kernels.hopper.linear import Linears
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import linear
from atom.kernels.triton.linear.tiles import MAX_ROWS

H200 = Gpu(132, 227 << 10, (9, 0))


def is_chosen(rows: int = MANY_ROWS, inner: int = 128, width: int = 72, kind: str | None = "silu",
              dtype: torch.dtype = torch.bfloat16, apart: int = 0, offset: int = 0) -> bool:  # fmt: skip
    x = torch.zeros(rows, inner + apart, dtype=dtype)[:, :inner]
    weight = torch.zeros(2 * width * inner + offset, dtype=dtype)[offset:].view(2 * width, inner)
    return suits(x, weight, kind)


@pytest.mark.parametrize("given", [{}, {"rows": 5000}, {"inner": 72}, {"width": 8}, {"apart": 8}])
def test_it_takes_many_rows(given: dict[str, Any]):
    assert is_chosen(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"rows": MANY_ROWS - 1}, {"kind": None}, {"kind": "gelu"}, {"dtype": torch.float16}, {"dtype": torch.float32},
        {"inner": 64}, {"inner": 132}, {"width": 70}, {"apart": 4}, {"offset": 4},
    ],
)  # fmt: skip
def test_it_leaves_to_the_library(given: dict[str, Any]):
    assert not is_chosen(**given)


@pytest.mark.parametrize(
    ("capability", "version", "has_gluon"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.9.1", True), ((9, 0), "3.5.1", False), ((9, 0), "3.10.0", False),
     ((8, 0), "3.6.0", False), ((10, 0), "3.6.0", False)],
)  # fmt: skip
def test_a_gpu_and_a_triton_that_run_our_kernels_have_the_feature_gluon(
    capability: tuple[int, int], version: str, has_gluon: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(hopper, "version", lambda _: version)
    hopper.knows_gluon.cache_clear()
    assert hopper.find_features() == ({"gluon"} if has_gluon else frozenset())
    hopper.knows_gluon.cache_clear()


def test_what_has_measured_parameters_is_left_unchanged():
    assert MANY_ROWS > MAX_ROWS


COMPILE = """
import torch, triton
from kernels.compiling import use_hopper
from atom.kernels.hopper.linear import Linears
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import linear

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def compile(*args, **options):
            made = self.kernel.warmup(*args, grid=grid, **options)
            ptx = made.asm["ptx"]
            assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.bulk.tensor"), "inputs are waited for"
            print(made.metadata.shared)
        return compile

use_hopper()
gpu = Gpu(132, 227 << 10, (9, 0))
from atom.kernels.hopper import gated_linear as gate_hopper
linear.find_gpu = gate_hopper.find_gpu = lambda device: gpu
gate_hopper._gated_linear = Compile(gate_hopper._gated_linear)
x, weight = (torch.zeros(size, 128, dtype=torch.bfloat16) for size in (gate_hopper.MANY_ROWS, 144))
Linears().gated_linear(x, weight, kind="silu")
"""


@pytest.mark.slow  # scripts/check-kernels compiles a variant of each kernel
def test_it_compiles_for_such_a_gpu():
    done = compile_for_hopper(COMPILE)
    assert int(done.stdout) <= H200.shared_memory
    assert "serialized" not in done.stderr, "of wgmma: ptxas warns where products would wait for each other"


IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def make(*shape: int) -> torch.Tensor:
    return torch.randn(shape).cuda().bfloat16()


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
class TestOnHopper:
    @pytest.mark.parametrize(
        ("rows", "inner", "width"),
        [
            (1, 72, 8),
            (127, 128, 64),
            (256, 136, 72),
            (257, 320, 192),
            (3000, 1024, 3072),
            (600, 4096, 264),
            (2300, 80, 8),
        ],
    )
    @pytest.mark.parametrize("size", [0.02, 2.0])  # gates near zero, and far from it on both sides
    def test_any_size_is_as_near_to_the_truth_as_two_kernels(self, rows: int, inner: int, width: int, size: float):
        from atom.kernels.hopper import gated_linear as gate_hopper

        x, weight = make(rows, inner + 8)[:, :inner], make(2 * width, inner) * size
        y = gate_hopper.gated_linear(x, weight)
        plain = linear.activate_gates(F.linear(x, weight), "silu")
        gates, ups = F.linear(x.double(), weight.double()).chunk(2, dim=1)
        truth = F.silu(gates) * ups
        assert y.isfinite().all()
        assert relative_error(y, truth) <= 1.1 * relative_error(plain, truth)
        assert (y.double() - truth).abs().max() <= 0.02 * truth.abs().max()
        for _ in range(3):
            assert torch.equal(gate_hopper.gated_linear(x, weight), y)

    def test_what_is_not_finite_stays_where_it_is(self):
        from atom.kernels.hopper import gated_linear as gate_hopper

        x, weight = make(600, 128), make(144, 128)
        whole = gate_hopper.gated_linear(x, weight)
        x[7], x[300, 5] = torch.nan, torch.inf
        y = gate_hopper.gated_linear(x, weight)
        others = torch.arange(600) % 293 != 7
        assert y[7].isnan().all() and torch.equal(y[others.cuda()], whole[others.cuda()])

    def test_a_captured_chain_gives_what_its_kernels_give_one_by_one(self):
        """Each begins while the one ahead of it runs, and x is written by the one ahead."""
        from atom.kernels.hopper import gated_linear as gate_hopper

        a, b, norm, weight, down = (
            make(2000, 512),
            make(2000, 512),
            make(512),
            make(1536, 512) * 0.1,
            make(512, 768) * 0.1,
        )

        linears = Linears()

        def layers() -> torch.Tensor:
            total = a
            for _ in range(4):
                m, total = linears.add_norm_linear(total, b, norm, weight, eps=1e-6, kind="silu")
                total = linears.linear(m, down) + total
            return total

        expected, total = a, a
        for _ in range(4):
            normed, total = linear.normalize(expected, b, norm, 1e-6)
            torch.cuda.synchronize()
            m = gate_hopper.gated_linear(normed, weight)
            torch.cuda.synchronize()
            expected = F.linear(m, down) + total
        assert torch.equal(layers(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layers()
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)

    @pytest.mark.parametrize("kind", ["silu", "gelu"])
    def test_the_ops_take_it_where_it_suits(self, kind: str, monkeypatch: pytest.MonkeyPatch):
        from atom.kernels.hopper import gated_linear as gate_hopper

        calls, launch = [], gate_hopper.gated_linear
        monkeypatch.setattr(gate_hopper, "gated_linear", lambda *args: (calls.append(args), launch(*args))[1])
        a, b, norm, weight = make(MANY_ROWS, 128), make(MANY_ROWS, 128), make(128), make(144, 128)
        y, total = Linears().add_norm_linear(a, b, norm, weight, eps=1e-6, kind=kind)
        normed, expected = linear.normalize(a, b, norm, 1e-6)
        assert torch.equal(total, expected)
        plain = linear.activate_gates(F.linear(normed, weight), kind)
        torch.testing.assert_close(y, plain, rtol=0.02, atol=0.02)
        assert len(calls) == (kind == "silu")
