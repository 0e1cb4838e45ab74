import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.checks import assert_as_near, assert_equal, calls_of
from kernels.paged import LatentCase, change, choices, make_latent_case, reference

from atom.kernels.torch import PagedLatentAttention, latent


@pytest.fixture(params=["absorbed", "expanded", "either"])
def form(request, monkeypatch):
    """Of the prefills."""
    if request.param != "either":
        monkeypatch.setattr(latent, "_is_absorbed", lambda *_args: request.param == "absorbed")
    return request.param


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> LatentCase:
    decodes = draw(st.lists(st.integers(1, 90), max_size=5))
    prefills = draw(
        st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), min_size=0 if decodes else 1, max_size=3)
    )
    rank, rotated = draw(st.sampled_from([(1, 2), (12, 6), (35, 10), (40, 14), (18, 0)]))
    return make_latent_case(
        decodes, [(num, num + before) for num, before in prefills], heads=draw(st.sampled_from([1, 3, 16])), rank=rank,
        rotated=rotated, plain=draw(st.sampled_from([1, 7, 12])), value=draw(st.sampled_from([1, 9, 12])),
        block_size=draw(st.sampled_from([1, 3, 16, 32])), dtype=dtype, seed=draw(st.integers(0, 9)),
    )  # fmt: skip


@settings(max_examples=80)
@given(batches())
def test_any_mix_of_decodes_and_prefills_equals_the_reference(case):
    out = PagedLatentAttention()(*case, scale=0.3)
    assert_equal(out, reference(case, scale=0.3), tolerance=1e-4)  # absorbed, the sums run in another order


@settings(max_examples=40)
@given(batches(torch.bfloat16))
def test_in_bf16_it_is_as_near_to_the_truth_as_the_reference(case):
    truth = reference(case, scale=0.3, wide=True)
    assert_as_near(PagedLatentAttention()(*case, scale=0.3), reference(case, scale=0.3), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_may_have_another_dtype(form, dtype, cache_dtype):
    case = make_latent_case([20, 5], [(7, 30)], heads=3, dtype=dtype, cache_dtype=cache_dtype)
    truth = reference(case, scale=0.3, wide=True)
    assert_as_near(PagedLatentAttention()(*case, scale=0.3), reference(case, scale=0.3), truth)


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (1, False), (20, True)])
def test_sinks_and_windows(window, has_sinks, form):
    case = make_latent_case([1, 70, 33, 300], [(7, 30), (40, 50), (9, 300)], heads=3, window=window, foreign=math.nan)
    attributes = {"scale": 0.3, "window": window, "sinks": torch.tensor([-2.0, 0.5, 4.0]) if has_sinks else None}
    assert_equal(PagedLatentAttention()(*case, **attributes), reference(case, **attributes))


def test_queries_with_sinks_attend_to_what_they_chose():
    case = make_latent_case([70, 3], [(7, 30)], heads=3)
    more = {"selected": choices(case, 20), "sinks": torch.tensor([-2.0, 0.5, 4.0]), "scale": 0.3}
    assert_equal(PagedLatentAttention()(*case, **more), reference(case, **more))


def test_lengths_around_the_ends_of_blocks_and_tiles(form):
    prefills = [(num, num + before) for num in (1, 16, 63, 64, 65, 129) for before in (0, 15, 16, 17)]
    case = make_latent_case([1, 15, 16, 17, 31, 32, 33], prefills, heads=3)
    assert_equal(PagedLatentAttention()(*case, scale=0.3), reference(case, scale=0.3))


@pytest.mark.parametrize("foreign", [math.nan, math.inf, 1e30])
def test_what_lies_in_memory_of_others_changes_nothing(form, foreign):
    def run(foreign: float) -> torch.Tensor:
        case = make_latent_case([3, 40], [(5, 21), (70, 70)], heads=3, block_size=32, foreign=foreign)
        return PagedLatentAttention()(*case, scale=0.3)

    assert torch.equal(run(foreign), run(0.0))


def test_a_sequence_without_positions_and_a_token_without_sequence_give_zeros(form):
    case = make_latent_case([20, 1, 40], [(5, 9)], heads=3)
    expected = reference(case, scale=0.3)
    q_nope, q_rope = (torch.cat((q, q[:2])) for q in case[:2])
    padded = change(case, q_nope=q_nope, q_rope=q_rope, lengths=case.batch.lengths.clone())
    padded.batch.lengths[1] = 0
    out = PagedLatentAttention()(*padded, scale=0.3)
    assert not out[1].any()
    assert not out[-2:].any()
    assert_equal(out[[0, 2, 3, 7]], expected[[0, 2, 3, 7]])


def test_contexts_beyond_the_workspace_are_attended_in_parts():
    case = make_latent_case([1500, 3, 700, 256, 257], heads=3)
    bytes_a_position = 18 * 4
    small = PagedLatentAttention(workspace_bytes=300 * bytes_a_position)
    assert_equal(small(*case, scale=0.3), reference(case, scale=0.3))
    assert calls_of(lambda: small(*case, scale=0.3)).count("aten::bmm") > 7
    assert max(len(buffer) for buffer in small._workspace._buffers.values()) <= 512 * bytes_a_position // 4


@pytest.mark.parametrize("at_once", [1, 2, 3, 16])
def test_heads_are_expanded_as_many_at_a_time_as_the_budget_holds(monkeypatch, at_once):
    monkeypatch.setattr(latent, "_is_absorbed", lambda *_args: False)
    case = make_latent_case(prefills=[(40, 90)], heads=16)
    bytes_a_head = 90 * (8 + 6 + 10) * 4
    attend = PagedLatentAttention(expanded_bytes=at_once * bytes_a_head)
    assert_equal(attend(*case, scale=0.3), reference(case, scale=0.3))
    calls = calls_of(lambda: attend(*case, scale=0.3))
    assert calls.count("aten::bmm") == 2 * -(-16 // at_once)
    buffers = attend._workspace._buffers
    assert len(buffers["keys", torch.float32]) < 2 * at_once * 90 * 14


def test_a_budget_below_one_head_still_expands_one():
    case = make_latent_case(prefills=[(40, 40)], heads=3)
    assert_equal(PagedLatentAttention(expanded_bytes=1)(*case, scale=0.3), reference(case, scale=0.3))


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_weights_are_made_wide_as_many_heads_at_a_time_as_the_budget_holds(at_once):
    case = make_latent_case([20, 30], heads=16, rank=64, plain=8, value=8, dtype=torch.bfloat16)
    attend = PagedLatentAttention(workspace_bytes=at_once * 8 * 64 * 4)
    truth = reference(case, scale=0.3, wide=True)
    assert_as_near(attend(*case, scale=0.3), reference(case, scale=0.3), truth)
    assert attend._workspace._buffers["rows", torch.float32].numel() == at_once * 8 * 64


def test_few_queries_after_a_long_context_are_absorbed_and_a_prompt_is_expanded(monkeypatch):
    chosen = []
    for form in ("_attend_absorbed", "_attend_expanded"):
        original = getattr(PagedLatentAttention, form)
        monkeypatch.setattr(
            PagedLatentAttention,
            form,
            lambda *args, form=form, original=original: (chosen.append(form), original(*args)),
        )
    dims = {"heads": 2, "rank": 64, "plain": 16, "rotated": 8, "value": 16}
    PagedLatentAttention()(*make_latent_case(prefills=[(4, 300), (300, 300), (1, 1)], **dims), scale=0.3)
    assert chosen == ["_attend_absorbed", "_attend_expanded", "_attend_expanded"]


def test_a_decode_gives_what_the_prefill_of_its_position_gives(form):
    prompt = make_latent_case(prefills=[(70, 70)], heads=3)
    expected = PagedLatentAttention()(*prompt, scale=0.3)
    attend = PagedLatentAttention()
    for position in (0, 1, 15, 16, 17, 69):
        own = slice(position, position + 1)
        decode = change(
            prompt,
            q_nope=prompt.q_nope[own], q_rope=prompt.q_rope[own], starts=torch.tensor([0, 1]),
            lengths=torch.tensor([position + 1]), num_decodes=1,
        )  # fmt: skip
        assert_equal(attend(*decode, scale=0.3), expected[own])


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(form):
    whole = make_latent_case(prefills=[(150, 150)], heads=3)
    expected = PagedLatentAttention()(*whole, scale=0.3)
    attend = PagedLatentAttention()
    for first, last in [(0, 1), (1, 64), (64, 100), (100, 150)]:
        chunk = change(
            whole,
            q_nope=whole.q_nope[first:last], q_rope=whole.q_rope[first:last], starts=torch.tensor([0, last - first]),
            lengths=torch.tensor([last]),
        )  # fmt: skip
        assert_equal(attend(*chunk, scale=0.3), expected[first:last])


@pytest.mark.parametrize("query_len", [2, 4])
def test_leading_sequences_of_several_queries_each_are_attended_as_prompts(query_len):
    case = make_latent_case([], [(query_len, length) for length in (20, 33, 70)] + [(9, 12)], heads=3)
    several = change(case, num_decodes=3, query_len=query_len)
    assert_equal(PagedLatentAttention()(*several, scale=0.3), reference(case, scale=0.3))


def test_decodes_make_the_same_calls_whatever_their_number():
    attend = PagedLatentAttention()

    def calls(num: int) -> list[str]:
        case = make_latent_case([10 + row for row in range(num)], heads=4, dtype=torch.bfloat16)
        attend(*case, scale=0.3)
        return calls_of(lambda: attend(*case, scale=0.3))

    assert calls(2) == calls(40)


def test_the_layers_of_a_step_share_its_plan():
    attend = PagedLatentAttention()
    case = make_latent_case([30, 50], [(4, 20)], heads=4)
    out = attend(*case, scale=0.3)
    layer = change(case, q_nope=case.q_nope + 1, blocks=case.cache.blocks * 2, kv_b=case.kv_b + 1)
    assert_equal(attend(*layer, scale=0.3), reference(layer, scale=0.3))
    assert_equal(out, reference(case, scale=0.3))
    assert "aten::cumsum" not in calls_of(lambda: attend(*layer, scale=0.3))


def test_each_step_has_its_own_plan():
    attend = PagedLatentAttention()
    for seed in range(20):  # each case is freed before the next one, which may get its addresses
        case = make_latent_case([5 + seed, 9], heads=3, seed=seed)
        assert_equal(attend(*case, scale=0.3), reference(case, scale=0.3))
        earlier = change(case, lengths=case.batch.lengths - 1)
        assert_equal(attend(*earlier, scale=0.3), reference(earlier, scale=0.3))
