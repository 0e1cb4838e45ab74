"""Detect an answer that repeats itself: one pattern of tokens, many times.

    detector = RepetitionDetector(min_size=1, max_size=20, min_count=4)
    detector.push(token)
    detector.is_met             # whether the last tokens are one pattern, four times

It finds what vLLM's check_sequence_repetition does (vllm/v1/core/sched/utils.py). A token takes time by the number of
sizes, whatever the count and the length of the answer: of each size it counts for how many tokens the answer has been
equal to what it had that many tokens before.
"""

from __future__ import annotations

import numpy as np

from atom.sampling_params import SamplingParams


class RepetitionDetector:
    """The repetitions at the end of one sequence."""

    def __init__(self, min_size: int, max_size: int, min_count: int) -> None:
        """
        min_size, max_size: tokens of a pattern
        min_count: how often it is there
        """
        sizes = np.arange(min_size, max_size + 1)
        self._first = min_size - 1
        self._needed = sizes * (min_count - 1)
        self._equal = np.zeros(len(sizes), np.int64)  # last tokens that equal those one pattern before
        self._recent = np.full(max_size, -1)  # the newest first
        self.is_met = False

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        self._equal += 1
        self._equal *= self._recent[self._first :] == token
        self._recent[1:] = self._recent[:-1]
        self._recent[:1] = token
        self.is_met = bool((self._equal >= self._needed).any())


def make_detector(params: SamplingParams) -> RepetitionDetector | None:
    """The detector of a sequence; None if no repetition ends its answer, or it is too short for one."""
    asked = params.repetition_detection
    if asked is None:
        return None
    max_size = min(asked["max_pattern_size"], params.max_tokens // asked["min_count"])
    if asked["min_pattern_size"] > max_size:
        return None
    return RepetitionDetector(asked["min_pattern_size"], max_size, asked["min_count"])
