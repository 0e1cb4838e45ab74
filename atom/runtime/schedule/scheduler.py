"""Schedule a step: decodes first, then prompts in chunks.

Only policy: no device, no tensors.

    scheduler = Scheduler(cache, StepLimits(64, 8192, 4096))
    scheduler.add(sequence)
    while scheduler.has_work:
        plan = scheduler.schedule()
        sampled = ...                                                # the step runs
        ended = scheduler.commit(plan, sampled, lambda sequence: finish_reason(sequence, 4096))

A plan names no token. Tokens are appended, blocks published and sequences ended at its commit, which may come late:
until then a sequence keeps its blocks and its slot, even if it is aborted. If steps run ahead, a sequence of a pending
plan is planned again, past its end if that was not foreseen; otherwise it waits for its commit. Drafts of a pending
plan count as accepted until then: positions and blocks are planned for the max number of tokens.

A prefix that is being computed counts: a sequence that is admitted begins after the blocks that pending plans, or other
rows of its own step, compute, and waits for more of it (`PrefixMakers`). Those that follow in the queue may be admitted
meanwhile. If the prompt that it waits for is aborted or preempted, it computes the rest itself. If a step does not take
place, those that begin after its blocks are preempted.

Pipeline stages compute a plan each: a sequence whose next token is being computed waits for it, and a plan has a part
of the decodes, so that there are as many plans as stages.

A token that a budget of reasoning forces is planned once those before it are known. Only where reasoning begins once
more, with no budget left, is that found out late: what was sampled past it does not count, and the sequence is
preempted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from operator import attrgetter

import numpy as np

from atom.errors import RequestError
from atom.runtime.draft.speculation import Drafter, RunnerDrafter, is_drafted
from atom.runtime.draft.table import Acceptance
from atom.runtime.images.encode_planner import EncodePlanner
from atom.runtime.kv.cache import Cached, KVCache
from atom.runtime.kv.retention import RetentionCounts
from atom.runtime.metrics import SchedulerStats
from atom.runtime.schedule.fair_queue import FairQueue
from atom.runtime.schedule.prefill_budget import PrefillBudget
from atom.runtime.schedule.prefix_makers import PrefixMakers, find_parting
from atom.runtime.schedule.step_costs import StepLoad, load_of
from atom.runtime.step.input import NUM_REPORTED
from atom.runtime.types import Logprobs, Plan, Sampled, ScheduledRequest, Sequence, StepLimits


def finish_reason(sequence: Sequence, max_model_len: int) -> str | None:
    """Why the last token ends the answer: eos, stop_{id}, max_tokens, repetition, or None.

    Stop strings are the caller's.
    """
    params, token = sequence.params, sequence.output[-1]
    is_early = len(sequence.output) < params.min_tokens
    if not is_early:
        if token in sequence.stop_ids and not params.ignore_eos:
            return "eos"
        if params.stop_token_ids and token in params.stop_token_ids:
            return f"stop_{token}"
    if len(sequence.output) >= params.max_tokens or sequence.num_tokens >= max_model_len:
        return "max_tokens"
    return "repetition" if sequence.repetition is not None and sequence.repetition.is_met and not is_early else None


def take_reports(row: ScheduledRequest, place: int, sampled: Sampled) -> None:
    """Store what a step reports about a row's prompt: log probabilities, and the sum of an embedding."""
    sequence = row.sequence
    if place in sampled.prompt_logprobs:
        known, reported = sequence.prompt_logprobs[: row.start + 1], sampled.prompt_logprobs[place]
        targets = sequence.prompt[row.start + 1 :]
        shown = [each if target >= 0 else None for each, target in zip(reported, targets, strict=False)]
        sequence.prompt_logprobs = [*known, *shown]
    if place in sampled.pooled:
        pooled = np.frombuffer(sampled.pooled[place], np.float32).astype(np.float64)
        if sequence.pooled is not None and row.start:  # otherwise it may have been preempted
            pooled += sequence.pooled
        sequence.pooled = pooled


def take_taps(row: ScheduledRequest, place: int, sampled: Sampled, num_accepted: int) -> None:
    """Store the hidden states that a step reports of a row, before its tokens are appended.

    num_accepted: drafts of the row
    """
    sequence, num_tokens = row.sequence, row.num_tokens - len(row.drafts)
    start = sequence.num_tokens - num_tokens if row.samples else row.start  # its plan may have counted rejected drafts
    for number, states in sampled.tapped.get(place, {}).items():
        sequence.tapped[number].take(start, num_tokens + num_accepted, states)


MAX_COMPARED = 8  # newest prompts with which one that is to be placed is compared

_priority = attrgetter("priority")


class Scheduler:
    """Continuous batching: decodes first, then prompts in chunks, first come first served; the last is preempted first.

    Tenants are served in turn (`FairQueue`). A lower `priority` counts as an earlier arrival, among waiting and among
    running sequences; a waiting sequence takes no blocks from a running one. The first running sequence can take the
    blocks of all others, and `add` refuses a sequence that would not fit by itself: so every sequence ends.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: StepLimits,
        run_ahead: int = 0,
        drafter: Drafter | None = None,
        num_stages: int = 1,
        delay_factor: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        prefill_budget: PrefillBudget | None = None,
        images: EncodePlanner | None = None,
    ) -> None:
        """
        cache: the KV cache
        limits: of a step and of a sequence
        run_ahead: max number of plans after the oldest that is not committed
        drafter: drafts tokens for decodes to verify, the runner's if steps run ahead; None: no drafts
        num_stages: pipeline stages, each with a plan
        delay_factor: waiting sequences are admitted once one of them has waited for this factor times the duration of
          the last step with prompts, so that more of them are computed together; at once if nothing runs. 0: at once
        clock: seconds
        prefill_budget: limits prompts next to decodes, of this scheduler only; None: `max_prompt_tokens` does
        images: limits the images that a step encodes; None: no prompt has any
        """
        assert not run_ahead or drafter is None or isinstance(drafter, RunnerDrafter), "a draft follows known tokens"
        assert limits.max_decodes > 0, "a step needs room for a sequence and a token"
        self.cache, self.limits = cache, limits
        self.num_slots = limits.max_decodes
        self.stats = SchedulerStats()
        self.sequences: dict[str, Sequence] = {}  # all that wait or run, by id
        self.waiting = FairQueue()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self._drafter = drafter
        self._acceptance = Acceptance(NUM_REPORTED)
        self._run_ahead = run_ahead  # max plans after the oldest that is pending
        self._num_stages = num_stages
        self._delay_factor = delay_factor
        self._clock = clock
        self._step_began = clock()  # the oldest step that is not committed
        self._prompt_seconds = 0.0  # that the last step with prompts took
        self._in_flight: Counter[Sequence] = Counter()  # plans that are not committed, by sequence
        self._leaving: set[Sequence] = set()  # preempted once they are in no plan
        self._stale: set[Sequence] = set()  # of these, those whose pending tokens do not count
        self._slots = list(range(self.num_slots - 1, -1, -1))  # free ones
        self._refused: Sequence | None = None  # found no room, and no block has been freed since
        self._suspects: dict[Sequence, None] = {}  # of a step that failed and is not run as it was: one is at fault
        self._max_suspects = self.num_slots  # in a step, which has no others
        self.is_paused = False  # none is admitted
        self.max_prompt_tokens: int | None = None  # of the next step; None: max_num_batched_tokens
        self._prefill_budget = prefill_budget
        self._images = images
        self.num_deferred = 0  # waiting ones that the last step left out for something other than room

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def has_suspects(self) -> bool:
        """Whether a step failed, and the sequence at fault is being found."""
        return bool(self._suspects)

    @property
    def is_idle(self) -> bool:
        """Whether no plan is pending."""
        return not self._in_flight

    @property
    def decode_load(self) -> StepLoad:
        """The load of a step of all sequences whose prompts are computed or planned."""
        contexts = [each.num_planned for each in self.running if each.num_planned >= len(each.prompt)]
        return StepLoad(len(contexts), sum(contexts))

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_waiting_by_tenant(self) -> Counter[str]:
        return self.waiting.counts()

    @property
    def num_open(self) -> int:
        """The number of sequences that may be added and need not wait for a slot; 0 if one waits for blocks."""
        return 0 if self._refused is not None else max(len(self._slots) - len(self.waiting), 0)

    @property
    def fullest(self) -> tuple[int, int]:
        """Used blocks and all blocks of the fullest pool."""
        return self.cache.fullest

    @property
    def host_usage(self) -> tuple[int, int]:
        """Used blocks and all blocks of the fullest pool on the host."""
        return self.cache.host_usage

    @property
    def retention(self) -> RetentionCounts:
        """What became of the retained blocks of KV."""
        return self.cache.retention

    def has_room(self, sequence: Sequence, num_shared: int, num_promised: int) -> bool:
        """Whether blocks are free for a sequence, besides those promised to others. num_shared: of its tokens"""
        return self.cache.has_room(sequence.num_tokens, num_shared, num_promised + len(self.running))

    def find_cached(self, sequence: Sequence) -> Cached:
        """The sequence's tokens that it need not compute here."""
        return Cached(0, 0) if sequence.needs_prompt else self.cache.find_cached(sequence)

    def count_spared(self, sequence: Sequence, cached: Cached) -> int:
        """The sequence's tokens that are cached, or that prompts which are here compute; the newest are compared."""
        if sequence.needs_prompt or not self.cache.enable_prefix_caching:
            return cached.num_tokens
        prompts = (each for each in reversed(self.sequences.values()) if each.num_computed < len(each.prompt))
        shared = (self.cache.count_shared(each, sequence, cached.num_tokens) for each in islice(prompts, MAX_COMPARED))
        return max(cached.num_tokens, *shared, 0)

    def check(self, sequence: Sequence) -> None:
        """Raise RequestError for a sequence that can never run."""
        num_prompt = len(sequence.prompt)
        if sequence.id in self.sequences:
            raise RequestError(f"the id {sequence.id} is in use, choose another")
        if not num_prompt:
            raise RequestError("the prompt is empty, give at least one token")
        is_pooled = sequence.pooling is not None
        if num_prompt >= self.limits.max_model_len + is_pooled:
            fault = "is longer than" if is_pooled else "leaves no room for an answer in"
            raise RequestError(
                f"a prompt of {num_prompt} tokens {fault} max_model_len="
                f"{self.limits.max_model_len}, shorten it or raise max_model_len"
            )
        num_tokens = min(num_prompt + sequence.params.max_tokens, self.limits.max_model_len)
        at_once = 1 if self._images is None else self._images.largest(sequence)
        # the KV of the last token is never computed
        if not self.cache.can_ever_fit(max(num_tokens - 1, num_prompt), at_once):
            raise RequestError(
                f"prompt and max_tokens are {num_tokens} tokens, more than the whole KV cache holds, "
                "shorten them or raise kv_cache_memory (num_kvcache_blocks if set)"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises as `check` does, with nothing changed."""
        self.check(sequence)
        self.sequences[sequence.id] = sequence
        self.waiting.add(sequence)
        if sequence.parent is None and not sequence.needs_prompt:
            self.cache.fetch(sequence)

    def abort(self, id: str, reason: str = "abort") -> Sequence | None:
        """End a sequence, whatever step it is in; None if no sequence has this id."""
        sequence = self.sequences.get(id)
        if sequence is None:
            return None
        if sequence not in self.running:
            self.waiting.remove(sequence)
            self.cache.drop_fetch(sequence)
        self._end(sequence, reason)
        return sequence

    def schedule(self) -> Plan:
        """Plan the next step. It has no rows if there is no work, or none before a pending plan is committed."""
        self.cache.take_fetched()
        self.cache.begin_plan()
        if not self._in_flight:
            self._step_began = self._clock()
        if self._prefill_budget is not None:
            self._prefill_budget.begin(is_idle=self.is_idle)
            self.max_prompt_tokens = self._prefill_budget.limit(self.decode_load)
            self.stats.max_prompt_tokens = self.max_prompt_tokens or 0
        planned = self._plan_rows()
        if self._suspects and not planned and not self._in_flight:  # they wait for others
            self._suspects.clear()
            planned = self._plan_rows()
        decode_rows: list[ScheduledRequest] = []
        other_rows: list[ScheduledRequest] = []
        for sequence, num_tokens in planned.items():
            row = self._plan(sequence, num_tokens)
            (decode_rows if row.is_decode else other_rows).append(row)
        copies = self.cache.drain_copies(planned) if planned else None
        if copies is not None:
            self.stats.num_saved_blocks += sum(map(len, copies.saves.values()))
            self.stats.num_loaded_blocks += sum(map(len, copies.loads.values()))
        return Plan(decode_rows + other_rows, len(decode_rows), copies, self.cache.is_chained)

    def commit(self, plan: Plan, sampled: Sampled, finish: Callable[[Sequence], str | None]) -> list[Sequence]:
        """Append what a step sampled; the sequences that it ended. Sequences aborted since its plan get no token.

        finish: called after each appended token; returns the reason to end there, or None
        """
        self.stats.num_steps += 1
        self.cache.may_chain = True
        now = self._clock()
        if len(plan.rows) > plan.num_decodes:  # advanced prompts publish blocks, and free those outside their windows
            self._refused = None
            self._prompt_seconds = now - self._step_began
        self._step_began = now
        if self._prefill_budget is not None:
            self._prefill_budget.commit(load_of(plan))
        for row in plan.rows if self._suspects else ():
            self._suspects.pop(row.sequence, None)
        ended = []
        answers = enumerate(zip(sampled.tokens, sampled.logprobs, strict=True))
        has_reports = bool(sampled.prompt_logprobs or sampled.pooled or sampled.tapped)
        for place, row in enumerate(plan.rows):
            sequence = row.sequence
            self._land(row)
            answer = next(answers) if row.samples else None
            if sequence.finish_reason is not None:
                self.stats.num_overrun += row.samples
                self._release(sequence)
                continue
            if sequence in self._stale:
                self.stats.num_overrun += row.samples
                self._preempt_if_landed(sequence)
                continue
            sequence.num_computed = sequence.num_tokens if row.samples else row.start + row.num_tokens
            self.cache.commit(sequence)
            if has_reports:
                take_reports(row, place, sampled)
                take_taps(row, place, sampled, 0 if answer is None else len(sampled.accepted.get(answer[0], ())))
            if answer is None:
                self.stats.num_chunks += 1
            else:
                at, (token, logprobs) = answer
                tokens = [token, *sampled.accepted[at]] if at in sampled.accepted else [token]
                if self._take(row, tokens, logprobs, sampled.num_drafted.get(at, 0), finish):
                    ended.append(sequence)
            if sequence in self._leaving:
                self._preempt_if_landed(sequence)
        return ended

    def retract(self, plan: Plan) -> None:
        """Take back the newest plan, whose step did not take place: its rows may be planned again.

        A step that failed may have written over recurrent state: its rows begin again, after the last copy of it, and
        half of them at a time until a step has only the one at fault. The rows of a step that read one another's KV are
        planned again without that, so that the step can be run in halves.
        """
        lost = set[tuple[str, int]]()
        if not self.cache.can_repeat or plan.is_chained:
            self._suspects |= dict.fromkeys(row.sequence for row in plan.rows if row.sequence.finish_reason is None)
            self._max_suspects = len(plan.rows) if self.cache.can_repeat else max(len(plan.rows) // 2, 1)
        for row in plan.rows:
            sequence = row.sequence
            self._land(row)
            sequence.num_planned = row.start
            lost |= self.cache.retract(sequence, row.start)
        self.cache.may_chain &= not plan.is_chained
        for sequence in [each for each in reversed(self.running) if lost and self.cache.reads(each, lost)]:
            if not sequence.output:
                sequence.admitted_at = None  # nothing of the prefix was there
            self._preempt(sequence)
        for row in plan.rows:
            sequence = row.sequence
            if sequence.slot < 0:
                continue
            if sequence.finish_reason is not None:
                self._release(sequence)
            elif not self.cache.can_repeat:
                self._leaving.add(sequence)
                self._preempt_if_landed(sequence)
            elif sequence in self._stale:
                self._preempt_if_landed(sequence)

    def drop_kv(self) -> None:
        """Preempt all running sequences, and forget all prefixes; no plan is pending."""
        assert not self._in_flight, "all plans are committed"
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)
        self.cache.forget()
        if self._images is not None:
            self._images.clear()

    def _plan_rows(self) -> dict[Sequence, int]:
        """Plan the sequences of a step, and the number of tokens of each."""
        planned: dict[Sequence, int] = {}
        if self._images is not None:
            self._images.begin()
        budget = self._plan_running(planned)
        if not self.is_paused and not self._is_delayed():
            self._admit(planned, budget)
        return planned

    def _may_join(self, sequence: Sequence, planned: dict[Sequence, int]) -> bool:
        """Whether the sequence may be in the step though there are suspects: only some of them may."""
        return sequence in self._suspects and len(planned) < self._max_suspects

    def _plan_running(self, planned: dict[Sequence, int]) -> int:
        """Plan the running sequences, decodes first; the number of tokens that the step has left."""
        decodes, prompts = self._find_ready()
        budget = self.limits.max_num_batched_tokens
        max_prompt_tokens = budget if self.max_prompt_tokens is None else self.max_prompt_tokens
        kept = 0 if self._drafter is None else self._keep_for_prompts(bool(prompts))
        if num_whole := self._count_whole(prompts):
            kept, max_prompt_tokens = max(kept, num_whole), max(max_prompt_tokens, num_whole)
            del decodes[budget - num_whole :]
        max_drafts = self._max_drafts(len(decodes))
        for at, sequence in enumerate(decodes + prompts):
            if at == len(decodes):
                budget = min(budget, max_prompt_tokens)
            if not budget or sequence not in self.running or sequence in self._leaving:  # preempted for an earlier one
                continue
            if self._suspects and not self._may_join(sequence, planned):
                continue
            if self._images is not None and not self._images.fit(sequence, budget):  # its image waits for another step
                continue
            if self._drafter is not None:
                self._draft(sequence, max_drafts, budget - max(len(decodes) - at, 1) - kept)
            num_tokens = self._extend(sequence, budget)
            if not num_tokens:
                num_tokens, budget = self._make_room(sequence, budget, planned)
            if num_tokens:
                planned[sequence] = num_tokens
                budget -= num_tokens
        return min(budget, max_prompt_tokens)

    def _count_whole(self, prompts: list[Sequence]) -> int:
        """The tokens of an image that the step has to have room for at once: that of the prompt which comes first."""
        if self._images is None:
            return 0
        if not prompts and self._can_admit:
            prompts = [self.waiting.peek()]
        return self._images.min_tokens(prompts[0]) if prompts and prompts[0].images else 0

    def _find_ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that need not wait for a commit: decodes, and prompts.

        With pipeline stages, only a part of the decodes. A sequence whose KV is being loaded is among them only if
        there is no other.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        loading: list[Sequence] = []
        for sequence in self.running:
            if sequence in self.cache.pending_loads:
                loading.append(sequence)
            elif num_left := self._num_left(sequence):
                (decodes if num_left == 1 else prompts).append(sequence)
        decodes.sort(key=_priority)
        prompts.sort(key=_priority)
        if self._num_stages > 1:
            num_decodes = len(decodes) + sum(sequence.num_pending > 0 for sequence in self.running)
            del decodes[-(-num_decodes // self._num_stages) :]
        if not decodes and not prompts:
            prompts = sorted(loading, key=_priority)[:1]
        return decodes, prompts

    def _make_room(self, sequence: Sequence, budget: int, planned: dict[Sequence, int]) -> tuple[int, int]:
        """Preempt later sequences until a running one has room for its next tokens.

        Returns the number of tokens that have room, 0 if the sequence skips this step and keeps its blocks, and the
        budget that is left.
        """
        while not sequence.num_unverified:  # otherwise its commit may move it back to where it has room
            free = (other for other in reversed(self.running) if other not in self._in_flight or other is sequence)
            last = max(free, key=_priority)
            if last is sequence:
                return 0, budget + self._ask_to_leave(sequence, planned)
            budget += planned.pop(last, 0)
            self._preempt(last)
            if num_tokens := self._extend(sequence, budget):
                return num_tokens, budget
        return 0, budget

    def _is_delayed(self) -> bool:
        """Whether waiting sequences should wait for more of them, as with vLLM's scheduler_delay_factor."""
        if not (self._delay_factor and self.waiting and self.running):
            return False
        waited = self._clock() - min(sequence.arrival for sequence in self.waiting)
        return waited <= self._delay_factor * self._prompt_seconds

    def _admit(self, planned: dict[Sequence, int], budget: int) -> None:
        """Admit waiting sequences to the running ones and to the step."""
        passed = []  # that wait for something other than room
        makers = PrefixMakers(self.cache, planned)
        for sequence in {**planned, **self._in_flight}:
            if sequence in self.running and sequence not in self._leaving:
                makers.add(sequence)
        while self.waiting and budget and self._slots:
            sequence = self.waiting.pop()
            is_held = self._suspects and not self._may_join(sequence, planned)
            is_fetching = self.cache.is_fetching(sequence)
            if is_held or is_fetching or self._waits_for_parent(sequence) or makers.is_awaited_by(sequence):
                passed.append(sequence)
                continue
            num_tokens = 0 if sequence is self._refused else self._start(sequence, budget)
            if not num_tokens:
                self._refused = sequence
                self.waiting.put_back(sequence)
                break
            self.running[sequence] = None
            if planned and sequence in self.cache.pending_loads:  # during this step
                continue
            planned[sequence] = num_tokens
            budget -= num_tokens
            makers.add(sequence)
        self.num_deferred = len(passed)
        for sequence in reversed(passed):
            self.waiting.put_back(sequence)

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        if parent not in self.running or sequence.needs_prompt:
            return False
        return parent.num_computed < len(parent.prompt)

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Allocate a cached prefix and room for tokens after it; the number of these tokens, 0 if nothing was taken."""
        num_cached = num_forked = 0
        sequence.drafts = []  # those of a plan that preempted it
        if not sequence.needs_prompt:
            found = self.cache.match_prefix(sequence, spare=len(self.running))
            if found is None:
                return 0
            num_cached = found
            if not num_cached and sequence.parent in self.running:
                num_forked = self.cache.fork(sequence.parent, sequence)
        sequence.num_computed = sequence.num_planned = num_cached + num_forked
        sequence.parting = find_parting(self.cache, sequence, self.waiting) if self.cache.wants_parting else 0
        # a spare block for each running one: a sequence admitted to the last blocks is preempted at once
        num_tokens = self._extend(sequence, budget, spare=len(self.running))
        if not num_tokens:
            self.cache.free(sequence)
            sequence.num_computed = sequence.num_planned = 0
            return 0
        sequence.slot = self._slots.pop()
        sequence.awaits = None
        if sequence.admitted_at is None:
            sequence.admitted_at = time.perf_counter()
            if sequence.parent is None:  # less those of an admission that was taken back
                self.stats.num_cached_tokens += num_cached - sequence.num_cached
            sequence.num_cached = num_cached
            self.cache.note_admission(sequence, num_cached)
            self.waiting.charge(sequence, num_prompt=len(sequence.prompt) - num_cached - num_forked)
        self._count_hits(sequence, num_cached, num_forked)
        return num_tokens

    def _count_hits(self, sequence: Sequence, num_cached: int, num_forked: int) -> None:
        """Count the tokens that an admitted sequence need not compute."""
        stats, cache = self.stats, self.cache
        if cache.enable_prefix_caching and not sequence.needs_prompt:
            stats.num_prefix_queries += sequence.num_tokens
            if cache.host_pools:
                num_loading = cache.num_loading(sequence)
                stats.num_host_queries += sequence.num_tokens - num_cached + num_loading
                stats.num_host_hit_tokens += num_loading
        stats.num_prefix_hit_tokens += num_cached
        stats.num_forked_tokens += num_forked

    def _keep_for_prompts(self, has_prompts: bool) -> int:
        """The tokens of a step that are kept for prompts, so not used for drafts."""
        return self.limits.max_num_batched_tokens // 2 if has_prompts or self._can_admit else 0

    @property
    def _can_admit(self) -> bool:
        """Whether a sequence waits that may find room in this step."""
        return bool(self.waiting and self._slots) and self.waiting.peek() is not self._refused

    def _max_drafts(self, num_decodes: int) -> int:
        """Max drafts of each of a step's decodes; if times are known, the number with the most tokens/s."""
        if self._drafter is None or not num_decodes:
            return 0
        if (table := self.limits.draft_table) is None:
            return self.limits.max_verified_tokens // num_decodes - 1
        best = table.best(num_decodes, self._acceptance.rates)
        if not best:
            self._acceptance.forget()
        return best

    def _draft(self, sequence: Sequence, max_drafts: int, budget: int) -> None:
        """Draft what may follow the newest token of a decode, no further than its answer can go.

        max_drafts: of each decode of this step
        budget: tokens that neither the other decodes nor this one need
        """
        sequence.drafts = []
        if self._drafter is None or self._num_left(sequence) != 1 or not is_drafted(sequence):
            return
        num_left = min(
            sequence.params.max_tokens - self._min_output(sequence),
            self.limits.max_model_len - sequence.num_tokens - sequence.num_pending,
        )
        num_drafts = min(num_left - 1, budget, max_drafts)
        if sequence.thinking is not None:
            num_drafts = min(num_drafts, sequence.thinking.num_free - sequence.num_pending - 1)
        if num_drafts > 0:
            sequence.drafts = self._drafter.draft(sequence, num_drafts)

    def _extend(self, sequence: Sequence, budget: int, spare: int = 0) -> int:
        """Allocate room for the sequence's next tokens, at most `budget`; the number of tokens that have room.

        Drafts that have no room are dropped.
        """
        start, stop = sequence.num_planned, sequence.num_tokens + sequence.num_pending
        if self._images is not None:
            budget = self._images.fit(sequence, budget)
        if sequence.drafts:
            end = stop + len(sequence.drafts)
            # with a spare block for each running one: none is preempted for a draft
            if end - start <= budget and self.cache.allocate(sequence, end, max(spare, len(self.running))) == end:
                return end - start
            sequence.drafts = []
        stop = self.cache.allocate(sequence, self.cache.chunk_end(sequence, min(start + budget, stop)), spare)
        if self._images is not None:
            stop = self._images.chunk_end(sequence, stop)
        return max(stop - start, 0)

    def _num_left(self, sequence: Sequence) -> int:
        """The number of tokens that its next step may compute; 0 if it waits for a commit."""
        if sequence in self._in_flight:
            is_last = (
                self._min_output(sequence) >= sequence.params.max_tokens
                or sequence.num_tokens + sequence.num_pending >= self.limits.max_model_len
            )
            waits = sequence.needs_host or (self._num_stages > 1 and sequence.num_pending > 0)
            if not self._run_ahead or waits or is_last:
                return 0
        return sequence.num_tokens + sequence.num_pending - sequence.num_planned

    def _min_output(self, sequence: Sequence) -> int:
        """The number of output tokens once pending plans are committed, if they accept no draft."""
        return len(sequence.output) + sequence.num_pending - sequence.num_unverified

    def _ask_to_leave(self, sequence: Sequence, planned: dict[Sequence, int]) -> int:
        """Mark the last sequence to be preempted at its commit; the tokens of this step that this frees."""
        last = max(reversed(self.running), key=_priority)
        if last is sequence or self._leaving:
            return 0
        self._leaving.add(last)
        return planned.pop(last, 0)

    def _plan(self, sequence: Sequence, num_tokens: int) -> ScheduledRequest:
        """The sequence's row of the step that is being planned."""
        start, drafts = sequence.num_planned, tuple(sequence.drafts)
        samples = start + num_tokens - len(drafts) == sequence.num_tokens + sequence.num_pending
        self.stats.num_ahead += sequence in self._in_flight
        self._in_flight[sequence] += 1
        sequence.num_planned += num_tokens
        sequence.num_pending += samples + len(drafts)
        sequence.num_unverified += len(drafts)
        return ScheduledRequest(sequence, start, num_tokens, samples, drafts)

    def _take(
        self,
        row: ScheduledRequest,
        tokens: list[int],
        logprobs: Logprobs | None,
        num_drafted: int,
        finish: Callable[[Sequence], str | None],
    ) -> bool:
        """Append the tokens drawn for a row, up to the end of the answer; whether it has ended."""
        sequence = row.sequence
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        sequence.num_planned -= 1 + len(row.drafts) - len(tokens)  # the rest was rejected
        self._acceptance.count(len(row.drafts), len(tokens) - 1)
        num_taken, reason = 0, None
        for token in tokens:
            sequence.output.append(token)
            num_taken += 1
            if sequence.thinking is not None:
                sequence.thinking.push(token)
            if sequence.repetition is not None:
                sequence.repetition.push(token)
            reason = finish(sequence)
            if reason is not None or sequence.finish_reason is not None:
                break
            if sequence.thinking is not None and sequence.thinking.forced is not None:
                self._drop_later(sequence, is_newest=num_taken == len(tokens))
                break
        self.waiting.charge(sequence, num_output=num_taken)
        if num_drafted:
            self._count_drafts(sequence, num_drafted, min(num_taken, len(tokens) - 1))
            self.stats.num_overrun += len(tokens) - num_taken
        if sequence.finish_reason is not None:  # finish may have aborted it
            return False
        if num_taken > 1:
            sequence.num_computed = sequence.num_tokens - 1
            self.cache.commit(sequence)
        if reason is not None:
            self._end(sequence, reason)
        return reason is not None

    def _count_drafts(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        stats = self.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafted
        stats.num_accepted_tokens += num_accepted
        sequence.num_accepted += num_accepted
        counts = [*stats.accepted_per_pos, *[0] * (num_accepted - len(stats.accepted_per_pos))]
        stats.accepted_per_pos = [
            count + (at < num_accepted) for at, count in enumerate(counts)
        ]  # a new list, since others hold the old one

    def _land(self, row: ScheduledRequest) -> None:
        """Note that a plan of the sequence is no longer pending."""
        sequence = row.sequence
        sequence.num_pending -= row.samples + len(row.drafts)
        sequence.num_unverified -= len(row.drafts)
        self._in_flight[sequence] -= 1
        if not self._in_flight[sequence]:
            del self._in_flight[sequence]

    def _drop_later(self, sequence: Sequence, *, is_newest: bool) -> None:
        """Have what was sampled after the last token not count, since the next one is forced.

        is_newest: its step has sampled none after it
        """
        if not is_newest or sequence in self._in_flight:
            self._leaving.add(sequence)
            self._stale.add(sequence)

    def _preempt_if_landed(self, sequence: Sequence) -> None:
        if sequence not in self._in_flight:
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks and slot; its tokens stay, their KV is computed again."""
        del self.running[sequence]
        self._leaving.discard(sequence)
        self._stale.discard(sequence)
        self._release(sequence)
        sequence.num_computed = sequence.num_planned = 0
        self.waiting.put_back(sequence)
        self.stats.num_preemptions += 1
        sequence.num_preemptions += 1

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self._suspects.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.forget(sequence)
        del self.sequences[sequence.id]
        self.running.pop(sequence, None)
        self._leaving.discard(sequence)
        self._stale.discard(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free its blocks and slot, unless a pending plan uses them: then that plan's commit does."""
        if sequence not in self._in_flight:
            self.cache.free(sequence)
            if sequence.slot >= 0:
                self._slots.append(sequence.slot)
                sequence.slot = -1
            self._refused = None
