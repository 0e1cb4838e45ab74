from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kinds import every_kind, full_kind, recurrent_kind, window_kind

from atom.errors import CapacityError, ConfigError
from atom.runtime.kv.plan import fit_slots, plan_memory
from atom.runtime.types import StateKind, StepLimits

FULL = full_kind(10)


def plan(kinds: Sequence[StateKind], *, max_num_seqs: int = 8, **limits: int) -> dict[str, int]:
    return plan_memory(kinds, 4, StepLimits(max_num_seqs, 40, 100), **limits)


def test_full_kinds_share_the_memory() -> None:
    assert plan([FULL], memory_bytes=40 * 101) == {"full": 101}
    assert plan([FULL, full_kind(30, name="big")], memory_bytes=160 * 50 + 159) == {"full": 50, "big": 50}


def test_a_window_kind_gets_what_it_can_use_and_full_kinds_the_rest() -> None:
    window = window_kind(9, 30)
    blocks = plan([FULL, window], memory_bytes=40_000)
    most = 8 * window.blocks(100) + 10  # 8 sequences, and 40 tokens of a step
    assert blocks == {"full": 1000 - 3 * (most + 1), "window": most + 1}
    assert plan([FULL, window], num_blocks=500) == {"full": 501, "window": most + 1}
    small = plan([FULL, window], memory_bytes=160 * 26)
    assert small == {"full": 26, "window": 26}


def test_kept_conversations_have_room_for_their_windows() -> None:
    """One for each 8,192 tokens of the other KV, if those are more than sequences run at a time."""
    window = window_kind(9)
    blocks = plan([FULL, window], num_blocks=100 * 8192 // 4)
    assert blocks["window"] == 1 + 100 * window.blocks(100) + 10
    assert plan([window], num_blocks=100 * 8192 // 4) == {"window": 1 + 8 * window.blocks(100) + 10}, (
        "nothing else is kept"
    )


def test_entries_of_several_blocks_of_tokens_take_their_part_of_the_memory() -> None:
    kinds = [FULL, every_kind(2, 5), every_kind(16, 1)]  # 4 blocks of 40 and 20 bytes for one of 16
    assert plan(kinds, memory_bytes=40 * 101 + 20 * 101 + 16 * 26) == {"full": 101, "every_2": 101, "every_16": 26}
    assert plan(kinds, num_blocks=50) == {"full": 51, "every_2": 51, "every_16": 14}
    with pytest.raises(ConfigError, match=r"takes 25 blocks of 4 tokens: set serve.num_kvcache_blocks=25 or more"):
        plan([every_kind(16)], num_blocks=24)
    assert plan([every_kind(16)], num_blocks=25) == {"every_16": 8}


def test_the_least_memory_holds_one_sequence_of_max_model_len() -> None:
    window = window_kind(9, 30)
    with pytest.raises(CapacityError) as error:
        plan([FULL, window], memory_bytes=2000)
    assert plan([FULL, window], memory_bytes=2840) == {"full": 26, "window": 15}
    assert str(error.value) == (
        "the KV of one sequence of serve.max_model_len=100 takes 2840 bytes, there are 2000 or lower serve.max_model_len "
        "to 44"
    )


def test_memory_too_small_for_any_sequence_names_only_the_knob() -> None:
    with pytest.raises(CapacityError, match=r"there are 79$"):
        plan([FULL], memory_bytes=79)


STATE = recurrent_kind(500)


def test_recurrent_state_takes_its_slots_and_a_tenth_of_the_rest_for_copies() -> None:
    slots = 9 * 500  # of 8 sequences and of padding
    assert plan([FULL, STATE], memory_bytes=slots + 15_500) == {"full": (15_500 - 3 * 500) // 40, "state": 3}
    assert plan([FULL, STATE], memory_bytes=slots + 5500) == {"full": (5500 - 1000) // 40, "state": 2}
    assert plan([FULL, STATE], memory_bytes=slots + 15_500, state_memory=3000) == {"full": 12_500 // 40, "state": 6}
    assert plan([FULL, STATE], num_blocks=1124) == {"full": 1125, "state": 10}  # a tenth of 50,000 bytes


def test_a_model_of_recurrent_state_has_copies_in_all_of_its_pool() -> None:
    assert plan([STATE], memory_bytes=9 * 500 + 5500) == {"state": 11}
    assert plan([STATE], num_blocks=7) == {"state": 8}


def test_states_that_have_no_room_are_refused_with_what_to_lower() -> None:
    with pytest.raises(CapacityError) as error:
        plan([FULL, STATE], memory_bytes=5400)
    assert str(error.value) == (
        "the recurrent states of serve.max_num_seqs=8 sequences take 4500 bytes, and copies of them 1000, "
        "there are 5400 or lower serve.max_num_seqs"
    )
    with pytest.raises(CapacityError, match=r"takes 1040 bytes, there are 6000 or lower serve.max_model_len to"):
        plan([FULL, STATE], memory_bytes=6000)


def test_as_many_sequences_run_as_have_room_for_their_state() -> None:
    """The shapes of Qwen3.5-35B-A3B (30 states of 2 MiB and 48 KiB) and of a 27B model (48 of 3 MiB and 60 KiB)."""
    sizes = 30 * (2 << 20) + 30 * (48 << 10), 48 * (3 << 20) + 48 * (60 << 10)
    lefts = 127 * 10**9 - 70 * 10**9, 127 * 10**9 - 54 * 10**9  # of 141 GB at 0.9, after weights in bf16
    bytes_per_token = 20 << 10, 64 << 10
    for size, left, per_token, num_tokens in zip(sizes, lefts, bytes_per_token, (1_200_000, 390_000), strict=True):
        kinds = [StateKind("full", FULL.rule, 16 * per_token, 16), StateKind("state", STATE.rule, size, 16)]
        assert fit_slots(kinds, StepLimits(512, 16384, 32768), left) == 256
        blocks = plan_memory(kinds, 16, StepLimits(256, 16384, 32768), memory_bytes=left)
        assert blocks["full"] * 16 > num_tokens
        assert blocks["full"] * 16 / blocks["state"] == pytest.approx(8192, rel=0.02), (
            "tokens for which there is a copy"
        )
    limits = StepLimits(512, 16384, 32768)
    assert fit_slots(kinds, replace(limits, max_num_seqs=100), left) == 100
    assert fit_slots([FULL], limits, 1) == 512
    assert [fit_slots([STATE], limits, size) for size in (0, 910, 911 * 2, 911 * 3, 10**9)] == [1, 1, 1, 2, 512]


def test_large_states_have_copies_in_half_of_the_pool_unless_a_sequence_needs_more() -> None:
    large = recurrent_kind(10_000_000)  # 8,192 tokens of KV take 81,920 bytes
    limits, slots = StepLimits(1, 40, 100), 2 * 10_000_000
    blocks = plan_memory([FULL, large], 4, limits, memory_bytes=slots + 10**8)
    assert blocks == {"full": 5 * 10**7 // 40, "state": 5}
    limits = replace(limits, max_model_len=7_000_000)
    blocks = plan_memory([FULL, large], 4, limits, memory_bytes=slots + 10**8)
    assert blocks == {"full": 8 * 10**7 // 40, "state": 2}, "70 MB are one sequence"


def test_with_drafts_a_slot_has_a_state_of_each_position_that_may_be_next() -> None:
    limits, size = StepLimits(8, 40, 100, num_drafts=3), 4 * 500
    assert [fit_slots([STATE], limits, memory) for memory in (10 * size, 17 * size)] == [4, 8]
    assert plan_memory([STATE], 4, limits, memory_bytes=9 * size + 5500) == {"state": 11}, "copies are of one"
