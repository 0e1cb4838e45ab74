"""Which images a step encodes, and where its chunks stop for them."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import full_kind, window_kind

from atom.errors import RequestError
from atom.images.types import Image, PlacedImage, placeholder
from atom.runtime.images.encode_planner import EncodePlanner
from atom.runtime.images.row_pool import RowPool
from atom.runtime.images.step_images import StepImages
from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import Capacity, StepInput
from atom.runtime.types import Plan, Sampled, Sequence, StateKind, StepLimits
from atom.sampling_params import SamplingParams

FULL = full_kind()


def picture(digest: int, num_rows: int) -> Image:
    """An image of 4 patches a row."""
    return Image(digest << 20, b"", ((1, 2, 2 * num_rows),), num_rows)


def ask(id: str, *parts: int | Image, max_tokens: int = 2) -> Sequence:
    """A prompt of numbers of text tokens and images."""
    prompt, placed = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, Image):
            placed.append(PlacedImage(part, len(prompt), len(prompt) + part.num_rows))
            prompt += [placeholder(part.digest, at) for at in range(part.num_rows)]
        else:
            prompt += [len(prompt) + at + 1 for at in range(part)]
    return Sequence(id, prompt, SamplingParams(max_tokens=max_tokens), images=tuple(placed))


class Steps:
    """Plans and builds steps; none runs."""

    def __init__(
        self,
        num_rows: int,
        max_patches: int,
        max_tokens: int = 64,
        num_blocks: int = 100,
        is_whole: bool = False,
        kinds: tuple[StateKind, ...] = (FULL,),
    ) -> None:
        self.pool = RowPool(num_rows)
        cache = KVCache(kinds, {kind.name: num_blocks for kind in kinds}, 4, enable_prefix_caching=True)
        limits = StepLimits(8, max_tokens, 200)
        planner = EncodePlanner(self.pool, max_patches, is_whole=is_whole)
        self.scheduler = Scheduler(cache, limits, images=planner)
        self.builder = StepBuilder(
            Capacity(tuple(kind.name for kind in kinds), 8, 50, 1000),
            StepImages(self.pool, lambda images: ({}, np.arange(sum_rows(images))), has_ends=is_whole),
        )

    def run(self) -> tuple[dict[str, int], int]:
        """The tokens of each sequence in the next step, and the rows that it encodes."""
        plan = self.scheduler.schedule()
        step = self.builder.build(plan)
        self.commit(plan)
        return {row.sequence.id: row.num_tokens for row in plan.rows}, num_encoded(step)

    def commit(self, plan: Plan) -> None:
        num = sum(row.samples for row in plan.rows)
        self.scheduler.commit(plan, Sampled([7] * num, [None] * num), lambda each: finish_reason(each, 200))


def sum_rows(images: list[Image]) -> int:
    return sum(image.num_rows for image in images)


def num_encoded(step: StepInput) -> int:
    return 0 if step.encode is None else len(step.encode.rows) // 4


def test_a_chunk_stops_at_an_image_beyond_the_patches_of_a_step() -> None:
    steps = Steps(num_rows=100, max_patches=40)
    steps.scheduler.add(ask("a", 3, picture(1, 6), 2, picture(2, 6), 1))  # 24 patches each
    assert steps.run() == ({"a": 11}, 6)
    assert steps.run() == ({"a": 7}, 6)
    assert steps.run() == ({"a": 1}, 0)


def test_an_image_is_encoded_once_for_all_its_chunks_and_prompts() -> None:
    steps, image = Steps(num_rows=100, max_patches=400, max_tokens=8), picture(1, 12)
    steps.scheduler.add(ask("a", 2, image, 3, max_tokens=1))
    assert [steps.run() for _ in range(3)] == [({"a": 8}, 12), ({"a": 8}, 0), ({"a": 1}, 0)]
    steps.scheduler.add(ask("b", 5, image, max_tokens=1))
    assert steps.run() == ({"b": 8}, 0)
    assert (steps.pool.num_encoded, steps.pool.num_patches, steps.pool.num_hits) == (1, 48, 1)


def test_a_cached_prefix_needs_no_rows() -> None:
    steps, image = Steps(num_rows=12, max_patches=400), picture(1, 8)
    steps.scheduler.add(ask("a", 4, image, 5, max_tokens=1))
    assert steps.run() == ({"a": 17}, 8)
    steps.pool.clear()
    steps.scheduler.add(ask("b", 4, image, 9, max_tokens=1))
    assert steps.run() == ({"b": 5}, 0), "16 of 21 tokens are cached"
    assert steps.pool.num_encoded == 1


def test_images_that_have_no_room_together_take_steps_of_their_own() -> None:
    steps = Steps(num_rows=10, max_patches=400, max_tokens=6)
    steps.scheduler.add(ask("a", 1, picture(1, 8), 1, max_tokens=1))
    steps.scheduler.add(ask("b", picture(2, 8), 1, max_tokens=1))
    taken = [steps.run() for _ in range(6)]
    assert [num for _, num in taken].count(8) >= 2
    assert not steps.scheduler.has_work
    assert all(num <= 8 for _, num in taken)


def test_a_step_that_did_not_take_place_is_encoded_again() -> None:
    steps = Steps(num_rows=10, max_patches=400)
    steps.scheduler.add(ask("a", 1, picture(1, 8), 1))
    plan = steps.scheduler.schedule()
    assert num_encoded(steps.builder.build(plan)) == 8
    steps.builder.retract(plan)
    steps.scheduler.retract(plan)
    assert steps.run() == ({"a": 10}, 8)


def test_a_preempted_prompt_finds_its_images() -> None:
    steps = Steps(num_rows=100, max_patches=400, max_tokens=16, num_blocks=13)
    steps.scheduler.add(ask("a", 2, picture(1, 6), max_tokens=30))
    steps.scheduler.add(ask("b", 2, picture(2, 6), max_tokens=30))
    for _ in range(100):
        if steps.scheduler.has_work:
            steps.run()
    assert not steps.scheduler.has_work and steps.scheduler.stats.num_preemptions
    assert steps.pool.num_encoded == 2


def test_a_chunk_ends_ahead_of_an_image_that_is_not_divided() -> None:
    steps = Steps(num_rows=100, max_patches=400, max_tokens=10, is_whole=True)
    steps.scheduler.add(ask("a", 3, picture(1, 8), 2, picture(2, 5), 1))
    assert [steps.run() for _ in range(3)] == [({"a": 3}, 0), ({"a": 10}, 8), ({"a": 6}, 5)]


def test_a_prefix_may_end_within_an_image_of_which_the_step_computes_the_rest() -> None:
    steps, image = Steps(num_rows=100, max_patches=400, max_tokens=16, is_whole=True), picture(1, 9)
    steps.scheduler.add(ask("a", 4, image, 1, max_tokens=1))
    assert steps.run() == ({"a": 14}, 9)
    steps.scheduler.add(ask("b", 4, image, 1, max_tokens=1))
    plan = steps.scheduler.schedule()
    step = steps.builder.build(plan)
    ((_, start, num_tokens, *_),) = plan.rows
    assert (start, num_tokens) == (12, 2), "blocks have 4 tokens"
    assert np.frombuffer(step.image_ends, np.int32).tolist() == [12, -1]
    steps.commit(plan)


def test_an_image_that_is_not_divided_comes_before_decodes_that_leave_no_room() -> None:
    steps = Steps(num_rows=100, max_patches=400, max_tokens=10, is_whole=True)
    for id in "ab":
        steps.scheduler.add(ask(id, 4, max_tokens=30))
    assert steps.run()[0] == {"a": 4, "b": 4}
    steps.scheduler.add(ask("c", picture(1, 9), 3, max_tokens=1))
    assert steps.run() == ({"a": 1, "c": 9}, 9)
    assert steps.run()[0] == {"a": 1, "b": 1, "c": 3}


def test_an_image_that_is_not_divided_may_exceed_the_tokens_of_prompts() -> None:
    steps = Steps(num_rows=100, max_patches=400, is_whole=True)
    steps.scheduler.max_prompt_tokens = 4
    steps.scheduler.add(ask("a", 6, picture(1, 9), 5, max_tokens=1))
    assert [steps.run()[0]["a"] for _ in range(3)] == [6, 9, 4]


def test_a_window_without_room_for_an_image_takes_that_of_later_prompts() -> None:
    steps = Steps(100, 400, max_tokens=11, num_blocks=6, is_whole=True, kinds=(window_kind(4),))
    steps.scheduler.add(ask("a", 3, picture(1, 11), max_tokens=1))
    steps.scheduler.add(ask("b", 5, max_tokens=9))
    assert steps.run() == ({"a": 3, "b": 5}, 0)
    assert steps.run() == ({"a": 11}, 11), "of which 9 have room next to the other one"
    assert steps.scheduler.stats.num_preemptions == 1
    while steps.scheduler.has_work:
        assert steps.run()[0]


def test_an_image_for_which_no_window_has_room_is_refused() -> None:
    steps = Steps(100, 400, max_tokens=40, num_blocks=9, is_whole=True, kinds=(window_kind(4),))
    steps.scheduler.check(ask("a", 20, picture(1, 16), 9))
    with pytest.raises(RequestError, match="more than the whole KV cache holds"):
        steps.scheduler.check(ask("a", 20, picture(1, 36), 9))


def test_an_image_that_waits_for_a_step_of_its_own_takes_no_room_from_others() -> None:
    steps = Steps(num_rows=100, max_patches=400, max_tokens=10, is_whole=True)
    for number, id in enumerate("ab", 1):
        steps.scheduler.add(ask(id, 3, picture(number, 8), max_tokens=1))
    steps.scheduler.add(ask("c", 2, max_tokens=30))
    assert steps.run()[0] == {"a": 3, "b": 3, "c": 2}
    assert steps.run()[0] == {"c": 1, "a": 8}
    assert steps.run()[0] == {"c": 1, "b": 8}
    assert not steps.scheduler.stats.num_preemptions
