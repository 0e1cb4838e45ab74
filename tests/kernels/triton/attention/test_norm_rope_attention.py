import math
from typing import NamedTuple

import pytest
import torch
from kernels.checks import assert_as_near, assert_equal, relative_error
from kernels.paged import KIND, change, move, share, widen
from kernels.paged import make_case as make_attended
from torch import Tensor

from atom.graph import Batch, PagedCache, ops
from atom.kernels.triton.attention import paged
from atom.kernels.triton.attention.paged import NormRopeAttention, decode
from atom.kernels.triton.attention.rope import norm_rope_write
from atom.kernels.triton.linear.linear import Linears

SMALL_PARTS = decode.Parameters(tile_bytes=1024, programs_per_unit=4)  # sequences are cut into many


class Case(NamedTuple):
    """The arguments of norm_rope_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cache: PagedCache
    batch: Batch
    sinks: Tensor | None


def make_case(decodes: list[int], prefills: list[tuple[int, int]] = (), *, kv_heads: int = 1, heads: int = 1, dim: int = 8,
              turned: int = 0, has_norm: bool = True, dtype: torch.dtype = torch.float32, **others) -> Case:  # fmt: skip
    """As there; `turned` dims of `dim` turn. The entries of this step's own tokens are not in the cache: NaN."""
    q, cache, batch, sinks = make_attended(
        decodes, prefills, kv_heads=kv_heads, heads=heads, dim=dim, dtype=dtype, **others
    )
    random = torch.Generator().manual_seed(1)
    counts = batch.starts.diff()
    row_of = torch.repeat_interleave(torch.arange(len(counts)), counts)
    positions = torch.arange(len(q)) - batch.starts[row_of + 1] + batch.lengths[row_of]
    block_size = cache.blocks.shape[1]
    slots = batch.tables[KIND][row_of, positions // block_size].long() * block_size + positions % block_size
    cache.blocks.flatten(0, 1)[slots] = math.nan
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = torch.randn(len(positions), sum(sizes), generator=random).to(dtype)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split(sizes, dim=1))
    cos, sin = ops.rotary.body(positions, torch.rand(turned // 2, generator=random)) if turned else (None, None)
    norms = (1 + torch.randn(2, dim, generator=random)).to(dtype) if has_norm else (None, None)
    return Case(q, k, v, cos, sin, *norms, cache, batch._replace(slot_mappings={KIND: slots}), sinks)


def copy(case: Case, device: str) -> Case:
    """There, and with a cache of its own."""
    return move(change(case, case.cache.blocks.clone()), device)  # type: ignore[no-any-return]


def run(case: Case, device: str, attend: NormRopeAttention | None = None, **attributes) -> tuple[Tensor, Tensor]:
    """Its result, and the cache after it."""
    own = copy(case, device)
    return (attend or NormRopeAttention())(*own, **attributes).cpu(), own.cache.blocks.cpu()


def reference(case: Case, *, wide: bool = False, **attributes) -> tuple[Tensor, Tensor]:
    """The op's own body, which reads what it masks and so needs a number there; `wide`: on float32, the truth."""
    own = widen(case) if wide else change(case, case.cache.blocks.nan_to_num())
    return ops.norm_rope_attention.body(*own, **attributes), own.cache.blocks


def assert_right(case: Case, device: str, attend: NormRopeAttention | None = None, **attributes) -> None:
    (out, cache), (expected, expected_cache) = run(case, device, attend, **attributes), reference(case, **attributes)
    assert_equal(out, expected)
    slots, before = case.batch.slot_mappings[KIND], case.cache.blocks
    assert_equal(cache.flatten(0, 1)[slots], expected_cache.flatten(0, 1)[slots], 1e-6)
    cache.flatten(0, 1)[slots] = math.nan
    assert torch.equal(cache.isnan(), before.isnan())
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dim", "turned", "kv_heads", "group", "block_size"),
    [(8, 8, 1, 1, 16), (20, 14, 2, 3, 3), (64, 64, 1, 8, 16), (80, 80, 3, 2, 1), (96, 24, 1, 1, 32),
     (128, 128, 2, 4, 16), (256, 64, 1, 5, 16), (512, 512, 1, 8, 16), (16, 16, 1, 16, 16), (16, 16, 1, 33, 16)],
)  # fmt: skip
def test_decodes_and_prefills_equal_the_reference(triton_device, dim, turned, kv_heads, group, block_size):
    sizes = {"kv_heads": kv_heads, "heads": kv_heads * group, "dim": dim, "turned": turned, "block_size": block_size}
    attributes = {"scale": 0.1, "eps": 1e-3}
    assert_right(make_case([1, 15, 70], **sizes), triton_device, **attributes)
    assert_right(make_case([2, 33], [(1, 1), (5, 21)], **sizes), triton_device, **attributes)


@pytest.mark.parametrize("query_len", [2, 4])
def test_several_queries_of_each_sequence_see_those_before_them(triton_device, query_len):
    lengths = [query_len, 17, 33, 70]
    case = make_case([], [(query_len, length) for length in lengths], kv_heads=2, heads=6, dim=20, turned=20)
    case = case._replace(batch=case.batch._replace(num_decodes=len(lengths), query_len=query_len))
    for attend in (NormRopeAttention(), NormRopeAttention(SMALL_PARTS)):
        assert_right(case, triton_device, attend, scale=0.3, eps=1e-6)


def test_queries_of_decodes_that_share_a_prefix_are_normed_and_rotated(triton_device):
    case = make_case([130, 20, 140, 129], [(3, 9)], kv_heads=2, heads=6, dim=20, turned=14, has_sinks=True)
    assert_right(share(case, [(128, [2, 0, 3])]), triton_device, scale=0.3, eps=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 37])
def test_windows_sinks_and_soft_caps_equal_the_reference(triton_device, window, has_sinks, softcap):
    case = make_case([3, 1, 70], kv_heads=2, heads=6, dim=20, turned=20, window=window, has_sinks=has_sinks)
    assert_right(case, triton_device, scale=0.3, eps=1e-6, window=window, softcap=softcap)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("turned", [0, 8, 20])
def test_norms_and_rotations_equal_the_reference(triton_device, turned, has_norm, interleaved):
    case = make_case([3, 40], [(2, 9)], kv_heads=2, heads=4, dim=20, turned=turned, has_norm=has_norm)
    assert_right(case, triton_device, scale=0.3, eps=1e-3, interleaved=interleaved)


@pytest.mark.parametrize("window", [None, 17])
def test_lengths_around_the_ends_of_blocks_and_tiles(triton_device, window):
    decodes = [1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 127, 128, 129, 130]
    case = make_case(decodes, heads=4, dim=16, turned=16, window=window)
    assert_right(case, triton_device, scale=0.3, eps=1e-6, window=window)


@pytest.mark.sampled(0, gpu=2)
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (50, 1.5, True)])
@pytest.mark.parametrize("lengths", [[70, 1, 40], [18], [16, 17, 16, 34]])
def test_sequences_cut_in_parts_equal_the_reference_each_time(triton_device, lengths, window, softcap, has_sinks):
    attend = NormRopeAttention(SMALL_PARTS)
    case = make_case(lengths, kv_heads=2, heads=6, dim=12, turned=12, block_size=3, window=window, has_sinks=has_sinks)
    attributes = {"scale": 0.3, "eps": 1e-6, "window": window, "softcap": softcap}
    assert_right(case, triton_device, attend, **attributes)
    ((_, stats, tickets),) = attend._decode._memory.values()
    stats.fill_(math.nan)
    assert_right(case, triton_device, attend, **attributes)
    assert stats.isfinite().all(dim=-1).sum() >= 2 * 6  # every head of some sequence was in parts
    assert not tickets.any()


@pytest.mark.parametrize("query_len", [2, 4])
def test_leading_sequences_of_several_queries_each_are_attended_as_prompts(triton_device, query_len):
    prefills = [(query_len, length) for length in (20, 33, 70)] + [(9, 12)]
    case = make_case([], prefills, kv_heads=2, heads=6, turned=8)
    assert_right(change(case, num_decodes=3, query_len=query_len), triton_device, scale=0.3, eps=1e-6)


@pytest.mark.sampled(0, gpu=1)
def test_more_sequences_than_the_smallest_bucket_has(triton_device):
    case = make_case([1 + row % 20 for row in range(33)], heads=3, dim=16, turned=16)
    assert_right(case, triton_device, scale=0.3, eps=1e-6)


def test_a_step_of_decodes_is_one_launch(triton_device, monkeypatch):
    monkeypatch.setattr(paged, "norm_rope_write", None)
    monkeypatch.setattr(paged.prefill, "prefill", None)
    assert_right(make_case([20, 1, 40], heads=2), triton_device, scale=0.3)
    with pytest.raises(TypeError, match="not callable"):
        run(make_case([20], [(1, 1)], heads=2), triton_device, scale=0.3)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_sequence_without_positions_gives_zeros_and_writes_its_key(triton_device, has_sinks):
    case = make_case([20, 1, 40], kv_heads=2, heads=4, turned=8, has_sinks=has_sinks)
    expected, expected_cache = reference(case, scale=0.3, eps=1e-6)
    case.batch.lengths[1] = 0
    case.v[1] = math.inf
    out, cache = run(case, triton_device, scale=0.3, eps=1e-6)
    assert not out[1].any()
    assert_equal(out[[0, 2]], expected[[0, 2]])
    keys, expected_keys = (x.flatten(0, 1)[case.batch.slot_mappings[KIND], 0] for x in (cache, expected_cache))
    assert_equal(keys, expected_keys, 1e-6)


def test_rows_that_pad_a_batch_disturb_nobody(triton_device):
    """Several rows of one position in block 0, as `decode_inputs` makes them."""
    case = make_case([20, 1, 33, 1, 1], kv_heads=2, heads=4, turned=8)
    expected, _ = reference(case, scale=0.3, eps=1e-6)
    case.batch.tables[KIND][[1, 3, 4]], case.batch.slot_mappings[KIND][[1, 3, 4]] = 0, 0
    out, _ = run(case, triton_device, scale=0.3, eps=1e-6)
    assert_equal(out, expected)


def test_rows_of_inputs_may_lie_apart_and_begin_anywhere(triton_device):
    case = make_case([40, 5], kv_heads=2, heads=4, dim=16, turned=16)
    expected, _ = reference(case, scale=0.3, eps=1e-6)
    apart = copy(case, triton_device)
    table = torch.nn.functional.pad(apart.batch.tables[KIND], (1, 5))[:, 1:-2]
    lengths, slots = (
        torch.nn.functional.pad(x, (1, 0))[1:] for x in (apart.batch.lengths, apart.batch.slot_mappings[KIND])
    )
    q, k, v = (torch.cat((x, x), dim=1)[:, : x.shape[1]] for x in apart[:3])
    apart = change(apart, q=q, k=k, v=v, table=table, lengths=lengths, slots=slots)
    assert_equal(NormRopeAttention()(*apart, scale=0.3, eps=1e-6).cpu(), expected)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float16,) * 2, (torch.float32, torch.float16)])
def test_half_precision_is_nearly_as_near_to_the_truth_as_the_reference(triton_device, dtype, cache_dtype):
    case = make_case([20, 1, 70], kv_heads=2, heads=6, dim=32, turned=32, dtype=dtype, cache_dtype=cache_dtype)
    attributes = {"scale": 0.2, "eps": 1e-6}
    truth, true_cache = reference(case, wide=True, **attributes)
    plain, plain_cache = reference(case, **attributes)
    out, cache = run(case, triton_device, NormRopeAttention(SMALL_PARTS), **attributes)
    assert out.dtype == dtype
    assert relative_error(out, truth) <= 1.5 * relative_error(plain, truth) + 1e-6
    assert_as_near(*(x.flatten(0, 1)[case.batch.slot_mappings[KIND]] for x in (cache, plain_cache, true_cache)))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
def test_a_sequence_of_one_token_gives_the_value_as_the_cache_keeps_it(triton_device, cache_dtype):
    case = make_case([1, 1], kv_heads=2, heads=6, turned=8, cache_dtype=cache_dtype)
    out, _ = run(case, triton_device, scale=0.3, eps=1e-6)
    assert torch.equal(out, case.v.to(cache_dtype).float().repeat_interleave(3, dim=1))


def test_the_newest_key_counts_as_the_cache_keeps_it(triton_device):
    case = make_case([2, 5], kv_heads=2, heads=6, has_norm=False, cache_dtype=torch.float16)
    out, _ = run(case, triton_device, scale=3.0)
    expected, _ = reference(case, scale=3.0)
    assert_equal(out, expected, 1e-6)
    finer, _ = reference(change(case, case.cache.blocks.float()), scale=3.0)
    assert (finer - expected).abs().max() > 1e-5 * expected.abs().max()  # than the cache is


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("dim", "turned", "kv_heads", "group", "window", "softcap"),
        [(128, 128, 8, 4, None, None), (128, 128, 8, 2, None, None), (64, 64, 8, 8, 128, None),
         (256, 128, 4, 2, 500, 30.0), (80, 32, 3, 3, None, None), (96, 96, 4, 1, None, None),
         (128, 64, 2, 16, None, None), (128, 0, 1, 48, None, None)],
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("prefills", [[], [(300, 300), (65, 700)]])
    def test_sizes_of_real_models_equal_the_reference(
        self, dtype, dim, turned, kv_heads, group, window, softcap, prefills
    ):
        case = make_case(
            [1, 16, 17, 700, 1999], prefills, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, turned=turned,
            window=window, dtype=dtype, has_sinks=window is not None,
        )  # fmt: skip
        case = copy(case, "cuda")
        attributes = {"scale": dim**-0.5, "eps": 1e-6, "window": window, "softcap": softcap}
        (truth, true_cache), (plain, plain_cache) = (
            reference(case, wide=True, **attributes),
            reference(case, **attributes),
        )
        for attend in (NormRopeAttention(), NormRopeAttention(SMALL_PARTS)):
            own = copy(case, "cuda")
            out = attend(*own, **attributes)
            if dtype is torch.float32:
                assert_as_near(out, plain, truth)
            else:
                assert relative_error(out, truth) <= 2 * relative_error(plain, truth)
            assert_as_near(
                *(x.flatten(0, 1)[case.batch.slot_mappings[KIND]] for x in (own.cache.blocks, plain_cache, true_cache))
            )

    def test_blocks_beyond_two_to_the_31_elements_are_found(self):
        sizes = {"kv_heads": 8, "heads": 16, "dim": 128, "turned": 128, "dtype": torch.float16}
        case = copy(make_case([40, 33], **sizes), "cuda")
        near, slots = case.cache.blocks, case.batch.slot_mappings[KIND]
        num_far = 2**31 // near[0].numel() + 1
        blocks = torch.full((num_far + len(near), *near.shape[1:]), math.nan, device="cuda").half()
        blocks[num_far:] = near
        far_slots = slots + num_far * near.shape[1]
        far = change(case, blocks, table=case.batch.tables[KIND] + num_far, slots=far_slots)
        attributes = {"scale": 0.1, "eps": 1e-6}
        assert torch.equal(NormRopeAttention()(*far, **attributes), NormRopeAttention()(*case, **attributes))
        assert torch.equal(blocks.flatten(0, 1)[far_slots], near.flatten(0, 1)[slots])

    @pytest.mark.parametrize("decodes", [[300], [600] * 4, [1, 900, 17, 1100] * 16])
    def test_a_captured_chain_of_layers_waits_for_what_the_kernel_ahead_gives(self, decodes):
        """Each layer's q, k and v come from the layer before; every replay gives what single kernels, one by one, do."""
        random = torch.Generator().manual_seed(2)
        case = make_case(decodes, kv_heads=8, heads=16, dim=128, turned=128, dtype=torch.bfloat16)
        case = copy(case, "cuda")
        num, sizes = len(decodes), [16 * 128, 8 * 128, 8 * 128]
        starts = torch.randn(2, num, 1024, generator=random).bfloat16().cuda()  # in turns: nothing old is right
        start = starts[0].clone()
        into, back = (
            (torch.randn(4, out, inner, generator=random) / inner**0.5).bfloat16().cuda()
            for out, inner in ((sum(sizes), 1024), (1024, sizes[0]))
        )
        linear = Linears().linear
        attend, caches = NormRopeAttention(), case.cache.blocks.nan_to_num().repeat(4, 1, 1, 1, 1, 1)
        slots = case.batch.slot_mappings[KIND]
        plain_attend, plain_caches = paged.PagedAttention(), caches.clone()

        def forward(is_fused: bool) -> Tensor:
            x = start
            for layer in range(4):
                qkv = linear(x, into[layer])
                q, k, v = (part.unflatten(1, (-1, 128)) for part in qkv.split(sizes, dim=1))
                if is_fused:
                    args = change(case, caches[layer], q=q, k=k, v=v)
                    out = attend(*args, scale=0.1, eps=1e-6)
                else:
                    torch.cuda.synchronize()
                    cached = PagedCache(plain_caches[layer], KIND)
                    q = norm_rope_write(q, k, v, *case[3:7], cached, case.batch, eps=1e-6)
                    out = plain_attend(q, cached, case.batch, scale=0.1)
                    torch.cuda.synchronize()
                x = linear(out.flatten(1), back[layer])
            return x

        expected = []
        for each in starts:
            start.copy_(each)
            expected.append((forward(False), plain_caches.flatten(1, 2)[:, slots]))
        forward(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(True)
        for turn in range(50):
            start.copy_(starts[turn % 2])
            out.zero_()
            caches.flatten(1, 2)[:, slots] = math.nan
            graph.replay()
            found = out, caches.flatten(1, 2)[:, slots]
            for each, right in zip(found, expected[turn % 2], strict=True):
                assert relative_error(each, right) <= 5e-2  # roundings grow from layer to layer
            assert max(map(relative_error, out, expected[turn % 2][0])) <= 0.1

    def test_a_captured_launch_follows_lengths_and_tables_that_change(self):
        attend = NormRopeAttention()
        case = copy(make_case([700, 20, 300], kv_heads=2, heads=8, dim=64, turned=64), "cuda")
        case = change(case, case.cache.blocks.nan_to_num())
        batch = case.batch
        attributes = {"scale": 0.1, "eps": 1e-6}
        attend(*case, **attributes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(*case, **attributes)
        for lengths in ([700, 20, 300], [1, 1, 1], [650, 3, 16], [33, 20, 300]):
            new = torch.tensor(lengths, device="cuda")
            batch.lengths.copy_(new)
            blocks = batch.tables[KIND].gather(1, (new - 1).unsqueeze(1) // 16).squeeze(1).long()
            batch.slot_mappings[KIND].copy_(blocks * 16 + (new - 1) % 16)
            expected, _ = reference(case, **attributes)
            graph.replay()
            assert_equal(out, expected)
