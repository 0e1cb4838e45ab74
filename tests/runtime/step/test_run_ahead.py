"""Steps ahead of the host, over a device that has only what a real one has: what it was sent, and what it sampled.

A token's KV is its whole past, and the next token a hash of that: who reads another one's KV, or stale KV, is found out.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kinds import cells_of, every_kind, full_kind, in_blocks, window_kind
from runtime.test_engine import EOS, Letters

from atom.errors import CapacityError, RequestError
from atom.runtime.engine import Engine
from atom.runtime.kv.cache import LOADED_BYTES, KVCache
from atom.runtime.requests.thinking import Marker, ReasoningMarkers
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import ADMISSION, NUM_REPORTED, Capacity, StepInput
from atom.runtime.types import (
    BlockCopies,
    Logprobs,
    Plan,
    RequestOptions,
    RequestOutput,
    Sampled,
    ScheduledRequest,
    Sequence,
    StateKind,
    StepLimits,
    SwapCosts,
)
from atom.sampling_params import SamplingParams

FULL = full_kind()
WINDOW = window_kind(5)
KINDS = [
    [FULL],
    [WINDOW],
    [FULL, WINDOW],
    [window_kind(1, name="w1"), window_kind(7, name="w7"), FULL],
    [WINDOW, every_kind(4), every_kind(8)],
]
DEPTHS = (0, 1, 2, 3)
NUM_SLOTS, WIDTH = 8, 100


def next_token(tokens: list[int], seed: int) -> int:
    """An A, B, C or D, or once in eight times the end."""
    draw = zlib.crc32(bytes([*tokens, seed % 256])) >> 8  # the low bits of a CRC are too regular
    return EOS if draw % 8 == 0 else 65 + draw // 8 % 4


THINKS = ReasoningMarkers(Marker("A", [65]), [Marker("BC", [66, 67])], lambda tokens: "".join(map(chr, tokens)))


def forced_token(prompt: list[int], output: list[int], budget: int | None) -> int | None:
    """The token of BC that ends what an A begins, once its letters are as many as the budget, all blocks together."""
    before, after = "".join(map(chr, prompt)), "".join(map(chr, output))
    start = before.rfind("A")
    text = (before[start:] if start > before.rfind("BC") else "") + after
    blocks = re.findall("A(.*?)(BC|$)", text, re.DOTALL)
    if budget is None or not blocks or blocks[-1][1] or sum(len(body) for body, _ in blocks) < budget:
        return None
    return ord("C" if blocks[-1][0].endswith("B") else "B")


def by_itself(sequence: Sequence, max_model_len: int) -> list[int]:
    """The tokens that a sequence gets by itself."""
    params, tokens = sequence.params, list(sequence.prompt)
    while True:
        forced = forced_token(sequence.prompt, tokens[len(sequence.prompt) :], params.thinking_token_budget)
        tokens.append(next_token(tokens, sequence.seed) if forced is None else forced)
        output = tokens[len(sequence.prompt) :]
        is_over = len(output) == params.max_tokens or len(tokens) == max_model_len
        is_stopped = tokens[-1] == EOS and not params.ignore_eos and len(output) >= params.min_tokens
        text = "".join(chr(token) for token in output if token != EOS)
        if is_over or is_stopped or any(text.endswith(stop) for stop in params.stop_strings or ()):
            return output


class Bound:
    """A matcher that allows anything, but must have been given every token before it is asked."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self, vocab: int) -> np.ndarray:
        return np.ones(vocab, np.bool_)

    def push(self, token: int) -> bool:
        self.tokens.append(token)
        return False


class Sent(NamedTuple):
    """What a plan's runner is sent, and the plan, which a device only uses to check what it was sent."""

    plan: Plan
    step: StepInput


class Builder(StepBuilder):
    def build(self, plan: Plan) -> Sent:  # type: ignore[override]
        return Sent(plan, super().build(plan))


@dataclass
class Device:
    """A runner: steps are computed when they are started, in order, and what they gave is returned when they are waited for."""

    run_ahead: int
    cache: KVCache
    fail: Callable[[Plan, StepInput | None], None] = lambda plan, step: None

    def __post_init__(self) -> None:
        self.num_places = {  # of a block
            pool.name: pool.kind.block_tokens // pool.kind.rule.entry_tokens for pool in self.cache.pools
        }
        self.known: dict[int, list[int]] = {}  # by slot: the tokens that the device knows of its sequence
        self.num_given: dict[int, int] = {}  # by slot: those that the host gave
        self.tables = np.zeros((len(self.cache.pools), NUM_SLOTS + 1, WIDTH), np.int32)
        self.cells: dict[tuple[str, int, int], object] = {}  # kind, block, place in it -> the past of its token
        self.pending: list[
            tuple[Plan, list[dict[str, set[int]]]]
        ] = []  # with the blocks that each row may read or write
        self.plans: list[Plan] = []
        self.rows: dict[
            tuple[str, int, int], object
        ] = {}  # of the host: kind, block, place in it -> the past of its token
        self.copies: BlockCopies | None = None  # during the step that was started last, or is next
        self.late: list[tuple[dict[Any, object], dict[Any, object], dict[str, list[tuple[int, int]]]]] = []  # of them

    def copy(self, copies: BlockCopies) -> None:
        """Copies happen as late as they may, and what they save must still be there."""
        self.finish_copies()
        self.copies = copies
        self.late = [(self.rows, self.cells, copies.saves), (self.cells, self.rows, copies.loads)]
        self.finish_copies(2 if copies.awaits_loads else int(copies.awaits_saves))

    def finish_copies(self, count: int = 2) -> None:
        """Do saves, and then loads, that are left; count: of both"""
        done, self.late = self.late[:count], self.late[count:]
        for to, of, pairs in done:
            for kind, blocks in pairs.items():
                for block, row in blocks:
                    source, target = (block, row) if to is self.rows else (row, block)
                    for place in range(self.num_places[kind]):
                        to[kind, target, place] = of[kind, source, place]

    def execute(self, sent: Sent) -> Started:
        plan, step = sent
        if plan.copies is not self.copies:  # they ran during the preceding step
            self.finish_copies()
        self.fail(plan, None)
        rows, named = plan.rows, [self.blocks_named(row) for row in plan.rows]
        assert len({row.sequence.slot for row in rows}) == len(rows)
        self.admit(plan, step)
        if step.table_entries:
            places, blocks = np.frombuffer(step.table_entries, np.int32).reshape(2, -1)
            self.tables.reshape(-1)[places] = blocks
        self.fail(plan, step)
        given = [-1] * len(rows)
        slots = np.frombuffer(step.packed, np.int32)
        if not step.is_decode:
            slots, starts, ends, _, _, tokens_given, *_ = step.shape.split(slots)
            assert [int(end) for end in ends if end] == [
                row.start + row.num_tokens for row in rows if self.is_given(row)
            ]
            given = [tokens_given[starts[at] : starts[at + 1]].tolist() for at in range(len(rows))]
        assert slots.tolist() == [row.sequence.slot for row in rows]
        assert step.reported == [
            row.sequence.slot * NUM_REPORTED + (row.start + row.num_tokens) % NUM_REPORTED
            for row in rows
            if row.samples
        ]
        allowed = dict(step.shaping.allowed if step.shaping else [])
        only = {at: each.index(1) for at, each in allowed.items() if sum(each) == 1}  # of rows that sample
        tokens: list[int] = []
        for row, own in zip(rows, given, strict=True):
            token = self.compute(row, own, only.get(len(tokens)))
            tokens += [] if token is None else [token]
        scored = {each.row: [Logprobs(token, -1.0, 1, []) for token in each.targets] for each in step.scored}
        self.pending.append((plan, named))
        self.plans.append(plan)
        return Started(self, plan, Sampled(tokens, [None] * len(tokens), scored))

    def admit(self, plan: Plan, step: StepInput) -> None:
        by_slot = {row.sequence.slot: row.sequence for row in plan.rows}
        pending = [row.sequence for plan, _ in self.pending for row in plan.rows]
        for slot, num_tokens, *_ in ADMISSION.iter_unpack(step.admissions):
            sequence = by_slot[slot]
            assert all(other.slot != slot for other in pending if other is not sequence)
            tokens = sequence.tokens(0, num_tokens)
            assert sequence not in pending or tokens == self.known[slot], "what the device knows better stays"
            self.known[slot], self.num_given[slot] = tokens, num_tokens
        for sequence in by_slot.values():
            if isinstance(sequence.matcher, Bound):
                assert sequence not in pending, "its next token follows from those that the host has"
                assert sequence.matcher.tokens == sequence.output

    def is_given(self, row: ScheduledRequest) -> bool:
        return row.start < self.num_given[row.sequence.slot]

    def compute(self, row: ScheduledRequest, given: object, only: int | None) -> int | None:
        """only: the one token that may come next; None: any may"""
        sequence, stop = row.sequence, row.start + row.num_tokens
        known = self.known[sequence.slot]
        if self.is_given(row):
            assert given == sequence.tokens(row.start, stop) == known[row.start : stop]
        else:
            assert given in (-1, [-1])
            assert (row.start, row.num_tokens) == (len(known) - 1, 1), "a decode is of the newest token"
        for kind, pool in enumerate(self.cache.pools):
            for at, block in enumerate(sequence.blocks[pool.name]):
                assert not block or self.tables[kind, sequence.slot, at] == block, "it was sent its blocks"
        size, pasts = self.cache.block_size, [(sequence.salt, tuple(known[: place + 1])) for place in range(stop)]
        for pool in self.cache.pools:
            table = sequence.blocks[pool.name]
            for position, index, place in cells_of(pool.kind, row.start, stop, size):
                block = table[index]
                assert block, "a token has no block to be written to"
                for plan, named in self.pending:
                    for other, blocks in zip(plan.rows, named, strict=True):
                        assert other.sequence is sequence or block not in blocks[pool.name], "a step that runs names it"
                for *_, pairs in self.late:
                    assert block not in dict(pairs.get(pool.name, [])), "a copy that runs reads it or writes there"
                self.cells[pool.name, block, place] = pasts[position]
            first = 0 if pool.keeps_all else max(row.start - pool.kind.rule.window + 1, 0)
            for position, index, place in cells_of(pool.kind, first, stop, size):
                assert self.cells[pool.name, table[index], place] == pasts[position]
        if not row.samples:
            return None
        known.append(next_token(known[:stop], sequence.seed) if only is None else only)
        assert len(known) == stop + 1
        return known[-1]

    def blocks_named(self, row: ScheduledRequest) -> dict[str, set[int]]:
        tables = row.sequence.blocks
        return {pool.name: {*tables[pool.name][pool.kind.first_visible(row.start) :]} for pool in self.cache.pools}


@dataclass
class Started:
    device: Device
    plan: Plan
    sampled: Sampled

    def wait(self) -> Sampled:
        oldest, _ = self.device.pending.pop(0)
        assert oldest is self.plan, "steps are committed in their order"
        return self.sampled


class World:
    """An engine over a device, and every request that it has had."""

    def __init__(self, kinds: list[StateKind], *, run_ahead: int, num_blocks: int = 60, block_size: int = 4,
                 prefix: bool = False, max_num_seqs: int = 8, budget: int = 64, max_model_len: int = 100,
                 num_host_blocks: int = 0, loaded_bytes: int = LOADED_BYTES, has_stages: bool = False) -> None:  # fmt: skip
        kinds = in_blocks(kinds, block_size)
        pools, host = ({kind.name: num for kind in kinds} for num in (num_blocks, num_host_blocks))
        cache = KVCache(kinds, pools, block_size, enable_prefix_caching=prefix, num_host_blocks=host if prefix and
                        num_host_blocks else None, loaded_bytes=loaded_bytes)  # fmt: skip
        self.device = Device(run_ahead, cache, self.fail)
        self.num_stages = 1 + run_ahead if has_stages else 1
        limits = StepLimits(max_num_seqs, budget, max_model_len)
        self.scheduler = Scheduler(cache, limits, run_ahead, num_stages=self.num_stages)
        self.engine = Engine(
            self.device,  # type: ignore[arg-type]
            self.scheduler,
            Builder(Capacity(tuple(kind.name for kind in kinds), NUM_SLOTS, WIDTH, vocab=400)),
            Vocabulary(400, frozenset({EOS}), Letters(), lambda: THINKS),  # type: ignore[arg-type]
            seed=0,
        )
        self.sequences: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.poisoned: set[str] = set()  # request ids: a step with one of them raises
        self.is_short = False  # the next step finds no memory
        self.is_unheard = False  # the callback for the next plan raises
        self.num_to_interrupt: int | None = None  # steps or halves of them that begin before an interrupt

    def on_plan(self) -> None:
        if self.is_unheard:
            self.is_unheard = False
            raise LookupError("nobody hears")

    def fail(self, plan: Plan, step: StepInput | None) -> None:
        """step: None before anything of it is done, or if it was sent and nothing is computed"""
        assert not any(row.sequence in self.scheduler._leaving for row in plan.rows), "it would never leave"
        if self.is_short and step is None:
            self.is_short = False
            raise CapacityError("a step ran out of memory")
        if self.num_to_interrupt is not None and step is None:
            self.num_to_interrupt = self.num_to_interrupt - 1 if self.num_to_interrupt else None
            if self.num_to_interrupt is None:
                raise KeyboardInterrupt
        if step is not None and any(row.sequence.request_id in self.poisoned for row in plan.rows):
            raise ValueError("poison")

    def add(self, prompt: list[int], *, is_bound: bool = False, salt: bytes = b"", priority: int = 0,
            abort_at: int | None = None, **params: Any) -> list[Sequence]:  # fmt: skip
        """A request; with is_bound each token needs the host, at abort_at tokens its callback ends it."""
        params = {"max_tokens": 12, "seed": len(self.sequences), **params}
        sequences = self.engine.prepare(prompt, SamplingParams(**params), RequestOptions(salt, priority))
        for sequence in sequences:
            sequence.matcher = Bound() if is_bound else None

        def hear(output: RequestOutput) -> None:
            if abort_at is not None and len(output.sequence.output) >= abort_at:
                self.engine.abort(output.request_id)

        self.engine.submit(sequences, hear)
        self.sequences += sequences
        return sequences

    def step(self) -> None:
        num_left = 0
        try:
            self.ended += self.engine.step(self.on_plan)
        except CapacityError:
            pass  # and is taken again
        except KeyboardInterrupt:
            num_left = 1  # what has begun is committed by the next step
        except LookupError:
            self.engine.end_failed()  # which blames nobody
        except ValueError:
            self.engine.end_failed()
        assert len(self.engine._pending) <= self.device.run_ahead + num_left
        assert self.num_stages == 1 or all(each.num_pending <= 1 for each in self.sequences), (
            "its newest token is unknown"
        )
        slots = [*self.scheduler._slots, *(each.slot for each in self.sequences if each.slot >= 0)]
        assert sorted(slots) == list(range(self.scheduler.num_slots)), "each slot is one sequence's, or free"

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "some never end"
        assert not self.device.pending and not self.scheduler._in_flight
        assert not self.scheduler._leaving and not self.scheduler._stale
        assert sorted(self.scheduler._slots) == list(range(self.scheduler.num_slots))
        cache = self.scheduler.cache
        assert all(pool.num_free == pool.num_blocks - 1 for pool in [*cache.pools, *cache.host_pools.values()])
        assert Counter(self.ended) == Counter(self.sequences), "each ends once"
        assert self.stats.num_preemptions == sum(each.num_preemptions for each in self.sequences)
        assert self.stats.num_cached_tokens == sum(each.num_cached for each in self.sequences if each.parent is None)
        for each in self.sequences:
            expected = by_itself(each, self.scheduler.limits.max_model_len)
            if each.finish_reason in ("abort", "error"):
                expected = expected[: len(each.output)]
            assert each.output == expected

    @property
    def stats(self) -> Any:
        return self.scheduler.stats

    def num_sampled(self) -> int:
        """Tokens that the device sampled."""
        return sum(row.samples for plan in self.device.plans for row in plan.rows)


@pytest.fixture(params=DEPTHS)
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def prompt(length: int) -> list[int]:
    return [66 + place % 3 for place in range(length)]


def test_each_has_the_tokens_that_it_has_by_itself_and_what_came_after_its_end_is_thrown_away(depth: int) -> None:
    world = World([FULL], run_ahead=depth, budget=16)
    for length in (1, 3, 4, 5, 17, 30, 8, 2, 16, 9, 6):
        world.add(prompt(length), max_tokens=40)
    world.finish()
    assert Counter(each.finish_reason for each in world.sequences)["eos"] > 5
    assert (world.stats.num_ahead > 0, world.stats.num_overrun > 0) == (depth > 0, depth > 0)
    assert world.num_sampled() == sum(len(each.output) for each in world.sequences) + world.stats.num_overrun
    assert world.stats.num_chunks > 0


def test_stages_take_turns_with_parts_of_the_decodes_and_compute_chunks_one_after_another() -> None:
    world = World([FULL], run_ahead=2, has_stages=True, budget=16, num_blocks=100)
    for _ in range(7):
        world.add(prompt(2), max_tokens=20, ignore_eos=True)
    world.add(prompt(50), max_tokens=20, ignore_eos=True)
    world.finish()
    plans = [[row.sequence for row in plan.rows] for plan in world.device.plans if len(plan.rows) == plan.num_decodes]
    assert {len(plan) for plan in plans[20:30]} <= {2, 3}, "8 sequences among 3 stages"
    assert not any({*one} & {*other} for one, other in itertools.pairwise(plans[20:30]))
    assert world.stats.num_ahead > 0 and world.stats.num_chunks > 1, "chunks need no token"
    assert world.stats.num_overrun == 0


def test_nothing_is_computed_after_the_end_of_a_sequence_that_max_tokens_ends(depth: int) -> None:
    world = World([FULL], run_ahead=depth)
    for max_tokens in (1, 2, 3, 9):
        world.add(prompt(5), max_tokens=max_tokens, ignore_eos=True)
    world.add(prompt(93), max_tokens=50, ignore_eos=True)  # to max_model_len, 100
    world.finish()
    assert [len(each.output) for each in world.sequences] == [1, 2, 3, 9, 7]
    assert (world.num_sampled(), world.stats.num_overrun) == (1 + 2 + 3 + 9 + 7, 0)


def test_a_sequence_that_needs_the_host_waits_for_each_commit_and_the_others_go_on(depth: int) -> None:
    world = World([FULL], run_ahead=depth)
    (free,) = world.add(prompt(3), max_tokens=24, ignore_eos=True)
    (bound,) = world.add(prompt(3), max_tokens=6, ignore_eos=True, is_bound=True)
    world.finish()
    plans = [[row.sequence for row in plan.rows] for plan in world.device.plans]
    assert all(free in plan for plan in plans[:24]), "it is delayed by nobody"
    assert [at for at, plan in enumerate(plans) if bound in plan] == [place * (depth + 1) for place in range(6)]
    assert world.stats.num_ahead == (23 if depth else 0)


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_reasoning_ends_where_its_budget_does_and_steps_ahead_wait_only_for_that(depth: int, budget: int) -> None:
    world = World([FULL, WINDOW], run_ahead=depth, num_blocks=200, prefix=True)
    for length in range(1, 9):
        for opened in ([], [65], [65, 68, 66]):  # the reasoning is open, the last time with a part of its end
            world.add([*prompt(length), *opened], max_tokens=40, ignore_eos=True, thinking_token_budget=budget)
    world.finish()
    texts = ["".join(map(chr, each.output)) for each in world.sequences]
    assert sum(text.count("A") > 1 for text in texts) > 5, "some think again, and again"
    assert (world.stats.num_ahead > 0) == (depth > 0)
    assert (world.stats.num_preemptions > 0, world.stats.num_overrun > 0) == (depth > 0, depth > 0)


def test_steps_run_ahead_of_a_budget_that_is_far(depth: int) -> None:
    world = World([FULL], run_ahead=depth)
    (sequence,) = world.add([65], max_tokens=20, ignore_eos=True, thinking_token_budget=30)
    world.finish()
    assert world.stats.num_ahead == (19 if depth else 0)
    assert world.stats.num_overrun == world.stats.num_preemptions == 0 and len(sequence.output) == 20


def test_siblings_start_once_the_first_prompt_is_committed_and_share_it(depth: int) -> None:
    world = World([FULL], run_ahead=depth)
    first, *others = world.add(prompt(10), n=3, ignore_eos=True)
    world.finish()
    starts = [next(at for at, plan in enumerate(world.device.plans) if each in (row.sequence for row in plan.rows))
              for each in (first, *others)]  # fmt: skip
    assert starts == [0, depth + 1, depth + 1]
    assert world.stats.num_forked_tokens == 2 * 8
    assert len({tuple(each.output) for each in (first, *others)}) == 3


def test_a_stop_string_ends_a_sequence_whose_next_steps_run_already(depth: int) -> None:
    world = World([FULL], run_ahead=depth)
    for length in range(1, 7):
        world.add(prompt(length), max_tokens=30, stop_strings=["AB", "CD"], ignore_eos=True)
    world.finish()
    stopped = [each for each in world.sequences if each.finish_reason == "stop_sequence"]
    assert len(stopped) > 3
    assert {each.stop_string for each in stopped} == {"AB", "CD"}
    letters = ["".join(chr(token) for token in each.output if token != EOS) for each in stopped]
    assert [each.text for each in stopped] == [each[:-2] for each in letters]
    assert world.stats.num_overrun == len(stopped) * depth


def test_an_aborted_sequence_keeps_its_slot_and_blocks_until_no_step_names_them(depth: int) -> None:
    world = World([FULL], run_ahead=depth, max_num_seqs=1, num_blocks=1 + 4)
    (first,) = world.add(prompt(9), max_tokens=6, ignore_eos=True)
    (second,) = world.add(prompt(9), max_tokens=6, ignore_eos=True)
    world.step()
    world.engine.abort(first.request_id)
    assert world.scheduler._slots == ([] if depth else [0])
    for num_pending in range(depth, 0, -1):
        assert (second.slot, len(world.device.pending)) == (-1, num_pending)
        world.step()
    world.finish()
    assert (first.output, len(second.output)) == (by_itself(first, 100)[:1], 6)
    assert world.stats.num_overrun == depth


def test_the_last_to_come_leaves_once_its_steps_are_committed_and_is_computed_again(depth: int) -> None:
    world = World([FULL], run_ahead=depth, num_blocks=1 + 14)
    for length in (9, 14, 11, 3):
        world.add(prompt(length), max_tokens=25, ignore_eos=True)
    world.finish()
    assert world.stats.num_preemptions > 0
    assert (world.stats.num_ahead > 0) == (depth > 0)
    assert world.stats.num_overrun == 0, "what a preempted sequence sampled is kept"


def test_a_prefix_is_found_by_those_that_come_while_steps_run(depth: int) -> None:
    world = World([FULL, WINDOW], run_ahead=depth, prefix=True)
    shared = prompt(12)
    world.add(shared, max_tokens=10, ignore_eos=True)
    for _ in range(3):
        world.step()
        world.add([*shared, 70, 71], max_tokens=10, ignore_eos=True)
    world.finish()
    assert world.stats.num_prefix_hit_tokens >= 2 * 12


def begin_four(depth: int) -> tuple[World, list[Sequence], Sequence, Sequence]:
    """A world after three steps, two of its sequences, one that is to fail, and one after that."""
    world = World([FULL], run_ahead=depth)
    good = [world.add(prompt(length), max_tokens=20, ignore_eos=True)[0] for length in (2, 5)]
    (bad,) = world.add(prompt(3), max_tokens=20, ignore_eos=True)
    (other,) = world.add(prompt(4), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        world.step()
    return world, good, bad, other


@pytest.mark.parametrize("is_short", [False, True], ids=["poison", "memory"])
def test_a_step_that_fails_leaves_the_steps_before_it_and_the_other_sequences_as_they_are(
    depth: int, is_short: bool
) -> None:
    world, good, bad, other = begin_four(depth)
    assert len(world.device.pending) == depth
    world.is_short, world.poisoned = is_short, set() if is_short else {bad.request_id}
    world.step()
    world.finish()
    assert all(len(each.output) == 20 for each in (*good, other))
    assert (bad.finish_reason, bad.error) == (("max_tokens", None) if is_short else ("error", "ValueError: poison"))
    assert len(bad.output) == (20 if is_short else 3 + depth)


def test_a_plan_that_could_not_be_announced_is_made_again(depth: int) -> None:
    for num_steps in range(5):
        world = World([FULL], run_ahead=depth, budget=8)
        for length in (2, 11, 5):
            world.add(prompt(length), max_tokens=9, ignore_eos=True)
        for _ in range(num_steps):
            world.step()
        world.is_unheard = True
        world.step()
        world.engine.reset_prefix_cache()
        world.finish()
        assert not world.is_unheard and all(each.finish_reason == "max_tokens" for each in world.sequences)


def test_what_a_plan_that_nobody_hears_finds_cached_is_counted_once() -> None:
    world = World([FULL], run_ahead=0, block_size=1, num_blocks=21, prefix=True, max_num_seqs=2, budget=3)
    world.is_unheard = True
    for length in (2, 3):
        world.add(prompt(length), max_tokens=1)
    world.finish()
    assert world.stats.num_prefix_hit_tokens and world.stats.num_preemptions


def test_a_sequence_that_is_aborted_before_its_failure_is_committed_has_no_error(depth: int) -> None:
    world = World([FULL], run_ahead=depth)
    world.add(prompt(2), max_tokens=20, ignore_eos=True)
    (bad,) = world.add(prompt(3), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        world.step()
    world.poisoned = {bad.request_id}
    world.step()
    world.engine.abort(bad.request_id)
    world.finish()
    assert (bad.finish_reason, bad.error) == (("abort", None) if depth else ("error", "ValueError: poison"))


def test_a_half_that_runs_when_an_interrupt_comes_is_committed(depth: int) -> None:
    world, good, bad, other = begin_four(depth)
    world.poisoned, world.num_to_interrupt = {bad.request_id}, 2  # the step and its first half begin
    world.step()
    assert world.num_to_interrupt is None
    assert [row.sequence for row in world.device.pending[-1][0].rows] == good
    world.finish()
    assert [each.finish_reason for each in (*good, bad, other)] == [*["max_tokens"] * 2, "error", "max_tokens"]


class Serving(RuleBasedStateMachine):
    """Any order of arrivals, aborts, failures and steps, at any depth, in tiny pools."""

    @initialize(
        kinds=st.sampled_from(KINDS),
        run_ahead=st.sampled_from(DEPTHS),
        num_tokens=st.integers(20, 70),
        block_size=st.sampled_from([1, 3, 4]),
        prefix=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        max_model_len=st.integers(10, 40),
        has_stages=st.booleans(),
        num_host_blocks=st.sampled_from([0, 2, 10, 60]),
        loaded_bytes=st.sampled_from([1, 5, LOADED_BYTES]),
    )
    def begin(self, num_tokens: int, block_size: int, **limits: Any) -> None:
        if any(kind.rule.entry_tokens > 1 for kind in limits["kinds"]):
            block_size = 4  # of their strides
        self.world = World(num_blocks=1 + -(-num_tokens // block_size), block_size=block_size, **limits)

    @rule(
        length=st.integers(1, 12),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        stop_strings=st.sampled_from([None, None, ["AB", "C"]]),
        salt=st.sampled_from([b"", b"", b"s"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        is_bound=st.sampled_from([False, False, True]),
        thinking_token_budget=st.sampled_from([None, None, 0, 1, 3, 7]),
        abort_at=st.sampled_from([None, None, None, 1, 3]),
    )
    def add(self, length: int, **params: Any) -> None:
        with contextlib.suppress(RequestError):
            self.world.add(prompt(length), **params)

    @rule(index=st.integers(0, 40))
    def abort(self, index: int) -> None:
        for sequence in self.world.sequences[index : index + 1]:
            self.world.engine.abort(sequence.request_id)

    @rule(index=st.integers(0, 80))
    def poison(self, index: int) -> None:
        for sequence in self.world.sequences[index : index + 1]:
            self.world.poisoned.add(sequence.request_id)

    @rule()
    def run_short_of_memory(self) -> None:
        self.world.is_short = True

    @rule()
    def hear_nothing(self) -> None:
        self.world.is_unheard = True

    @rule(num_begun=st.integers(0, 4))
    def interrupt(self, num_begun: int) -> None:
        self.world.num_to_interrupt = num_begun

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            for pool in self.world.scheduler.cache.pools:
                holders: Counter[int] = Counter()
                for each in self.world.sequences:
                    holders.update(block for block in each.blocks.get(pool.name, []) if block)
                assert [holders[block] for block in range(pool.num_blocks)] == pool.num_holders

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


Serving.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestServing = Serving.TestCase


@pytest.mark.sampled(12)
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("kinds", "num_blocks"), [*zip(KINDS, [14, 7, 14, 14, 14], strict=True)])
def test_a_tiny_pool_under_load_ends_every_sequence(
    kinds: list[StateKind], num_blocks: int, prefix: bool, depth: int
) -> None:
    chance = random.Random(1)
    world = World(kinds, run_ahead=depth, num_blocks=num_blocks, block_size=2, prefix=prefix, max_num_seqs=6, budget=9,
                  max_model_len=30)  # fmt: skip
    for _ in range(400):
        if world.scheduler.num_waiting + world.scheduler.num_running < 10:
            world.add(prompt(chance.randint(1, 11)), n=chance.choice([1, 1, 3]), max_tokens=chance.randint(1, 16),
                      ignore_eos=chance.random() < 0.5, is_bound=chance.random() < 0.2)  # fmt: skip
        if chance.random() < 0.05:
            world.engine.abort(chance.choice(world.sequences).request_id)
        world.step()
    world.finish()
    stats = world.stats
    assert stats.num_preemptions > 0 and stats.num_chunks > 0
    assert (stats.num_ahead > 0, stats.num_overrun > 0) == (depth > 0, depth > 0)
    assert stats.num_prefix_hit_tokens > 0 if prefix else stats.num_forked_tokens > 0


@pytest.mark.sampled(12)
@pytest.mark.parametrize("loaded_bytes", [1, LOADED_BYTES])
@pytest.mark.parametrize(("kinds", "num_blocks"), [*zip(KINDS, [30, 20, 30, 30, 30], strict=True)])
def test_conversations_that_take_turns_in_a_tiny_pool_are_loaded_from_the_host(
    kinds: list[StateKind], num_blocks: int, loaded_bytes: int, depth: int
) -> None:
    world = World(kinds, run_ahead=depth, num_blocks=num_blocks, block_size=2, prefix=True, max_num_seqs=6, budget=9,
                  max_model_len=30, num_host_blocks=400, loaded_bytes=loaded_bytes)  # fmt: skip
    talks = [[66 + number, 67, 68 - number % 3] for number in range(24)]
    for turn in range(6):
        for number, talk in enumerate(talks):
            (sequence,) = world.add(talk[:], max_tokens=2, ignore_eos=True)
            if (turn, number) in ((3, 2), (5, 7)):
                world.engine.abort(sequence.request_id)
            while world.scheduler.num_waiting > 3:
                world.step()
        world.finish()
        talks = [[*(each.prompt + each.output)[:26], 68] for each in world.sequences[-len(talks) :]]
    stats = world.stats
    assert stats.num_saved_blocks > 0 and stats.num_loaded_blocks > 0
    assert stats.num_prefix_hit_tokens >= stats.num_host_hit_tokens > stats.num_prefix_hit_tokens / 3
    copied = [plan.copies for plan in world.device.plans if plan.copies and not plan.copies.awaits_loads]
    assert any(copies.loads for copies in copied)
    assert loaded_bytes == 1 or any(copies.loads and copies.awaits_saves for copies in copied)


def load_during(depth: int, costs: SwapCosts | None = None) -> tuple[World, Sequence, Sequence]:
    """A sequence that decodes, and one whose 8 blocks of 4 tokens only the host has."""
    world = World([FULL], run_ahead=depth, num_blocks=18, prefix=True, num_host_blocks=60, loaded_bytes=8, budget=40)
    world.scheduler.cache.costs = costs
    world.add([90, *prompt(33)], max_tokens=1)
    world.finish()
    for number in (91, 92):  # push the first one's blocks out
        world.add([number, *prompt(33)], max_tokens=1)
        world.finish()
    (running,) = world.add(prompt(3), max_tokens=20, ignore_eos=True)
    while len(running.output) < 2:
        world.step()
    (loaded,) = world.add([90, *prompt(33)], max_tokens=2, ignore_eos=True)
    return world, running, loaded


def blocks_loaded(plan: Plan) -> int:
    return sum(map(len, plan.copies.loads.values())) if plan.copies else 0


def test_a_long_prefix_is_loaded_during_several_steps_that_do_not_wait_for_it(depth: int) -> None:
    world, running, loaded = load_during(depth)
    first = len(world.device.plans)
    while not loaded.output:
        world.step()
    loading = [plan for plan in world.device.plans[first:] if blocks_loaded(plan)]
    assert [blocks_loaded(plan) for plan in loading] == [2, 2, 2, 2]  # 8 bytes each
    assert all(not plan.copies.awaits_loads for plan in loading if plan.copies)
    assert all([row.sequence for row in plan.rows] == [running] for plan in loading)
    joined = next(plan for plan in world.device.plans[first:] if any(row.sequence is loaded for row in plan.rows))
    assert world.device.plans.index(joined) == world.device.plans.index(loading[-1]) + 1
    world.finish()


def test_more_is_loaded_during_a_prompt_in_the_time_that_it_takes() -> None:
    costs = SwapCosts(load_seconds=0.0, load_token_seconds=1.0, compute_token_seconds=3.0)
    world, _, loaded = load_during(0, costs)
    world.add(prompt(5), max_tokens=1)  # 5 tokens of a prompt and one of a decode: 18 bytes more
    first = len(world.device.plans)
    while not loaded.output:
        world.step()
    assert [blocks_loaded(plan) for plan in world.device.plans[first:]][:3] == [7, 1, 0]
    world.finish()


def test_a_step_with_nothing_else_to_do_waits_for_one_prefix(depth: int) -> None:
    world, running, loaded = load_during(depth)
    world.engine.abort(running.request_id)
    first = len(world.device.plans)
    while not loaded.output:
        world.step()
    plan = world.device.plans[first]
    assert plan.copies is not None and plan.copies.awaits_loads and blocks_loaded(plan) == 8
    assert [row.sequence for row in plan.rows] == [loaded]
    world.finish()
