"""Attention and cache writes in C++, against the reference bodies of their ops."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from gil import releases_gil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.checks import assert_equal, relative_error
from kernels.paged import KIND, Case, make_case, reference

from atom.graph import Batch, PagedCache, ops
from atom.kernels import LoadContext, find_kernel
from atom.kernels.cpp import attention
from atom.kernels.torch import attention as torch_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(case: Case, **attributes: Any) -> torch.Tensor:
    run = find_kernel(ops.paged_attention, "cpp").load(LoadContext())
    assert isinstance(run, attention.PagedAttention)
    made: torch.Tensor = run(*case, **attributes)
    return made


@st.composite
def decodes(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[Case, dict[str, Any]]:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 3), (3, 3)]))
    window = draw(st.sampled_from([None, None, 1, 5, 16, 130]))
    case = make_case(
        draw(st.lists(st.integers(1, 300), min_size=1, max_size=5)), [], kv_heads=kv_heads, heads=kv_heads * group,
        dim=draw(st.sampled_from([8, 20, 36, 64, 80, 128, 200, 256, 300, 512])), block_size=draw(st.sampled_from([1, 3, 16, 32])), window=window,
        dtype=dtype, has_sinks=draw(st.booleans()), seed=draw(st.integers(0, 9)),
    )  # fmt: skip
    return case, {"scale": 0.3, "window": window, "softcap": draw(st.sampled_from([None, 1.5]))}


@settings(max_examples=50)
@given(decodes())
def test_any_decodes_equal_the_reference(drawn: tuple[Case, dict[str, Any]]):
    case, attributes = drawn
    assert_equal(attend(case, **attributes), reference(case, **attributes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_it_is_as_near_to_the_truth_as_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype):
    case = make_case([1, 127, 128, 129, 260], [], kv_heads=2, heads=6, dim=80, dtype=dtype, cache_dtype=cache_dtype)
    truth = reference(case, scale=0.3, wide=True)
    allowed = 1.1 * relative_error(reference(case, scale=0.3), truth) + 1e-6
    assert relative_error(attend(case, scale=0.3), truth) <= allowed


@pytest.mark.parametrize("foreign", [math.nan, math.inf, 1e30])
def test_what_lies_in_memory_of_others_changes_nothing(foreign: float):
    def run(foreign: float) -> torch.Tensor:
        return attend(make_case([3, 40], [], block_size=32, window=30, foreign=foreign), scale=0.3, window=30)

    assert torch.equal(run(foreign), run(0.0))


def test_a_decode_releases_the_gil():
    case = make_case([2000] * 8, [], kv_heads=4, heads=8, dim=128)
    run = find_kernel(ops.paged_attention, "cpp").load(LoadContext())
    assert releases_gil(lambda: run(*case, scale=0.3))


@pytest.fixture
def torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention fails, so that what passes is in C++."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it is left to torch")

    monkeypatch.setattr(torch_attention.PagedAttention, "__call__", refuse)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 3), (3, 3)]))
    window = draw(st.sampled_from([None, None, 1, 5, 16, 130]))
    lengths = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 193, 300])
    before = st.sampled_from([0, 0, 1, 31, 127, 128, 200])
    found = draw(st.lists(st.tuples(lengths, before), min_size=1, max_size=3))
    is_chunked = draw(st.booleans()) and window is not None
    decodes = [] if is_chunked else draw(st.lists(st.integers(1, 300), max_size=3))
    case = make_case(
        decodes, [(num, num + more) for num, more in found], kv_heads=kv_heads, heads=kv_heads * group,
        dim=draw(st.sampled_from([8, 20, 36, 64, 80, 128, 300])), block_size=draw(st.sampled_from([1, 3, 16, 32])),
        window=window, has_sinks=draw(st.booleans()), seed=draw(st.integers(0, 9)),
        foreign=0.0 if is_chunked else math.nan,  # what is before a chunk counts as in the window
    )  # fmt: skip
    softcap = draw(st.sampled_from([None, None, 1.5]))
    return case, {"scale": 0.3, "window": window, "softcap": softcap, "chunked": is_chunked}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts())
@pytest.mark.usefixtures("torch_refuses")
def test_any_prompts_equal_the_reference(drawn: tuple[Case, dict[str, Any]]):
    case, attributes = drawn
    assert_equal(attend(case, **attributes), reference(case, **attributes))


@pytest.mark.usefixtures("torch_refuses")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_prompt_is_as_near_to_the_truth_as_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype):
    prefills = [(1, 1), (65, 65), (130, 300)]
    case = make_case([], prefills, kv_heads=2, heads=6, dim=80, dtype=dtype, cache_dtype=cache_dtype)
    truth = reference(case, scale=0.3, wide=True)
    allowed = 1.02 * relative_error(reference(case, scale=0.3), truth) + 1e-6
    assert relative_error(attend(case, scale=0.3), truth) <= allowed


@pytest.mark.usefixtures("torch_refuses")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_is_torch_s_attention(dtype: torch.dtype):
    num, heads, kv_heads, dim = 700, 6, 2, 64
    case = make_case([], [(num, num)], kv_heads=kv_heads, heads=heads, dim=dim, dtype=dtype, foreign=0.0)
    table = case.batch.tables[KIND][0].long()
    keys, values = case.cache.blocks[table].flatten(0, 1)[:num].double().permute(1, 2, 0, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.double().transpose(0, 1), keys, values, is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    made = attend(case, scale=0.3).double()
    allowed = 1e-6 if dtype is torch.float32 else 1.02 * relative_error(expected.to(dtype).double(), expected)
    assert relative_error(made, expected) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_prompts_and_writes_are_right_with_fewer_instructions(limit: str):
    """As on an older CPU: of the instructions that this one has, our code uses those of the limit."""
    tests = ["-k", "(prompt or chunks or slopes or a_write_is or small_scores) and not fewer_instructions", "-m", ""]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, *tests],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout


@pytest.mark.usefixtures("torch_refuses")
def test_prompts_take_slopes_and_ends():
    case = make_case([], [(150, 190), (3, 3)], kv_heads=2, heads=4, dim=20)
    slopes = torch.tensor([0.5, 0.1, 0.01, 0.3])
    assert_equal(attend(case, slopes=slopes, scale=0.3), reference(case, slopes=slopes, scale=0.3))
    ends = torch.full((153,), -1, dtype=torch.int32)
    ends[20:60] = 150  # of position 60 to 99: an image that ends at 150
    assert_equal(attend(case, ends=ends, scale=0.3), reference(case, ends=ends, scale=0.3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_s_bits_do_not_depend_on_chunks_or_the_batch(dtype: torch.dtype, window: int | None):
    num, cuts = 300, [0, 1, 130, 290, 300]
    case = make_case([], [(num, num), (77, 200)], kv_heads=2, heads=6, dim=36, dtype=dtype, foreign=0.0)
    whole = attend(case, scale=0.3, window=window)[:num]
    table = case.batch.tables[KIND][:1]
    for begin, end in pairwise(cuts):
        starts, lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        batch = Batch({KIND: table}, {}, starts, lengths, 0)
        part = Case(case.q[begin:end], case.cache, batch)
        assert torch.equal(attend(part, scale=0.3, window=window), whole[begin:end])


def test_a_prompt_releases_the_gil():
    case = make_case([], [(1000, 1000)], kv_heads=4, heads=8, dim=128)
    run = find_kernel(ops.paged_attention, "cpp").load(LoadContext())
    assert releases_gil(lambda: run(*case, scale=0.3))


def test_prompts_of_heads_of_more_than_512_dims_are_torch_s():
    case = make_case([20, 5], [(3, 9)], kv_heads=1, heads=2, dim=520)
    assert_equal(attend(case, scale=0.3), reference(case, scale=0.3))


@pytest.mark.parametrize("shift", [0.0, 80.0, -80.0, 1e4])
@pytest.mark.parametrize("num", [1, 20])
def test_large_and_small_scores_overflow_nothing(shift: float, num: int):
    case = make_case([200] if num == 1 else [], [(num, 200)] if num > 1 else [], kv_heads=1, heads=2, dim=16)
    case = case._replace(q=case.q + shift)
    made = attend(case, scale=1.0)
    assert made.isfinite().all() and relative_error(made, reference(case, scale=1.0)) < 1e-3


WRITE = find_kernel(ops.norm_rope_write, "cpp")


@pytest.mark.parametrize("cache_dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("half", "interleaved"), [(None, False), (16, False), (16, True), (5, False), (5, True)])
@pytest.mark.parametrize("norm", ["none", "same", "float32"])
def test_a_write_is_that_of_the_op(
    dtype: torch.dtype, cache_dtype: torch.dtype, half: int | None, interleaved: bool, norm: str
):
    torch.manual_seed(3)
    tokens, heads, kv_heads, dim = 21, 5, 2, 32
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).mul_(30).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    norm_dtype = dtype if norm == "same" else torch.float32  # which weights with an offset have
    norms = [torch.randn(dim).to(norm_dtype) if norm != "none" else None for _ in range(2)]
    turns = [None, None] if half is None else [torch.rand(tokens, half), torch.rand(tokens, half)]
    slots = torch.randperm(40)[:tokens]
    scales = [torch.tensor([0.25]), torch.tensor([1.5])] if cache_dtype is torch.float8_e4m3fn else [None, None]

    def run(body: Any, wide: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.zeros(5, 8, 2, kv_heads, dim).to(cache_dtype)
        tables = torch.zeros(1, 1, dtype=torch.int32)
        batch = Batch({"full": tables}, {"full": slots}, tables[0], tables[0], 0)
        given = [each.float() if wide and each is not None else each for each in (q, k, v)]
        normed = [each.float() if wide and each is not None else each for each in norms]
        made = body(
            *given, *turns, *normed, PagedCache(blocks, "full"), batch, *scales, eps=1e-5, interleaved=interleaved
        )
        return made, blocks.float()

    ours, truth, theirs = (
        run(WRITE.load(LoadContext())),
        run(ops.norm_rope_write.body, True),
        run(ops.norm_rope_write.body),
    )
    for one, exact, other in zip(ours, truth, theirs, strict=True):
        rounded = 1e-6 if dtype is cache_dtype is torch.float32 else 2e-4  # a number between two may become the other
        assert (
            relative_error(one.float(), exact.float()) <= 1.05 * relative_error(other.float(), exact.float()) + rounded
        )
    written = torch.zeros(40, dtype=torch.bool).index_fill_(0, slots, True)
    assert not ours[1].flatten(0, 1)[~written].any(), "other slots are left alone"


def test_a_key_that_is_nan_in_fp8_gives_nan():
    q, cache, batch, sinks = make_case([20], [], kv_heads=1, heads=2, dim=16)
    blocks = cache.blocks.clamp(-448, 448).to(torch.float8_e4m3fn)
    of_fp8 = Case(q, cache._replace(blocks=blocks), batch, sinks)
    assert attend(of_fp8, scale=0.3).isfinite().all()
    blocks.view(torch.uint8).fill_(0x7F)
    assert attend(of_fp8, scale=0.3).isnan().all()


def test_every_fp8_comes_back_and_ties_go_to_even():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    row = torch.cat((values, ties, torch.tensor([1e9, -1e9, 460.0, 1e-9])))
    k = row.view(1, 1, -1)
    blocks, tables = torch.zeros(1, 1, 2, 1, len(row)).to(torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.int32)
    batch = Batch({"full": tables}, {"full": torch.zeros(1, dtype=torch.int64)}, tables[0], tables[0], 0)
    WRITE.load(LoadContext())(k, k, k, None, None, None, None, PagedCache(blocks, "full"), batch)
    assert torch.equal(blocks[0, 0, 0, 0].float(), row.clamp(-448, 448).to(torch.float8_e4m3fn).float())
