"""What the device makes of its slots is what the host makes of a plan whose tokens it knows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Place
from torch import Tensor

from atom.graph import Batch
from atom.kernels import find_step_kernels
from atom.kernels.step import Inputs
from atom.kernels.triton.step.prepare_inputs import ENTRIES, TOKENS
from atom.runtime.step.input import BatchShape, PackedRows
from atom.runtime.step.request_state import RequestState

NUM_SLOTS = 11  # after which comes the slot of padding
KINDS = ("full", "window_5", "latent")
UNWRITTEN = -7


@dataclass
class State:
    """What `RequestState` has of these."""

    num_slots: int
    tokens: Tensor
    lengths: Tensor
    drafts: Tensor | None = None


class Row(NamedTuple):
    """A sequence's share of a step, as the host knows it."""

    slot: int
    tokens: list[int]  # of the sequence
    start: int
    num_tokens: int
    is_given: bool
    blocks: dict[str, list[int]]

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


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
        row = self._add(length, length - 1, 1, is_given=False)
        self.state.tokens[row.slot], self.state.lengths[row.slot] = row.tokens[-1], length
        return row

    def prompt(self, start: int, num_tokens: int, length: int) -> Row:
        return self._add(length, start, num_tokens, is_given=True)

    def _add(self, length: int, start: int, num_tokens: int, is_given: bool) -> Row:
        slot, num_blocks = self.slots.pop(), -(-length // self.block_size)
        tokens = [self.chance.randrange(1000) for _ in range(length)]
        blocks = {
            kind: [own.pop() for _ in range(num_blocks)] for kind, own in zip(self.kinds, self.blocks, strict=True)
        }
        for at, kind in enumerate(self.kinds):
            self.tables[at, slot, :num_blocks] = torch.tensor(blocks[kind], dtype=torch.int32)
        return Row(slot, tokens, start, num_tokens, is_given, blocks)

    def on_device(self) -> Any:
        return State(NUM_SLOTS, self.state.tokens.to(self.device), self.state.lengths.to(self.device))

    def inputs(self, num_tokens: int, num_rows: int, starts: Tensor | None = None) -> Inputs:
        """starts: none of decodes, which are not asked for them"""

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, UNWRITTEN, dtype=dtype, device=self.device)

        numbers, num_kinds = empty(2 + len(self.kinds), num_tokens), len(self.kinds)
        tables = empty(num_kinds, num_rows, self.tables.shape[2], dtype=torch.int32)
        lengths = empty(num_rows, dtype=torch.int32)
        batch = Batch(
            dict(zip(self.kinds, tables, strict=True)), dict(zip(self.kinds, numbers[2:], strict=True)),
            lengths if starts is None else starts, lengths, 0,
        )  # fmt: skip
        return Inputs(numbers[0], numbers[1], batch, numbers[2:], tables)

    def assert_as_the_host_has_it(self, inputs: Inputs, rows: list[Row], num_decodes: int, num_left: int = 0) -> None:
        """num_left: rows of padding, of a token each, between decodes and the others"""
        size, at = self.block_size, 0
        for place, row in enumerate(rows):
            at += num_left * (place == num_decodes)
            own, line = slice(at, at := at + row.num_tokens), place + num_left * (place >= num_decodes)
            positions = range(row.start, row.stop)
            assert inputs.tokens[own].tolist() == row.tokens[row.start : row.stop]
            assert inputs.positions[own].tolist() == [*positions]
            assert inputs.batch.lengths[line] == row.stop
            for kind, blocks in row.blocks.items():
                slots, table = inputs.batch.slot_mappings[kind], inputs.batch.tables[kind]
                assert slots[own].tolist() == [blocks[p // size] * size + p % size for p in positions]
                num_blocks = -(-row.stop // size)
                assert table[line, :num_blocks].tolist() == blocks[:num_blocks]


def pack(shape: BatchShape, rows: list[Row], num_decodes: int) -> Tensor:
    """The rows in a shape, decodes first; what is left is padding."""
    packed = torch.frombuffer(shape.pad(NUM_SLOTS), dtype=torch.int32)
    slots, starts, ends, _, _, given, row_of, _ = shape.split(packed)
    num_left, at = shape.num_decodes - num_decodes, 0
    for place, row in enumerate(rows):
        at += num_left * (place == num_decodes)
        line = place + num_left * (place >= num_decodes)
        slots[line], starts[line], ends[line] = row.slot, at, row.stop if row.is_given else 0
        given[at : at + row.num_tokens] = torch.tensor(row.tokens[row.start : row.stop] if row.is_given else [-1])
        row_of[at : at + row.num_tokens] = line
        at += row.num_tokens
    starts[len(rows) + num_left :] = at
    row_of[at:] = len(rows) + num_left
    return packed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_kinds", [0, 1, 3])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_decodes(place: Place, block_size: int, num_kinds: int, num_padding: int):
    world = World(place.device, block_size, num_kinds, width=-(-700 // block_size))
    lengths = [2, 3, 15, 16, 17, 33, ENTRIES, ENTRIES + 1, 2 * ENTRIES + 5]
    rows = [world.decode(length) for length in lengths]
    slots = [row.slot for row in rows] + [NUM_SLOTS] * num_padding
    inputs, state = world.inputs(len(slots), len(slots)), world.on_device()
    on_device = torch.tensor(slots, dtype=torch.int32, device=place.device)
    find_step_kernels(place.device, place.backend).decode_inputs(
        on_device, state, world.tables.to(place.device), block_size, inputs
    )
    world.assert_as_the_host_has_it(inputs, rows, len(rows))
    assert state.tokens.tolist() == world.state.tokens.tolist()
    assert state.lengths.tolist() == world.state.lengths.tolist()
    padding = slice(len(lengths), None)
    assert inputs.positions[padding].tolist() == [0] * num_padding
    assert inputs.batch.lengths[padding].tolist() == [1] * num_padding
    assert inputs.slots[:, padding].tolist() == [[0] * num_padding] * num_kinds, "they write to block 0"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("num_drafts", "num_kept"), [(1, 1), (3, 3), (3, 5)])
def test_decodes_with_drafts(place: Place, block_size: int, num_drafts: int, num_kept: int):
    """Rows are sequences whose last tokens are drafts; some have fewer blocks than drafts, or no draft at all."""
    world = World(place.device, block_size, 2, width=-(-(2 * ENTRIES + 20) // block_size))
    lengths, max_drafts = (
        [2, 3, 15, 16, 17, ENTRIES, 2 * ENTRIES + 5],
        [num_drafts, 0, 1, num_drafts, num_drafts - 1, 1, 0],
    )
    rows, drafts = [], torch.full((NUM_SLOTS + 1, num_kept), -1)
    for length, own in zip(lengths, max_drafts, strict=True):
        row = world.decode(length + own)
        drafts[row.slot, :own] = torch.tensor(row.tokens[length:])
        world.state.tokens[row.slot], world.state.lengths[row.slot] = row.tokens[length - 1], length
        rows.append(row._replace(start=length - 1, num_tokens=1 + own))
    num_padding = 2
    slots = torch.tensor([row.slot for row in rows] + [NUM_SLOTS] * num_padding, dtype=torch.int32)
    limits = torch.tensor(max_drafts + [0] * num_padding, dtype=torch.int32)
    inputs, state = world.inputs(len(slots) * (1 + num_drafts), len(slots)), world.on_device()
    state.drafts = drafts.to(place.device)
    batch = inputs.batch._replace(num_decodes=len(slots), query_len=1 + num_drafts)
    inputs = inputs._replace(batch=batch)
    find_step_kernels(place.device, place.backend).decode_inputs(
        slots.to(place.device), state, world.tables.to(place.device), block_size, inputs, limits.to(place.device)
    )
    for place_of, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        first = place_of * (1 + num_drafts)
        own, following = slice(first, first + row.num_tokens), slice(first + row.num_tokens, first + 1 + num_drafts)
        assert inputs.tokens[own].tolist() == row.tokens[row.start :]
        assert inputs.positions[first : first + 1 + num_drafts].tolist() == [*range(length - 1, length + num_drafts)]
        assert inputs.tokens[following].tolist() == [0] * (num_drafts + 1 - row.num_tokens), "an id that there is"
        assert inputs.batch.lengths[place_of] == length + num_drafts
        for kind, blocks in row.blocks.items():
            slots_of, table = inputs.batch.slot_mappings[kind], inputs.batch.tables[kind]
            expected = [blocks[p // block_size] * block_size + p % block_size for p in range(row.start, row.stop)]
            assert slots_of[own].tolist() == expected
            assert all(0 <= slot < block_size for slot in slots_of[following].tolist()), "in block 0"
            assert table[place_of, : len(blocks)].tolist() == blocks
    padding = slice(len(rows) * (1 + num_drafts), None)
    assert ((inputs.slots[:, padding] >= 0) & (inputs.slots[:, padding] < block_size)).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_kinds", [0, 1, 2])
@pytest.mark.parametrize("more", [(0, 0, 0, 0), (1, 1, 0, 0), (140, 4, 3, 0), (2, 2, 2, 2), (140, 9, 3, 3)], ids=str)
def test_steps_with_prompts(place: Place, block_size: int, num_kinds: int, more: tuple[int, ...]):
    world = World(place.device, block_size, num_kinds, width=-(-500 // block_size))
    rows = [world.decode(length) for length in (2, 16, 17, 400)]
    rows.append(world.prompt(0, 1, 1))
    num_decodes = len(rows)
    rows += [
        world.prompt(0, 7, 7),
        world.prompt(5, TOKENS, 5 + TOKENS),
        world.prompt(30, 9, 50),
        world.prompt(299, 1, 300),
    ]
    num_tokens, num_left = sum(row.num_tokens for row in rows), more[-1]
    own = (num_tokens, len(rows), len(rows), num_decodes)
    shape = BatchShape(*(count + extra for count, extra in zip(own, more, strict=True)))
    packed = pack(shape, rows, num_decodes).to(place.device)
    split = shape.split(packed)
    inputs, state = world.inputs(shape.num_tokens, shape.num_rows, split.starts), world.on_device()
    tables = world.tables.to(place.device)
    find_step_kernels(place.device, place.backend).mixed_inputs(split, state, tables, block_size, inputs)
    world.assert_as_the_host_has_it(inputs, rows, num_decodes, num_left)
    lengths = world.state.lengths.clone()
    for row in rows:
        lengths[row.slot] = row.stop
    assert state.lengths.tolist() == lengths.tolist(), "a slot whose tokens were given has its length"
    assert state.tokens.tolist() == world.state.tokens.tolist()
    for tokens in (slice(num_decodes, num_decodes + num_left), slice(num_tokens + num_left, None)):
        assert inputs.slots[:, tokens].eq(0).all(), "padding writes to block 0"
        assert inputs.positions[tokens].eq(0).all() and inputs.tokens[tokens].eq(0).all()
    for padding in (slice(num_decodes, num_decodes + num_left), slice(len(rows) + num_left, None)):
        assert inputs.batch.lengths[padding].eq(0).all(), "and sees nothing"


def test_a_step_of_padding_only(place: Place):
    world, shape = World(place.device, 4, 2, width=5), BatchShape(3, 2, 1)
    packed = torch.frombuffer(shape.pad(NUM_SLOTS), dtype=torch.int32).to(place.device)
    rows = shape.split(packed)
    inputs, state, tables = world.inputs(3, 2, rows.starts), world.on_device(), world.tables.to(place.device)
    find_step_kernels(place.device, place.backend).mixed_inputs(rows, state, tables, 4, inputs)
    assert inputs.slots.eq(0).all() and inputs.positions.eq(0).all() and inputs.batch.lengths.eq(0).all()
    assert state.lengths.tolist() == world.state.lengths.tolist()


@pytest.mark.parametrize("num_entries", [1, ENTRIES, ENTRIES + 1])
def test_tables_are_extended_where_the_update_is_and_nowhere_else(place: Place, num_entries: int):
    tables = torch.full((2, NUM_SLOTS + 1, 40), UNWRITTEN, dtype=torch.int32, device=place.device)
    chance = random.Random(num_entries)
    places = chance.sample(range(tables.numel()), num_entries)
    blocks = [chance.randrange(1 << 30) for _ in places]
    expected = tables.clone().cpu()
    for at, block in zip(places, blocks, strict=True):
        expected.view(-1)[at] = block
    find_step_kernels(place.device, place.backend).extend_tables(
        tables, torch.tensor([places, blocks], dtype=torch.int32, device=place.device)
    )
    assert torch.equal(tables.cpu(), expected)


@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 5, TOKENS + 3])
def test_a_draft_reads_the_tokens_after_those_of_decodes(place: Place, num_rows: int, num_queries: int):
    """Each slot knows of its positions p the token 1000 * slot + p."""
    chance = random.Random(num_rows)
    state, history = histories(place.device, num_rows)
    slots = chance.sample(range(num_rows), num_rows - num_rows // 5) + [num_rows] * (num_rows // 5)
    firsts, counts = [chance.randrange(20) for _ in slots], [chance.randrange(num_queries) for _ in slots]
    for slot, first, count in zip(slots, firsts, counts, strict=True):
        state.lengths[slot] = first + 2 + count
    positions = [first + query for first in firsts for query in range(num_queries)]
    found, places = ask_for_draft_inputs(place, slots, None, state, positions, num_queries)
    owners = [slot for slot in slots for _ in range(num_queries)]
    assert found == [history[slot][position + 1] for slot, position in zip(owners, positions, strict=True)]
    expected = [row * num_queries + count for row, count in enumerate(counts)]
    used = [at for at, slot in enumerate(slots) if slot < num_rows]
    assert [places[at] for at in used] == [expected[at] for at in used]
    assert all(0 <= each < len(positions) for each in places)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_draft_reads_the_tokens_after_those_of_prompts(place: Place, num_drafts: int):
    """Two decodes, the second of padding; a prompt that samples, one that does not, and padding."""
    state, history = histories(place.device, 5)
    shape = BatchShape(2 + 90 + 60 + 20, 5, 3, 2).drafting(num_drafts)
    packed = torch.zeros(len(shape.pad(5)) // 4, dtype=torch.int32)
    rows, queries = shape.split(packed), 1 + num_drafts
    lengths = [queries, queries, 90, 60, 20]
    rows.slots[:] = torch.tensor([3, 5, 0, 2, 5])
    rows.row_of[:] = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    rows.sampled[:] = torch.tensor([3, 5, 0])
    rows.token_index[:] = torch.tensor([0, queries, 2 * queries + 89])
    positions = [*range(7, 7 + queries), *range(queries), *range(4, 94), *range(60), *([0] * 20)]
    state.lengths[3], state.lengths[0] = 7 + 2 + num_drafts, 95  # all drafts were accepted
    rows = PackedRows(*(each.to(place.device) for each in rows))
    found, places = ask_for_draft_inputs(place, rows.sampled.tolist(), rows, state, positions, queries)
    owners = [3] * queries + [5] * queries + [0] * 90 + [2] * 60 + [5] * 20
    assert found == [history[slot][position + 1] for slot, position in zip(owners, positions, strict=True)]
    assert (places[0], places[2]) == (num_drafts, 2 * queries + 89) and queries <= places[1] < 2 * queries


def test_no_token_is_read_past_the_last_one_that_a_slot_has_room_for(place: Place):
    state, history = histories(place.device, 1)
    state.lengths[0] = 500  # of a rehearsal
    found, places = ask_for_draft_inputs(place, [0], None, state, [98, 99, 100], 3)
    assert (found, places) == ([history[0][99]] * 3, [2])


def histories(device: str, num_slots: int) -> tuple[RequestState, list[list[int]]]:
    state = RequestState(num_slots, 50, device, 3, 100)
    assert state.history is not None
    history = [[1000 * slot + at for at in range(100)] for slot in range(num_slots + 1)]
    state.history.copy_(torch.tensor(history))
    return state, history


def ask_for_draft_inputs(
    place: Place, slots: list[int], rows: PackedRows | None, state: RequestState, positions: list[int], num_queries: int
) -> tuple[list[int], list[int]]:
    own, at = (torch.tensor(each, device=place.device) for each in (slots, positions))
    batch = Batch({}, {}, own.int(), own.int(), len(slots), num_queries)
    inputs = Inputs(at, at, batch, at[None], at[None, None].int())
    tokens, places = find_step_kernels(place.device, place.backend).draft_inputs(own.int(), rows, state, inputs)
    return tokens.tolist(), places.tolist()
