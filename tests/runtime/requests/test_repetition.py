"""Repetitions at the end of an answer."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_sources import tree

from atom.runtime.requests.repetition import RepetitionDetector, make_detector
from atom.runtime.schedule.scheduler import finish_reason
from atom.runtime.types import Sequence
from atom.sampling_params import SamplingParams

LIMITS = [(1, 1, 2), (1, 4, 2), (2, 3, 3), (3, 7, 2), (1, 20, 4)]  # sizes of patterns, and times


def ends(tokens: list[int], min_size: int, max_size: int, min_count: int) -> bool:
    """Whether the last tokens are a pattern of such a size, so many times."""
    tails = ((size, tokens[-size * min_count :]) for size in range(min_size, max_size + 1))
    return any(len(tail) == size * min_count and tail == tail[:size] * min_count for size, tail in tails)


def texts(seed: int) -> list[int]:
    """Tokens with repetitions of all sizes, some of which break off."""
    chance, tokens = random.Random(seed), list[int]()
    while len(tokens) < 120:
        pattern = [chance.randrange(3) for _ in range(chance.randint(1, 9))]
        tokens += (pattern * chance.randint(1, 5))[: chance.randint(1, 40)]
    return tokens


def assert_found(find: Callable[..., bool]) -> None:
    for limits in LIMITS:
        met = 0
        for seed in range(20):
            detector, tokens = RepetitionDetector(*limits), texts(seed)
            for count, token in enumerate(tokens, 1):
                detector.push(token)
                assert detector.is_met == find(tokens[:count], *limits)
                met += detector.is_met
        assert 0 < met < 20 * 120


def test_a_pattern_is_found_wherever_the_last_tokens_repeat_it_often_enough():
    assert_found(ends)


def test_the_same_are_found_as_by_vllm():
    names = ("_has_repeating_pattern", "check_sequence_repetition")
    found = [node for node in tree("v1/core/sched/utils.py").body if getattr(node, "name", None) in names]
    scope: dict[str, Any] = {}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *found], []), "vLLM", "exec"), scope)

    def find(tokens: list[int], min_size: int, max_size: int, min_count: int) -> bool:
        asked = SimpleNamespace(max_pattern_size=max_size, min_pattern_size=min_size, min_count=min_count)
        return bool(scope["check_sequence_repetition"](tokens, asked))

    assert_found(find)


def test_a_pattern_that_an_answer_has_no_room_for_costs_nothing():
    huge = {"max_pattern_size": (1 << 31) - 1, "min_count": 2}
    detector = make_detector(SamplingParams(max_tokens=9, repetition_detection=huge))
    assert detector is not None and len(detector._recent) == 4, "of 9 tokens, a pattern that is there twice has 4"
    assert make_detector(SamplingParams(max_tokens=9, repetition_detection=huge | {"min_pattern_size": 5})) is None
    assert make_detector(SamplingParams()) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "repetition"),
        ({"min_tokens": 3}, None),
        ({"min_tokens": 2}, "repetition"),
        ({"stop_token_ids": [5]}, "stop_5"),  # as in vLLM, what else ends it there is the reason
        ({"max_tokens": 2}, "max_tokens"),
    ],
)
def test_other_reasons_to_end_there_come_first_and_min_tokens_holds(more: dict[str, Any], reason: str | None):
    params = SamplingParams(**{"max_tokens": 9, **more}, repetition_detection={"max_pattern_size": 1, "min_count": 2})
    sequence = Sequence("a", [5, 5, 5], params, repetition=RepetitionDetector(1, 1, 2))
    for token in (5, 5):
        assert sequence.repetition is not None
        sequence.output.append(token)
        sequence.repetition.push(token)
    assert finish_reason(sequence, 100) == reason
