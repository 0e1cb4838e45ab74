"""Attention to chosen entries in Gluon, as plain Python."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.hopper import emulated
from kernels.hopper.emulated import WarpGroups, emulate

from atom.kernels.hopper import chosen_attention
from atom.kernels.triton.attention.rows import Rows


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`attend_chosen` of the module, its groups of warps as threads."""
    language, groups = emulated._language(), WarpGroups()
    language.SwizzledSharedLayout = lambda *_: None
    language.max, language.exp2, language.log2 = lambda x, dim: x.max(dim).values, torch.exp2, torch.log2
    language.maximum = lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    monkeypatch.setattr(emulated, "_language", lambda: language)

    def find_slots(selected: torch.Tensor, _rows: Rows, _size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return selected, (selected >= 0).sum(1).int()

    def arrive(bar: Any, increment_count: bool) -> None:
        for _ in range(128):  # each thread of four warps
            groups.names["mbarrier"].arrive(bar)

    copies = SimpleNamespace(
        async_copy_global_to_shared=lambda memory, pointer: memory.store(emulated._load(pointer)),
        mbarrier_arrive=arrive,
    )  # fmt: skip
    made = emulate(chosen_attention, **groups.names, find_slots=find_slots, async_copy=copies, NOTHING=-1e38,
                   find_gpu=lambda _: SimpleNamespace(units=3))  # fmt: skip
    return made.attend_chosen


@pytest.mark.parametrize(("top_k", "counts"), [(256, [256, 1, 0]), (300, [300, 64, 65, 127, 128, 129])])
@pytest.mark.parametrize("part", [1, 1000])
def test_parts_and_tiles_of_what_is_chosen_equal_a_softmax(top_k, counts, part, attend, monkeypatch):
    monkeypatch.setitem(attend.__globals__, "MIN_PART", part)
    heads, num = 64, len(counts)
    q, q_rope = torch.randn(heads, num, 512), torch.randn(num, heads, 64)
    cache = torch.full((20, 64, 576), math.nan)
    flat, selected = cache.view(-1, 576), torch.full((num, top_k), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        selected[row, :count] = torch.randperm(1280)[:count].int()
        flat[selected[row, :count].long()] = torch.randn(count, 576)
    rows = Rows(torch.zeros(num, 1), None, torch.zeros(num), 0, num)
    sums, weights = attend(q, q_rope, cache, rows, selected, 0.05)
    if weights is not None:
        sums = torch.einsum("snt,sntl->ntl", torch.softmax(weights * math.log(2), 0), sums.nan_to_num(0.0))
    for row, count in enumerate(counts):
        if count:
            entries = flat[selected[row, :count].long()]
            scores = torch.cat((q[:, row], q_rope[row]), 1) @ entries.T * 0.05
            torch.testing.assert_close(sums[:, row], scores.softmax(-1) @ entries[:, :512], rtol=1e-4, atol=1e-5)
        elif weights is None:
            assert (sums[:, row] == 0).all()
