"""Packed linears on Hopper without a GPU: programs multiply by the numbers that are stored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernels.hopper.emulated import activate_rounded, emulate
from kernels.hopper.ptx import run_inline

pytest.importorskip("triton")

from kernels.hopper.test_hopper import CLAMPED, draw

from atom.graph import ops
from atom.kernels.hopper import boxes, kquants, packed_linear
from atom.kernels.hopper.experts import unpack_experts
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear.shuffled import Wgmma

pytestmark = pytest.mark.early
OUT, INNER = 160, 384  # outputs that fill no last tile, columns that fill no last stage


@pytest.fixture(scope="module")
def emulated() -> SimpleNamespace:
    sizes = {name: getattr(emulate(boxes), name) for name in ("BLOCK_O", "BOX")}
    own = emulate(kquants)
    names = {**sizes, "is_kquant": kquants.is_kquant, "FMA_U4_ASM": own.U4_ASM}
    names |= {name: getattr(own, name) for name in ("EXPONENT", "INTEGER")}
    return emulate(packed_linear, inline_asm_elementwise=run_inline, activate_rounded=activate_rounded, **names)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fmt", ["mxfp4", "int4[1, 128]", "awq_int4[1, 128]"])
@pytest.mark.parametrize("tiles", [Wgmma(16, 2, 2), Wgmma(8, 2, 2), Wgmma(16, 1, 3, 2), Wgmma(32, 2, 2)])
@pytest.mark.parametrize("kind", [None, CLAMPED])
def test_a_program_multiplies_an_experts_rows(fmt: str, tiles: Wgmma, kind: dict | None, emulated: SimpleNamespace):
    torch.manual_seed(0)
    counts = [0, 17, 1, 16, 0]
    weight, bias = draw(fmt, len(counts), OUT, INNER), torch.randn(len(counts), OUT).bfloat16()
    x, ends = torch.randn(sum(counts), INNER).bfloat16(), torch.tensor(counts).cumsum(0)
    plain = unpack_experts(weight, torch.float32)
    parts = zip(x.float().split(counts), plain, bias.float(), strict=True)
    truth = torch.cat([rows @ own.t() + each for rows, own, each in parts])
    gate, counters = None if kind is None else Gate(**kind), torch.zeros(64, dtype=torch.int32)
    y = emulated.multiply_grouped(x, shuffle(weight), ends, bias, gate, counters, tiles)
    truth = truth if kind is None else ops.gated_activate.body(truth.bfloat16(), **kind).float()
    # scaled numbers of int4 are rounded to bf16, as where a weight is unpacked first
    bound = 0.012 if "int4" in fmt and kind is not None else 0.004
    assert (y.float() - truth).norm() < bound * truth.norm()
    assert not counters.any(), "those that wait for the last split are counted from 0 again"
