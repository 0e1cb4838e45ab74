import math

import pytest
import torch
from kernels.checks import assert_as_near, assert_equal, relative_error
from kernels.paged import KIND, Case, change, image_ends, make_case, move, reference

from atom.kernels.triton.attention.context import Context
from atom.kernels.triton.attention.paged import PagedAttention, decode
from atom.kernels.triton.gpu import Gpu

SMALL_PARTS = decode.Parameters(tile_bytes=1024, programs_per_unit=4)  # sequences are cut into many


def run(case: Case, device: str, attend: PagedAttention | None = None, **attributes) -> torch.Tensor:
    return (attend or PagedAttention())(*move(case, device), **attributes).cpu()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dim", "kv_heads", "group", "block_size"),
    [
        (8, 1, 1, 16),
        (20, 2, 3, 3),
        (64, 1, 8, 16),
        (80, 3, 2, 1),
        (96, 1, 1, 32),
        (128, 2, 4, 16),
        (256, 1, 5, 16),
        (512, 1, 8, 16),
    ],
)
def test_decodes_and_prefills_equal_the_reference(triton_device, dim, kv_heads, group, block_size):
    case = make_case(
        [1, 15, 70], [(1, 1), (5, 21), (40, 40)], kv_heads=kv_heads, heads=kv_heads * group, dim=dim,
        block_size=block_size,
    )  # fmt: skip
    assert_equal(run(case, triton_device, scale=0.1), reference(case, scale=0.1))


@pytest.mark.sampled(6, gpu=2)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 37])
def test_windows_sinks_and_soft_caps_equal_the_reference(triton_device, window, has_sinks, softcap):
    case = make_case([3, 70], [(25, 50)], kv_heads=2, heads=6, dim=20, window=window, has_sinks=has_sinks)
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    assert_equal(run(case, triton_device, **attributes), reference(case, **attributes))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(
    ("window", "chunked", "has_slopes"), [(None, False, True), (16, True, False), (37, True, True), (1, True, False)]
)
def test_chunks_and_slopes_equal_the_reference(triton_device, window, chunked, has_slopes, query_len):
    case = make_case(
        [], [(3, 3), (3, 70), (3, 49), (25, 50), (80, 90)], kv_heads=2, heads=6, dim=20, block_size=3, window=window
    )
    if query_len == 3:
        case = change(case, num_decodes=3, query_len=3)
    slopes = torch.linspace(0.01, 0.3, 6) if has_slopes else None
    expected = reference(case, scale=0.3, window=window, chunked=chunked, slopes=slopes)
    slopes = None if slopes is None else slopes.to(triton_device)
    for attend in (PagedAttention(), PagedAttention(SMALL_PARTS)):
        attributes = {"scale": 0.3, "window": window, "chunked": chunked, "slopes": slopes}
        assert_equal(run(case, triton_device, attend, **attributes), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (20, 1.5, True)])
def test_queries_see_up_to_their_ends(triton_device, window, softcap, has_sinks, query_len):
    case = make_case(
        [], [(3, 3), (3, 9), (60, 70), (5, 21)], kv_heads=2, heads=6, dim=20, block_size=3, window=window,
        has_sinks=has_sinks,
    )  # fmt: skip
    if query_len == 3:
        case = change(case, num_decodes=2, query_len=3)
    ends = image_ends(case, [(2, 12, 40), (2, 50, 52), (3, 16, 20)])
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    expected = reference(case, **attributes, ends=ends)
    assert not torch.equal(expected, reference(case, **attributes))
    assert_equal(run(case, triton_device, ends=ends.to(triton_device), **attributes), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (16, True)])
def test_decodes_see_their_chunk_and_fall_by_slopes(triton_device, window, chunked):
    case = make_case([1, 16, 17, 70, 33], kv_heads=2, heads=6, dim=20, window=window)
    attributes = {"scale": 0.3, "window": window, "chunked": chunked}
    slopes = torch.linspace(0.01, 0.3, 6)
    expected = reference(case, **attributes, slopes=slopes)
    for attend in (PagedAttention(), PagedAttention(SMALL_PARTS)):
        assert_equal(run(case, triton_device, attend, slopes=slopes.to(triton_device), **attributes), expected)


@pytest.mark.sampled(0, gpu=1)
@pytest.mark.parametrize("num_spare", [0, 5])
@pytest.mark.parametrize(("room", "num_there"), [(18, 4), (7, 2), (1, 0)])  # blocks; of 5, 2, 10 and 1
def test_few_programs_attend_prompts_over_fp8_that_are_not_unpacked(
    triton_device, room, num_there, num_spare, monkeypatch
):
    """Instead of Hopper's kernel, the reference attends those that are."""
    from atom.kernels.hopper import attention
    from atom.kernels.hopper import prefill_attention as prefill_hopper

    case = make_case([3, 40], [(70, 70), (5, 21), (140, 150), (1, 9)], kv_heads=2, heads=6, dim=12, has_sinks=True)
    scales = torch.tensor([0.7, 1.3])
    entries = (case.cache.blocks / scales.view(2, 1, 1)).to(torch.float8_e4m3fn)
    expected = reference(change(case, entries.float() * scales.view(2, 1, 1)), scale=0.3)
    plans = []

    def prefill_unpacked(*args):
        (starts, out), plan = (args[3], args[9]), args[-1]
        plans.append((plan[2:6] >= 0).tolist())
        for each in range(2, 2 + num_there):
            own = slice(int(starts[each]), int(starts[each + 1]))
            out[own] = expected[own].to(out.device)
        out[len(expected) :] = 0

    monkeypatch.setattr(prefill_hopper, "prefill", prefill_unpacked)
    monkeypatch.setattr(prefill_hopper, "suits", lambda *args: True)
    attend = attention.PagedAttention(Context(room * 16 * 2 * 2 * 12 * 4))
    padded = change(case, entries, q=torch.cat((case.q, case.q[:1].expand(num_spare, -1, -1))))
    out = attend(*move(padded, triton_device), *scales.to(triton_device).split(1), scale=0.3).cpu()
    assert_equal(out[: len(expected)], expected)
    assert not out[len(expected) :].any()
    assert plans == [[each < num_there for each in range(4)]]


@pytest.mark.parametrize("window", [None, 17])
def test_lengths_around_the_ends_of_blocks_and_tiles(triton_device, window):
    decodes = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129]
    prefills = [(1, 16), (1, 17), (7, 15), (8, 16), (9, 17), (16, 16), (16, 31), (15, 33)]
    case = make_case(decodes, prefills, heads=4, dim=16, window=window)
    assert_equal(run(case, triton_device, scale=0.3, window=window), reference(case, scale=0.3, window=window))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (50, 1.5, True)])
@pytest.mark.parametrize("lengths", [[70, 1, 40], [17], [15, 16, 16, 33]])
def test_sequences_cut_in_parts_equal_the_reference_each_time(triton_device, lengths, window, softcap, has_sinks):
    attend = PagedAttention(SMALL_PARTS)
    case = make_case(lengths, kv_heads=2, heads=6, dim=12, block_size=3, window=window, has_sinks=has_sinks)
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    expected = reference(case, **attributes)
    assert_equal(run(case, triton_device, attend, **attributes), expected)
    ((_, stats, tickets),) = attend._decode._memory.values()
    stats.fill_(math.nan)
    assert_equal(run(case, triton_device, attend, **attributes), expected)
    assert stats.isfinite().all(dim=-1).sum() >= 2 * 6  # every head of some sequence was in parts
    assert not tickets.any()


@pytest.mark.sampled(0, gpu=1)
def test_a_sequence_may_be_in_more_parts_than_are_merged_at_a_time(triton_device):
    attend = PagedAttention(SMALL_PARTS._replace(programs_per_unit=9))
    case = make_case([16 * 18], heads=24, dim=128, has_sinks=True)  # so wide that parts are merged one by one
    run(case, triton_device, attend, scale=0.3)
    ((_, stats, _),) = attend._decode._memory.values()
    stats.fill_(math.nan)
    assert_equal(run(case, triton_device, attend, scale=0.3), reference(case, scale=0.3))
    assert stats.isfinite().all(dim=-1).any(dim=-1).any(dim=-1).sum() == 9  # programs


def test_how_the_work_is_cut_changes_only_roundings(triton_device):
    case = make_case([60, 33], kv_heads=2, heads=4, dim=16)
    together = run(case, triton_device, PagedAttention(SMALL_PARTS), scale=0.3)
    for row in range(2):
        single = change(
            case,
            q=case.q[row : row + 1], table=case.batch.tables[KIND][row : row + 1], lengths=case.batch.lengths[row : row + 1],
            starts=case.batch.starts[:2], num_decodes=1,
        )  # fmt: skip
        assert_equal(run(single, triton_device, PagedAttention(SMALL_PARTS), scale=0.3), together[row : row + 1])


@pytest.mark.parametrize(("foreign", "softcap"), [(math.nan, None), (math.nan, 1.5), (math.inf, None), (1e30, 1.5)])
def test_what_lies_in_memory_of_others_changes_nothing(triton_device, foreign, softcap):
    def attended(foreign: float) -> torch.Tensor:
        case = make_case([3, 40], [(5, 21), (32, 33)], dim=16, block_size=32, window=30, foreign=foreign)
        stale = torch.full_like(case.cache.blocks[:1], foreign)
        table = torch.where(
            case.batch.tables[KIND] == 0, len(case.cache.blocks), case.batch.tables[KIND]
        )  # before the window, after the end
        case = change(case, blocks=torch.cat((case.cache.blocks, stale)), table=table.int())
        return run(case, triton_device, scale=0.3, window=30, softcap=softcap)

    assert torch.equal(attended(foreign), attended(0.0))
    assert attended(foreign).isfinite().all()


def test_a_sink_takes_from_nothing_to_all(triton_device):
    case = make_case([20, 1], [(5, 9)], kv_heads=2, heads=4)
    without = run(case, triton_device, scale=0.3)
    sinks = torch.tensor([-math.inf, -200.0, 200.0, math.inf])
    out = run(change(case, sinks=sinks), triton_device, scale=0.3)
    assert_equal(out[:, :2], without[:, :2])
    assert not out[:, 2:].any()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_sequence_without_positions_and_a_token_without_sequence_give_zeros(triton_device, has_sinks):
    case = make_case([20, 1, 40], [(5, 9), (1, 1)], kv_heads=2, heads=4, has_sinks=has_sinks)
    expected = reference(case, scale=0.3)
    padded = change(case, q=torch.cat((case.q, case.q[:2])), lengths=case.batch.lengths.clone())
    padded.batch.lengths[1] = padded.batch.lengths[4] = 0
    out = run(padded, triton_device, scale=0.3)
    assert not out[1].any()
    assert not out[-3:].any()
    assert_equal(out[[0, 2, 3, 7]], expected[[0, 2, 3, 7]])


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(triton_device):
    whole = make_case(prefills=[(90, 90)], kv_heads=2, heads=6, has_sinks=True)
    expected = reference(whole, scale=0.3, window=40)
    for first, last in [(0, 1), (1, 33), (33, 90)]:
        chunk = change(
            whole, q=whole.q[first:last], starts=torch.tensor([0, last - first]), lengths=torch.tensor([last])
        )
        assert_equal(run(chunk, triton_device, scale=0.3, window=40), expected[first:last])


@pytest.mark.sampled(12, gpu=2)
@pytest.mark.parametrize("parameters", [None, SMALL_PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (17, 1.5, True), (2, None, False)])
@pytest.mark.parametrize(("query_len", "heads"), [(2, 6), (4, 2), (4, 12), (7, 14)])
def test_sequences_of_several_queries_each(triton_device, query_len, heads, window, softcap, has_sinks, parameters):
    lengths = [query_len, query_len + 1, 16, 20, 33, 70, 129]
    case = make_case([], [(query_len, length) for length in lengths] + [(9, 12)], kv_heads=2, heads=heads, dim=20,
                     window=window, has_sinks=has_sinks)  # fmt: skip
    several = change(case, num_decodes=len(lengths), query_len=query_len)
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    out = run(several, triton_device, PagedAttention(parameters), **attributes)
    assert_equal(out, reference(case, **attributes))


@pytest.mark.sampled(0, gpu=1)
def test_more_sequences_than_the_smallest_bucket_has(triton_device):
    case = make_case([1 + row % 20 for row in range(33)], [(1, 1)] * 32, dim=16)
    assert_equal(run(case, triton_device, scale=0.3), reference(case, scale=0.3))


def test_rows_of_inputs_may_lie_apart_and_begin_anywhere(triton_device):
    case = make_case([40, 5], [(6, 30)], kv_heads=2, heads=4, dim=16)
    apart = move(case, triton_device)
    q = torch.cat((apart.q, apart.q), dim=1)[:, :4]
    table = torch.nn.functional.pad(apart.batch.tables[KIND], (1, 5))[:, 1:-2]
    starts, lengths = (torch.nn.functional.pad(x, (1, 0))[1:] for x in (apart.batch.starts, apart.batch.lengths))
    apart = change(apart, q=q, table=table, starts=starts, lengths=lengths)
    assert_equal(run(apart, triton_device, scale=0.3), reference(case, scale=0.3))


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float16,) * 2, (torch.float32, torch.float16)])
def test_half_precision_is_nearly_as_near_to_the_truth_as_the_reference(triton_device, dtype, cache_dtype):
    case = make_case([20, 70], [(7, 40)], kv_heads=2, heads=6, dim=32, dtype=dtype, cache_dtype=cache_dtype)
    truth = reference(case, scale=0.2, wide=True)
    out = run(case, triton_device, PagedAttention(SMALL_PARTS), scale=0.2)
    assert out.dtype == dtype
    assert relative_error(out, truth) <= 1.5 * relative_error(reference(case, scale=0.2), truth) + 1e-6


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("dim", "kv_heads", "group", "window", "softcap"),
        [(128, 8, 4, None, None), (128, 8, 2, None, None), (64, 8, 8, 128, None), (256, 4, 2, 500, 30.0),
         (80, 3, 3, None, None), (96, 4, 1, None, None), (128, 2, 16, None, None), (128, 1, 48, None, None)],
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_sizes_of_real_models_equal_the_reference(self, dtype, dim, kv_heads, group, window, softcap):
        case = move(
            make_case(
                [1, 16, 17, 700, 1999], [(1, 1), (300, 300), (65, 700)], kv_heads=kv_heads, heads=kv_heads * group,
                dim=dim, window=window, dtype=dtype, has_sinks=window is not None,
            ),
            "cuda",
        )  # fmt: skip
        attributes = {"scale": dim**-0.5, "window": window, "softcap": softcap}
        truth, plain = reference(case, wide=True, **attributes), reference(case, **attributes)
        for attend in (PagedAttention(), PagedAttention(SMALL_PARTS)):
            out = attend(*case, **attributes)
            if dtype is torch.float32:
                assert_as_near(out, plain, truth)
            else:
                assert relative_error(out, truth) <= 2 * relative_error(plain, truth)

    def test_blocks_beyond_two_to_the_31_elements_are_found(self):
        case = move(make_case([40, 33], [(20, 50)], kv_heads=8, heads=16, dim=128, dtype=torch.float16), "cuda")
        num_far = 2**31 // case.cache.blocks[0].numel() + 1
        cache = torch.full(
            (num_far + len(case.cache.blocks), *case.cache.blocks.shape[1:]), math.nan, device="cuda"
        ).half()
        cache[num_far:] = case.cache.blocks
        far = change(case, blocks=cache, table=case.batch.tables[KIND] + num_far)
        assert torch.equal(PagedAttention()(*far, scale=0.1), PagedAttention()(*case, scale=0.1))

    def test_a_captured_launch_follows_lengths_and_tables_that_change(self):
        attend, first = PagedAttention(), move(make_case([700, 20, 300], kv_heads=2, heads=8, dim=64), "cuda")
        table = torch.nn.functional.pad(first.batch.tables[KIND], (0, 60))
        first = change(first, table=table)
        attend(*first, scale=0.1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(*first, scale=0.1)
        for lengths in ([700, 20, 300], [1, 1, 1], [650, 3, 16], [33, 20, 300]):
            first.batch.lengths.copy_(torch.tensor(lengths))
            graph.replay()
            assert_equal(out, reference(first, scale=0.1))


def test_many_sequences_have_smaller_programs_where_16_bits_are_multiplied_with_much_memory():
    large, small = Gpu(132, 227 << 10, (9, 0)), Gpu(128, 64 << 10, (0, 0))
    few, many = decode.choose(64, 128, 2, 2, large), decode.choose(65, 128, 2, 2, large)
    assert few.programs_per_unit < many.programs_per_unit and few.num_warps > many.num_warps
    for size, entry, gpu in ((4, 4, large), (2, 2, small), (2, 1, large)):
        assert decode.choose(64, 128, size, entry, gpu) == decode.choose(65, 128, size, entry, gpu)
