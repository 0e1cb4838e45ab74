"""The Triton kernel of n-grams, against the reference body of its op."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from graph.ops.test_ngrams import in_chunks, rows_of
from kernels.triton.recurrent.test_recurrent import run_on


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, 1), (30, 4), (50, 2)])
def test_rows_of_any_chunks_equal_the_reference(triton_device: str, max_tokens: int, kept: int):
    torch.manual_seed(0)
    sequences = [torch.randint(6, (length,)) for length in (37, 2, 50)]
    made = in_chunks(run_on(triton_device, "ngrams"), sequences, max_tokens, kept)
    for rows, tokens in zip(made, sequences, strict=True):
        assert torch.equal(rows, rows_of(tokens))
