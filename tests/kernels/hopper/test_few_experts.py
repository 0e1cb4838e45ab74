"""Experts of few tokens on Hopper: how rows are cut, that the kernels compile, and on such a GPU what they give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.checks import poisoned
from kernels.compiling import compile_for_hopper

pytest.importorskip("triton")

from kernels.hopper.emulated import Value, activate_rounded, emulate, value
from kernels.hopper.test_hopper import FORMATS, H200, IS_HOPPER, draw

from atom.graph import PackedWeight, ops
from atom.kernels.hopper import few_experts as few_hopper
from atom.kernels.hopper import packed_linear as packed_hopper
from atom.kernels.hopper.experts import Experts, unpack_experts
from atom.kernels.hopper.few_experts import FEW_PACKED, FEW_PLAIN
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear.matrix import make_counters
from atom.kernels.triton.linear.weight_encoding import PLAIN, encoding_of, encoding_of_weight

EXPERTS = (None, *FORMATS)  # None: plain


@pytest.mark.parametrize("fmt", EXPERTS)
@pytest.mark.parametrize("inner", [384, 768, 1408, 2880, 7168])
def test_rings_fit_in_memory(fmt: str | None, inner: int):
    encoding = encoding_of(fmt, 256) if fmt else PLAIN
    for programs, splits_columns in ((1, False), (1, True), (96, True), (300, True), (5000, True)):
        ring = few_hopper.choose_ring(programs, inner, encoding, H200, splits_columns=splits_columns)
        assert ring.splits == 1 or (fmt and splits_columns and programs * ring.splits <= 3 * H200.units)
        columns = few_hopper.columns_of(encoding)
        assert 1 <= ring.stages <= ring.steps(inner, columns)
        assert ring.boxes * columns % (encoding.columns or 1) == 0, "a stage has whole blocks"
        stage = ring.boxes * few_hopper.box_bytes(encoding, few_hopper.GATE_SIZES)
        tables = few_hopper.table_bytes(inner, encoding, few_hopper.GATE_SIZES)
        assert ring.stages * stage + tables < H200.shared_memory
        assert ring.stages == 1 or ring.stages * stage + tables <= few_hopper.MAX_STAGES * stage


def test_down_programs_fit_next_to_two_of_gate_up():
    """Of Qwen3-30B-A3B in block fp8, on a multiprocessor, which keeps 1 KiB of shared memory for each program."""
    encoding = encoding_of("fp8[128, 128]", 256)

    def memory(programs: int, inner: int) -> int:
        ring = few_hopper.choose_ring(programs, inner, encoding, H200)
        stages = ring.stages * ring.boxes * few_hopper.box_bytes(encoding, few_hopper.GATE_SIZES)
        return stages + few_hopper.table_bytes(inner, encoding, few_hopper.GATE_SIZES) + 1024

    assert 2 * memory(24 * 8, 2048) + memory(256, 768) <= 228 << 10


@pytest.mark.parametrize(
    ("fmt", "inner", "first"),
    [
        ("mxfp4", 2880, 11),  # of 22.5 boxes, in stages of 2: 11 and 12
        ("mxfp4", 1024, 4),
        ("mxfp4", 992, 2),  # else the first half would have more scales than the second
        ("fp8[128, 128]", 1408, 10),  # of 22: one block less
        ("fp8[128, 128]", 128, None),
        ("fp8[1, *]", 1152, 8),
        ("int4[1, 128]", 512, 2),
        ("int4[1, 128]", 768, None),  # zeros would be numbers
    ],
)
def test_columns_are_halved_in_whole_stages(fmt: str, inner: int, first: int | None):
    encoding = encoding_of(fmt, 256)
    assert few_hopper.halve(inner, encoding) == first
    if first is not None:
        columns = few_hopper.columns_of(encoding)
        ring = few_hopper.choose_ring(1, inner - first * columns, encoding, H200)
        assert ring.steps(inner - first * columns, columns) * ring.boxes * columns >= inner - first * columns
        assert 2 * first * columns <= inner


def test_what_is_not_few_is_grouped():
    weight, x = draw("fp8[1, *]", 4, 256, 512), torch.zeros(FEW_PLAIN + 1, 512, dtype=torch.bfloat16)
    ids = torch.zeros(FEW_PLAIN + 1, 8, dtype=torch.int64)
    assert few_hopper.suits_few(x[:FEW_PACKED], ids[:FEW_PACKED], weight, weight)
    assert not few_hopper.suits_few(x[: FEW_PACKED + 1], ids[: FEW_PACKED + 1], weight, weight), (
        "more of packed ones are grouped"
    )
    plain = torch.zeros(4, 256, 512)
    assert few_hopper.suits_few(x[1:], ids[1:], plain, plain)
    for tokens, chosen in ((x, ids), (x[:0], ids[:0]), (x[:1].float(), ids[:1]), (x[:1], ids[:1].repeat(1, 3))):
        assert not few_hopper.suits_few(tokens, chosen, weight, weight)


def test_more_than_8_experts_of_a_token_are_few_if_neither_weight_is_unpacked_with_more_than_a_scale():
    wide, narrow = draw("fp8[128, 128]", 16, 256, 256), draw("mxfp4", 16, 256, 256)
    x, ids = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(1, 11, dtype=torch.int64)
    assert few_hopper.suits_few(x, ids, wide, wide)
    assert not few_hopper.suits_few(x, ids, wide, narrow)
    assert not few_hopper.suits_few(x, ids, narrow, wide)
    assert few_hopper.suits_few(x, ids[:, :8], wide, narrow)


COMPILE = """
import itertools, sys, torch, triton
from kernels.compiling import use_hopper
from kernels.hopper.test_few_experts import EXPERTS, make_experts
from kernels.hopper.test_hopper import H200
from atom.kernels.hopper import experts as moe, few_experts as few_hopper
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear.matrix import make_counters

launches = itertools.count()

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def compile(*args, **options):
            fmt, place = divmod(next(launches), 2)
            if sys.argv[1] == "few" and (fmt // 2 + place) % 2:
                return  # gates of two formats, downs of the next two
            made = self.kernel.warmup(*args, grid=grid, **options)
            assert made.metadata.shared <= H200.shared_memory
            assert "mma.sync" in made.asm["ptx"] and ".local" not in made.asm["ptx"]
            print("compiled")
        return compile

use_hopper()
few_hopper.find_gpu = lambda device: H200
for name in ("_gate_up_kernel", "_down_kernel"):
    setattr(few_hopper, name, Compile(getattr(few_hopper, name)))
for number, fmt in enumerate(EXPERTS):
    gate_up, down, *biases = make_experts(fmt, 4, 256, 384, number % 2 == 1, "cpu")
    chosen = 11 if few_hopper.max_chosen(gate_up) > 8 else 3
    x, ids = torch.zeros(2, 384, dtype=torch.bfloat16), torch.zeros(2, chosen, dtype=torch.int64)
    weights = torch.zeros(2, chosen)
    gate = Gate("swigluoai", 7.0, 1.7) if number % 2 else Gate("silu")
    ring = few_hopper.Ring(2, 1, splits=1 + number % 2)
    m = few_hopper.multiply_gate_up(x, ids, gate_up, biases[0], gate, make_counters(x.device), ring)
    few_hopper.multiply_down(m, weights, ids, down, biases[1])
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


@pytest.mark.slow  # scripts/check-kernels compiles a variant of each kernel
@pytest.mark.parametrize("share", ["few", "all"])
def test_they_compile_for_such_a_gpu(share: str):
    done = compile_for_hopper(COMPILE, share)
    assert done.stdout.count("compiled") == (1 if share == "few" else 2) * len(EXPERTS)


def without_others(weight: torch.Tensor | PackedWeight, chosen: set[int]) -> torch.Tensor | PackedWeight:
    """A weight whose experts that nobody chose hold NaN."""
    others = torch.tensor([expert not in chosen for expert in range(weight.shape[0])], device=weight.device)
    if isinstance(weight, torch.Tensor):
        return weight.masked_fill(others[:, None, None], float("nan"))
    return poisoned(weight, others)


def plain_of(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return weight.double() if isinstance(weight, torch.Tensor) else unpack_experts(weight, torch.float32).double()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def unpack(tile: Value, operand: Value | None, values: str, _layout: None) -> Value:
    """`packed_hopper._unpack` by the layout's description in hopper/shuffle.py."""
    rows = len(tile)
    if values == "e4m3":
        thread_product_turn_eighth = tile.contiguous().view(torch.float8_e4m3fn).float().view(rows, 4, 4, 2, 2)
        return value(thread_product_turn_eighth.permute(0, 2, 4, 1, 3).reshape(rows, 64))
    assert operand is not None
    if values == "u4":  # a byte: thread, product, turn, second; its halves: eighth
        halves = torch.stack((tile & 15, tile >> 4), -1).double().view(rows, 4, 4, 2, 2, 2)
        numbers = halves - operand.double().view(rows, 1, 1, 1, 1, 1)
        return value(numbers.permute(0, 2, 4, 5, 1, 3).reshape(rows, 128).float())
    exponents = operand[:, None] >> 8 * torch.arange(4) & 255  # of 32 columns each
    factors = 2.0 ** (exponents.double() - 1 - int(packed_hopper.UP_EXPONENT.value))
    words = tile.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    found = (
        words << 6 & 0x81C081C0,
        words << 2 & 0x81C081C0,
        (words << 28 | words >> 4) & 0x81C081C0,
        words >> 8 & 0x00400040 | words & 0x81808180,
    )
    pairs = torch.stack(found, -1).to(torch.uint32).view(torch.bfloat16).double().view(rows, 4, 4, 4, 2)
    numbers = pairs * factors[:, None, :, None, None]  # thread, product of 32 columns, eighth of it, turn
    return value(numbers.permute(0, 2, 3, 1, 4).reshape(rows, 128).float())


@pytest.fixture(scope="module")
def emulated():
    """The kernels, without a GPU."""
    shared = emulate(packed_hopper)

    loads = {name: getattr(shared, name) for name in ("_find_blocks", "UP_EXPONENT")}
    small = H200._replace(units=1, shared_memory=40 << 10)  # so that a stage is used again
    return emulate(
        few_hopper, _unpack=unpack, activate_rounded=activate_rounded, find_gpu=lambda device: small, **loads
    )


@pytest.mark.sampled(24)
@pytest.mark.parametrize("fmt", EXPERTS)
@pytest.mark.parametrize(("kind", "sizes"), [("silu", (4, 128, 256, 3)), ("swigluoai", (3, 128, 128, 1)),
                                             ("silu", (13, 128, 128, 11))])  # fmt: skip
def test_each_token_goes_through_its_experts_by_these_programs(
    fmt: str | None, kind: str, sizes: tuple[int, ...], emulated: SimpleNamespace
):
    check_experts(fmt, kind, sizes, emulated, "cpu", ((1, False), (2, True)))


@pytest.mark.parametrize(
    ("fmt", "width", "top_k"),
    [
        ("mxfp4", 352, 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fp8[128, 128]", 384, 3), ("fp8[1, *]", 576, 1))),
        pytest.param("int4[1, 128]", 512, 2, marks=pytest.mark.slow),
    ],
)
def test_each_token_goes_through_its_experts_by_programs_of_half_the_columns(
    fmt: str, width: int, top_k: int, emulated: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    halved, halve = [], few_hopper.halve
    names = emulated.multiply_down.__globals__
    monkeypatch.setitem(names, "find_gpu", lambda device: H200._replace(shared_memory=40 << 10))
    monkeypatch.setitem(names, "halve", lambda *args: halved.append(halve(*args)) or halved[-1])
    check_experts(fmt, "silu", (5, width, 128, top_k), emulated, "cpu", ((1, False), (2, False)))
    assert len(halved) == 2 and all(halved)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize("fmt", EXPERTS)
@pytest.mark.parametrize("kind", ["silu", "swigluoai"])
@pytest.mark.parametrize(
    "sizes",
    [
        (9, 128, 384, 3),
        (16, 384, 1152, 8),
        (5, 256, 128, 1),
        (6, 128, 640, 6),
        (8, 1408, 2048, 6),
        (13, 128, 640, 11),
        (20, 512, 2048, 16),
        (16, 1440, 1440, 4),
    ],
)
def test_each_token_goes_through_its_experts(fmt: str | None, kind: str, sizes: tuple[int, ...]):
    check_experts(fmt, kind, sizes, few_hopper, "cuda", ((1, False), (3, False), (FEW_PLAIN, True)))


def check_experts(
    fmt: str | None, kind: str, sizes: tuple[int, ...], kernels: Any, device: str, cases: tuple[tuple[int, bool], ...]
) -> None:
    """The gate/up projection, and the down projection, are not further off than their rounding.

    sizes: experts, their width, the hidden size, and how many a token chooses. cases: tokens, and whether they choose
    the same.
    """
    experts, width, hidden, top_k = sizes
    if fmt is not None and top_k > 8 and not fmt.startswith("fp8"):
        pytest.skip("of weights that are unpacked with more than a scale no token has so many experts")
    gate = Gate(kind, 7.0, 1.702) if kind == "swigluoai" else Gate(kind)
    gate_up, down, *biases = make_experts(fmt, experts, width, hidden, kind == "swigluoai", device)
    plain, counters = (plain_of(gate_up), plain_of(down)), make_counters(torch.device(device))
    for tokens, is_alike in cases:
        ids = torch.stack([torch.randperm(max(top_k, experts - 1))[:top_k] for _ in range(tokens)]).to(device)
        ids = ids[:1].expand(tokens, -1).contiguous() if is_alike else ids
        x = torch.randn(tokens, hidden + 8).to(device).bfloat16()[:, :hidden]
        weights = torch.rand(tokens, top_k).to(device)
        gates = torch.einsum("th,tkoh->tko", x.double(), plain[0][ids])
        gates = gates if biases[0] is None else gates + biases[0][ids]
        m = ops.gated_activate.body(gates.bfloat16().flatten(0, 1), **gate._asdict())
        downs = torch.einsum("tkw,tkhw->tkh", m.double().view(tokens, top_k, -1), plain[1][ids])
        downs = downs if biases[1] is None else downs + biases[1][ids]
        truth = torch.einsum("tkh,tk->th", downs, weights.double())
        bad = [without_others(each, set(ids.flatten().tolist())) for each in (gate_up, down)]
        bad = [each if isinstance(each, torch.Tensor) else shuffle(each) for each in bad]
        for splits in (1, 3):  # at the largest size some of them have nothing to do
            ring = few_hopper.choose_ring(1, hidden, encoding_of_weight(bad[0]), H200)._replace(stages=1, splits=splits)
            ours = kernels.multiply_gate_up(x, ids, bad[0], biases[0], gate, counters, ring)
            assert relative_error(ours, m) < 2e-3 and not counters.any()
        assert torch.equal(ours, kernels.multiply_gate_up(x, ids, bad[0], biases[0], gate, counters, ring))
        assert relative_error(kernels.multiply_down(m, weights, ids, bad[1], biases[1]), truth) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize("fmt", ["fp8[128, 128]", "mxfp4"])
def test_a_captured_chain_follows_what_its_tokens_choose(fmt: str):
    """Downs are sent for by ids that the kernel ahead of the gates has just written."""
    gate_up, down, *_ = make_experts(fmt, 32, 256, 512, False, "cuda")
    laid_out = shuffle(gate_up), shuffle(down)
    x, scores = torch.randn(2, 512, device="cuda").bfloat16(), torch.randn(2, 32, device="cuda")
    own = Experts()

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
