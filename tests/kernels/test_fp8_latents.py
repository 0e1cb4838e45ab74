"""Attention over latents in fp8_e4m3 next to rotated keys that are not, of every backend, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernels.checks import assert_as_near, assert_equal
from kernels.paged import LatentCase, cached, change, make_latent_case, move
from torch import Tensor

from atom.graph import KV, Type, ops
from atom.graph.ops.latent import latent_entry
from atom.kernels import Target, find_kernel
from atom.kernels.torch import PagedLatentAttention
from atom.kernels.torch import latent as on_cpu
from atom.kernels.torch.rope import norm_rope_write_latent as cpu_write
from atom.kernels.triton.attention import latent
from atom.kernels.triton.gpu import find_gpu

FP8 = torch.float8_e4m3fn
SCALES = [None, 0.7, 0.011]

pytestmark = pytest.mark.usefixtures("exact_fp8")


class Kernels(NamedTuple):
    device: str
    attend: Callable[..., Tensor]
    write: Callable[..., Tensor]


@pytest.fixture(params=["op", "absorbed", "expanded", "interpreter", "interpreter in parts", pytest.param("cuda", marks=pytest.mark.gpu)])  # fmt: skip
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    name = request.param
    if name == "op":
        return Kernels("cpu", ops.paged_mla_attention.body, ops.norm_rope_write_latent.body)
    if name in ("absorbed", "expanded"):
        monkeypatch.setattr(on_cpu, "_is_absorbed", lambda *_args: name == "absorbed")
        return Kernels("cpu", PagedLatentAttention(), cpu_write)
    if (name == "cuda") != torch.cuda.is_available():
        pytest.skip("Triton's kernels run on the GPU if it exists, else they are interpreted")
    if name == "interpreter in parts":
        monkeypatch.setattr(latent, "MAX_SPLITS", 5)
        monkeypatch.setattr(latent, "PART_TILES", 0.01)
        monkeypatch.setattr(latent, "find_gpu", lambda device: find_gpu(device)._replace(units=10_000))
    device = "cuda" if name == "cuda" else "cpu"
    return Kernels(device, latent.PagedLatentAttention(), latent.norm_rope_write_latent)


def as_bytes(latents: Tensor, k_rope: Tensor, scale: float | None) -> Tensor:
    """Entries as they are kept: fp8 [..., E]; rotated keys start at a multiple of their size."""
    rounded = (latents.float() / (scale or 1.0)).clamp(-448, 448).to(FP8).view(torch.uint8)
    padded = F.pad(rounded, (0, -rounded.shape[-1] % k_rope.itemsize))
    return torch.cat((padded, k_rope.contiguous().view(torch.uint8)), dim=-1).view(FP8)


def split(case: LatentCase) -> tuple[Tensor, Tensor]:
    return case.cache.blocks.split([case.kv_b.shape[1], case.q_rope.shape[2]], dim=-1)


def run(kernels: Kernels, case: LatentCase, scale: float | None, of_scores: float = 0.3) -> Tensor:
    entries, k_scale = as_bytes(*split(case), scale), None if scale is None else torch.tensor([scale])
    q = torch.cat((case.q_nope, case.q_rope), dim=2).to(kernels.device)
    case = move(change(case, entries), kernels.device)
    q_nope, q_rope = q.split([case.q_nope.shape[2], case.q_rope.shape[2]], dim=2)  # views of one output, as in a model
    k_scale = None if k_scale is None else k_scale.to(kernels.device)
    return kernels.attend(q_nope, q_rope, *case[2:], k_scale, scale=of_scores).cpu()


def expected(case: LatentCase, scale: float | None, of_scores: float = 0.3) -> Tensor:
    """In float32 over plain entries that are rounded by plain torch."""
    latents, k_rope = (part.float().nan_to_num(posinf=0) for part in split(case))
    rounded = (latents / (scale or 1.0)).clamp(-448, 448).to(FP8).float() * (scale or 1.0)
    wide = change(case, torch.cat((rounded, k_rope), dim=-1))
    q_nope, q_rope, kv_b = (x.float() for x in case[:3])
    return ops.paged_mla_attention.body(q_nope, q_rope, kv_b, *wide[3:], scale=of_scores)


def check(kernels: Kernels, case: LatentCase, scale: float | None = 0.7) -> None:
    assert_equal(run(kernels, case, scale), expected(case, scale))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("heads", "rank", "rotated", "plain", "value", "block_size"), [
    (1, 18, 8, 12, 10, 16), (4, 11, 6, 1, 1, 1), (3, 1, 2, 7, 9, 3), (20, 36, 10, 12, 12, 16),
])  # fmt: skip
def test_latents_are_numbers_of_fp8_times_their_scale(
    kernels: Kernels, scale: Any, heads: int, rank: int, rotated: int, plain: int, value: int, block_size: int
):
    case = make_latent_case(
        [1, 70, 33], [(1, 1), (7, 30), (13, 13)], heads=heads, rank=rank, rotated=rotated, plain=plain, value=value,
        block_size=block_size,
    )  # fmt: skip
    check(kernels, case, scale)


@pytest.mark.sampled(6, gpu=1)
def test_lengths_around_the_ends_of_blocks_and_tiles(kernels: Kernels):
    decodes, prefills = [1, 15, 16, 17, 31, 32, 33, 65], [(16, 16), (17, 17), (1, 31), (40, 65)]
    check(kernels, make_latent_case(decodes, prefills, heads=3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("following", [[], [(9, 12)]])
@pytest.mark.parametrize(("query_len", "heads"), [(2, 3), (3, 20)])
def test_leading_sequences_of_several_queries_each(kernels: Kernels, query_len: int, heads: int, following: Any):
    lengths = (query_len, query_len + 1, 33, 70)
    case = make_latent_case([], [(query_len, length) for length in lengths] + following, heads=heads)
    check(kernels, change(case, num_decodes=len(lengths), query_len=query_len))


@pytest.mark.sampled(2, gpu=1)
def test_what_lies_in_memory_of_others_changes_nothing(kernels: Kernels):
    results = [
        run(kernels, make_latent_case([3, 40], [(5, 21)], heads=3, block_size=32, foreign=foreign), 0.7)
        for foreign in (math.nan, 0.0)
    ]
    assert torch.equal(*results)


@pytest.mark.sampled(2, gpu=1)
def test_in_half_precision_it_is_as_near_to_the_truth_as_the_op(kernels: Kernels):
    case = make_latent_case([20, 70], [(7, 40), (30, 30)], heads=6, rank=35, dtype=torch.float16)
    body = Kernels("cpu", ops.paged_mla_attention.body, ops.norm_rope_write_latent.body)
    # kernels round absorbed queries and sums, where the op rounds keys and values
    assert_as_near(run(kernels, case, 0.7), run(body, case, 0.7), expected(case, 0.7), factor=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rank", "rotated", "has_norm", "has_rope", "interleaved"), [
    (18, 8, True, True, True), (11, 6, False, True, False), (1, 2, True, False, False),
])  # fmt: skip
def test_latents_are_divided_by_their_scale_and_rotated_keys_are_kept_whole(
    kernels: Kernels, rank: int, rotated: int, has_norm: bool, has_rope: bool, interleaved: bool, dtype: Any, scale: Any
):
    random = torch.Generator().manual_seed(rank)
    q_rope = torch.randn(9, 33, 3 + rotated, generator=random).to(dtype)[..., 3:]
    latents, k_rope = torch.randn(9, rank + rotated, generator=random).to(dtype).split([rank, rotated], dim=1)
    latents[3] *= 1e4  # beyond 448 if there is no norm
    cos, sin = ops.rotary.body(torch.arange(9) + 7, torch.rand(rotated // 2)) if has_rope else (None, None)
    norm = 50 * torch.rand(rank, generator=random).to(dtype) if has_norm else None
    slots = torch.tensor([9, 3, 12, 0, 14, 1, 2, 13, 5])
    key = k_rope.unsqueeze(1) if cos is None else ops.rope.body(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved)
    normed = latents if norm is None else ops.rms_norm.body(latents, norm, eps=1e-5)
    wanted = as_bytes(normed, key.squeeze(1), scale)

    cache, batch = cached(torch.full((5, 3, wanted.shape[1]), 7.0).to(FP8), slots)
    k_scale = None if scale is None else torch.tensor([scale])
    args = q_rope, latents, k_rope.unsqueeze(1), cos, sin, norm, cache, batch, k_scale
    args = move(args, kernels.device)
    out = kernels.write(*args, eps=1e-5, interleaved=interleaved)
    turned = q_rope if cos is None else ops.rope.body(q_rope, cos, sin, interleaved=interleaved)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.cpu(), turned, **tolerance)
    written = args[6].blocks.cpu().flatten(0, 1)
    ours, theirs = (each[:, :rank].float() for each in (written[slots], wanted))
    assert torch.isclose(ours, theirs, rtol=1 / 7, atol=2**-9).all()  # where a tie fell otherwise
    assert (ours == theirs).float().mean() > 0.95
    first = rank + -rank % k_rope.itemsize
    ours, theirs = (each[:, first:].contiguous().view(dtype) for each in (written[slots], wanted))
    torch.testing.assert_close(ours, theirs, **tolerance)
    untouched = torch.ones(15, dtype=torch.bool).index_fill(0, slots, False)
    assert (written[untouched].float() == 7).all()


def test_an_entry_is_a_byte_a_latent_dim_and_a_whole_rotated_key():
    assert latent_entry("fp8_e4m3", "bf16", 512, 64) == Type("fp8_e4m3", (512 + 64 * 2,))
    assert latent_entry("fp8_e4m3", "fp32", 18, 8) == Type("fp8_e4m3", (20 + 8 * 4,)), "keys begin at a multiple of 4"
    assert latent_entry("bf16", "bf16", 512, 64) == Type("bf16", (576,))


def test_what_does_not_fit_is_refused():
    q_nope, q_rope = Type("bf16", ("T", 3, 4)), Type("bf16", ("T", 3, 6))
    latents, k_rope, kv_b = Type("bf16", ("T", 12)), Type("bf16", ("T", 1, 6)), Type("bf16", (27, 12))

    def infer(cache: Type, num_scales: int = 1) -> Type:
        args = q_nope, q_rope, latents, k_rope, kv_b, KV("0", cache), Type("fp32", (num_scales,))
        return ops.mla_attention.infer(*args, scale=1.0)

    assert infer(Type("fp8_e4m3", (24,))) == Type("bf16", ("T", 3, 5))
    with pytest.raises(ValueError, match=r"the cache keeps fp8_e4m3\[18\] of 12 latent dims, not fp8_e4m3\[24\]"):
        infer(Type("fp8_e4m3", (18,)))
    with pytest.raises(ValueError, match=r"a scale of entries in fp8_e4m3, the cache keeps bf16\[18\]"):
        infer(Type("bf16", (18,)))
    with pytest.raises(ValueError, match=r"a scale of entries is fp32\[3\], not fp32\[1\]"):
        infer(Type("fp8_e4m3", (24,)), 3)


@pytest.mark.parametrize("op", [ops.paged_mla_attention, ops.norm_rope_write_latent])
def test_a_gpu_that_does_not_convert_fp8_takes_the_op_itself(op: ops.Op):
    accepts, cache = find_kernel(op, "triton").accepts, KV("0", Type("fp8_e4m3", (640,)))
    args = Type("bf16", ("T", 8, 128)), Type("bf16", ("T", 8, 64)), Type("bf16", (2048, 512)), cache
    older, newer = (Target("cuda", frozenset({"nvidia", name})) for name in ("sm_80", "sm_90"))
    assert accepts(older, *args) == "fp8_e4m3 needs sm_89, not sm_80"
    assert accepts(newer, *args) is None
