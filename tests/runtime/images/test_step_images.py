"""What a step sends of the images of its prompts."""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np

from atom.images.types import Image, PlacedImage, placeholder
from atom.runtime.images.row_pool import RowPool
from atom.runtime.images.step_images import StepImages
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import BatchShape, Capacity, StepInput
from atom.runtime.types import Plan, ScheduledRequest, Sequence
from atom.sampling_params import SamplingParams

FIRST, SECOND = Image(1 << 20, b"", ((1, 2, 6),), 3), Image(2 << 20, b"", ((1, 2, 4),), 2)
SHAPE = BatchShape(14, 6, 6, 2)  # captured: two decodes, 12 tokens of prompts
CAPACITY = Capacity(("full",), 9, table_width=10, vocab=1000, mixed_shapes=(SHAPE,))


def build(*rows: ScheduledRequest, pool: RowPool, num_decodes: int = 0) -> StepInput:
    def encoder_inputs(images: List[Image]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        num_rows = sum(image.num_rows for image in images)
        return {"patches": np.zeros((4 * num_rows, 2), np.uint8)}, np.arange(num_rows)[::-1]  # the last row first

    return StepBuilder(CAPACITY, StepImages(pool, encoder_inputs)).build(Plan(list(rows), num_decodes))


def ask(slot: int, prompt: list[int | Image], **more: object) -> Sequence:
    tokens, placed = list[int](), list[PlacedImage]()
    for part in prompt:
        start = len(tokens)
        if isinstance(part, Image):
            middle = [placeholder(part.digest, at) for at in range(part.num_rows)]
            tokens += [middle[0], 77, *middle[1:]] if part is SECOND else middle  # a break within
            placed.append(PlacedImage(part, start, len(tokens)))
        else:
            tokens.append(part)
    made = Sequence(f"s{slot}", tokens, SamplingParams(), slot=slot, blocks={"full": [slot + 1]}, images=tuple(placed))
    vars(made).update(more)
    return made


def numbers(packed: bytearray) -> list[int]:
    return np.frombuffer(packed, np.int32).tolist()


def test_tokens_of_a_chunk_take_the_rows_of_their_images() -> None:
    pool = RowPool(8)
    text, asked = ask(0, [1, 2]), ask(1, [5, FIRST, 6, SECOND, 8])  # 5 a a a 6 b 77 b 8
    step = build(ScheduledRequest(text, 1, 1, True), ScheduledRequest(asked, 2, 6, False), pool=pool, num_decodes=1)
    assert step.encode is not None
    name, shape, content = step.encode.inputs["patches"]
    assert (name, shape, len(content)) == ("uint8", (20, 2), 40)
    first, second = pool.find(FIRST.digest).tolist(), pool.find(SECOND.digest).tolist()
    assert numbers(step.encode.rows) == (first + second)[::-1]
    rows = [-1, -1, first[1], first[2], -1, second[0], -1, second[1]]  # a decode, one of padding, the chunk
    assert numbers(step.image_rows) == rows + [-1] * (SHAPE.num_tokens - len(rows))
    assert SHAPE.split(np.frombuffer(step.packed, np.int32)).host_tokens[2:8].tolist() == [0, 0, 6, 0, 77, 0]
    assert not step.rope_positions


def test_a_step_of_text_sends_nothing() -> None:
    asked = ask(1, [FIRST, 5, 6, 7])
    step = build(ScheduledRequest(asked, 3, 3, True), pool=RowPool(8))
    assert step.encode is None and not step.image_rows


def test_rope_positions_are_sent_up_to_the_end_of_the_last_image() -> None:
    positions = np.arange(12, dtype=np.int32).reshape(3, 4) + 100
    asked = ask(1, [5, FIRST, 6, 7], rope_positions=positions, rope_delta=-2)
    step = build(ScheduledRequest(asked, 1, 5, True), pool=RowPool(8))
    index, *axes = np.frombuffer(step.rope_positions, np.int32).reshape(4, -1).tolist()
    assert (index, axes) == ([2, 3, 4], [[101, 102, 103], [105, 106, 107], [109, 110, 111]]), "after two of padding"
    assert np.frombuffer(step.admissions, np.int64)[4] == -2


def test_host_state_of_a_prompt_has_no_placeholders() -> None:
    asked = ask(1, [5, FIRST, 6], params=SamplingParams(presence_penalty=1.0, prompt_logprobs=0))
    step = build(ScheduledRequest(asked, 0, 5, True), pool=RowPool(8))
    assert step.counted[0].prompt == [5, 6]
    assert step.scored[0].targets == [0, 0, 0, 6]
