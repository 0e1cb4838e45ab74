"""What the kernels of `aiter` hand to AITER's functions gives what the ops' bodies give: layouts, scales, order.

The functions are doubles in plain torch with AITER's recorded signatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.aiter_doubles import library, mxfp4, read_newest, unshuffled, write_sources
from kernels.paged import NAN, cached, make_case, make_latent_case
from torch import Tensor

from atom.graph import PackedWeight, Type, ops
from atom.graph.ops import Op
from atom.kernels.aiter import attention, latent, linear, moe
from atom.kernels.aiter.mxfp4 import number_tiles
from atom.kernels.aiter.shuffle import lay_out, shuffle_tiles, to_fnuz

ARCHES = ("gfx942", "gfx950")
Run = Callable[..., Any]


class Kernels:
    """The kernels of `aiter` over doubles, and the names of those that were called."""

    def __init__(self, root: Path) -> None:
        self.calls: list[str] = []
        self.aiter = library(root, read_newest(), self.calls)

    def __getitem__(self, op: Op) -> Run:
        module = next(each for each in (attention, latent, moe, linear) if hasattr(each, op.name))
        return partial(getattr(module, op.name), self.aiter)


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    return Kernels(write_sources(tmp_path, read_newest()))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


def packed(fmt: str, *shape: int) -> PackedWeight:
    *others, out, inner = shape
    block = (1, inner) if fmt == "fp8[1, *]" else (128, 128)
    blocks = *others, out // block[0], inner // block[1]
    values = random(*shape, dtype=torch.float32).mul_(40).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[..., 0, :2] = 0x80  # a negative zero, which is the NaN of e4m3fnuz
    scales = torch.linspace(0.001, 0.02, math.prod(blocks)).view(blocks)
    return PackedWeight(Type("bf16", shape, fmt), {"values": values, "scales": scales})


def check(given: Any, wanted: Any, tolerance: float = 0.02) -> None:
    for one, other in zip(*((each,) if isinstance(each, Tensor) else each for each in (given, wanted)), strict=True):
        torch.testing.assert_close(
            one.float(), other.float(), rtol=tolerance, atol=tolerance * float(other.abs().max())
        )


def test_every_pattern_of_e4m3_is_half_as_large_in_e4m3fnuz():
    bits = torch.tensor([each for each in range(256) if each & 0x7F != 0x7F], dtype=torch.uint8)  # not NaN
    values = bits.view(torch.float8_e4m3fn)
    assert torch.equal(to_fnuz(values).float() * 2, values.float())


@pytest.mark.parametrize("arch", ARCHES)
def test_a_laid_out_weight_has_the_numbers_of_the_stored_one(arch: str):
    weight = packed("fp8[128, 128]", 256, 128)
    laid_out = lay_out(weight, arch)
    spread = laid_out.parts["scales"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    numbers = unshuffled(laid_out.parts["values"]).float() * spread
    assert torch.equal(numbers.bfloat16(), weight.unpack())
    is_fnuz = laid_out.parts["values"].dtype is torch.float8_e4m3fnuz
    assert is_fnuz == (arch == "gfx942")


def test_norms_and_gates(kernels: Kernels):
    x, r, w = random(5, 32), random(5, 32) * 2, random(32)
    check(kernels[ops.rms_norm](x, w, eps=1e-6), ops.rms_norm(x, w, eps=1e-6))
    heads = random(5, 3, 16).transpose(0, 1)
    check(kernels[ops.rms_norm](heads, w[:16], eps=1e-6), ops.rms_norm(heads, w[:16], eps=1e-6))
    part = random(5, 48)[:, 8:40]  # of a joined linear
    check(kernels[ops.rms_norm](part, w, eps=1e-6), ops.rms_norm(part, w, eps=1e-6))
    check(kernels[ops.add_rms_norm](x, part, w, eps=1e-5), ops.add_rms_norm(x, part, w, eps=1e-5))
    check(kernels[ops.add_rms_norm](part, r, w, eps=1e-5), ops.add_rms_norm(part, r, w, eps=1e-5))
    check(kernels[ops.gated_activate](x, kind="silu"), ops.gated_activate(x, kind="silu"))


@pytest.mark.parametrize(
    ("fmt", "arch"), [("", "gfx950"), *((fmt, arch) for fmt in ("fp8[1, *]", "fp8[128, 128]") for arch in ARCHES)]
)
def test_linears(kernels: Kernels, fmt: str, arch: str):
    x, r, norm, bias = random(7, 300)[:, :256], random(7, 256) * 3, random(256), random(256)
    stored: Any = packed(fmt, 256, 256) if fmt else random(256, 256)
    weight: Any = lay_out(stored, arch) if fmt else stored
    act = {"fp8[1, *]": "fp8[1, *]", "fp8[128, 128]": "fp8[1, 128]"}.get(fmt)
    tolerance = 0.06 if fmt else 0.02  # activations are rounded to other numbers where the largest is not 448
    for op, args, attributes in (
        (ops.linear, (x, weight, bias), {}),
        (ops.linear, (x, weight), {}),
        (ops.gated_linear, (x, weight), {"kind": "silu"}),
        (ops.norm_linear, (x, norm, weight, bias), {"eps": 1e-6}),
        (ops.norm_linear, (x, norm, weight), {"eps": 1e-6, "kind": "silu"}),
        (ops.add_norm_linear, (x, r, norm, weight, bias), {"eps": 1e-6}),
        (ops.add_norm_linear, (x, r, norm, weight), {"eps": 1e-6, "kind": "silu"}),
    ):
        wanted = op(*(stored if each is weight else each for each in args), act=act, **attributes)
        check(kernels[op](*args, act=act, **attributes), wanted, tolerance)
    assert ("rms_norm_quantize" in kernels.calls) == (fmt == "fp8[1, *]"), "norm and quantization are one call"


ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {  # the function that is called, the rule
    "softmax": ("topk_softmax", {"top_k": 3}),
    "renormalized": ("topk_softmax", {"top_k": 3, "renormalize": True, "scale": 2.5}),
    "experts that all tokens share": ("topk_softmax", {"top_k": 3, "renormalize": True, "scale": 2.5, "shared": 2}),
    "groups that greedy ignores": ("topk_softmax", {"top_k": 3, "groups": 8, "top_groups": 1}),
    "sigmoid": ("topk_of_groups", {"top_k": 1, "score": "sigmoid", "scale": 2.0}),
    "best groups": (
        "topk_of_groups",
        {"top_k": 3, "method": "group_limited_greedy", "groups": 4, "top_groups": 2, "scale": 16.0},
    ),
    "pairs of the best": (
        "topk_with_correction",
        {"top_k": 4, "method": "noaux_tc", "score": "sigmoid", "groups": 8, "top_groups": 2, "renormalize": True,
         "scale": 2.5},
    ),
    "one group": ("topk_with_correction", {"top_k": 4, "method": "noaux_tc", "score": "sigmoid", "renormalize": True}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "rule"), ROUTERS.values(), ids=ROUTERS)
def test_routers(kernels: Kernels, function: str, rule: dict[str, Any]):
    x, r, norm, weight = random(9, 64), random(9, 64) * 2, random(64), random(32, 64)
    bias, correction = random(32) / 4, random(32, dtype=torch.float32) / 8
    own = {"correction": correction} if function == "topk_with_correction" else {}
    for given in (own, {**own, "bias": bias}):
        found, wanted = (run(x, weight, **given, **rule) for run in (kernels[ops.router], ops.router))
        assert found[1].dtype is torch.int64 and torch.equal(found[1], wanted[1])
        check(found[0], wanted[0], 1e-5)
    assert kernels.calls == [function] * 2
    found, wanted = (
        run(x, r, norm, weight, **own, eps=1e-6, **rule) for run in (kernels[ops.add_norm_router], ops.add_norm_router)
    )
    check(found[2:], wanted[2:])
    check(found[:2], kernels[ops.router](found[2], weight, **own, **rule))


@pytest.mark.parametrize("first", [None, 3], ids=["all_experts", "some_experts"])
@pytest.mark.parametrize(
    ("fmt", "arch"), [("", "gfx950"), *((fmt, arch) for fmt in ("fp8[1, *]", "fp8[128, 128]") for arch in ARCHES)]
)
def test_experts(kernels: Kernels, fmt: str, arch: str, first: int | None):
    shapes = (4, 2 * 128, 256), (4, 256, 128)
    stored: Any = [packed(fmt, *shape) if fmt else random(*shape) / 8 for shape in shapes]
    own = [lay_out(each, arch) if fmt else shuffle_tiles(each) for each in stored]
    x, weights = random(6, 300)[:, :256], random(6, 2, dtype=torch.float32).softmax(-1)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [0, 2], [3, 1]])
    here: tuple[Any, ...] = ()
    if first is not None:  # ids are of 8 experts, and two tokens have none here
        ids, here = ids.where(ids < 2, ids + 3), (None, None, torch.tensor([first]))
    run = {"kind": "silu", "act": {"fp8[1, *]": "fp8[1, *]", "fp8[128, 128]": "fp8[1, 128]"}.get(fmt)}
    found, wanted = (
        kernels[ops.experts](x, weights, ids, *own, *here, **run),
        ops.experts(x, weights, ids, *stored, *here, **run),
    )
    check(found, wanted, 0.06 if fmt else 0.02)
    assert kernels.calls == ["experts"] and (first is None or not wanted[3].any())
    none = kernels[ops.experts](x[:0], weights[:0], ids[:0], *own, *here, **run)
    assert none.shape == (0, 256) and kernels.calls == ["experts"]


@pytest.mark.parametrize(
    ("gate", "first"),
    [({"kind": "silu"}, 3), ({"kind": "swigluoai", "limit": 0.5, "alpha": 1.7}, None)],
    ids=["some_experts", "biases"],
)
def test_experts_in_mxfp4(kernels: Kernels, gate: dict[str, Any], first: int | None):
    gate_up, down = mxfp4(4, 2 * 32, 96), mxfp4(4, 96, 32)
    biases = (random(4, 64), random(4, 96)) if first is None else (None, None)
    x, weights = random(6, 300)[:, :96], random(6, 2, dtype=torch.float32).softmax(-1)
    ids = torch.tensor([[0, 3], [2, 0], [3, 2], [2, 0], [0, 2], [2, 3]])  # nobody chooses the second
    here: tuple[Any, ...] = ()
    if first is not None:  # ids are of 8 experts, and two tokens have none here
        ids, here = ids.where(ids < 2, ids + 3), (torch.tensor([first]),)
        ids[:2] = torch.tensor([[1, 0], [0, 7]])
    args = x, weights, ids, gate_up, down, *biases, *here
    check(kernels[ops.experts](*args, **gate), ops.experts(*args, **gate))
    assert kernels.calls == ["expert_tiles", "routing_data", "expert_matmuls", "expert_matmuls"]


@pytest.mark.parametrize(
    ("counts", "elsewhere"),
    [([1, 0, 1], 0), ([40, 0, 33, 7], 5), ([0, 0, 0, 0, 700], 0), ([3] * 70, 0), ([0, 0], 3)],
    ids=["few", "several", "one_expert", "many_experts", "nothing"],
)
def test_tiles_of_experts_are_numbered_as_aiter_documents(kernels: Kernels, counts: list[int], elsewhere: int):
    ends = torch.tensor(counts).cumsum(0)
    routing = number_tiles(kernels.aiter, ends, sum(counts) + elsewhere)  # of which the double holds each
    assert routing.expt_data.hist.tolist() == counts


@pytest.mark.parametrize(("interleaved", "has_norms"), [(False, False), (True, True)])
def test_rope_and_cache_write(kernels: Kernels, interleaved: bool, has_norms: bool):
    q, k, v = random(5, 6, 16), random(5, 2, 16), random(5, 2, 16) * 2
    cos, sin = ops.rotary(torch.tensor([3, 9, 0, 1, 2]), torch.linspace(1, 0.1, 8))
    norms = (random(16), random(16) + 1) if has_norms else (None, None)
    slots, found = torch.tensor([7, 2, 0, 11, 9]), []
    for run in (kernels[ops.norm_rope_write], ops.norm_rope_write):
        blocks = torch.zeros(3, 4, 2, 2, 16, dtype=torch.bfloat16)
        out = run(q, k, v, cos, sin, *norms, *cached(blocks, slots), eps=1e-6, interleaved=interleaved)
        found.append((out, blocks))
    check(*found)


@pytest.mark.parametrize(
    "attributes", [{}, {"window": 5}, {"softcap": 3.0}, {"has_sinks": True}], ids=lambda each: "_".join(each) or "plain"
)
@pytest.mark.parametrize("prefills", [[], [(5, 9), (1, 20), (3, 3)]], ids=["decodes", "mixed"])
def test_paged_attention(kernels: Kernels, attributes: dict[str, Any], prefills: list[tuple[int, int]]):
    has_sinks, window = attributes.get("has_sinks", False), attributes.get("window")
    shape = {"kv_heads": 2, "heads": 4, "dim": 16, "window": window, "has_sinks": has_sinks}
    case, clean = (make_case([17, 6], prefills, foreign=foreign, **shape) for foreign in (NAN, 0.0))
    run = {"scale": 0.3, "window": window, "softcap": attributes.get("softcap")}
    check(kernels[ops.paged_attention](*case, **run), ops.paged_attention(*clean, **run), 1e-4)


def test_scales_of_an_fp8_cache_multiply_its_entries(kernels: Kernels):
    case = make_case([9, 4], [(3, 8)], kv_heads=2, heads=4, dim=16, cache_dtype=torch.float8_e4m3fn, foreign=1.0)
    scales = torch.tensor([0.5]), torch.tensor([3.0])
    check(kernels[ops.paged_attention](*case, *scales, scale=0.3), ops.paged_attention(*case, *scales, scale=0.3), 1e-4)


def test_attention_after_its_cache_write(kernels: Kernels):
    case = make_case([5, 9], kv_heads=2, heads=4, dim=16, foreign=0.5)
    slots = {case.cache.kind: torch.tensor([20, 33])}
    batch = case.batch._replace(slot_mappings=slots)
    k, v = random(2, 2, 16, dtype=torch.float32), random(2, 2, 16, dtype=torch.float32)
    angles, found = ops.rotary(torch.tensor([4, 8]), torch.linspace(1, 0.1, 8)), []
    for run in (kernels[ops.norm_rope_attention], ops.norm_rope_attention):
        cache = case.cache._replace(blocks=case.cache.blocks.clone())
        out = run(case.q, k, v, *angles, None, None, cache, batch, scale=0.3)
        found.append((out, cache.blocks))
    check(*found, 1e-4)


@pytest.mark.parametrize(("block_size", "query_len"), [(16, 1), (48, 1), (64, 3)])
def test_latent_attention(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, block_size: int, query_len: int):
    monkeypatch.setattr(latent, "ABSORBED_BYTES", 1000)  # not all heads of a prompt at a time
    decodes, prompts = [(query_len, length) for length in (70, 6, 40)], [(5, 9), (1, 20)]
    shape: dict[str, Any] = {"heads": 3, "rank": 32, "rotated": 16, "block_size": block_size}
    case, clean = (make_latent_case([], [*decodes, *prompts], foreign=foreign, **shape) for foreign in (NAN, 0.0))
    batch = case.batch._replace(num_decodes=len(decodes), query_len=query_len)
    found, wanted = (
        kernels[ops.paged_mla_attention](*case[:-1], batch, scale=0.3),
        ops.paged_mla_attention(*clean, scale=0.3),
    )
    check(found, wanted, 1e-4)
    assert {*kernels.calls} == {"latent_decode", "latent_prefill"} and kernels.calls.count("latent_prefill") > 1


def test_sequences_of_no_positions_and_tokens_of_no_sequence_give_zeros(kernels: Kernels):
    case = make_latent_case([17, 0, 6], [(3, 8)], heads=2, rank=32, rotated=16)
    starts = case.batch.starts - torch.tensor([0, 0, 0, 0, 1])  # the last token is nobody's
    batch = case.batch._replace(starts=starts.int())
    found = kernels[ops.paged_mla_attention](*case[:-1], batch, scale=0.3)
    assert found[[0, 2, 3, 4]].abs().amax((1, 2)).gt(0).all() and not found[[1, 5]].any()
