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


def assert_greedy_tokens(tokens: list[int], reference_logits: torch.Tensor) -> None:
    """Each token is the reference's best; the first that is not must fall where its two best logits nearly tie.

    reference_logits [len(tokens), V]: the reference's, at the position before each token, on these very tokens. Up to the
    first difference that is what the reference would have generated itself.
    """
    assert len(tokens) == len(reference_logits)
    for place, (token, logits) in enumerate(zip(tokens, reference_logits, strict=True)):
        if token != logits.argmax():
            best = logits.topk(2).values
            gap = (best[0] - best[1]) / logits.abs().max()
            assert gap <= NEAR_TIE, (
                f"token {place} is {token}, the reference's {logits.argmax()}, whose lead is {gap:.3g}"
            )
            return


def assert_fp16_as_near(ours: torch.Tensor, theirs: torch.Tensor, reference: torch.Tensor) -> None:
    """Logits [T, V] of the positions of many prompts, in fp16 and in float32: ours are finite wherever theirs are, and
    half of ours are at most 1.25 times as far off as half of theirs.

    A median, since where two experts nearly tie either may be taken, and then a position and those after it are far
    off: of 480 positions some are, ours or theirs. Over 7,200 the means are within 1.1 of each other too.
    """
    comparable = theirs.isfinite().all(-1)
    assert ours[comparable].isfinite().all() and comparable.any()
    errors = [median_error(logits[comparable], reference[comparable]) for logits in (ours, theirs)]
    assert errors[0] <= 1.25 * errors[1], f"{errors[0]:.3g} is over 1.25 times {errors[1]:.3g}"


def median_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The median of ‖a - b‖ / ‖b‖ over positions, which those after a near tie of two experts do not move."""
    return ((ours.float() - reference).norm(dim=-1) / reference.norm(dim=-1)).median().item()


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """‖a - b‖ / ‖b‖ over all positions."""
    return ((ours.float() - reference).norm() / reference.norm()).item()
