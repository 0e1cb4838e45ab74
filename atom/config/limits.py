"""Limits of a step, and how tokens are drafted, for the runtime.

load([…]).limits, load([…]).drafting             # EngineLimits(512, 16384, 40960, 8), None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

VERIFIED_TOKENS = {"cpu": 8, "cuda": 128}  # serve.max_verified_tokens if nothing is set or measured
SPEC_FACTORS = {"cpu": 1.0, "cuda": 4.0}  # serve.suffix_decoding_max_spec_factor if it is not set


@dataclass(frozen=True)
class EngineLimits:
    """The largest step and sequence."""

    max_num_seqs: int  # of a step
    max_num_batched_tokens: int  # of a step
    max_model_len: int  # tokens of a sequence
    max_verified_tokens: int = 8  # max. tokens of a step's decodes, drafts included
    num_drafts: int = 0  # max tokens that are drafted for a sequence in a step

    @property
    def num_states(self) -> int:
        """The recurrent states that a slot keeps: of each position where the next step may begin."""
        return 1 + self.num_drafts

    @property
    def max_decodes(self) -> int:
        """Max. decodes of a step: each running sequence gets a token in each step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class SuffixLimits(NamedTuple):
    """How tokens are drafted by suffixes; as vLLM's suffix_decoding_*."""

    max_tree_depth: int = 24  # of a match and the draft after it, in tokens
    max_cached_requests: int = 10_000  # answers that are kept
    max_spec_factor: float = 4.0  # drafts per token of the match
    min_token_prob: float = 0.1  # share of the matches that a draft agrees with


class Drafting(NamedTuple):
    """How a runner drafts tokens."""

    num_tokens: int  # max drafts of a slot in a step
    min_n: int  # min last tokens that prompt lookup matches
    max_n: int  # max last tokens that it matches
    has_programs: bool = False  # programs of the text draft; else tokens are looked up
    suffix: SuffixLimits | None = None  # the host looks up suffixes; None: n-grams are looked up, if no program drafts
    rates: tuple[float, ...] = ()  # chance to accept each draft after those before it; (): accept what equals the draw


def suffix_limits(device: str, fields: Mapping[str, Any]) -> SuffixLimits:
    """The limits that fields of serve set, by their names; the others as they are for a device."""
    given = {name: fields[f"suffix_decoding_{name}"] for name in SuffixLimits._fields}
    known = {name: value for name, value in given.items() if value is not None}
    return SuffixLimits(**{"max_spec_factor": SPEC_FACTORS[device], **known})


def acceptance_rates(length: float | None, num_tokens: int) -> tuple[float, ...]:
    """The chances to accept each draft after those before it, with which a step gives `length` tokens on average.

    As in ROCm/ATOM: drafts within the whole part of the length are always accepted, the next one with the chance that
    the rest of the length gives. Empty without a length.
    """
    if length is None:
        return ()
    return tuple(min(max(length - 1 - at, 0.0), 1.0) for at in range(num_tokens))
