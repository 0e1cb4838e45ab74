"""The kernels of `aiter` on an AMD GPU with amd-aiter, against the ops' bodies on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.aiter_doubles import move, mxfp4
from kernels.paged import make_case, make_latent_case
from torch.utils._pytree import tree_map_only

from atom.graph import PackedWeight, Type, ops
from atom.graph.ops import Op
from atom.kernels import LoadContext, find_kernel
from atom.kernels.aiter import FP4_ARCH, find_features
from atom.kernels.aiter.shuffle import find_arch, shuffle

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _has_aiter() -> None:
    if not torch.cuda.is_available() or "aiter" not in find_features():
        pytest.skip("there is no AMD GPU with amd-aiter here")


def need(*functions: str) -> None:
    for name in functions:
        if lacking := [each for each in find_features() if each.startswith(f"no aiter.{name}: ")]:
            pytest.skip(f"this version of AITER has {lacking[0]}")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1])).to(BF16)


def to_gpu(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.cuda(), values)


def check(op: Op, args: tuple[Any, ...], attributes: dict[str, Any], own: tuple[Any, ...] | None = None) -> None:
    """own: the arguments on the GPU, where they are others than the same"""
    given = find_kernel(op, "aiter").load(LoadContext())(*(own or to_gpu(args)), **attributes)
    wanted = op(*args, **attributes)
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (given, wanted)), strict=True):
        bound = 0.06 * float(other.abs().max())
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0.06, atol=bound)


def test_norms_and_gates():
    x, r, w = random(33, 1024), random(33, 1024) * 2, random(1024)
    check(ops.rms_norm, (x, w), {"eps": 1e-6})
    check(ops.add_rms_norm, (x, r, w), {"eps": 1e-6})
    check(ops.gated_activate, (x,), {"kind": "silu"})


def packed(act: str, *shape: int) -> PackedWeight:
    fmt, block = ("fp8[1, *]", (1, shape[-1])) if act == "fp8[1, *]" else ("fp8[128, 128]", (128, 128))
    values = random(*shape).float().mul(40).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], shape[-2] // block[0], shape[-1] // block[1]) / 100 + 0.001
    return PackedWeight(Type("bf16", shape, fmt), {"values": values, "scales": scales})


def laid_out(stored: torch.Tensor | PackedWeight) -> Any:
    if isinstance(stored, torch.Tensor):
        return shuffle(stored.cuda())
    return shuffle(PackedWeight(stored.type, {name: part.cuda() for name, part in stored.parts.items()}))


@pytest.mark.parametrize("tokens", [1, 33, 512])
@pytest.mark.parametrize("act", [None, "fp8[1, *]", "fp8[1, 128]"])
def test_linears(tokens: int, act: str | None):
    x, norm, weight = random(tokens, 1024), random(1024), random(2048, 1024)
    stored: Any = weight if act is None else packed(act, 2048, 1024)
    own = weight.cuda() if act is None else laid_out(stored)
    check(ops.linear, (x, stored), {"act": act}, (x.cuda(), own))
    fused = {"eps": 1e-6, "kind": "silu", "act": act}
    check(ops.norm_linear, (x, norm, stored), fused, (x.cuda(), norm.cuda(), own))
    check(ops.add_norm_linear, (x, x, norm, stored), fused, (x.cuda(), x.cuda(), norm.cuda(), own))


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 8, "renormalize": True},
    "sigmoid": {"top_k": 1, "score": "sigmoid"},
    "best groups": {"top_k": 6, "method": "group_limited_greedy", "groups": 8, "top_groups": 3, "scale": 16.0},
    "pairs of the best": {"top_k": 8, "method": "noaux_tc", "score": "sigmoid", "groups": 8, "top_groups": 4,
                          "renormalize": True, "scale": 2.5},
}  # fmt: skip


@pytest.mark.parametrize("rule", ROUTERS.values(), ids=ROUTERS)
def test_routers(rule: dict[str, Any]):
    x, weight = random(33, 1024), random(256, 1024)
    correction = torch.linspace(-0.1, 0.1, 256) if "noaux_tc" in rule.values() else None
    check(ops.router, (x, weight, None, correction), rule)
    check(ops.add_norm_router, (x, x, random(1024), weight, None, correction), {"eps": 1e-6, **rule})


@pytest.mark.parametrize("first", [None, 8], ids=["all_experts", "some_experts"])
@pytest.mark.parametrize("tokens", [1, 33, 512])
@pytest.mark.parametrize("act", [None, "fp8[1, *]", "fp8[1, 128]"])
def test_experts(tokens: int, act: str | None, first: int | None):
    shapes = (16, 2 * 512, 1024), (16, 1024, 512)
    stored: Any = [random(*shape) / 16 if act is None else packed(act, *shape) for shape in shapes]
    scores = torch.randn(tokens, 16 if first is None else 32, generator=torch.Generator().manual_seed(0))
    weights, ids = scores.softmax(-1).topk(4)
    x, here = random(tokens, 1024), () if first is None else (None, None, torch.tensor([first]))
    own = (*to_gpu((x, weights, ids)), *map(laid_out, stored), *to_gpu(here))
    check(ops.experts, (x, weights, ids, *stored, *here), {"kind": "silu", "act": act}, own)


@pytest.mark.parametrize("tokens", [1, 300])
def test_experts_in_mxfp4(tokens: int):
    need("expert_matmuls", "expert_tiles", "routing_data")
    if find_arch() != FP4_ARCH:
        pytest.skip(f"AITER multiplies MXFP4 on {FP4_ARCH} alone")
    weights, ids = torch.rand(tokens, 4), torch.stack([torch.randperm(8)[:4] for _ in range(tokens)])
    matrices = mxfp4(8, 2 * 704, 480), mxfp4(8, 480, 704), random(8, 2 * 704), random(8, 480)
    args = random(tokens, 480), weights, ids, *matrices
    check(ops.experts, args, {"kind": "swigluoai", "limit": 7.0, "alpha": 1.702}, move(args, "cuda"))


@pytest.mark.parametrize("prefills", [[], [(70, 200), (1, 20)]], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (16, None, True), (None, 20.0, False)]
)
def test_attention(prefills: list[tuple[int, int]], window: int | None, softcap: float | None, has_sinks: bool):
    shape: dict[str, Any] = {"kv_heads": 2, "heads": 8, "dim": 128, "dtype": BF16}
    case = make_case([170, 6], prefills, window=window, has_sinks=has_sinks, foreign=0.0, **shape)
    check(ops.paged_attention, tuple(case), {"scale": 0.09, "window": window, "softcap": softcap})


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("prefills", [[], [(70, 200), (1, 20)]], ids=["decodes", "mixed"])
def test_latent_attention(prefills: list[tuple[int, int]], block_size: int):
    need("latent_decode", "latent_prefill")
    shape: dict[str, Any] = {"heads": 16, "rank": 512, "rotated": 64, "plain": 128, "value": 128, "dtype": BF16}
    case = make_latent_case([170, 6], prefills, block_size=block_size, foreign=0.0, **shape)
    check(ops.paged_mla_attention, tuple(case), {"scale": 0.07})


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_cache_write(interleaved: bool):
    case = make_case([17, 30], kv_heads=2, heads=8, dim=128, dtype=BF16, foreign=0.0)
    batch = case.batch._replace(slot_mappings={case.cache.kind: torch.tensor([16, 45])})
    k, v, norm = random(2, 2, 128), random(2, 2, 128), random(128)
    angles = ops.rotary(torch.tensor([16, 29]), torch.linspace(1, 0.01, 64))
    args = (case.q, k, v, *angles, norm, norm, case.cache, batch)
    own = to_gpu(args)
    check(ops.norm_rope_write, args, {"eps": 1e-6, "interleaved": interleaved}, own)
    torch.testing.assert_close(own[7].blocks.cpu().float(), case.cache.blocks.float(), rtol=0.06, atol=0.06)
