import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checks import assert_equal, calls_of, relative_error
from kernels.paged import Case, change, image_ends, make_case, reference
from torch.profiler import ProfilerActivity, profile

from atom.graph import ops
from atom.kernels import LoadContext, Target, find_kernel
from atom.kernels.torch import PagedAttention


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[Case, dict[str, Any]]:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 3), (3, 3)]))
    window = draw(st.sampled_from([None, None, 1, 5, 16, 70]))
    decodes = draw(st.lists(st.integers(1, 90), max_size=5))
    prefills = draw(
        st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), min_size=0 if decodes else 1, max_size=3)
    )
    case = make_case(
        decodes, [(num, num + before) for num, before in prefills], kv_heads=kv_heads, heads=kv_heads * group,
        dim=draw(st.sampled_from([8, 20, 36])), block_size=draw(st.sampled_from([1, 3, 16, 32])), window=window,
        dtype=dtype, has_sinks=draw(st.booleans()), seed=draw(st.integers(0, 9)),
    )  # fmt: skip
    slopes = torch.linspace(0.01, 0.3, kv_heads * group) if draw(st.booleans()) else None
    chunked = window is not None and draw(st.booleans())
    attributes = {"scale": 0.3, "window": window, "chunked": chunked, "softcap": draw(st.sampled_from([None, 1.5]))}
    return case, {**attributes, "slopes": slopes}


@settings(max_examples=80)
@given(batches())
def test_any_mix_of_decodes_and_prefills_equals_the_reference(case):
    case, attributes = case
    assert_equal(PagedAttention()(*case, **attributes), reference(case, **attributes))


@settings(max_examples=30)
@given(batches(torch.bfloat16))
def test_in_bf16_it_is_as_near_to_the_truth_as_the_reference(case):
    case, attributes = case
    truth = reference(case, **attributes, wide=True)
    allowed = 1.1 * relative_error(reference(case, **attributes), truth) + 1e-6
    assert relative_error(PagedAttention()(*case, **attributes), truth) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_may_have_another_dtype(dtype, cache_dtype):
    case = make_case([20, 5], [(7, 30)], kv_heads=2, heads=4, dtype=dtype, cache_dtype=cache_dtype)
    truth = reference(case, scale=0.3, wide=True)
    allowed = 1.1 * relative_error(reference(case, scale=0.3), truth) + 1e-6
    assert relative_error(PagedAttention()(*case, scale=0.3), truth) <= allowed


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 15, 16, 17])
def test_lengths_around_the_ends_of_blocks_windows_and_tiles(window, has_sinks):
    lengths = [1, 15, 16, 17, 31, 32, 33]
    prefills = [(num, num + before) for num in (1, 16, 63, 64, 65, 129) for before in (0, 15, 16, 17)]
    case = make_case(lengths, prefills, kv_heads=2, heads=6, window=window, has_sinks=has_sinks)
    assert_equal(PagedAttention()(*case, scale=0.3, window=window), reference(case, scale=0.3, window=window))


@pytest.mark.parametrize("window", [None, 20])
def test_ends_of_a_tile_may_be_in_a_later_one(window):
    case = make_case([40], [(160, 170), (5, 21), (3, 3)], kv_heads=2, heads=6, window=window, has_sinks=True)
    attributes = {"scale": 0.3, "window": window, "ends": image_ends(case, [(1, 30, 150), (1, 160, 165), (2, 16, 20)])}
    assert_equal(PagedAttention()(*case, **attributes), reference(case, **attributes))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("foreign", [math.nan, math.inf, 1e30])
def test_what_lies_in_memory_of_others_changes_nothing(foreign, has_sinks, softcap):
    def run(foreign: float) -> torch.Tensor:
        case = make_case([3, 40], [(5, 21), (70, 70)], block_size=32, window=30, foreign=foreign, has_sinks=has_sinks)
        return PagedAttention()(*case, scale=0.3, window=30, softcap=softcap)

    assert torch.equal(run(foreign), run(0.0))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_what_an_earlier_step_left_in_the_workspace_changes_nothing(softcap):
    attend = PagedAttention()
    clean, spoilt = make_case([3, 40], [(5, 21)]), make_case([5, 70], [(9, 30)])
    attend(*change(spoilt, blocks=torch.full_like(spoilt.cache.blocks, math.nan)), scale=0.3, softcap=softcap)
    assert_equal(attend(*clean, scale=0.3, softcap=softcap), reference(clean, scale=0.3, softcap=softcap))


def test_a_sink_takes_from_nothing_to_all():
    case = make_case([20, 1], [(5, 9)], kv_heads=2, heads=4)
    without = PagedAttention()(*case, scale=0.3)
    sinks = torch.tensor([-math.inf, -200.0, 200.0, math.inf])
    out = PagedAttention()(*change(case, sinks=sinks), scale=0.3)
    assert_equal(out[:, :2], without[:, :2])
    assert not out[:, 2:].any()


def test_layers_with_sinks_of_their_own_share_a_plan():
    attend = PagedAttention()
    case = make_case([20, 30], [(4, 20)], kv_heads=2, heads=4, has_sinks=True)
    attend(*case, scale=0.3)
    for sinks in (-case.sinks, None, case.sinks):
        layer = change(case, sinks=sinks)
        assert_equal(attend(*layer, scale=0.3), reference(layer, scale=0.3))
        assert "aten::gather" not in calls_of(lambda layer=layer: attend(*layer, scale=0.3))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_sequence_without_positions_and_a_token_without_sequence_give_zeros(has_sinks):
    case = make_case([20, 1, 40], [(5, 9)], kv_heads=2, heads=4, has_sinks=has_sinks)
    expected = reference(case, scale=0.3)
    padded = change(case, q=torch.cat((case.q, case.q[:2])), lengths=case.batch.lengths.clone())
    padded.batch.lengths[1] = 0
    out = PagedAttention()(*padded, scale=0.3)
    assert not out[1].any()
    assert not out[-2:].any()
    assert_equal(out[[0, 2, 3, 7]], expected[[0, 2, 3, 7]])


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_batch_of_nothing_but_empty_sequences_gives_zeros(has_sinks):
    case = make_case([1, 1], kv_heads=2, heads=4, has_sinks=has_sinks)
    empty = change(case, lengths=torch.zeros(2, dtype=torch.int32))
    assert torch.equal(PagedAttention()(*empty, scale=0.3), torch.zeros_like(case.q))


@pytest.mark.parametrize(("has_sinks", "softcap"), [(False, None), (True, None), (False, 1.5), (True, 1.5)])
@pytest.mark.parametrize("window", [None, 600])
def test_contexts_beyond_the_workspace_are_attended_in_parts(window, has_sinks, softcap):
    case = make_case([1500, 3, 700, 256, 257], kv_heads=2, heads=6, window=window, has_sinks=has_sinks)
    bytes_a_position = 2 * 2 * 8 * 4
    small = PagedAttention(workspace_bytes=300 * bytes_a_position)
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    assert_equal(small(*case, **attributes), reference(case, **attributes))
    again = calls_of(lambda: small(*case, **attributes))
    assert again.count("aten::bmm") > 5
    assert max(len(buffer) for buffer in small._plans._workspace._buffers.values()) <= 512 * bytes_a_position // 4


@pytest.mark.parametrize("has_sinks", [False, True])
def test_groups_of_whole_sequences_equal_the_reference(has_sinks):
    case = make_case([30 + row for row in range(20)], kv_heads=2, heads=6, has_sinks=has_sinks)
    small = PagedAttention(workspace_bytes=150 * 2 * 2 * 8 * 4)
    assert_equal(small(*case, scale=0.3), reference(case, scale=0.3))
    assert calls_of(lambda: small(*case, scale=0.3)).count("aten::bmm") == 7  # 20 sequences, three at a time


@pytest.mark.parametrize("has_sinks", [False, True])
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(has_sinks):
    whole = make_case(prefills=[(150, 150)], kv_heads=2, heads=6, has_sinks=has_sinks)
    expected = PagedAttention()(*whole, scale=0.3, window=40)
    attend = PagedAttention()
    for first, last in [(0, 1), (1, 64), (64, 100), (100, 150)]:
        chunk = change(
            whole, q=whole.q[first:last], starts=torch.tensor([0, last - first]), lengths=torch.tensor([last])
        )
        assert_equal(attend(*chunk, scale=0.3, window=40), expected[first:last])


@pytest.mark.parametrize("query_len", [2, 4])
def test_leading_sequences_of_several_queries_each_are_attended_as_prompts(query_len):
    case = make_case([], [(query_len, length) for length in (20, 33, 70)] + [(9, 12)], kv_heads=2, heads=6)
    several = change(case, num_decodes=3, query_len=query_len)
    assert_equal(PagedAttention()(*several, scale=0.3), reference(case, scale=0.3))


def test_decodes_make_the_same_calls_whatever_their_number():
    attend = PagedAttention()

    def calls(num: int) -> tuple[list[str], list[str]]:
        case = make_case([10 + row for row in range(num)], kv_heads=2, heads=4)
        first = calls_of(lambda: attend(*case, scale=0.3))
        return first, calls_of(lambda: attend(*case, scale=0.3))

    assert calls(2) == calls(40)
    assert len(calls(2)[1]) == 8


def test_the_next_layer_leaves_the_results_of_this_one_unchanged():
    attend = PagedAttention()
    case = make_case([20, 30], kv_heads=2, heads=4)
    out = attend(*case, scale=0.3)
    attend(*change(case, q=case.q + 1), scale=0.3)
    assert_equal(out, reference(case, scale=0.3))


def test_the_layers_of_a_step_share_its_plan():
    attend = PagedAttention()
    case = make_case([30, 50], [(4, 20)], kv_heads=2, heads=4, foreign=0.0)
    first = calls_of(lambda: attend(*case, scale=0.3))
    assert_equal(attend(*case, scale=0.3, window=7), reference(case, scale=0.3, window=7))
    second = calls_of(lambda: attend(*change(case, blocks=case.cache.blocks.clone()), scale=0.3))
    assert "aten::arange" in first
    assert "aten::arange" not in second
    assert_equal(attend(*case, scale=0.3), reference(case, scale=0.3))


def test_each_step_has_its_own_plan():
    attend = PagedAttention()
    for seed in range(20):  # each case is freed before the next one, which may get its addresses
        case = make_case([5 + seed, 9], kv_heads=2, heads=4, seed=seed)
        assert_equal(attend(*case, scale=0.3), reference(case, scale=0.3))
        earlier = change(case, lengths=case.batch.lengths - 1)
        assert_equal(attend(*earlier, scale=0.3), reference(earlier, scale=0.3))


def test_tiles_shrink_where_the_context_is_very_long(monkeypatch):
    monkeypatch.setattr("atom.kernels.torch.prefill.MAX_SCORES", 6 * 90 * 3)
    case = make_case(prefills=[(40, 90)], kv_heads=2, heads=6)
    attend = PagedAttention()
    assert_equal(attend(*case, scale=0.3), reference(case, scale=0.3))
    assert calls_of(lambda: attend(*case, scale=0.3)).count("aten::bmm") == 2 * 14  # three queries a tile


def test_each_load_has_a_workspace_of_its_own():
    kernel = find_kernel(ops.paged_attention, "torch")
    assert kernel.load(LoadContext()) is not kernel.load(LoadContext())


def test_a_decode_step_allocates_less_than_a_hundredth_of_the_weights():
    """30 layers of SmolLM2-135M, whose weights have 269 MB: norms, rotary, cache writes and attention of one request."""
    context = LoadContext()
    used = (ops.add_rms_norm, ops.norm_rope_write, ops.paged_attention)
    load = {op: find_kernel(op, "torch").load(context) for op in used}
    case = make_case([129], kv_heads=3, heads=9, dim=64, dtype=torch.bfloat16, foreign=0.0)
    qkv, x, weight = torch.randn(1, 960).bfloat16(), torch.randn(1, 576).bfloat16(), torch.ones(576).bfloat16()
    cos, sin = ops.rotary.body(torch.tensor([128]), torch.ones(32))

    def step(length: int) -> None:
        inputs = change(case, lengths=torch.tensor([length], dtype=torch.int32), slots=torch.tensor([length - 1]))
        q, k, v = (part.unflatten(-1, (-1, 64)) for part in qkv.split([576, 192, 192], dim=-1))
        for _ in range(30):
            load[ops.add_rms_norm](x, x, weight, eps=1e-5)
            turned = load[ops.norm_rope_write](q, k, v, cos, sin, None, None, inputs.cache, inputs.batch)
            load[ops.paged_attention](turned, *inputs[1:], scale=0.125)
            load[ops.add_rms_norm](x, x, weight, eps=1e-5)

    step(128)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step(129)
    memory = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = sum(size for size in memory if size > 0)
    assert 0 < allocated < 0.01 * 269e6


@pytest.mark.parametrize("op", [ops.paged_attention, ops.paged_mla_attention, ops.norm_rope_write, ops.combine])
def test_kernels_refuse_other_devices(op):
    kernel = find_kernel(op, "torch")
    assert kernel.accepts(Target("cpu")) is None
    assert kernel.accepts(Target("cuda")) == "runs on cpu, not on cuda"
