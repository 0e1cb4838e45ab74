"""K-quants in the layout wgmma: no number is lost, and a program multiplies by what the blocks say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gguf_files import draw_blocks
from kernels.hopper.emulated import emulate
from kernels.hopper.ptx import run_inline

pytest.importorskip("triton")

from atom.graph import PackedWeight, Type, W
from atom.graph.formats import parse_format, part_shape
from atom.graph.recipe_contents import held_by_format, held_bytes
from atom.graph.recipes import Shuffle
from atom.kernels.hopper import boxes, kquants, packed_linear
from atom.kernels.hopper.linear import Linears
from atom.kernels.hopper.shuffle import LAYOUT, shuffle
from atom.kernels.triton.linear import packed
from atom.kernels.triton.linear.shuffled import Wgmma

pytestmark = pytest.mark.early
BITS = {
    "q4_k": 4.625,
    "q5_k": 5.625,
    "q6_k": 6.5625,
}  # of a number, with its part of scales; a file has 4.5, 5.5, 6.5625
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def draw(fmt: str, out: int, inner: int, dtype: str = "bf16", device: str = "cpu") -> PackedWeight:
    stored, type = torch.from_numpy(draw_blocks(fmt.upper(), out, inner)), Type(dtype, (out, inner), fmt)
    values = stored.view(part_shape(type, parse_format(fmt).parts["values"]))
    return PackedWeight(type, {"values": values.to(device)})


def plain_of(weight: PackedWeight) -> torch.Tensor:
    return PackedWeight(Type("fp32", weight.shape, weight.type.fmt), weight.parts).unpack().double()


def relative_error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("fmt", BITS)
def test_a_weight_takes_at_most_five_percent_more_than_its_blocks(fmt: str):
    weight, recipe = draw(fmt, 16, 768), Shuffle(W("q", Type("bf16", (16, 768), fmt)), LAYOUT)
    held = sum(part.nbytes for part in shuffle(weight).parts.values())
    assert held == BITS[fmt] * 16 * 768 / 8 == held_bytes(recipe) <= 1.05 * weight.parts["values"].nbytes
    assert held_by_format(recipe) == {fmt: held}


@pytest.mark.parametrize("fmt", BITS)
def test_unpacked_by_the_kernel_it_is_what_it_was(triton_device: str, fmt: str):
    weight = draw(fmt, 38, 2304, "fp32", triton_device)
    assert torch.equal(packed.unpack(shuffle(weight), torch.float32), weight.unpack())


@pytest.fixture(scope="module")
def emulated() -> SimpleNamespace:
    """The module packed_linear, without a GPU."""
    sizes = {name: getattr(emulate(boxes), name) for name in ("BLOCK_O", "BOX")}
    own = emulate(kquants, inline_asm_elementwise=run_inline, **sizes)
    names = {name: getattr(own, name) for name in ("load_codes", "unpack_codes", "EXPONENT")}
    return emulate(packed_linear, **sizes, **names)


@pytest.mark.parametrize("fmt", BITS)
@pytest.mark.parametrize(("out", "tiles"), [(80, Wgmma(8, 2, 2)), (64, Wgmma(8, 1, 3, 2))])
def test_a_program_multiplies_by_the_numbers_of_the_blocks(fmt: str, out: int, tiles: Wgmma, emulated: SimpleNamespace):
    """But for the rounding of scales, minima and numbers to bf16. 80 rows are more than one tile has."""
    torch.manual_seed(0)
    weight, x = draw(fmt, out, 768), torch.randn(5, 768).bfloat16()
    counters = torch.zeros(2, dtype=torch.int32)
    y = emulated.multiply(x, shuffle(weight), None, None, counters, tiles)
    assert relative_error(y, x.double() @ plain_of(weight).t()) < 0.006


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize("fmt", BITS)
@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 128, 200, 300])
@pytest.mark.parametrize(("out", "inner"), [(144, 768), (4096, 4096)])
def test_rows_are_multiplied_like_the_op(fmt: str, rows: int, out: int, inner: int):
    torch.manual_seed(0)
    weight, x = draw(fmt, out, inner, device="cuda"), torch.randn(rows, inner, device="cuda").bfloat16()
    bias, laid_out, linears = torch.randn(out, device="cuda").bfloat16(), shuffle(weight), Linears()
    made = [linears.linear(x, laid_out, bias) for _ in range(3)]
    assert relative_error(made[0], x.double() @ plain_of(weight).t() + bias.double()) < 0.006
    assert all(torch.equal(made[0], each) for each in made)
