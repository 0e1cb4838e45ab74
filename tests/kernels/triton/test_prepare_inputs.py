"""What the device makes of its slots is what the host makes of a plan whose tokens it knows."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from atom.config import SamplingParams
from atom.kernels.triton.prepare_inputs import ENTRIES, TOKENS, Inputs, extend_tables, feed_decodes, feed_rows
from atom.runtime.batch import build_inputs
from atom.runtime.batch_shape import Layout
from atom.runtime.types import Plan, Row, Sequence

NUM_SLOTS = 11  # of which the last, behind these, is nobody's
KINDS = ("full", "window_5", "latent")
UNWRITTEN = -7


@dataclass
class State:
    """What `Slots` has of these."""

    num_slots: int
    tokens: Tensor
    lengths: Tensor


class World:
    """Sequences in slots, with scattered blocks, as the host has them and as the device does."""

    def __init__(self, device: str, block_size: int, num_kinds: int, width: int) -> None:
        self.device, self.block_size, self.kinds = device, block_size, KINDS[:num_kinds]
        self.chance = random.Random(block_size)
        self.tables = torch.zeros(num_kinds, NUM_SLOTS + 1, width, dtype=torch.int32)
        self.state = State(
            NUM_SLOTS, torch.full((NUM_SLOTS + 1,), 3333), torch.full((NUM_SLOTS + 1,), 99, dtype=torch.int32)
        )
        self.state.lengths[NUM_SLOTS] = 1
        self.blocks = [self.chance.sample(range(1, 10000), 9000) for _ in self.kinds]
        self.slots = self.chance.sample(range(NUM_SLOTS), NUM_SLOTS)

    def decode(self, length: int) -> Row:
        """A sequence of so many tokens, the newest of which the device has sampled."""
        sequence = self._sequence(length)
        sequence.prompt, sequence.output = sequence.prompt[:-1], sequence.prompt[-1:]
        sequence.num_given = length - 1
        self.state.tokens[sequence.slot], self.state.lengths[sequence.slot] = sequence.output[-1], length
        return Row(sequence, length - 1, 1, True)

    def prompt(self, start: int, num_tokens: int, length: int) -> Row:
        sequence = self._sequence(length)
        sequence.num_given = length
        return Row(sequence, start, num_tokens, start + num_tokens == length)

    def _sequence(self, length: int) -> Sequence:
        slot, num_blocks = self.slots.pop(), -(-length // self.block_size)
        prompt = [self.chance.randrange(1000) for _ in range(length)]
        blocks = {
            kind: [own.pop() for _ in range(num_blocks)] for kind, own in zip(self.kinds, self.blocks, strict=True)
        }
        for at, kind in enumerate(self.kinds):
            self.tables[at, slot, :num_blocks] = torch.tensor(blocks[kind], dtype=torch.int32)
        return Sequence("s", prompt, SamplingParams(), slot=slot, blocks=blocks)

    def on_device(self) -> State:
        return State(NUM_SLOTS, self.state.tokens.to(self.device), self.state.lengths.to(self.device))

    def inputs(self, num_tokens: int, num_rows: int) -> Inputs:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, UNWRITTEN, dtype=dtype, device=self.device)

        numbers, num_kinds = empty(2 + len(self.kinds), num_tokens), len(self.kinds)
        tables = empty(num_kinds, num_rows, self.tables.shape[2], dtype=torch.int32)
        return Inputs(numbers[0], numbers[1], empty(num_rows, dtype=torch.int32), numbers[2:], tables)

    def assert_as_the_host_has_it(self, inputs: Inputs, plan: Plan, num_left: int = 0) -> None:
        """num_left: rows of padding, of a token each, between decodes and the others"""
        names = [f"{part}_{kind}" for part in ("slots", "table") for kind in self.kinds]
        expected: dict[str, Any] = build_inputs(plan, names, self.block_size)
        tokens, rows = (
            [at + num_left * (at >= plan.num_decodes) for at in range(count)]
            for count in (plan.num_tokens, len(plan.rows))
        )
        assert inputs.tokens[tokens].tolist() == expected["tokens"].tolist()
        assert inputs.positions[tokens].tolist() == expected["positions"].tolist()
        assert inputs.lengths[rows].tolist() == expected["lengths"].tolist()
        for at, kind in enumerate(self.kinds):
            assert inputs.slots[at, tokens].tolist() == expected[f"slots_{kind}"].tolist()
            for place, length, table in zip(rows, expected["lengths"], expected[f"table_{kind}"], strict=True):
                num_blocks = -(-int(length) // self.block_size)
                assert inputs.tables[at, place, :num_blocks].tolist() == table[:num_blocks].tolist()


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_kinds", [1, 3])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_decodes(triton_device: str, block_size: int, num_kinds: int, num_padding: int):
    world = World(triton_device, block_size, num_kinds, width=-(-700 // block_size))
    lengths = [2, 3, 15, 16, 17, 33, ENTRIES, ENTRIES + 1, 2 * ENTRIES + 5]
    plan = Plan([world.decode(length) for length in lengths], len(lengths))
    slots = [row.sequence.slot for row in plan.rows] + [NUM_SLOTS] * num_padding
    rows = torch.tensor(slots, dtype=torch.int32, device=triton_device)
    inputs, state = world.inputs(len(rows), len(rows)), world.on_device()
    feed_decodes(rows, state, world.tables.to(triton_device), block_size, inputs)
    world.assert_as_the_host_has_it(inputs, plan)
    assert state.tokens.tolist() == world.state.tokens.tolist()
    assert state.lengths.tolist() == world.state.lengths.tolist()
    padding = slice(len(lengths), None)
    assert inputs.positions[padding].tolist() == [0] * num_padding
    assert inputs.lengths[padding].tolist() == [1] * num_padding
    assert inputs.slots[:, padding].tolist() == [[0] * num_padding] * num_kinds, "they write to block 0"


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_kinds", [1, 2])
@pytest.mark.parametrize("more", [(0, 0, 0, 0), (1, 1, 0, 0), (140, 4, 3, 0), (2, 2, 2, 2), (140, 9, 3, 3)], ids=str)
def test_steps_with_prompts(triton_device: str, block_size: int, num_kinds: int, more: tuple[int, ...]):
    world = World(triton_device, block_size, num_kinds, width=-(-500 // block_size))
    rows = [world.decode(length) for length in (2, 16, 17, 400)]
    rows.append(world.prompt(0, 1, 1))
    num_decodes = len(rows)
    rows += [
        world.prompt(0, 7, 7),
        world.prompt(5, TOKENS, 5 + TOKENS),
        world.prompt(30, 9, 50),
        world.prompt(299, 1, 300),
    ]
    plan = Plan(rows, num_decodes)
    own, num_left = Layout.of(plan), more[-1]
    layout = Layout(*(count + extra for count, extra in zip(astuple(own), more, strict=True)))
    packed = torch.from_numpy(layout.pack(plan, NUM_SLOTS)).to(triton_device)
    slots, starts, ends, given, row_of = layout.rows(packed)
    inputs, state = world.inputs(layout.num_tokens, layout.num_rows), world.on_device()
    feed_rows(slots, given, row_of, starts, ends, state, world.tables.to(triton_device), block_size, inputs)
    world.assert_as_the_host_has_it(inputs, plan, num_left)
    lengths = world.state.lengths.clone()
    for row in rows:
        lengths[row.sequence.slot] = row.start + row.num_tokens
    assert state.lengths.tolist() == lengths.tolist(), "a slot whose tokens were given has its length"
    assert state.tokens.tolist() == world.state.tokens.tolist()
    for tokens in (slice(num_decodes, num_decodes + num_left), slice(own.num_tokens + num_left, None)):
        assert inputs.slots[:, tokens].eq(0).all(), "padding writes to block 0"
        assert inputs.positions[tokens].eq(0).all() and inputs.tokens[tokens].eq(0).all()
    for padding in (slice(num_decodes, num_decodes + num_left), slice(own.num_rows + num_left, None)):
        assert inputs.lengths[padding].eq(0).all(), "and sees nothing"


def test_a_step_of_padding_alone(triton_device: str):
    world, layout = World(triton_device, 4, 2, width=5), Layout(3, 2, 1)
    slots, starts, ends, given, row_of = layout.rows(torch.from_numpy(layout.padding(NUM_SLOTS)).to(triton_device))
    inputs, state = world.inputs(3, 2), world.on_device()
    feed_rows(slots, given, row_of, starts, ends, state, world.tables.to(triton_device), 4, inputs)
    assert inputs.slots.eq(0).all() and inputs.positions.eq(0).all() and inputs.lengths.eq(0).all()
    assert state.lengths.tolist() == world.state.lengths.tolist()


@pytest.mark.parametrize("num_entries", [1, ENTRIES, ENTRIES + 1])
def test_tables_are_extended_where_it_is_said_and_nowhere_else(triton_device: str, num_entries: int):
    tables = torch.full((2, NUM_SLOTS + 1, 40), UNWRITTEN, dtype=torch.int32, device=triton_device)
    chance = random.Random(num_entries)
    places = chance.sample(range(tables.numel()), num_entries)
    blocks = [chance.randrange(1 << 30) for _ in places]
    expected = tables.clone().cpu()
    for place, block in zip(places, blocks, strict=True):
        expected.view(-1)[place] = block
    extend_tables(tables, torch.tensor([places, blocks], dtype=torch.int32, device=triton_device))
    assert torch.equal(tables.cpu(), expected)
