from __future__ import annotations

from collections.abc import Sequence

import pytest
from kinds import full_kind, window_kind

from atom.errors import CapacityError
from atom.runtime.kv.plan import plan_memory
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
