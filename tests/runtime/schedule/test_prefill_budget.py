"""Steps of a scheduler whose clock goes by a formula: what decodes wait, and how prompts advance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from kinds import full_kind

from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.data_parallel import DataParallelScheduler
from atom.runtime.schedule.prefill_budget import MIN_TOKENS, START, PrefillBudget, chunk_sizes
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.schedule.step_costs import StepLoad, load_of
from atom.runtime.types import Plan, Sampled, Sequence, StepLimits
from atom.sampling_params import SamplingParams

TIMES = (0.010, 1e-4, 1e-7)  # seconds of a step: in any case, for a row, for a token of KV that a decode reads
MAX_TOKENS, BLOCK = 4096, 16
NEVER = 10**9


def seconds_of(plan: Plan, times: tuple[float, float, float] = TIMES) -> float:
    load, (step, row, context) = load_of(plan), times
    return step + row * (load.num_decodes + load.num_prompt) + context * load.context


def on_gpu(plan: Plan, rng: random.Random) -> float:
    """As of 8 billion parameters on a GPU: up to 136 rows take as long as reading the weights; a step in 200 is late."""
    load = load_of(plan)
    weights, rows = 0.006, 0.003 + 2.2e-5 * (load.num_decodes + load.num_prompt)
    seconds = max(weights, rows) + 1.5e-8 * load.context + 2.2e-10 * load.attended + 3e-4 * (load.num_prompt > 0)
    return seconds * rng.uniform(0.97, 1.05) * (1 if rng.random() > 0.005 else 1.5)


class World:
    """A scheduler whose steps run ahead by `run_ahead`; `steps` has each step's decodes, prompt tokens and seconds."""

    def __init__(
        self,
        max_itl: float | None,
        *,
        run_ahead: int = 0,
        num_stages: int = 1,
        block_size: int = BLOCK,
        times: tuple[float, float, float] = TIMES,
        clock: Callable[[Plan], float] | None = None,
    ) -> None:
        self.now, self.times, self.run_ahead = 0.0, times, run_ahead
        self.clock = clock or (lambda plan: seconds_of(plan, self.times))
        self.rng = random.Random(3)
        budget = None
        if max_itl is not None:
            budget = PrefillBudget(max_itl, block_size, MAX_TOKENS, num_stages, clock=lambda: self.now)
        cache = KVCache((full_kind(),), {"full": 20000}, block_size, enable_prefix_caching=False)
        limits = StepLimits(64, MAX_TOKENS, 50000)
        self.scheduler = Scheduler(
            cache, limits, run_ahead, None, num_stages, clock=lambda: self.now, prefill_budget=budget
        )
        self.steps: list[tuple[int, int, float]] = []
        self.times_of: dict[str, list[float]] = {}
        self.pending: deque[Plan] = deque()

    def add(self, id: str, num_prompt: int, max_tokens: int = NEVER) -> Sequence:
        prompt = [self.rng.randrange(1000) for _ in range(num_prompt)]
        sequence = Sequence(id, prompt, SamplingParams(max_tokens=min(max_tokens, 40000 - num_prompt), ignore_eos=True))
        self.scheduler.add(sequence)
        self.times_of[id] = []
        return sequence

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            while len(self.pending) <= self.run_ahead and (plan := self.scheduler.schedule()).rows:
                self.pending.append(plan)
            plan = self.pending.popleft()
            seconds = self.clock(plan)
            self.now += seconds
            num_samples = sum(row.samples for row in plan.rows)
            self.scheduler.commit(
                plan, Sampled([1] * num_samples, [None] * num_samples), lambda each: finish_reason(each, 50000)
            )
            load = load_of(plan)
            self.steps.append((load.num_decodes, load.num_prompt, seconds))
            for row in plan.rows:
                if row.samples:
                    self.times_of[row.sequence.id].append(self.now)

    def serve_agents(self, num_turns: int = 40) -> None:
        """Eight sequences decode, and prompts of 1,500 tokens arrive among them one after the other."""
        for number in range(8):
            self.add(f"decode {number}", 500)
        self.step(20)
        for number in range(num_turns):
            turn = self.add(f"turn {number}", 1500, max_tokens=2)
            while turn.finish_reason is None:
                self.step()


def serve_turns(world: World, num_agents: int, num_turns: int) -> list[float]:
    """Agents send 1,500 tokens, read 100, think for a second, and so on: the seconds to each first token."""
    waiting = [(world.rng.uniform(0, 3), agent, 0) for agent in range(num_agents)]
    running: dict[Sequence, tuple[float, int, int]] = {}
    first: list[float] = []
    while waiting or running:
        for turn in sorted(each for each in waiting if each[0] <= world.now):
            waiting.remove(turn)
            running[world.add(f"{turn[1]}-{turn[2]}", 1500, max_tokens=100)] = turn
        if not running:
            world.now = min(waiting)[0]
            continue
        world.step()
        for sequence in [each for each in running if each.finish_reason is not None]:
            start, agent, number = running.pop(sequence)
            first.append(world.times_of[sequence.id][0] - start)
            if number + 1 < num_turns:
                waiting.append((world.now + 1.0, agent, number + 1))
    return sorted(first)


def latencies(world: World) -> list[float]:
    return sorted(after - before for times in world.times_of.values() for before, after in pairwise(times))


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_decodes_keep_their_latency_while_prompts_use_what_it_leaves(run_ahead: int) -> None:
    world = World(0.040, run_ahead=run_ahead)
    world.serve_agents()
    late = latencies(world)
    assert late[int(0.99 * len(late))] <= 0.040, "10 ms, and 0.1 ms a row"
    full = [prompt for decodes, prompt, _ in world.steps[60:] if decodes and prompt]
    assert sorted(full)[len(full) // 2] >= 224, "of about 280 tokens that end in 40 ms"
    without = World(None, run_ahead=run_ahead)
    without.serve_agents()
    assert latencies(without)[-1] > 0.150, "1,500 tokens in one step"


def test_agents_on_a_gpu_wait_evenly_in_the_same_time() -> None:
    """docs/lab/2026-11-30-prefill-budget.md has the figures of more turns and limits."""
    without, limited = (
        World(limit, run_ahead=1, clock=partial(on_gpu, rng=random.Random(1))) for limit in (None, 0.020)
    )
    for world in (without, limited):
        serve_turns(world, 32, 2)
    p99, before = (late[int(0.99 * len(late))] for late in map(latencies, (limited, without)))
    assert p99 <= 0.020 < before / 3
    assert limited.now < 1.03 * without.now, "prompts ride along while decodes read weights"


def test_prompts_have_the_whole_step_if_nothing_decodes() -> None:
    world = World(0.001)
    world.add("a", 9000)
    world.step(3)
    assert [prompt for _, prompt, _ in world.steps] == [4096, 4096, 9000 - 2 * 4096]


def test_chunks_grow_from_the_first_ones_as_steps_are_measured() -> None:
    world = World(0.100)
    world.add("a", 8)
    world.step(3)
    world.add("b", 3000)
    world.step(6)
    chunks = [prompt for _, prompt, _ in world.steps[3:]]
    assert chunks[0] <= START and all(after <= 2 * before for before, after in pairwise(chunks))
    assert max(chunks) > 500 and max(seconds for *_, seconds in world.steps) <= 0.100


@pytest.mark.parametrize(("block_size", "chunk"), [(1, MIN_TOKENS), (16, 16), (24, 24), (64, 64)])
def test_a_prompt_advances_by_a_block_though_decodes_exceed_the_latency(block_size: int, chunk: int) -> None:
    world = World(0.005, block_size=block_size, times=(0.010, 4e-4, 0))
    world.add("a", 8)
    world.step(10)
    turn = world.add("b", 480)
    world.step(80)
    chunks = [prompt for _, prompt, _ in world.steps[10:] if prompt]
    assert len(turn.output) > 0
    assert len(chunks) <= -(-480 // chunk) and set(chunks[2:-1]) == {chunk}


def test_prompts_get_a_fifth_of_the_time_though_decodes_exceed_the_latency() -> None:
    world = World(0.040, times=(0.060, 1e-4, 0))
    world.add("a", 8)
    world.step(10)
    world.add("b", 3000)
    world.step(20)
    chunks = [(prompt, seconds) for _, prompt, seconds in world.steps[15:] if prompt]
    assert {prompt for prompt, _ in chunks} == {128}, "the next size, 160, takes 16 ms"
    assert all(seconds <= 0.060 / 0.8 for _, seconds in chunks)


def test_what_begins_to_cost_more_is_learned_anew() -> None:
    world = World(0.040)
    world.serve_agents(20)
    world.times = (0.010, 4e-4, 1e-7)
    num_before = len(world.steps)
    for number in range(20, 60):
        turn = world.add(f"turn {number}", 1500, max_tokens=2)
        while turn.finish_reason is None:
            world.step()
    later = [seconds for decodes, prompt, seconds in world.steps[num_before + 60 :] if decodes and prompt]
    assert len(later) > 500 and sum(seconds > 0.041 for seconds in later) < len(later) / 100


def test_each_of_several_stages_gets_its_part_of_the_latency() -> None:
    """A decode's next token takes as many steps as there are stages."""
    world = World(0.060, run_ahead=1, num_stages=2)
    world.serve_agents()
    late = latencies(world)
    assert late[int(0.99 * len(late))] <= 0.060


def test_groups_that_step_together_are_limited_by_the_decodes_of_any() -> None:
    now = 0.0
    cache = [KVCache((full_kind(),), {"full": 4000}, BLOCK, enable_prefix_caching=False) for _ in range(2)]
    groups = [Scheduler(each, StepLimits(4, MAX_TOKENS, 20000)) for each in cache]
    scheduler = DataParallelScheduler(groups, PrefillBudget(0.030, BLOCK, MAX_TOKENS, clock=lambda: now))

    def step() -> list[tuple[int, int]]:
        nonlocal now
        plan = scheduler.schedule()
        parts = [Plan(rows, sum(row.is_decode for row in rows)) for rows in by_group(plan)]
        now += max(seconds_of(part) for part in parts if part.rows)
        sampled = [Sampled([1] * n, [None] * n) for part in parts for n in [sum(row.samples for row in part.rows)]]
        first = Sampled(sampled[0].tokens, sampled[0].logprobs, others=sampled[1:])
        scheduler.commit(plan, first, lambda each: None)
        return [(load_of(part).num_decodes, load_of(part).num_prompt) for part in parts]

    def by_group(plan: Plan):
        return [[row for row in plan.rows if row.sequence.group == group] for group in range(2)]

    scheduler.add(Sequence("a", [1] * 40, SamplingParams(max_tokens=3000)))
    assert step() == [(0, 40), (0, 0)]
    for _ in range(8):
        step()
    scheduler.add(Sequence("b", [2] * 3000, SamplingParams(max_tokens=3000)))
    began = now
    assert step() == [(1, 0), (0, 80)], "its own group decodes nothing; 40 tokens were measured"
    assert scheduler.stats.max_prompt_tokens == 80
    lengths = []
    while not scheduler.sequences["b"].output:
        before = now
        step()
        lengths.append(now - before)
    assert max(lengths) <= 0.030 and now - began < 0.030 * 3000 / 150


def test_sizes_of_chunks_differ_by_a_quarter_at_most() -> None:
    sizes = chunk_sizes(16, 1000)
    assert sizes[:9] == [16, 20, 24, 28, 32, 40, 48, 56, 64] and sizes[-3:] == [768, 896, 1000]
    assert all(after <= 1.25 * before for before, after in pairwise(sizes))
    assert chunk_sizes(64, 40) == [40] and chunk_sizes(24, 50) == [24, 30, 36, 42, 48, 50]


def test_time_without_steps_is_no_step() -> None:
    now = 0.0
    budget = PrefillBudget(0.030, BLOCK, MAX_TOKENS, clock=lambda: now)
    for pause in (0.0, 100.0) * 10:
        now += pause
        budget.begin(is_idle=True)
        now += 0.010 + 1e-4 * 101
        budget.commit(StepLoad(1, 100, 100, 5000))
    limit = budget.limit(StepLoad(1, 100))
    assert limit is not None and 100 <= limit <= 200
