"""The law of numbers: what it means that two ways of computing a model agree."""

from __future__ import annotations

import torch

RELATIVE_ERROR = 1e-4  # of float32 logits, against the largest
NEAR_TIE = 2e-4  # between the reference's two best logits, against the largest


def assert_same_logits(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Float32 logits [T, V]: max|a - b| <= 1e-4 · max|b| at every position."""
    assert ours.shape == reference.shape
    error = (ours - reference).abs().amax(-1)
    allowed = RELATIVE_ERROR * reference.abs().amax(-1)
    worst = (error / allowed).argmax().item()
    assert (error <= allowed).all(), f"position {worst}: {error[worst]:.3g} is over {allowed[worst]:.3g}"


def assert_same_tokens(ours: list[int], reference: list[int], reference_logits: torch.Tensor) -> None:
    """Greedy tokens; the first difference must fall where the reference's two best logits nearly tie.

    reference_logits [len(reference), V]: what each of its tokens was chosen from.
    """
    for place, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            logits = reference_logits[place]
            best = logits.topk(2).values
            gap = (best[0] - best[1]) / logits.abs().max()
            assert gap <= NEAR_TIE, f"token {place} is {a}, the reference's {b}, whose lead is {gap:.3g}"
            return
    assert len(ours) == len(reference)
