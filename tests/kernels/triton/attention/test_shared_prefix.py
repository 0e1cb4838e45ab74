"""Decodes that share a prefix, against the reference, which reads each sequence's own table."""

import pytest
import torch
from kernels.checks import assert_as_near, assert_equal
from kernels.paged import Case, change, make_case, move, reference, share
from torch import Tensor

from atom.graph.batch import SharedPrefixes
from atom.kernels.hopper import attention as hopper
from atom.kernels.triton.attention import shared_prefix
from atom.kernels.triton.attention.paged import PagedAttention, decode
from atom.kernels.triton.attention.shared_prefix import PrefixAttention, Tiling
from atom.kernels.triton.gpu import Gpu

SMALL_PARTS = decode.Parameters(tile_bytes=1024, programs_per_unit=4)  # sequences are cut into many
SMALL_TILES = Tiling(16, 32, 5, 4, 2)


def run(case: Case, device: str, attend: PagedAttention | None = None, **attributes) -> Tensor:
    return (attend or PagedAttention())(*move(case, device), **attributes).cpu()


@pytest.mark.sampled(6, gpu=2)
@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "block_size"),
    [(64, 1, 8, 16), (20, 2, 3, 64), (80, 3, 2, 1), (128, 2, 4, 16), (256, 1, 5, 32), (512, 1, 8, 16)],
)
def test_decodes_of_two_groups_and_of_none_equal_the_reference(triton_device, dim, kv_heads, group, block_size):
    case = make_case(
        [130, 40, 256, 300, 259, 400, 1], [(5, 21)], kv_heads=kv_heads, heads=kv_heads * group, dim=dim,
        block_size=block_size,
    )  # fmt: skip
    shared = share(case, [(256, [4, 3, 5]), (128, [0, 2])])
    expected = reference(shared, scale=0.1)
    for attend in (PagedAttention(), PagedAttention(SMALL_PARTS, sharing=SMALL_TILES)):
        assert_equal(run(shared, triton_device, attend, scale=0.1), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, True), (1.5, False)])
@pytest.mark.parametrize(("query_len", "heads"), [(1, 6), (3, 6), (4, 14)])
def test_sinks_caps_and_several_queries_of_each_sequence(triton_device, query_len, heads, softcap, has_sinks):
    lengths = [130, 300, query_len, 128 + query_len, 257]
    case = make_case([], [(query_len, length) for length in lengths] + [(9, 12)], kv_heads=2, heads=heads, dim=20,
                     has_sinks=has_sinks)  # fmt: skip
    case = change(case, num_decodes=len(lengths), query_len=query_len)
    shared = share(case, [(128, [1, 3, 4])])
    attributes = {"scale": 0.3, "softcap": softcap}
    expected = reference(shared, **attributes)
    for attend in (PagedAttention(), PagedAttention(SMALL_PARTS, sharing=SMALL_TILES)):
        assert_equal(run(shared, triton_device, attend, **attributes), expected)


def test_groups_of_any_number_and_size_follow_each_other(triton_device):
    """Also none at all, on the memory that others have left, and a sequence that has nothing but its prefix."""
    attend = PagedAttention(sharing=SMALL_TILES)
    lengths = [300, 257, 290, 128, 400, 385, 390, 260, 128]
    for groups in ([(256, [0, 1, 2, 7]), (384, [4, 5, 6])], [], [(128, list(range(9)))], [(128, [3, 8])],
                   [(256, [1, 0]), (256, [2, 7]), (384, [6, 4]), (128, [8, 3])]):  # fmt: skip
        shared = share(make_case(lengths, kv_heads=2, heads=6, dim=12), groups, spare=4 - len(groups))
        assert_equal(run(shared, triton_device, attend, scale=0.3), reference(shared, scale=0.3))
        for part in (each for parts in attend._attend_prefixes._memory.values() for each in parts[:2]):
            part.fill_(torch.nan)


@pytest.mark.parametrize(("kv_heads", "group", "dim", "query_len"), [(8, 8, 128, 1), (2, 8, 256, 1), (8, 4, 128, 8)])
def test_numbers_of_decodes_up_to_a_power_of_two_share_a_kernel(monkeypatch, kv_heads, group, dim, query_len):
    """A start compiles that of the power of two, and no other."""
    launches = set()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.add((grid, args[12:], *options.values()))

    monkeypatch.setattr(shared_prefix, "_attend_prefixes", Kernel())
    monkeypatch.setattr(shared_prefix, "find_gpu", lambda _: Gpu(132, 227 << 10, (9, 0)))
    cache = torch.empty(1, 16, 2, kv_heads, dim, device="meta", dtype=torch.bfloat16)
    attend = PrefixAttention()
    for num in (257, 320, 384, 500, 512):
        q = torch.empty(num * query_len, kv_heads * group, dim, device="meta", dtype=torch.bfloat16)
        numbers = torch.empty(num, device="meta", dtype=torch.int32)
        prefixes = SharedPrefixes("full", numbers, numbers, numbers[:17])
        attend(q, cache, numbers[None], prefixes, None, 0.1, None, query_len)
    assert len(launches) == len(attend._memory) == 1


def test_layers_with_windows_and_other_caches_do_not_take_prefixes(triton_device):
    case = share(make_case([130, 140], kv_heads=2, heads=4), [(128, [0, 1])])
    wrong = case.batch.prefixes._replace(lengths=torch.full((2,), 10**6).int())
    for prefixes, attributes in ((wrong, {"window": 20}), (wrong._replace(kind="window_20"), {})):
        case = change(case, prefixes=prefixes)
        expected = reference(case, scale=0.3, **attributes)
        assert_equal(run(case, triton_device, scale=0.3, **attributes), expected)


@pytest.mark.parametrize("has_scales", [False, True])
def test_a_cache_in_fp8(triton_device, has_scales):
    case = make_case([130, 300, 40, 280], [(3, 5)], kv_heads=2, heads=6, dim=16)
    scales = torch.tensor([0.7, 1.3]) if has_scales else torch.ones(2)
    entries = (case.cache.blocks / scales.view(2, 1, 1)).to(torch.float8_e4m3fn)
    known = share(change(case, entries.float() * scales.view(2, 1, 1)), [(256, [1, 3])])
    shared = change(known, share(change(case, entries), [(256, [1, 3])]).cache.blocks)
    k_scale, v_scale = scales.to(triton_device).split(1) if has_scales else (None, None)
    out = run(shared, triton_device, k_scale=k_scale, v_scale=v_scale, scale=0.3)
    assert_equal(out, reference(known, scale=0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "sessions"),
    [(8, 4, 128, 33), (2, 8, 256, 20), (1, 7, 64, 9), (8, 8, 128, 40), (3, 5, 80, 3)],
)
def test_bf16_is_as_near_as_without_groups(kv_heads, group, dim, sessions, cache_dtype):
    lengths = [700 + 37 * row % 900 for row in range(sessions)]
    case = make_case(lengths, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, dtype=torch.bfloat16,
                     cache_dtype=cache_dtype)  # fmt: skip
    half = sessions // 2
    shared = share(case, [(640, list(range(half))), (512, list(range(half, sessions - 1)))])
    plain = change(shared, prefixes=None)
    truth = reference(plain, wide=True, scale=dim**-0.5)
    for attention in (PagedAttention, hopper.PagedAttention):
        attend = attention()
        ours, without = (run(each, "cuda", attend, scale=dim**-0.5) for each in (shared, plain))
        assert_as_near(ours, without, truth)
