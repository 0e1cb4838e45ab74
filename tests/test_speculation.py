"""Speculative decoding: the tokens of none, whatever is drafted."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
from kinds import full_kind, window_kind
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine, SamplingParams
from atom.runtime.draft.speculation import DraftLog, NgramDrafter, RunnerDrafter, draft_statistics
from atom.runtime.kv.cache import KVCache
from atom.runtime.metrics import SchedulerStats
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.step.runner import Pending
from atom.runtime.types import Plan, Sampled, ScheduledRequest, Sequence, StepLimits

__all__ = ["thread_ranks"]

Open = Callable[..., LLMEngine]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 24, "ignore_eos": True}
PARAMS = [
    GREEDY,
    SamplingParams(**SEEDED),
    SamplingParams(**SEEDED, top_p=0.8, top_k=20, n=2),
    SamplingParams(**SEEDED, min_p=0.1),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.2),
    SamplingParams(**SEEDED, frequency_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logit_bias={3: 1.5}),
    SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, allowed_token_ids=[3, 5, 7]),
    SamplingParams(temperature=0, max_tokens=18, min_tokens=9),
]


def prompts(count: int) -> list[list[int]]:
    """Some that repeat themselves, so that a lookup finds something, and some that do not."""
    return [tiny.prompt(9, seed=seed) * (3 if seed % 2 else 1) + [seed] for seed in range(count)]


class KnownDrafts:
    """Drafts the tokens of known answers: right as often as `turns` says, in order."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], turns: list[list[bool]]) -> None:
        self.answers, self.turns, self.num = answers, turns, 0

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        answer = self.answers.get(tuple(sequence.prompt), [])
        turn = self.turns[self.num % len(self.turns)]
        self.num += 1
        at = len(sequence.output)
        return [
            token if right else (token + 1) % 97 for token, right in zip(answer[at:], turn[:max_drafts], strict=False)
        ]

    def forget(self, sequence: Sequence) -> None: ...


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has schedulers take a drafter, in place of that of method ngram."""

    def use(drafter: Any) -> None:
        monkeypatch.setattr("atom.assemble.engine.open_drafter", lambda drafts, by_runner: drafter)

    return use


def tokens_of(engine: LLMEngine, params: Any, every: list[list[int]]) -> list[list[int]]:
    return [answer["token_ids"] for answer in engine.generate(every, params)]


def count_next_to_prompts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the runner's drafts, from now on, in steps that hold prompts too, and those that are accepted."""
    counts, wait = Counter[str](), Pending.wait

    def count(pending: Pending) -> Sampled:
        sampled, step = wait(pending), pending.step
        if not step.is_decode and step.shape.num_rows > step.shape.num_decodes:
            counts["drafted"] += sum(sampled.num_drafted.values())
            counts["accepted"] += sum(map(len, sampled.accepted.values()))
        return sampled

    monkeypatch.setattr(Pending, "wait", count)
    return counts


def note_preempted_drafts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ids of the sequences, from now on, that are preempted while they have drafts under way."""
    ids, preempt, ask_to_leave = set[str](), Scheduler._preempt, Scheduler._ask_to_leave

    def note(scheduler: Scheduler, sequence: Sequence) -> None:
        if sequence.drafts:  # of the step that was planned last
            ids.add(sequence.id)
        preempt(scheduler, sequence)

    def note_asked(scheduler: Scheduler, sequence: Sequence, planned: dict[Sequence, int]) -> int:
        freed = ask_to_leave(scheduler, sequence, planned)
        ids.update(each.id for each in scheduler._leaving if each.num_unverified)  # preempted at their commit
        return freed

    monkeypatch.setattr(Scheduler, "_preempt", note)
    monkeypatch.setattr(Scheduler, "_ask_to_leave", note_asked)
    return ids


EVENTFUL = {"num_kvcache_blocks": 22, "block_size": 4, "max_model_len": 76, "max_num_batched_tokens": 16,
            "enable_prefix_caching": True}  # fmt: skip
BUSY = {"max_num_seqs": 3, "max_num_batched_tokens": 10}  # prompts come in many chunks, next to decodes


def test_ngram_gives_the_tokens_of_none(open_engine: Open):
    every = prompts(len(PARAMS))
    expected = tokens_of(open_engine("qwen3"), PARAMS, every)
    fields = {"num_speculative_tokens": 5, "prompt_lookup_min": 1, "max_verified_tokens": 100}
    engine = open_engine("qwen3", method="ngram", **fields)
    assert tokens_of(engine, PARAMS, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "deepseek_v3", "gpt_oss", "olmo2", "glm4_moe", "deepseek_v4", "minimax_m3"]
)
def test_every_kind_of_attention_verifies(name: str, open_engine: Open, drafting: Callable[[Any], None]):
    params = [each for each in PARAMS if each.n == 1]
    every = prompts(len(params))
    expected = tokens_of(open_engine(name), params, every)
    known = {tuple(prompt): answer for prompt, answer in zip(every, expected, strict=True)}
    drafting(KnownDrafts(known, [[True, False], [True] * 3, [False]]))
    engine = open_engine(name, method="ngram", max_verified_tokens=100)
    assert tokens_of(engine, params, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.sampled(6)
@pytest.mark.parametrize("turns", [[[True] * 3], [[False] * 3], [[True, False, True], [True] * 3, [False], [True] * 2]],
                         ids=["right", "wrong", "mixed"])  # fmt: skip
@pytest.mark.parametrize("limits", [{}, EVENTFUL], ids=["roomy", "eventful"])
def test_whatever_is_drafted_the_tokens_are_those_of_none(
    turns: list[list[bool]], limits: dict[str, Any], open_engine: Open, drafting: Callable[[Any], None]
):
    params = [each for each in PARAMS if each.n == 1]
    every = prompts(len(params))
    expected = tokens_of(open_engine("qwen3_window"), params, every)
    drafting(KnownDrafts({tuple(prompt): answer for prompt, answer in zip(every, expected, strict=True)}, turns))
    engine = open_engine("qwen3_window", method="ngram", **limits, max_verified_tokens=100)
    for _ in range(2):  # the second time with prefix hits, where they are cached
        assert tokens_of(engine, params, every) == expected
    stats = engine.metrics.scheduler
    assert stats.num_drafts > 0
    if not limits:
        assert stats.num_steps <= 2 * 25, "no step was taken in parts, as one is that fails"
    if limits:
        assert stats.num_preemptions > 0 and stats.num_chunks > 0
    found = draft_statistics(stats)["distribution"]
    if turns == [[True] * 3]:
        assert stats.num_accepted_tokens == stats.num_draft_tokens and set(found) >= {0, 1, 2, 3} and not found[0]
    elif turns == [[False] * 3]:
        assert stats.num_accepted_tokens == 0
    else:
        assert all(found[number] > 0 for number in range(4))
    pools = engine._engine.scheduler.cache.pools
    assert all(pool.num_free == pool.num_blocks - 1 for pool in pools)


def test_an_end_within_accepted_tokens_is_the_end(open_engine: Open, drafting: Callable[[Any], None]):
    prompt = tiny.prompt(9)
    (answer,) = tokens_of(open_engine("qwen3"), GREEDY, [prompt])
    drafting(KnownDrafts({tuple(prompt): answer}, [[True] * 3]))
    assert_ends_within(open_engine("qwen3"), prompt, answer)


def assert_ends_within(engine: LLMEngine, prompt: list[int], answer: list[int], asked: SamplingParams = GREEDY) -> None:
    """Each of the first tokens of a known answer is where it ends, once it is one to stop at."""
    for place in range(1, 9):
        if answer[place] in answer[:place]:
            continue
        params = replace(asked, max_tokens=40, stop_token_ids=[answer[place]])
        ended = engine.generate([prompt], params)[0]
        assert ended["token_ids"] == answer[: place + 1] and ended["finish_reason"] == f"stop_{answer[place]}"
    assert engine.metrics.scheduler.num_overrun > 0


@pytest.mark.slow
def test_ranks_and_groups_accept_alike(thread_ranks: list[ThreadRanks], open_engine: Open):
    every = prompts(4)
    expected, counts = tokens_of(open_engine("qwen3_moe"), PARAMS[:4], every), []
    for fields in ({}, {"tensor_parallel_size": 2}, {"parallel.data": 2}):
        engine = open_engine("qwen3_moe", method="ngram", prompt_lookup_min=1, max_verified_tokens=100, **fields)
        assert tokens_of(engine, PARAMS[:4], every) == expected
        stats = engine.metrics.scheduler
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        counts.append((stats.num_drafts, stats.num_draft_tokens, stats.accepted_per_pos))
    assert counts == [counts[0]] * 3


def test_the_latest_place_of_the_most_tokens_is_looked_up():
    drafter = NgramDrafter(3, 2, 3)

    def draft(tokens: list[int], max_drafts: int = 9) -> list[int]:
        sequence = Sequence("a", tokens, SamplingParams())
        found = drafter.draft(sequence, max_drafts)
        drafter.forget(sequence)
        return found

    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9]
    assert draft([1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3]) == [4, 7, 2], "three tokens, not the later two"
    assert draft([2, 3, 4, 2, 3, 5, 2, 3]) == [5, 2, 3], "the latest"
    assert draft([1, 1, 1]) == [1, 1, 1] and draft([1, 2, 1, 2]) == [1, 2, 1], "what ends is repeated"
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], max_drafts=1) == [4]
    assert draft([1, 2, 3]) == draft([7]) == draft([3, 3]) == []
    growing = Sequence("b", [1, 2, 3], SamplingParams())
    found = []
    for token in (1, 2, 3, 1):
        growing.output.append(token)
        found.append(drafter.draft(growing, 9))
    assert found == [[], [3, 1, 2], [1, 2, 3], [2, 3, 1]]
    long = Sequence("c", [*range(5000), 1, 2, 3], SamplingParams())
    assert (drafter.draft(long, 9), drafter.draft(long, 9)) == ([], [4, 5, 6]), "which is looked at in two steps"
    assert {*drafter._indices} == {"b", "c"}


def test_a_line_of_the_log_is_of_the_drafts_since_the_last_one():
    log = DraftLog(10)
    assert log.describe(SchedulerStats(num_drafts=9)) is None
    first = SchedulerStats(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=12, accepted_per_pos=[8, 4])
    assert log.describe(first) == (
        "[MTP Stats Interval] Average toks/fwd: 2.20, Accepted/Total Draft tokens: 12/30, Acceptance rate: 40.00%, "
        "Accepted tokens distribution: {0: 2, 1: 4, 2: 4}"
    )
    assert log.describe(first) is None
    later = SchedulerStats(num_drafts=22, num_draft_tokens=66, num_accepted_tokens=18, accepted_per_pos=[12, 5, 1])
    assert log.describe(later) == (
        "[MTP Stats Interval] Average toks/fwd: 1.50, Accepted/Total Draft tokens: 6/36, Acceptance rate: 16.67%, "
        "Accepted tokens distribution: {0: 8, 1: 3, 2: 0, 3: 1}"
    )


FULL, WINDOW = full_kind(), window_kind(5)


def token(sequence: Sequence, at: int) -> int:
    """The token that a sequence has at a place of its answer."""
    return random.Random(f"{sequence.id} {at}").randrange(3)


def assert_answered(scheduler: Scheduler, every: list[Sequence], aborted: set[str]) -> None:
    """All have their tokens, and no block is held; some drafts were right, and some wrong."""
    for sequence in every:
        num_tokens = len(sequence.output) if sequence.id in aborted else sequence.params.max_tokens
        num_tokens = min(num_tokens, 40 - len(sequence.prompt))
        assert sequence.output == [token(sequence, at) for at in range(num_tokens)]
    assert all(pool.num_free == pool.num_blocks - 1 for pool in scheduler.cache.pools)
    assert 0 < scheduler.stats.num_accepted_tokens < scheduler.stats.num_draft_tokens


@pytest.mark.parametrize("seed", range(20))
def test_plans_with_drafts_in_tiny_pools_end_with_every_answer(seed: int):
    """Each token is known from its sequence and position; drafts are right or wrong at random."""
    chance = random.Random(seed)

    class AtRandom:
        def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
            first = len(sequence.output)
            right = [token(sequence, first + at) for at in range(min(max_drafts, chance.randrange(5)))]
            return [each if chance.random() < 0.7 else 3 for each in right]

        def forget(self, sequence: Sequence) -> None: ...

    kinds = chance.choice([[FULL], [WINDOW], [FULL, WINDOW]])
    cache = KVCache(kinds, {kind.name: 12 for kind in kinds}, 4, enable_prefix_caching=chance.random() < 0.5)
    limits = StepLimits(3, chance.choice([4, 9, 16]), 40, chance.choice([8, 100]))
    scheduler = Scheduler(cache, limits, drafter=AtRandom())
    every: list[Sequence] = []
    aborted: set[str] = set()
    for _ in range(600):
        if len(every) < 12 and chance.random() < 0.4:
            params = SamplingParams(max_tokens=chance.randint(1, 20))
            every.append(Sequence(str(len(every)), [7] * chance.randint(1, 20), params))
            scheduler.add(every[-1])
        if chance.random() < 0.02 and scheduler.sequences:
            aborted.add(chance.choice([*scheduler.sequences]))
            scheduler.abort([*aborted][-1])
        plan = scheduler.schedule()
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert [row.is_decode for row in plan.rows] == [at < plan.num_decodes for at in range(len(plan.rows))]
        assert not any(row.drafts for row in plan.rows[plan.num_decodes :]), "drafts are of decodes"
        ready = {each for each in scheduler.running if each.num_tokens - each.num_computed == 1}
        is_short = any(pool.num_free < len(scheduler.running) for pool in cache.pools)
        assert is_short or ready <= {row.sequence for row in plan.rows}, "a draft delays nobody"
        if not plan.rows:
            continue
        sampling = [row for row in plan.rows if row.samples]
        accepted: dict[int, list[int]] = {}
        for row in plan.rows:
            assert all(len(row.sequence.blocks[kind.name]) * 4 >= row.start + row.num_tokens for kind in kinds)
        for at, row in enumerate(sampling):
            first = len(row.sequence.output)
            for place, drafted in enumerate(row.drafts):
                if drafted != token(row.sequence, first + place):
                    break
                accepted.setdefault(at, []).append(token(row.sequence, first + place + 1))
        if chance.random() < 0.1:
            scheduler.retract(plan)
            continue
        tokens = [token(row.sequence, len(row.sequence.output)) for row in sampling]
        before = [(row.sequence, len(row.sequence.output)) for row in sampling]
        num_drafted = {at: len(row.drafts) for at, row in enumerate(sampling) if row.drafts}
        sampled = Sampled(tokens, [None] * len(tokens), accepted=accepted, num_drafted=num_drafted)
        scheduler.commit(plan, sampled, lambda each: finish_reason(each, 40))
        for at, (sequence, had) in enumerate(before):
            assert len(sequence.output) == had + 1 + len(accepted.get(at, ()))
            if sequence.finish_reason is None and sequence in scheduler.running:
                assert sequence.num_computed == sequence.num_planned == sequence.num_tokens - 1
    assert len(every) == 12 and not scheduler.has_work
    assert_answered(scheduler, every, aborted)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_plans_ahead_of_drafts_in_tiny_pools_end_with_every_answer(seed: int, run_ahead: int):
    """As above, but only a commit shows how many drafts of the runner were right; plans are made before it."""
    chance = random.Random(f"{seed} {run_ahead}")

    kinds = chance.choice([[FULL], [WINDOW], [FULL, WINDOW]])
    cache = KVCache(kinds, {kind.name: 14 for kind in kinds}, 4, enable_prefix_caching=chance.random() < 0.5)
    limits = StepLimits(3, chance.choice([4, 9, 16]), 40, 100)
    scheduler = Scheduler(cache, limits, run_ahead, RunnerDrafter(chance.choice([1, 3])))
    every: list[Sequence] = []
    aborted: set[str] = set()
    pending: deque[Plan] = deque()
    for _ in range(900):
        if len(every) < 12 and chance.random() < 0.4:
            params = SamplingParams(max_tokens=chance.randint(3, 30), min_tokens=chance.choice([0, 0, 3]))
            every.append(Sequence(str(len(every)), [7] * chance.randint(1, 20), params))
            scheduler.add(every[-1])
        if chance.random() < 0.02 and scheduler.sequences:
            aborted.add(chance.choice([*scheduler.sequences]))
            scheduler.abort([*aborted][-1])
        while len(pending) <= run_ahead:
            plan = scheduler.schedule()
            assert plan.num_tokens <= limits.max_num_batched_tokens
            for row in plan.rows:
                assert row.start + row.num_tokens <= limits.max_model_len
                assert all(len(row.sequence.blocks[kind.name]) * 4 >= row.start + row.num_tokens for kind in kinds)
            if not plan.rows:
                break
            if chance.random() < 0.1:
                scheduler.retract(plan)
                break
            pending.append(plan)
        if not pending:
            continue
        plan, num_drafted, accepted = pending.popleft(), dict[int, int](), dict[int, list[int]]()
        sampling = [row for row in plan.rows if row.samples]
        for at, row in enumerate(sampling):
            assert row.sequence.finish_reason is not None or row.start >= row.sequence.num_tokens - row.num_tokens
            first = len(row.sequence.output) + 1
            right = chance.randint(0, len(row.drafts))
            accepted[at] = [token(row.sequence, first + place) for place in range(right)]
            if row.drafts and chance.random() < 0.9:  # else nothing was drafted after all
                num_drafted[at] = len(row.drafts)
            else:
                accepted[at] = []
        tokens = [token(row.sequence, len(row.sequence.output)) for row in sampling]
        sampled = Sampled(tokens, [None] * len(tokens), accepted=accepted, num_drafted=num_drafted)
        scheduler.commit(plan, sampled, lambda each: finish_reason(each, 40))
        for row in sampling:
            sequence = row.sequence
            if sequence.finish_reason is None and sequence in scheduler.running:
                assert sequence.num_computed == sequence.num_tokens - 1
                assert sequence.num_planned >= sequence.num_computed
                if sequence not in scheduler._in_flight:
                    assert (sequence.num_planned, sequence.num_pending) == (sequence.num_computed, 0)
    assert len(every) == 12 and not scheduler.has_work and not pending
    assert_answered(scheduler, every, aborted)
    assert (scheduler.stats.num_ahead > 0) == (run_ahead > 0)


def test_a_sequence_that_is_admitted_again_drops_its_drafts():
    cache = KVCache([FULL], {"full": 12}, 4, enable_prefix_caching=False)
    scheduler = Scheduler(cache, StepLimits(3, 16, 40), drafter=NgramDrafter(3, 2, 4))
    sequence = Sequence("a", [*range(6)], SamplingParams(), drafts=[1, 2])
    scheduler.add(sequence)
    (row,) = scheduler.schedule().rows
    assert (row.num_tokens, row.drafts, row.samples) == (6, (), True)


def test_drafts_of_the_runner_leave_half_of_a_step_to_prompts():
    cache = KVCache([FULL], {"full": 100}, 4, enable_prefix_caching=False)
    scheduler = Scheduler(cache, StepLimits(5, 16, 64, 100), 1, RunnerDrafter(3))
    for at in range(4):
        scheduler.add(Sequence(str(at), [1], SamplingParams(max_tokens=30)))
    scheduler.commit(scheduler.schedule(), Sampled([2] * 4, [None] * 4), lambda each: None)
    assert [row.num_tokens for row in scheduler.schedule().rows] == [4] * 4
    scheduler.add(Sequence("late", [1] * 20, SamplingParams(max_tokens=30)))
    assert [row.num_tokens for row in scheduler.schedule().rows] == [4, 2, 1, 1, 8]
    assert [row.num_tokens for row in scheduler.schedule().rows] == [4, 2, 1, 1, 8]
    assert [row.num_tokens for row in scheduler.schedule().rows] == [4, 2, 1, 1, 4]
    assert [row.num_tokens for row in scheduler.schedule().rows] == [4, 4, 4, 3, 1], "once it is there"


def test_drafts_take_what_other_decodes_leave_of_a_step():
    class Wrong:
        def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
            return [9] * min(max_drafts, 3)

        def forget(self, sequence: Sequence) -> None: ...

    def planned(budget: int, max_drafts: int, num: int) -> list[int]:
        cache = KVCache([FULL], {"full": 100}, 4, enable_prefix_caching=False)
        scheduler = Scheduler(cache, StepLimits(4, budget, 64, max_drafts), drafter=Wrong())
        for at in range(num):
            scheduler.add(Sequence(str(at), [1], SamplingParams(max_tokens=30), output=[2]))
            scheduler.schedule()
        for sequence in scheduler.running:
            scheduler._land(ScheduledRequest(sequence, 0, 2, True))
            sequence.num_computed = sequence.num_planned = 1
        return [row.num_tokens for row in scheduler.schedule().rows]

    assert planned(4, 100, 4) == [1, 1, 1, 1]
    assert planned(6, 100, 4) == [3, 1, 1, 1]
    assert planned(64, 100, 4) == [4, 4, 4, 4]
    assert planned(64, 8, 4) == [2, 2, 2, 2] and planned(64, 8, 2) == [4, 4] and planned(64, 3, 2) == [1, 1]
