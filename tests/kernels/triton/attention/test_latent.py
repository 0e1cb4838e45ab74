import math
from typing import Any

import pytest
import torch
from kernels.checks import BF16, assert_as_near, assert_equal
from kernels.compiling import run_program
from kernels.paged import KIND, LatentCase, cached, change, make_latent_case, move, reference

from atom.graph import ops
from atom.kernels.triton.attention import latent
from atom.kernels.triton.attention.latent import PagedLatentAttention, norm_rope_write_latent
from atom.kernels.triton.gpu import find_gpu

LARGE = {"heads": 16, "rank": 512, "plain": 128, "rotated": 64, "value": 128}


@pytest.fixture(params=[1, 5])
def splits(request, monkeypatch):
    """The parts of a decode's context, of at least one position each."""
    monkeypatch.setattr(latent, "MAX_SPLITS", request.param)
    monkeypatch.setattr(latent, "PART_TILES", 0.01)
    monkeypatch.setattr(latent, "find_gpu", lambda device: find_gpu(device)._replace(units=10_000))
    return request.param


def on(case: LatentCase, device: str) -> LatentCase:
    """q_nope and q_rope stay views of one output."""
    q = torch.cat((case.q_nope, case.q_rope), dim=2).to(device).split([case.q_nope.shape[2], case.q_rope.shape[2]], 2)
    return LatentCase(*q, *move(case[2:], device))


def attend(case: LatentCase, device: str, scale: float = 0.3) -> torch.Tensor:
    return PagedLatentAttention()(*on(case, device), scale=scale).cpu()


def check(case: LatentCase, device: str, scale: float = 0.3) -> None:
    out, expected = attend(case, device, scale), reference(case, scale=scale)
    if out.dtype is torch.float32:
        assert_equal(out, expected)
    else:  # absorbed queries, shares and sums are rounded, where the reference rounds keys and values and computes wide
        truth = reference(case, scale=scale, wide=True)
        error, allowed = ((x.double() - truth).norm() / truth.double().norm() for x in (out, expected))
        assert error <= 2 * allowed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("heads", "rank", "rotated", "plain", "value", "block_size"), [
    (1, 18, 8, 12, 10, 16), (4, 11, 6, 1, 1, 1), (3, 1, 2, 7, 9, 3), (20, 35, 10, 12, 12, 16), (4, 18, 0, 12, 10, 16),
])  # fmt: skip
def test_decodes_and_chunks_of_prompts_equal_the_reference(
    heads, rank, rotated, plain, value, block_size, dtype, splits, triton_device
):
    case = make_latent_case(
        [1, 70, 33], [(1, 1), (7, 30), (13, 13)], heads=heads, rank=rank, rotated=rotated, plain=plain, value=value,
        block_size=block_size, dtype=dtype,
    )  # fmt: skip
    check(case, triton_device)


@pytest.mark.parametrize(("decodes", "prefills"), [
    ([1], []), ([16, 17, 31, 32, 33], []), ([], [(16, 16), (17, 17), (1, 31)]),
])  # fmt: skip
def test_lengths_around_the_ends_of_blocks_and_tiles(decodes, prefills, splits, triton_device):
    check(make_latent_case(decodes, prefills, heads=3), triton_device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("decodes", [[1], [5, 70], [200, 0, 3, 33]])
def test_few_queries_are_multiplied_by_kernels_of_their_own(decodes, splits, monkeypatch, triton_device):
    def run(few: int) -> torch.Tensor:
        monkeypatch.setattr(latent, "FEW_QUERIES", few)
        case = make_latent_case(decodes, heads=3, rank=35, plain=12, value=20)
        return attend(case, triton_device)

    assert_equal(run(4), run(0))


def test_a_context_is_split_if_programs_are_idle(monkeypatch, triton_device):
    monkeypatch.setattr(latent, "PART_TILES", 1)
    monkeypatch.setattr(latent, "find_gpu", lambda device: find_gpu(device)._replace(units=3))
    grids: list[tuple[int, ...]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    kernel = latent._attend_kernel
    monkeypatch.setattr(latent, "_attend_kernel", Spy())
    check(make_latent_case([70, 3], heads=2), triton_device)
    check(make_latent_case([70] * 7, heads=2), triton_device)
    assert grids == [(2, 3), (7, 1)]


@pytest.mark.sampled(0, gpu=1)
def test_more_parts_than_are_merged_at_a_time_equal_the_reference(monkeypatch, triton_device):
    monkeypatch.setattr(latent, "MAX_SPLITS", 40)
    monkeypatch.setattr(latent, "PART_TILES", 0.01)
    monkeypatch.setattr(latent, "find_gpu", lambda device: find_gpu(device)._replace(units=10_000))
    check(make_latent_case([40 * 32, 300]), triton_device, scale=3.0)


@pytest.mark.sampled(0, gpu=2)
@pytest.mark.parametrize("prompts", [[], [(9, 12)]])
@pytest.mark.parametrize(("query_len", "heads"), [(2, 3), (4, 7), (2, 16), (3, 20)])
def test_leading_sequences_of_several_queries_each(query_len, heads, prompts, splits, triton_device):
    lengths = (query_len, query_len + 1, 33, 70)
    case = make_latent_case([], [(query_len, length) for length in lengths] + prompts, heads=heads)
    check(change(case, num_decodes=len(lengths), query_len=query_len), triton_device)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (1, False), (20, True)])
def test_sinks_and_windows(window, has_sinks, splits, triton_device):
    case = make_latent_case([1, 70, 33], [(7, 30), (40, 50)], heads=3, window=window, foreign=math.nan)
    attributes, sinks = {"scale": 0.3, "window": window}, torch.tensor([-2.0, 0.5, 4.0]) if has_sinks else None
    there = None if sinks is None else sinks.to(triton_device)
    out = PagedLatentAttention()(*on(case, triton_device), sinks=there, **attributes).cpu()
    assert_equal(out, reference(case, sinks=sinks, **attributes))


@pytest.mark.parametrize("foreign", [math.nan, math.inf])
def test_what_lies_in_memory_of_others_changes_nothing(foreign, splits, triton_device):
    def run(foreign: float) -> torch.Tensor:
        return attend(make_latent_case([3, 40], [(5, 21)], heads=3, block_size=32, foreign=foreign), triton_device)

    assert torch.equal(run(foreign), run(0.0))


@pytest.mark.filterwarnings("ignore:.*CuBLAS.*deterministic:UserWarning")
def test_what_memory_held_before_changes_nothing(splits, triton_device):
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
    try:
        check(make_latent_case([3, 40], [(5, 21)], heads=3), triton_device)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_sequence_without_positions_and_a_token_without_sequence_give_zeros(splits, triton_device):
    case = make_latent_case([20, 1, 40], [(5, 9)], heads=3)
    expected = reference(case, scale=0.3)
    q = [torch.cat((part, part[:2])) for part in (case.q_nope, case.q_rope)]
    padded = change(case, q_nope=q[0], q_rope=q[1], lengths=case.batch.lengths.clone())
    padded.batch.lengths[1] = 0
    out = attend(padded, triton_device)
    assert not out[1].any()
    assert not out[-2:].any()
    assert_equal(out[[0, 2, 3, 4, 5, 6, 7]], expected[[0, 2, 3, 4, 5, 6, 7]])


def test_prompts_whose_absorbed_queries_are_many_go_by_some_heads_at_a_time(monkeypatch, triton_device):
    monkeypatch.setattr(latent, "ABSORBED_BYTES", 2 * 26 * 12 * 4)  # of two heads
    original, heads = latent._attend, []
    monkeypatch.setattr(latent, "_attend", lambda q, *args: (heads.append(len(q)), original(q, *args))[1])
    check(make_latent_case([9], [(20, 20), (6, 11)], heads=5), triton_device)
    assert heads == [5, 2, 2, 1], "of the decode, then of the prompts"


@pytest.mark.parametrize(("dtype", "cache_dtype"), [
    (torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float16, torch.float16),
    pytest.param(torch.bfloat16, torch.float32, marks=pytest.mark.gpu),
    pytest.param(torch.float32, torch.bfloat16, marks=pytest.mark.gpu),
])  # fmt: skip
def test_the_cache_may_have_another_dtype(dtype, cache_dtype, triton_device):
    check(make_latent_case([20, 5], [(7, 30)], heads=3, dtype=dtype, cache_dtype=cache_dtype), triton_device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [16, 128])
def test_entries_of_full_size_equal_the_reference(heads, dtype):
    decodes, prefills = [1, 1000, 64, 65, 4097], [(1, 900), (100, 300), (257, 257)]
    check(make_latent_case(decodes, prefills, **{**LARGE, "heads": heads}, dtype=dtype), "cuda", 192**-0.5)


@pytest.mark.gpu
def test_blocks_past_two_billion_numbers_are_found():
    case = on(make_latent_case([300], [(20, 50)], **LARGE, dtype=torch.bfloat16), "cuda")
    far = (1 << 32) // case.cache.blocks[0].numel()
    cache = torch.empty(far + len(case.cache.blocks), *case.cache.blocks.shape[1:], dtype=torch.bfloat16, device="cuda")
    cache[far:] = case.cache.blocks
    moved = change(case, blocks=cache, table=case.batch.tables[KIND] + far)
    assert torch.equal(PagedLatentAttention()(*moved, scale=0.1), PagedLatentAttention()(*case, scale=0.1))


@pytest.mark.gpu
def test_a_captured_step_follows_its_lengths():
    case = on(make_latent_case([300, 70, 33], heads=16), "cuda")
    PagedLatentAttention()(*case, scale=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = PagedLatentAttention()(*case, scale=0.3)
    for lengths in ([1, 70, 16], [299, 1, 32]):
        case.batch.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert_equal(
            out.cpu(),
            reference(move(case, "cpu"), scale=0.3),
        )


@pytest.mark.parametrize(("dtype", "cache_dtype"), [
    (torch.float32, torch.float32), (torch.float16, torch.float16),
    pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.gpu),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "heads", "rank", "rotated", "block_size"), [
    (1, 1, 1, 2, 1), (3, 33, 18, 8, 16), (7, 3, 11, 6, 3),
])  # fmt: skip
@pytest.mark.parametrize(("has_norm", "has_rope", "interleaved"), [
    (True, True, True), (True, True, False), (False, True, False), (True, False, False),
])  # fmt: skip
def test_entries_are_written_as_by_the_reference(
    tokens, heads, rank, rotated, block_size, has_norm, has_rope, interleaved, dtype, cache_dtype, triton_device
):
    plain, num_blocks = 3, tokens // block_size + 2
    random = torch.Generator().manual_seed(tokens)
    q_rope = torch.randn(tokens, heads, plain + rotated, generator=random).to(dtype)  # views of outputs, as in a model
    entries = torch.randn(tokens, rank + rotated, generator=random).to(dtype)
    cos, sin = ops.rotary.body(torch.arange(tokens) + 7, torch.rand(rotated // 2)) if has_rope else (None, None)
    norm = torch.randn(rank, generator=random).to(dtype) if has_norm else None
    slots = torch.randperm(num_blocks * block_size)[:tokens]

    def run(op, device: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.full((num_blocks, block_size, rank + rotated), -1.0, dtype=cache_dtype, device=device)
        parts = entries.to(device, dtype).split([rank, rotated], dim=1)
        weight = None if norm is None else norm.to(device, dtype)
        angles = (None if each is None else each.to(device) for each in (cos, sin))
        args = q_rope.to(device, dtype)[..., plain:], parts[0], parts[1].unsqueeze(1), *angles, weight
        out = op(*args, *cached(cache, slots.to(device)), eps=1e-5, interleaved=interleaved)
        return out.cpu(), cache.cpu()

    body = ops.norm_rope_write_latent.body
    truth = run(body, "cpu", torch.float32, torch.float32)
    expected = run(body, "cpu", dtype, cache_dtype)
    for ours, by_reference, true in zip(
        run(norm_rope_write_latent, triton_device, dtype, cache_dtype), expected, truth, strict=True
    ):
        assert_as_near(ours, by_reference, true)


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize(("rows", "queries"), [(1, 1), (16, 1), (17, 1), (32, 2), (33, 3), (128, 0), (100_000, 0)])
def test_queries_and_a_stage_of_entries_fit_in_shared_memory(rows, queries, shared, element_size):
    tiles = latent.choose_tiles(rows, 512 + 64, element_size, shared, queries)
    held = (tiles.rows + tiles.num_stages * tiles.positions) * (512 + 64) * element_size
    assert held <= shared or (element_size, tiles.num_stages) == (4, 1)


def test_tiles_have_fewer_rows_where_64_do_not_fit():
    assert latent.choose_tiles(128, 512 + 64, 2, 227 << 10) == (64, 64, 8, 2)
    assert latent.choose_tiles(128, 512 + 64, 2, 227 << 10, takes_64=False) == (32, 32, 8, 3)


COMPILE = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from atom.graph import Batch, PagedCache
from atom.kernels.triton.attention import latent
from atom.kernels.triton.gpu import Gpu

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **options):
        types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv",
                 torch.int32: "*i32", torch.int64: "*i64", int: "i32", float: "fp32"}
        kernel = self.kernel
        given = dict(zip(kernel.arg_names, args)) | {name: options.pop(name) for name in kernel.arg_names if name in options}
        is_constant = {p.name: p.is_constexpr or given[p.name] is None for p in kernel.params}
        signature = {name: "constexpr" if is_constant[name] else types[getattr(value, "dtype", type(value))]
                     for name, value in given.items()}
        constants = {name: value for name, value in given.items() if is_constant[name]}
        aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(signature.values()) if type[0] == "*"}
        made = triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
        assert made.metadata.shared <= 227 << 10, (kernel.__name__, made.metadata.shared)
        if kernel.__name__ == "_attend_kernel":
            print(*(int(size, 16) for size in re.findall(r"cp\\.async\\.c.*?(0x\\w+),", made.asm["ptx"])))

latent.find_gpu = lambda device: Gpu(132, 227 << 10, (9, 0))
for name in ("_attend_kernel", "_write_kernel", "_merge_kernel", "_absorb_kernel", "_merge_values_kernel",
             "_multiply_rest_kernel"):
    setattr(latent, name, Compile(getattr(latent, name)))

def batch(num_decodes):
    return Batch({"latent": torch.zeros(1, 8).int()}, {"latent": torch.zeros(2).long()}, torch.tensor([0, 2]).int(),
                 torch.tensor([2]).int(), num_decodes, 2)

for rank, rotated in ((12, 6), (64, 8)):
    q_nope, q_rope = torch.zeros(2, 3, 8 + rotated, dtype=torch.float16).split([8, rotated], 2)
    cache = PagedCache(torch.zeros(2, 16, rank + rotated, dtype=torch.float16), "latent")
    kv_b = torch.zeros(3 * 18, rank, dtype=torch.float16)
    latent.PagedLatentAttention()(q_nope, q_rope, kv_b, cache, batch(0), scale=1.0)

q_nope, q_rope = torch.zeros(2, 64, 256, dtype=torch.bfloat16).split([192, 64], 2)
wide, sinks = PagedCache(torch.zeros(8, 16, 1088, dtype=torch.bfloat16), "latent"), torch.zeros(64)
for num_decodes in (0, 1):
    latent.PagedLatentAttention()(q_nope, q_rope, torch.zeros(64 * 320, 1024, dtype=torch.bfloat16), wide,
                                  batch(num_decodes), None, None, sinks, scale=1.0, window=512)

scale, cache = torch.ones(1), PagedCache(torch.zeros(8, 16, 640).to(torch.float8_e4m3fn), "latent")
for num_decodes in (0, 1):
    q_nope, q_rope = torch.zeros(2, 128, 192, dtype=torch.bfloat16).split([128, 64], 2)
    kv_b, entry = torch.zeros(128 * 256, 512, dtype=torch.bfloat16), torch.zeros(2, 576, dtype=torch.bfloat16)
    latent.PagedLatentAttention()(q_nope, q_rope, kv_b, cache, batch(num_decodes), scale, scale=1.0)
latent._attend_absorbed(q_nope, q_rope, kv_b.view(128, 256, 512), cache.blocks, torch.zeros(1, 8).int(),
                        torch.tensor([0, 2]).int(), torch.tensor([2]).int(), torch.tensor([-1]).int(), scale, (None, 1.0, None),
                        torch.zeros(2, 128, 128, dtype=torch.bfloat16))
angle, norm = torch.zeros(2, 32), torch.ones(512, dtype=torch.bfloat16)
latent.norm_rope_write_latent(q_rope, entry[:, :512], entry[:, None, 512:], angle, angle, norm, cache, batch(0), scale)
"""


@pytest.mark.slow
def test_kernels_compile_and_copy_entries_by_as_many_bytes_as_each_is_aligned_to(tmp_path):
    done = run_program(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    widest = [max(map(int, line.split())) for line in done.stdout.splitlines()]
    # of entries of 36 bytes, of 144, of 2176 for a prompt and a decode with a window, and of 640 in fp8, for a prompt, for
    # a decode and for one next to expanded ones
    assert widest == [4, 16, 16, 16, 16, 16, 16]
