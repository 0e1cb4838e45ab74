"""Index scores of prompts in Gluon, as plain Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.hopper import emulated
from kernels.hopper.emulated import emulate

from atom.graph.ops.sparse import index_scores as expected_scores
from atom.kernels.hopper import INDEX_DIM, INDEX_HEADS, index_scores
from atom.kernels.triton.attention import index_scores as triton_scores
from atom.kernels.triton.attention.rows import Rows

COUNTS, LENGTHS, BEFORE = [3, 1, 130, 7, 0, 20], [3, 400, 300, 7, 50, 500], 2  # BEFORE: tokens of decodes


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`score_prompts` of the module, with parts of one tile of keys."""
    monkeypatch.setattr(triton_scores, "MIN_PART", 128)

    def nothing(*_: Any) -> None:
        pass

    def multiply(left: Any, right: Any, sums: Any, use_acc: bool, is_async: bool) -> Any:
        return emulated.value(left.tensor @ right.tensor)

    copies = SimpleNamespace(
        async_copy_global_to_shared=lambda memory, pointer: memory.store(emulated._load(pointer)),
        commit_group=nothing, wait_group=nothing,
    )  # fmt: skip
    made = emulate(index_scores, async_copy=copies, warpgroup_mma=multiply, INDEX_DIM=INDEX_DIM, INDEX_HEADS=INDEX_HEADS,
                   warpgroup_mma_wait=lambda _, deps: deps[0], find_gpu=lambda _: SimpleNamespace(units=3),
                   wait_for_inputs=nothing)  # fmt: skip
    made.gl.maximum = lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    made.gl.reshape = lambda x, shape: x.view([int(dim) for dim in shape])
    return made.score_prompts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(("first", "num"), [(0, 166), (0, 60), (60, 60), (120, 46)])
def test_tokens_of_several_prompts_have_the_scores_of_the_op(first, num, heads, score):
    q, weights, size = torch.randn(166, heads, 128), torch.randn(166, heads), 16
    cache, table = torch.randn(1 + 6 * 32, size, 128), 1 + torch.randperm(6 * 32).view(6, 32).int()
    starts = BEFORE + torch.tensor([0, *COUNTS]).cumsum(0).int()
    rows = Rows(table, starts, torch.tensor(LENGTHS).int(), BEFORE + first, num)
    scores = torch.full((num, 32 * size), torch.nan)
    score(q[first : first + num], weights[first : first + num], cache, rows, scores)
    tested = 0
    for row, (begin, end, length) in enumerate(zip(starts[:-1] - BEFORE, starts[1:] - BEFORE, LENGTHS, strict=True)):
        keys = cache[table[row].long()].flatten(0, 1)
        for token in range(max(begin, first), min(end, first + num)):
            seen = int(length - (end - token) + 1)
            expected = expected_scores(q[token : token + 1], keys[:seen], weights[token : token + 1])[0]
            torch.testing.assert_close(scores[token - first, :seen], expected, rtol=1e-4, atol=1e-3)
            tested += 1
    assert tested == min(sum(COUNTS), first + num) - first
