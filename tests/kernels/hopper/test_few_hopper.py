"""Experts of few tokens on Hopper: how columns are split, that the kernels compile, and on such a GPU what they give."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.compiling import compile_for_hopper

pytest.importorskip("triton")

from kernels.hopper.emulated import Value, emulate, value
from kernels.hopper.test_hopper import FORMATS, H200, IS_HOPPER, draw

from atom.graph import PackedWeight, ops
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.triton import few_hopper, few_packed_hopper, moe
from atom.kernels.triton.few_packed_hopper import Split
from atom.kernels.triton.grouped_linear import unpack_experts
from atom.kernels.triton.linear import packed_hopper
from atom.kernels.triton.linear.style import style_of

EXPERTS = (None, *FORMATS)  # None: plain


@pytest.mark.parametrize("inner", [384, 768, 1408, 2880, 7168])
def test_rings_fit_in_memory(inner: int):
    for programs in (1, 96, 300, 5000):
        stages = few_hopper.choose_stages(programs, inner, H200)
        assert 1 <= stages <= -(-inner // 128)
        assert stages * 2 * (64 + 8) * 64 * 2 < H200.shared_memory


@pytest.mark.parametrize("fmt", [*FORMATS, "fp8[1, 192]", "int4[1, 512]"])
@pytest.mark.parametrize(("inner", "top_k"), [(384, 8), (768, 6), (2880, 4), (4096, 8), (1 << 15, 1)])
def test_splits_have_whole_blocks_and_their_x_fits_in_memory(fmt: str, inner: int, top_k: int):
    style, experts = style_of(fmt, 256), 1 << (top_k - 1).bit_length()
    columns = 64 if style.bits == 8 else 128
    row_bytes = -(-inner // columns) * 64
    for split, each in (
        (few_packed_hopper.split_gates(style, row_bytes), 1),
        (few_packed_hopper.split_downs(style, 132, top_k, H200), experts),
        (few_packed_hopper.split_downs(style, 133, top_k, H200), experts),
    ):
        assert split.warps * each in (4, 8, 16)
        assert split.depth * columns % (style.columns or 1) == 0 or (style.columns or 1) < columns
        steps = -(-row_bytes // (64 * split.warps * split.depth))
        places = 1 << (steps * split.depth - 1).bit_length()
        assert places * split.warps * each * columns * 2 <= 160 << 10


def test_what_is_not_few_is_grouped():
    x, ids = torch.zeros(5, 512, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.int64)
    plain, packed = torch.zeros(4, 256, 512), draw("fp8[1, *]", 4, 256, 512)
    assert few_hopper.suits_few(x[:4], ids[:4], plain) and not few_hopper.suits_few(x, ids, plain)
    assert few_packed_hopper.suits_few(x[:2], ids[:2], packed)
    assert not few_packed_hopper.suits_few(x[:3], ids[:3], packed), "more of packed ones are grouped"
    for tokens, chosen in ((x[:0], ids[:0]), (x[:1].float(), ids[:1]), (x[:1], ids[:1].repeat(1, 2))):
        assert not few_hopper.suits_few(tokens, chosen, plain)
        assert not few_packed_hopper.suits_few(tokens, chosen, packed)
    wide = draw("fp8[1, *]", 1, 1 << 14, 128)
    assert few_packed_hopper.suits_few(x[:1, :128], ids[:1, :4], wide)
    assert not few_packed_hopper.suits_few(x[:1, :128], ids[:1, :5], wide), "x of eight is too large"


COMPILE = """
import sys, torch, triton
from kernels.compiling import use_hopper
from kernels.hopper.test_few_hopper import EXPERTS, make_experts
from kernels.hopper.test_hopper import H200
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.triton import few_hopper, few_packed_hopper

class Compile:
    def __init__(self, kernel, place):
        self.kernel, self.place = kernel, place
    def __getitem__(self, grid):
        def compile(*args, **options):
            if sys.argv[1] == "few" and (number // 2 + self.place) % 2:
                return  # gates of two formats, downs of the next two
            made = self.kernel.warmup(*args, grid=grid, **options)
            assert made.metadata.shared <= H200.shared_memory
            assert "mma.sync" in made.asm["ptx"] and ".local" not in made.asm["ptx"]
            assert fmt is None or "ld.global.v4.b32" in made.asm["ptx"]
            print("compiled")
        return compile

use_hopper()
for module in (few_hopper, few_packed_hopper):
    module.find_gpu = lambda device: H200
    for place, name in enumerate(("_gates_kernel", "_downs_kernel")):
        setattr(module, name, Compile(getattr(module, name), place))
for number, fmt in enumerate(EXPERTS):
    gate_up, down, *biases = make_experts(fmt, 4, 256, 384, number % 2 == 1, "cpu")
    if fmt:
        gate_up, down = shuffle(gate_up), shuffle(down)
    x, ids, weights = torch.zeros(2, 384, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    gate = ("swigluoai", 7.0, 1.7) if number % 2 else ("silu", None, None)
    kernels = few_packed_hopper if fmt else few_hopper
    m = kernels.multiply_gates(x, ids, gate_up, biases[0], *gate)
    kernels.multiply_downs(m, weights, ids, down, biases[1])
"""


def make_experts(
    fmt: str | None, experts: int, width: int, hidden: int, has_bias: bool, device: str
) -> tuple[torch.Tensor | PackedWeight, torch.Tensor | PackedWeight, torch.Tensor | None, torch.Tensor | None]:
    """gate_up and down, as they are stored, of products of about 1, and their biases."""

    def one(*shape: int) -> torch.Tensor | PackedWeight:
        if fmt is None:
            return (torch.randn(shape) / shape[-1] ** 0.5).to(device).bfloat16()
        weight = draw(fmt, *shape, device=device)
        scales = weight.parts["scales"]
        size = {"fp8": 60.0, "int": 5.0, "awq": 5.0}.get(fmt[:3])
        scales.copy_(scales - 5 if size is None else scales / (size * shape[-1] ** 0.5))
        return weight

    biases = [torch.randn(experts, rows).to(device).bfloat16() for rows in (2 * width, hidden)]
    first, second = biases if has_bias else (None, None)
    return one(experts, 2 * width, hidden), one(experts, hidden, width), first, second


@pytest.mark.parametrize("share", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_they_compile_for_such_a_gpu(share: str):
    done = compile_for_hopper(COMPILE, share)
    assert done.stdout.count("compiled") == (1 if share == "few" else 2) * len(EXPERTS)


def poisoned(weight: torch.Tensor | PackedWeight, chosen: set[int]) -> torch.Tensor | PackedWeight:
    """A weight whose experts that nobody chose hold NaN."""
    others = torch.tensor([expert not in chosen for expert in range(weight.shape[0])], device=weight.device)
    if isinstance(weight, torch.Tensor):
        return weight.masked_fill(others[:, None, None], float("nan"))
    bad = replace(weight, parts={name: part.clone() for name, part in weight.parts.items()})
    part = bad.parts["values" if str(weight.type.fmt).startswith("fp8") else "scales"]
    part.view(torch.uint8)[others] = 0x7F if part.element_size() == 1 else 0xFF
    return bad


def plain_of(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return weight.double() if isinstance(weight, torch.Tensor) else unpack_experts(weight, torch.float32).double()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def unpack(words: Value, operand: Value | None, values: str, _layout: None) -> Value:
    """`few_packed_hopper._unpack` by the layout's description in hopper/shuffle.py."""
    warps, rows, _ = words.shape
    tile = words.contiguous().view(torch.uint8).view(warps * rows, 64)
    if values == "e4m3":
        thread_product_turn_eighth = tile.view(torch.float8_e4m3fn).float().view(-1, 4, 4, 2, 2)
        return value(thread_product_turn_eighth.permute(0, 2, 4, 1, 3).reshape(warps, rows, 64))
    assert operand is not None
    factors = (operand.contiguous() << 16).view(torch.float32).double().view(-1, 4, 4)  # thread, product
    if values == "u4":  # a byte: thread, product, turn, second; its halves: eighth
        halves = torch.stack((tile & 15, tile >> 4), -1).double().view(-1, 4, 4, 2, 2, 2)
        numbers = halves - (factors[..., None, None, None] - 128)
        return value(numbers.permute(0, 2, 4, 5, 1, 3).reshape(warps, rows, 128).float())
    bits = words.long() & 0xFFFFFFFF
    found = (
        bits << 6 & 0x81C081C0,
        bits << 2 & 0x81C081C0,
        (bits << 28 | bits >> 4) & 0x81C081C0,
        bits >> 8 & 0x00400040 | bits & 0x81808180,
    )
    pairs = torch.stack(found, -1).to(torch.uint32).view(torch.bfloat16).double().view(-1, 4, 4, 4, 2)
    numbers = pairs * factors[..., None, None]  # thread, product of 32 columns, eighth of it, turn
    return value(numbers.permute(0, 2, 3, 1, 4).reshape(warps, rows, 128).float())


@pytest.fixture(scope="module")
def emulated() -> dict[bool, SimpleNamespace]:
    """The kernels, without a GPU, by whether they are of packed experts."""

    def activate(gates: Value, ups: Value, kind: str, limit: float | None, alpha: float | None) -> Value:
        both = torch.cat((gates.flatten(), ups.flatten()))[None]
        return value(ops.gated_activate.body(both, kind=kind, limit=limit, alpha=alpha)[0].view(gates.shape))

    small = H200._replace(units=1, shared_memory=40 << 10)  # so that a stage is used again
    common = {"activate_rounded": activate, "find_gpu": lambda device: small}
    exponent = emulate(packed_hopper).UP_EXPONENT
    packed = {"_unpack": unpack, "_ask": lambda pointer: None, "UP_EXPONENT": exponent}
    return {False: emulate(few_hopper, **common), True: emulate(few_packed_hopper, **common, **packed)}


def has_blocks(fmt: str | None, *inner: int) -> bool:
    """Whether a format holds rows of so many columns."""
    return all(columns % (32 if fmt == "mxfp4" else 128 if "int4" in str(fmt) else 8) == 0 for columns in inner)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fmt", EXPERTS)
@pytest.mark.parametrize(
    ("kind", "sizes"), [("silu", (4, 128, 640, 3)), ("swigluoai", (3, 128, 128, 1)), ("silu", (3, 96, 160, 2))]
)
def test_each_token_goes_through_its_experts_by_these_programs(
    fmt: str | None, kind: str, sizes: tuple[int, ...], emulated: dict[bool, SimpleNamespace]
):
    if not has_blocks(fmt, *sizes[1:3]):
        pytest.skip("no such rows")
    check_experts(fmt, kind, sizes, emulated[fmt is not None], "cpu", ((1, False), (2, True)))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize("fmt", EXPERTS)
@pytest.mark.parametrize("kind", ["silu", "swigluoai"])
@pytest.mark.parametrize(
    "sizes",
    [
        (9, 128, 384, 3), (16, 384, 1152, 8), (5, 256, 128, 1), (6, 128, 640, 6), (8, 1408, 2048, 6), (5, 96, 160, 2),
        (4, 104, 5128, 3),
    ],
)  # fmt: skip
def test_each_token_goes_through_its_experts(fmt: str | None, kind: str, sizes: tuple[int, ...]):
    if not has_blocks(fmt, *sizes[1:3]):
        pytest.skip("no such rows")
    kernels = few_packed_hopper if fmt else few_hopper
    check_experts(fmt, kind, sizes, kernels, "cuda", ((1, False), (2, True), (3, False)))


def check_experts(
    fmt: str | None, kind: str, sizes: tuple[int, ...], kernels: Any, device: str, cases: tuple[tuple[int, bool], ...]
) -> None:
    """Gates and ups alone, and downs alone, which are not further off than their rounding.

    sizes: experts, their width, the hidden size, and how many a token chooses. cases: tokens, and whether they choose
    the same.
    """
    experts, width, hidden, top_k = sizes
    limit, alpha = (7.0, 1.702) if kind == "swigluoai" else (None, None)
    gate_up, down, *biases = make_experts(fmt, experts, width, hidden, kind == "swigluoai", device)
    plain = plain_of(gate_up), plain_of(down)
    for tokens, is_alike in cases:
        ids = torch.stack([torch.randperm(max(top_k, experts - 1))[:top_k] for _ in range(tokens)]).to(device)
        ids = ids[:1].expand(tokens, -1).contiguous() if is_alike else ids
        x = torch.randn(tokens, hidden + 8).to(device).bfloat16()[:, :hidden]
        weights = torch.rand(tokens, top_k).to(device)
        gates = torch.einsum("th,tkoh->tko", x.double(), plain[0][ids])
        gates = gates if biases[0] is None else gates + biases[0][ids]
        m = ops.gated_activate.body(gates.bfloat16().flatten(0, 1), kind=kind, limit=limit, alpha=alpha)
        downs = torch.einsum("tkw,tkhw->tkh", m.double().view(tokens, top_k, -1), plain[1][ids])
        downs = downs if biases[1] is None else downs + biases[1][ids]
        truth = torch.einsum("tkh,tk->th", downs, weights.double())
        bad = [poisoned(each, set(ids.flatten().tolist())) for each in (gate_up, down)]
        bad = [each if isinstance(each, torch.Tensor) else shuffle(each) for each in bad]
        for cut in (None, 1 if fmt is None else Split(2, 2)):  # as chosen, and in more steps
            ours = kernels.multiply_gates(x, ids, bad[0], biases[0], kind, limit, alpha, cut)
            assert relative_error(ours, m) < 2e-3
            assert torch.equal(ours, kernels.multiply_gates(x, ids, bad[0], biases[0], kind, limit, alpha, cut))
            assert relative_error(kernels.multiply_downs(m, weights, ids, bad[1], biases[1], cut), truth) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize("fmt", ["fp8[128, 128]", "mxfp4"])
def test_a_captured_chain_follows_what_its_tokens_choose(fmt: str):
    """Downs are sent for by ids that the kernel ahead of the gates has just written."""
    gate_up, down, *_ = make_experts(fmt, 32, 256, 512, False, "cuda")
    laid_out = shuffle(gate_up), shuffle(down)
    x, scores = torch.randn(2, 512, device="cuda").bfloat16(), torch.randn(2, 32, device="cuda")
    own = moe.ShuffledExperts()

    def run() -> torch.Tensor:
        y = x
        for turn in range(6):
            weights, ids = scores.roll(turn * 5, 1).softmax(1).topk(4)
            y = own.experts(y, weights, ids, *laid_out, kind="silu")
            y = y / y.abs().amax(1, keepdim=True)  # which would overflow at last
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(10):
        scores.copy_(torch.randn(2, 32))
        graph.replay()
        assert torch.equal(y, run())
