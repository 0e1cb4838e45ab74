"""Attention over keys and values in fp8_e4m3, of every backend, against plain torch and the ops' own bodies.

Odd sizes, ends of blocks, windows, soft caps, sinks and groups of heads; NaN in fp8 wherever nobody may look.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from kernels.checks import assert_equal, relative_error
from kernels.paged import KIND, Case, cached, change, make_case, move
from torch import Tensor

from atom.graph import KV, PagedCache, Type, ops
from atom.kernels import Target, candidates, find_backend
from atom.kernels.torch import PagedAttention as CpuAttention
from atom.kernels.torch.rope import norm_rope_write as cpu_write
from atom.kernels.torch.workspace import Reader, Workspace
from atom.kernels.triton import accepts_attention
from atom.kernels.triton.attention.paged import NormRopeAttention, PagedAttention, decode
from atom.kernels.triton.attention.rope import norm_rope_write

FP8 = torch.float8_e4m3fn
SMALL_PARTS = decode.Parameters(tile_bytes=1024, programs_per_unit=4)  # sequences are cut into many
SCALES = [(None, None), (0.7, 1.3), (0.011, 0.002)]

pytestmark = pytest.mark.usefixtures("exact_fp8")


class Kernels(NamedTuple):
    device: str
    attend: Callable[..., Tensor]
    write: Callable[..., Tensor]


@pytest.fixture(params=["torch", "interpreter", "interpreter in parts", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return Kernels("cpu", CpuAttention(), cpu_write)
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("Triton's kernels run on the GPU if it exists, else they are interpreted")
    attend = PagedAttention(SMALL_PARTS if request.param == "interpreter in parts" else None)
    return Kernels("cuda" if request.param == "cuda" else "cpu", attend, norm_rope_write)


def scales_of(pair: tuple[float | None, float | None]) -> list[Tensor | None]:
    return [None if scale is None else torch.tensor([scale]) for scale in pair]


def with_scales(case: Case, pair: tuple[float | None, float | None]) -> tuple[Any, ...]:
    """The arguments of paged_attention; entries in fp8 of these scales."""
    scale = torch.tensor([scale or 1.0 for scale in pair]).view(2, 1, 1)
    return *change(case, (case.cache.blocks / scale).clamp(-448, 448).to(FP8)), *scales_of(pair)


def expected(case: Case, pair: tuple[float | None, float | None], **attributes: Any) -> Tensor:
    """Attention in float32 over what plain torch makes of the entries."""
    scale = torch.tensor([scale or 1.0 for scale in pair]).view(2, 1, 1)
    rounded = (case.cache.blocks.nan_to_num() / scale).clamp(-448, 448).to(FP8).float() * scale
    return ops.paged_attention.body(*change(case, rounded), **attributes)


@pytest.mark.sampled(48, gpu=8)
@pytest.mark.parametrize("pair", SCALES)
@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "block_size"), [(8, 1, 1, 16), (20, 2, 3, 3), (64, 1, 8, 16), (80, 3, 2, 1)]
)
def test_entries_are_numbers_of_fp8_times_their_scale(
    kernels: Kernels, pair: Any, dim: int, kv_heads: int, group: int, block_size: int
):
    case = make_case([1, 15, 70], [(1, 1), (5, 21), (40, 40)], kv_heads=kv_heads, heads=kv_heads * group, dim=dim,
                     block_size=block_size)  # fmt: skip
    out = kernels.attend(*move(with_scales(case, pair), kernels.device), scale=0.2).cpu()
    assert_equal(out, expected(case, pair, scale=0.2))


@pytest.mark.sampled(24, gpu=8)
@pytest.mark.parametrize("pair", SCALES[:2])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 37])
def test_windows_sinks_and_soft_caps(kernels: Kernels, window: Any, has_sinks: bool, softcap: Any, pair: Any):
    case = make_case([3, 70], [(25, 50)], kv_heads=2, heads=6, dim=20, window=window, has_sinks=has_sinks)
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    out = kernels.attend(*move(with_scales(case, pair), kernels.device), **attributes).cpu()
    assert_equal(out, expected(case, pair, **attributes))


@pytest.mark.sampled(12, gpu=2)
@pytest.mark.parametrize("window", [None, 17])
def test_lengths_around_the_ends_of_blocks_and_tiles(kernels: Kernels, window: Any):
    decodes = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129]
    prefills = [(1, 16), (1, 17), (8, 16), (9, 17), (16, 16), (15, 33), (65, 80)]
    case = make_case(decodes, prefills, heads=4, dim=16, window=window)
    out = kernels.attend(*move(with_scales(case, (0.7, 1.3)), kernels.device), scale=0.3, window=window).cpu()
    assert_equal(out, expected(case, (0.7, 1.3), scale=0.3, window=window))


@pytest.mark.sampled(2, gpu=1)
def test_in_half_precision_scores_round_like_those_of_entries_that_are_not_packed(kernels: Kernels):
    """An fp16 holds each number of e4m3: over the same numbers as fp16 the error is the same."""
    case = make_case([20, 70], [(7, 40)], kv_heads=2, heads=6, dim=32, dtype=torch.float16)
    packed = with_scales(case, (None, None))
    plain = change(case, packed[1].blocks.half())
    truth = ops.paged_attention.body(*move_to_float(change(case, packed[1].blocks.float().nan_to_num())), scale=0.2)
    out, same = (kernels.attend(*move(args, kernels.device), scale=0.2).cpu() for args in (packed, plain))
    assert out.dtype == torch.float16
    assert relative_error(out, truth) <= 1.5 * relative_error(same, truth) + 1e-6


def move_to_float(case: Case) -> Case:
    return case._replace(q=case.q.float())


@pytest.mark.parametrize("pair", SCALES)
@pytest.mark.parametrize(("dim", "turned"), [(8, 0), (20, 12), (64, 64)])
def test_what_is_written_is_divided_by_its_scale_and_rounded(kernels: Kernels, pair: Any, dim: int, turned: int):
    """To the nearest, at most 448, and the same number that is not in the cache's neighbours."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, dim, generator=random) * 30 for heads in (4, 2, 2))
    v[3] *= 1e4  # beyond 448
    cos, sin = ops.rotary.body(torch.arange(9), torch.rand(turned // 2, generator=random)) if turned else (None, None)
    blocks = torch.full((5, 3, 2, 2, dim), 7.0).to(FP8)
    slots = torch.tensor([9, 3, 12, 0, 14, 1, 2, 13, 5])
    key = k if cos is None else ops.rope.body(k, cos, sin)
    scales = torch.tensor([scale or 1.0 for scale in pair]).view(2, 1, 1)
    entries = (torch.stack((key, v), dim=1) / scales).clamp(-448, 448).to(FP8)
    for write in (kernels.write, ops.norm_rope_write.body):
        device = kernels.device if write is kernels.write else "cpu"
        cache, batch = cached(blocks.clone(), slots)
        args = move((q, k, v, cos, sin, None, None, cache, batch, *scales_of(pair)), device)
        write(*args)
        written = args[7].blocks.cpu().flatten(0, 1).float()
        close = torch.isclose(written[slots], entries.float(), rtol=1 / 7, atol=2**-9)  # where a tie fell otherwise
        assert close.all()
        assert (written[slots] == entries.float()).float().mean() > 0.999
        untouched = torch.ones(15, dtype=torch.bool).index_fill(0, slots, False)
        assert (written[untouched] == 7).all()


@pytest.mark.sampled(12, gpu=2)
@pytest.mark.parametrize("pair", SCALES[:2])
@pytest.mark.parametrize("prefills", [[], [(5, 21), (40, 40)]])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (17, 1.5, True)])
def test_a_decode_in_one_launch_is_the_write_and_the_attention(
    triton_device: str, window: Any, softcap: Any, has_sinks: bool, prefills: Any, pair: Any
):
    lengths = [1, 2, 15, 16, 17, 18, 70, 129]
    case = make_case(lengths, prefills, kv_heads=2, heads=6, dim=20, window=window, has_sinks=has_sinks)
    random = torch.Generator().manual_seed(1)
    counts = case.batch.starts.diff()
    row_of = torch.repeat_interleave(torch.arange(len(counts)), counts)
    positions = torch.arange(len(case.q)) - case.batch.starts[row_of + 1] + case.batch.lengths[row_of]
    slots = case.batch.tables[KIND][row_of, positions // 16].long() * 16 + positions % 16
    k, v = (torch.randn(len(case.q), 2, 20, generator=random) for _ in range(2))
    cos, sin = ops.rotary.body(positions, torch.rand(6, generator=random))
    norms = 1 + torch.randn(2, 20, generator=random)
    batch = case.batch._replace(slot_mappings={KIND: slots})
    attributes = {"scale": 0.3, "eps": 1e-6, "window": window, "softcap": softcap}

    def args(blocks: Tensor) -> tuple[Any, ...]:
        return case.q, k, v, cos, sin, *norms, PagedCache(blocks, KIND), batch, case.sinks, *scales_of(pair)

    entries = case.cache.blocks.clone()
    entries.flatten(0, 1)[slots] = math.nan
    own = args(entries.nan_to_num().to(FP8))
    right = ops.norm_rope_attention.body(*own, **attributes)
    for attend in (NormRopeAttention(), NormRopeAttention(SMALL_PARTS)):
        given = move(args(entries.to(FP8)), triton_device)
        out = attend(*given, **attributes).cpu()
        written, wanted = (each[7].blocks.cpu().float().flatten(0, 1)[slots] for each in (given, own))
        assert torch.isclose(written, wanted, rtol=1 / 7, atol=2**-9).all()
        assert (written == wanted).float().mean() > 0.999
        assert_equal(out, right, 1e-5 if torch.equal(written, wanted) else 2e-2)


def test_a_cpu_reads_every_number_as_torch_converts_it():
    numbers = torch.arange(256).to(torch.uint8).view(FP8)
    numbers = numbers[numbers.float().isfinite()]
    cache = numbers.view(1, 1, 1, 1, -1)
    reader = Reader(Workspace(), cache, len(numbers), torch.zeros(1, 1, dtype=torch.int64))
    reader.read(cache)
    assert torch.equal(reader.keys.flatten(), numbers.float())


def test_a_nan_stays_one(kernels: Kernels):
    cache, batch = cached(torch.zeros(2, 3, 2, 1, 8).to(FP8), torch.tensor([4]))
    x = torch.full((1, 1, 8), math.nan)
    args = move((x, x, x, None, None, None, None, cache, batch), kernels.device)
    kernels.write(*args)
    assert args[7].blocks.cpu().float().flatten(0, 1)[4].isnan().all()


@pytest.mark.parametrize(("feature", "reason"), [("sm_80", "fp8_e4m3 needs sm_89, not sm_80"), ("sm_89", None),
                                                 ("sm_90", None), ("sm_120", None), ("gfx942", None)])  # fmt: skip
def test_gpus_that_have_no_fp8_are_named(feature: str, reason: str | None):
    q, target = Type("bf16", ("T", 4, 64)), Target("cuda", frozenset({feature}))
    cache = KV("0", Type("fp8_e4m3", (2, 2, 64)))
    assert accepts_attention(target, q, cache) == reason
    assert accepts_attention(target, q, KV("0", Type("bf16", (2, 2, 64)))) is None
    if reason is not None:
        refused = [kernel.accepts(target, q, q, q, None, None, None, None, cache)
                   for kernel in candidates(ops.norm_rope_write, [find_backend("triton")])]  # fmt: skip
        assert refused == [reason]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "window", "softcap"),
    [(128, 8, 4, None, None), (64, 8, 8, 128, None), (256, 4, 2, 500, 30.0), (80, 3, 3, None, None)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sizes_of_real_models_on_a_gpu(
    dtype: torch.dtype, dim: int, kv_heads: int, group: int, window: Any, softcap: Any
):
    case = make_case([1, 16, 17, 700, 1999], [(1, 1), (600, 600), (65, 700)], kv_heads=kv_heads, heads=kv_heads * group,
                     dim=dim, window=window, dtype=dtype, cache_dtype=torch.float32,
                     has_sinks=window is not None)  # fmt: skip
    attributes = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    packed = move(with_scales(case, (0.02, 0.03)), "cuda")
    sinks = None if case.sinks is None else case.sinks.float()
    truth = expected(case._replace(q=case.q.float(), sinks=sinks), (0.02, 0.03), **attributes)
    for attend in (PagedAttention(), PagedAttention(SMALL_PARTS)):
        allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert relative_error(attend(*packed, **attributes).cpu(), truth) <= allowed
