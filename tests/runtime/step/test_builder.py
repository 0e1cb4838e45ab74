from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import ADMISSION, BatchShape, Capacity, Counted, Scored, StepInput
from atom.runtime.types import Plan, ScheduledRequest, Sequence
from atom.sampling_params import SamplingParams

PADDING = 9  # the slot that is nobody's
CAPACITY = Capacity(("full",), PADDING, table_width=10, vocab=1000)


def sequence(slot: int, num_prompt: int, output: list[int] | None = None, **params: Any) -> Sequence:
    prompt = [100 * slot + place for place in range(num_prompt)]
    params = SamplingParams(**params)  # type: ignore[assignment]
    return Sequence(f"s{slot}", prompt, params, slot=slot, output=output or [], blocks={"full": [slot + 1]})  # type: ignore[arg-type]


def mixed() -> Plan:
    """A decode, the end of a prompt, and a chunk of one that goes on: 1 + 3 + 2 tokens, 2 rows that sample."""
    rows = [
        ScheduledRequest(sequence(4, 5, [7]), 5, 1, True),
        ScheduledRequest(sequence(1, 8), 5, 3, True),
        ScheduledRequest(sequence(2, 9), 4, 2, False),
    ]
    return Plan(rows, 1)


def admit(builder: StepBuilder, each: Sequence) -> StepInput:
    """Its prompt, so that the runner has what follows it."""
    output, each.output = each.output, []
    step = builder.build(Plan([ScheduledRequest(each, 0, len(each.prompt), True)], 0))
    each.output = output
    return step


def pack(plan: Plan, *shapes: BatchShape, known: tuple[int, ...] = (4,)) -> tuple[BatchShape, dict[str, list[int]]]:
    """The shape of a step and what is in it. known: slots whose sequences the runner has already"""
    builder = StepBuilder(msgspec.structs.replace(CAPACITY, mixed_shapes=shapes))
    for row in plan.rows:
        if row.sequence.slot in known:
            admit(builder, row.sequence)
    step = builder.build(plan)
    assert not step.is_decode
    return step.shape, parts(step.shape, step.packed)


def parts(shape: BatchShape, packed: bytearray) -> dict[str, list[int]]:
    names = ("slots", "starts", "new_length", "sampled", "token_index", "host_tokens", "row_of", "max_accepted")
    split = shape.split(np.frombuffer(packed, np.int32))
    found = {name: part.tolist() for name, part in zip(names, split, strict=True)}
    if not any(found["max_accepted"]):
        del found["max_accepted"]
    return found


def test_a_plan_is_laid_out_row_by_row() -> None:
    shape, packed = pack(mixed())
    assert shape == BatchShape(num_tokens=6, num_rows=3, num_samples=2, num_decodes=1)
    assert packed == {
        "slots": [4, 1, 2],
        "starts": [0, 1, 4, 6],
        "new_length": [0, 8, 6],
        "host_tokens": [-1, 105, 106, 107, 204, 205],
        "row_of": [0, 1, 1, 1, 2, 2],
        "sampled": [4, 1],
        "token_index": [0, 3],
    }


def test_what_a_larger_shape_has_left_is_padding_of_nobody_s_slot_in_rows_without_tokens() -> None:
    shape = BatchShape(num_tokens=9, num_rows=5, num_samples=4, num_decodes=1)
    assert pack(mixed(), shape)[1] == {
        "slots": [4, 1, 2, 9, 9],
        "starts": [0, 1, 4, 6, 6, 6],
        "new_length": [0, 8, 6, 0, 0],
        "host_tokens": [-1, 105, 106, 107, 204, 205, 0, 0, 0],
        "row_of": [0, 1, 1, 1, 2, 2, 3, 3, 3],
        "sampled": [4, 1, 9, 9],
        "token_index": [0, 3, 0, 0],
    }


def test_decodes_that_a_larger_shape_has_left_have_tokens_of_nobody_s_slot_before_those_of_prompts() -> None:
    shape = BatchShape(num_tokens=10, num_rows=6, num_samples=4, num_decodes=3)
    assert pack(mixed(), shape)[1] == {
        "slots": [4, 9, 9, 1, 2, 9],
        "starts": [0, 1, 2, 3, 6, 8, 8],
        "new_length": [0, 0, 0, 8, 6, 0],
        "host_tokens": [-1, 0, 0, 105, 106, 107, 204, 205, 0, 0],
        "row_of": [0, 1, 2, 3, 3, 3, 4, 4, 5, 5],
        "sampled": [4, 1, 9, 9],
        "token_index": [0, 5, 0, 0],
    }


def test_prompts_of_only_one_token_leave_the_rest_to_padding() -> None:
    shape = BatchShape(num_tokens=5, num_rows=3, num_samples=3, num_decodes=2)
    plan = Plan([ScheduledRequest(sequence(4, 1), 0, 1, True)], 1)
    assert pack(plan, shape, known=())[1] == {
        "slots": [4, 9, 9],
        "starts": [0, 1, 2, 2],
        "new_length": [1, 0, 0],
        "host_tokens": [400, 0, 0, 0, 0],
        "row_of": [0, 1, 2, 2, 2],
        "sampled": [4, 9, 9],
        "token_index": [0, 0, 0],
    }


def test_a_shape_of_only_padding_gives_the_tokens_after_its_decodes_to_its_next_row() -> None:
    shape = BatchShape(num_tokens=3, num_rows=3, num_samples=1, num_decodes=1)
    assert parts(shape, shape.pad(PADDING)) == {
        "slots": [9, 9, 9],
        "starts": [0, 1, 1, 1],
        "new_length": [0, 0, 0],
        "host_tokens": [0, 0, 0],
        "row_of": [0, 1, 1],
        "sampled": [9],
        "token_index": [0],
    }


def test_a_sequence_that_was_preempted_gives_its_own_output_as_a_prompt() -> None:
    _, packed = pack(Plan([ScheduledRequest(sequence(3, 4, [7, 8]), 3, 3, True)], 0))
    assert packed == {
        "slots": [3],
        "starts": [0, 3],
        "new_length": [6],
        "host_tokens": [303, 7, 8],
        "row_of": [0, 0, 0],
        "sampled": [3],
        "token_index": [2],
    }


def test_the_last_given_token_is_given_though_its_row_is_a_decode() -> None:
    plan = Plan([ScheduledRequest(sequence(0, 1), 0, 1, True), ScheduledRequest(sequence(1, 7), 6, 1, True)], 2)
    _, packed = pack(plan)
    assert (packed["host_tokens"], packed["new_length"]) == ([0, 106], [1, 7])


@pytest.mark.parametrize(("sizes", "slots"), [((), [4]), ((1, 3), [4]), ((3,), [4, 9, 9])])
def test_decodes_are_their_slots_in_the_smallest_size_that_holds_them(sizes: tuple[int, ...], slots: list[int]) -> None:
    builder = StepBuilder(msgspec.structs.replace(CAPACITY, decode_sizes=sizes))
    each = sequence(4, 5, [7])
    admit(builder, each)
    step = builder.build(Plan([ScheduledRequest(each, 5, 1, True)], 1))
    assert step.is_decode and step.shape == BatchShape(*[len(slots)] * 4)
    assert np.frombuffer(step.packed, np.int32).tolist() == slots
    assert step.reported == [4 * 8 + 6]


def test_a_slot_gets_its_sequence_once_and_blocks_that_are_new() -> None:
    builder, each = (
        StepBuilder(CAPACITY),
        sequence(2, 5, seed=-1, temperature=0.5, top_k=(1 << 31) - 1, repetition_penalty=1.5),
    )
    each.seed = -1
    step = admit(builder, each)
    (admitted,) = ADMISSION.iter_unpack(step.admissions)
    assert admitted == (2, 5, 2**64 - 1, -1, 0, 0.5, (1 << 31) - 1, 1.0, 0.0, 0.0, 0.0, 1.5)
    assert step.counted == [Counted(2, each.prompt, [])]
    assert (step.sampling, step.has_penalties) == ("filtered", True)
    assert np.frombuffer(step.table_entries, np.int32).tolist() == [2 * 10, 3]
    each.output, each.blocks["full"] = [1], each.blocks["full"] + [7, 8]
    tables = each.blocks  # the same dict: it was not admitted anew
    again = builder.build(Plan([ScheduledRequest(each, 5, 1, True)], 1))
    assert again.admissions == again.table_entries == bytearray(), "a list in another's place is not looked at"
    each.blocks = dict(tables)
    sent = builder.build(Plan([ScheduledRequest(each, 5, 1, True)], 1))
    assert np.frombuffer(sent.table_entries, np.int32).reshape(2, -1).tolist() == [[20, 21, 22], [3, 7, 8]]
    assert sent.counted == [Counted(2, each.prompt, [1])]


def test_new_blocks_go_to_the_table_of_their_kind() -> None:
    builder, each = StepBuilder(msgspec.structs.replace(CAPACITY, kinds=("full", "window"))), sequence(2, 5)
    each.blocks["window"] = [0, 6]
    step = admit(builder, each)
    of_window = (PADDING + 1 + 2) * 10  # after a row for each slot, and for nobody's
    assert np.frombuffer(step.table_entries, np.int32).reshape(2, -1).tolist() == [
        [20, of_window, of_window + 1],
        [3, 0, 6],
    ]


def test_a_step_that_did_not_take_place_is_sent_again_except_what_only_the_runner_knows() -> None:
    builder, known, ahead = StepBuilder(CAPACITY), sequence(0, 3), sequence(1, 3)
    for each in (known, ahead):
        admit(builder, each)
    known.output = [7]
    plan = Plan([ScheduledRequest(known, 3, 1, True), ScheduledRequest(ahead, 3, 1, True)], 2)
    assert builder.build(plan).is_decode
    builder.retract(plan)
    step = builder.build(plan)
    assert [each[:2] for each in ADMISSION.iter_unpack(step.admissions)] == [(0, 4)]
    assert np.frombuffer(step.table_entries, np.int32).reshape(2, -1).tolist() == [[0, 10], [1, 2]]
    assert parts(step.shape, step.packed)["host_tokens"] == [7, -1], (
        "the newest token of the other one is not there yet"
    )


class Only:
    def allowed(self, vocab: int) -> Any:
        return np.arange(vocab) == 5


def test_a_step_refers_to_rows_by_number_and_can_be_sent() -> None:
    shape = BatchShape(num_tokens=16, num_rows=8, num_samples=8, num_decodes=3)
    builder = StepBuilder(msgspec.structs.replace(CAPACITY, mixed_shapes=(shape,)))
    plain, biased, bound, scored = sequence(0, 1), sequence(1, 2, logit_bias={3: 2.5}), sequence(2, 2), sequence(3, 4)
    bound.matcher = Only()  # type: ignore[assignment]
    scored.params = SamplingParams(prompt_logprobs=2, logprobs=1)
    rows = [ScheduledRequest(plain, 0, 1, True), *(ScheduledRequest(each, 0, 2, each is not scored) for each in
                                                   (scored, biased, bound))]  # fmt: skip
    step = builder.build(Plan(rows, 1))
    assert step.scored == [Scored(row=1, first=3, targets=[301, 302], num_top=2, num_rows=2)], (
        "after decodes of padding"
    )
    assert step.logprobs == [], "it does not sample yet"
    assert step.shaping is not None and step.shaping.added == [(1, 3, 2.5)] and step.shaping.banned == []
    ((row, allowed),) = step.shaping.allowed
    assert (row, np.frombuffer(allowed, np.bool_).nonzero()[0].tolist()) == (2, [5])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepInput) == step
    last = builder.build(Plan([ScheduledRequest(scored, 2, 2, True)], 0))
    assert (last.logprobs, last.scored) == ([(0, 1)], [Scored(row=0, first=3, targets=[303], num_top=2, num_rows=1)])


@pytest.mark.parametrize(
    ("larger", "is_held"),
    [
        (BatchShape(7, 4, 2, 2), True),  # itself
        (BatchShape(7, 5, 2, 2), True),
        (BatchShape(8, 5, 2, 2), True),
        (BatchShape(8, 4, 2, 2), False),  # no row for the token of padding
        (BatchShape(6, 5, 2, 2), False),
        (BatchShape(7, 3, 2, 2), False),
        (BatchShape(7, 4, 1, 2), False),
        (BatchShape(8, 5, 2, 3), True),
        (BatchShape(7, 5, 2, 3), False),  # four tokens after three decodes
        (BatchShape(8, 4, 2, 3), False),
        (BatchShape(9, 9, 9, 1), False),  # two decodes
    ],
)
def test_a_shape_holds_what_fits_with_a_row_for_its_padding(larger: BatchShape, is_held: bool) -> None:
    assert larger.holds(BatchShape(7, 4, 2, 2)) == is_held
