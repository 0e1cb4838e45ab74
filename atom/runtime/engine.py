"""The engine: schedule, execute, commit; requests in, text out.

engine = Engine(runner, scheduler, builder, Vocabulary(49152, frozenset({2}), tokenizer), seed=0)
request_id = engine.submit(engine.prepare([1, 2, 3], SamplingParams(max_tokens=8)))
while engine.has_work:
    for sequence in engine.step():
        print(sequence.text, sequence.finish_reason)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from torch import Tensor

from atom.errors import AtomError, RequestError, WeightsIncompleteError
from atom.runtime.images.placeholders import hide_placeholders, without_placeholders
from atom.runtime.images.request_images import RequestImages
from atom.runtime.kv.files import KVFiles
from atom.runtime.kv.retention import retained_prefixes
from atom.runtime.metrics import DEFAULT_VERSION, EngineStats
from atom.runtime.profiler import Profiler
from atom.runtime.ranks.links import Ranks
from atom.runtime.requests.detokenizer import Detokenizer
from atom.runtime.requests.grammar import Grammars
from atom.runtime.requests.loras import Loras
from atom.runtime.requests.output import Stream
from atom.runtime.requests.repetition import make_detector
from atom.runtime.requests.taps import Registered
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.schedule.data_parallel import DataParallelBuilder, DataParallelScheduler
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.sleep import Sleeper
from atom.runtime.step.bisect_failures import BeginAgain, Part, describe, execute, take
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import Runner
from atom.runtime.types import (
    NO_OPTIONS,
    PAUSE_MODES,
    SLEEP_LEVELS,
    TAGS,
    Matcher,
    Plan,
    RequestOptions,
    Sequence,
    StreamCallback,
    WeightSpan,
)
from atom.runtime.weight_updates import WeightUpdates
from atom.sampling_params import SamplingParams
from atom.weights.transfers import UpdateInfo

FETCH_SECONDS = 0.01  # to wait for files, if there is no other work, before messages are read again


class Engine:
    """One thread steps, submits and aborts; `prepare` and `stats` may be called from any."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler | DataParallelScheduler,
        builder: StepBuilder | DataParallelBuilder,
        vocabulary: Vocabulary,
        *,
        seed: int,
        profiler: Profiler | None = None,
        ranks: Ranks | None = None,
        files: KVFiles | None = None,
        keep: Callable[[], object] | None = None,
        loras: Loras | None = None,
        sleeper: Sleeper | None = None,
        grammars: Grammars | None = None,
        classifier: npt.NDArray[np.float32] | None = None,
        images: RequestImages | None = None,
        registered: Registered | None = None,
        weights: WeightUpdates | None = None,
    ) -> None:
        """
        runner: executes steps
        scheduler: plans steps
        builder: builds the runner's steps from plans
        vocabulary: the tokenizer, and the tokens that end answers
        seed: of requests that have none
        profiler: None: one that cannot trace
        ranks: the other ranks, which take the runner's steps too; None: there are none
        files: KV in files; None: there are none
        keep: writes KV that is still in memory to files, at the end
        loras: adapters of requests; None: there are none
        sleeper: releases memory; None: the engine cannot sleep
        grammars: the grammar compiler; None: a new one of this vocabulary
        classifier: [C, H], scores labels by the last hidden state; None: the model has no labels
        images: those of requests; None: it takes none
        registered: what requests may tap, and steer by; None: nothing
        weights: updates the weights; None: they stay what they are
        """
        self.runner = runner
        self.scheduler = scheduler
        self.builder = builder
        self.vocabulary = vocabulary
        self.profiler = profiler or Profiler(None)
        self._ranks = ranks
        self._files, self._keep = files, keep
        self._classifier, self._images, self._registered = classifier, images, registered or Registered()
        self._loras, self._sleeper, self._weights = loras, sleeper, weights
        self.metrics = EngineStats(scheduler.stats)
        self._streams: dict[str, Stream] = {}  # by sequence id
        self._requests: dict[str, list[Sequence]] = {}
        self._ended: list[Sequence] = []  # not returned by `step` yet
        self._moved: deque[Stream] = deque()  # with output to emit
        self._pending: deque[list[Part]] = deque()  # steps that run, oldest first
        self._failed: dict[str, Exception] = {}  # sequence id -> why the last step raised
        self._numbers = itertools.count()
        self._seeds = random.Random(seed)
        self.grammars = grammars or Grammars(vocabulary)
        self._lock = threading.Lock()  # of `_numbers` and `_seeds`
        self.weight_version = DEFAULT_VERSION  # the name of the weights that sample
        self.is_paused = False  # by `pause`
        self._is_halted = False  # no step is started

    @property
    def has_work(self) -> bool:
        is_held = self.is_paused or self.is_sleeping or self.is_updating
        has_requests = self.scheduler.has_work and not is_held
        return has_requests or bool(self._pending) or bool(self._ended) or bool(self._moved)

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is released: requests wait."""
        return self._sleeper is not None and self._sleeper.is_sleeping

    @property
    def is_updating(self) -> bool:
        """Whether an update of the weights has been started and not finished: requests wait."""
        return self._weights is not None and self._weights.is_open

    @property
    def weights_fault(self) -> str:
        """Why nothing is served: an update of the weights has failed half-way. "": they are whole."""
        return "" if self._weights is None else self._weights.fault

    @property
    def loras(self) -> Loras:
        """The adapters of requests. RequestError if the model is served without any."""
        if self._loras is None:
            raise RequestError("there are no adapters here; set serve.enable_lora=true")
        return self._loras

    @property
    def num_waiting(self) -> dict[str, int]:
        """Sequences that are not admitted, by tenant."""
        return self.scheduler.num_waiting_by_tenant

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
    ) -> list[Sequence]:
        """Make the n sequences of a request, nothing queued yet. RequestError if it cannot be served."""
        self._need_whole_weights()
        lora = None if options.adapter is None else self.loras.find(options.adapter)
        salt = options.salt if lora is None else hashlib.sha256(lora.digest + options.salt).digest()
        steering = self._registered.scales_of(options.steer)
        if any(steering):
            salt = hashlib.sha256(json.dumps(steering).encode() + salt).digest()
        tokens = self._tokenize(prompt, options)
        rope_positions, rope_delta = None, 0
        if self._images is not None and options.images:
            rope_positions, rope_delta = self._images.find_rope(tokens, options.images)
        self.vocabulary.check(params)
        bad_words = self.vocabulary.encode_bad_words(params.bad_words or ())
        matchers = self._compile_grammar(params)
        thinking = self.vocabulary.limit_thinking(params, without_placeholders(tokens) if options.images else tokens)
        retained = retained_prefixes(options.retained, params, len(tokens))
        with self._lock:
            request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
            seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                id=f"{request_id}-{index}",
                prompt=tokens,
                params=params,
                seed=seed + index,
                salt=salt,
                request_id=request_id,
                index=index,
                parent=sequences[0] if sequences else None,
                stop_ids=self.vocabulary.stop_ids,
                priority=options.priority,
                tenant=options.tenant,
                weight=options.weight,
                pooling=options.pooling,
                classifier=self._classifier if options.classify else None,
                matcher=matchers[index] if matchers else None,
                thinking=None if thinking is None else thinking.copy(),
                repetition=make_detector(params),
                bad_words=bad_words,
                adapter=lora,
                retained=retained,
                images=options.images,
                rope_positions=rope_positions,
                rope_delta=rope_delta,
                reads_prompt=options.reads_prompt,
                steering=steering,
                tapped=self._registered.open(options.taps),
            )
            self.scheduler.check(sequence)
            sequences.append(sequence)
        return sequences

    def _tokenize(self, prompt: str | list[int], options: RequestOptions) -> list[int]:
        """A prompt's tokens, placeholders of the images too. RequestError if these are not as given."""
        if not options.images:
            return self.vocabulary.tokenize(prompt)
        if self._images is None:
            raise RequestError("this engine takes no images: the model has no vision tower, or serve.images=false")
        if not isinstance(prompt, list):
            raise RequestError("images: give the prompt as token ids, with placeholders for the images")
        self._images.check(prompt, options.images)
        self.vocabulary.tokenize(hide_placeholders(prompt))
        return prompt

    def submit(self, sequences: list[Sequence], callback: StreamCallback | None = None) -> str:
        """Queue the sequences of `prepare`; the request's id. RequestError if another request runs under it."""
        self._need_whole_weights()
        first = sequences[0]
        if first.request_id in self._requests:
            raise RequestError(f"the request id {first.request_id} is in use, choose another")
        if first.adapter is not None:
            self.loras.acquire(first.adapter)
        streams = [Stream(sequence, self._detokenizer(sequence), callback) for sequence in sequences]
        for stream in streams:
            self._streams[stream.sequence.id] = stream
            self.scheduler.add(stream.sequence)
        self._requests[first.request_id] = sequences
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += len(first.prompt)
        return first.request_id

    def abort(self, request_id: str) -> None:
        """End a request's sequences that have not finished; an unknown id has ended already."""
        for sequence in self._requests.get(request_id, ()):
            self._drop(sequence, "abort")
        self._emit()

    def is_running(self, request_id: str) -> bool:
        """Whether a request has sequences that have not ended, or ended without being returned by `step`."""
        return request_id in self._requests or any(sequence.request_id == request_id for sequence in self._ended)

    def watch(self, callback: Callable[[AtomError], object]) -> None:
        """Have a thread call this with the reason when the engine can no longer run, in a step or between two."""
        if self._ranks is not None:
            self._ranks.watch(callback)

    @property
    def stopped_ranks(self) -> list[int]:
        """The other ranks whose processes are stopped; any thread may ask."""
        return [] if self._ranks is None else self._ranks.stopped

    def close(self) -> None:
        """Write the KV that is to be kept in files, and end the processes of other ranks."""
        if self._keep is not None:
            keep, self._keep = self._keep, None
            keep()
        if self._files is not None:
            self._files.close()
        if self._ranks is not None:
            self._ranks.close()

    def stop_keeping(self) -> None:
        """Have `close` write no more KV to files; any thread may call it."""
        if self._files is not None:
            self._files.stop()

    def sleep(self, level: int = 1, mode: str = "abort", on_step: Callable[[], object] = lambda: None) -> None:
        """Release the memory of weights and KV until `wake_up`; requests wait meanwhile.

        RequestError without serve.enable_sleep_mode.

        level: 1 keeps the weights in host memory, 2 reads them again
        mode: abort ends running requests with this finish_reason, wait lets them end, keep lets them go on after
          `wake_up`, with their KV computed again
        on_step: called after each step until then; it may abort requests, and if it raises, the engine stays awake
        """
        sleeper, scheduler = self._need_sleeper()
        if level not in SLEEP_LEVELS or mode not in PAUSE_MODES:
            raise RequestError(f"level={level}, mode={mode}: levels are 1 and 2, modes {', '.join(PAUSE_MODES)}")
        if level == 2 and self._loras is not None:
            raise RequestError("level=2 would drop what was read of LoRA adapters; sleep with level=1")
        with self._halt(mode, on_step):
            if not sleeper.is_sleeping:
                scheduler.drop_kv()
            drops_weights = level == 2 and sleeper.has_weights
            sleeper.sleep(level)
            if drops_weights and self._weights is not None:
                self._weights.reload()

    def wake_up(self, tags: List[str] | None = None) -> None:
        """Take the memory again, or first a part of it: weights, kv_cache. CapacityError if there is too little."""
        sleeper, _ = self._need_sleeper()
        if unknown := next((tag for tag in tags or () if tag not in TAGS), None):
            raise RequestError(f"tags={unknown} is not supported (supported: {', '.join(TAGS)})")
        lacks_weights = not sleeper.has_weights
        try:
            sleeper.wake_up(tags or TAGS)
        finally:
            if lacks_weights and sleeper.has_weights and sleeper.level == 2:
                self._name_weights(DEFAULT_VERSION)
        self._set_halted()

    def pause(
        self, mode: str = "abort", *, clear_cache: bool = True, on_step: Callable[[], object] = lambda: None
    ) -> None:
        """Start no step until `resume`; requests that come meanwhile wait.

        mode: abort ends all requests with this finish_reason, wait lets those that run end, keep lets them go on after
          `resume`
        clear_cache: forget the KV of all prompts, except in files; requests that go on compute theirs again
        on_step: called after each step until then; it may abort requests, and if it raises, the engine goes on
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode={mode} is not supported (supported: {', '.join(PAUSE_MODES)})")
        with self._halt(mode, on_step):
            if clear_cache and not self.is_sleeping:
                self.scheduler.drop_kv()
            self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`; an engine that sleeps does so once it is awake."""
        self.is_paused = False
        self._set_halted()

    def set_weight_version(self, version: str, on_step: Callable[[], object] = lambda: None) -> None:
        """Name the weights that sample from now on; answers report it as `weight_versions`.

        on_step: called after each step until then
        """
        with self._between_steps(on_step):
            self._name_weights(version)

    def reset_prefix_cache(self, on_step: Callable[[], object] = lambda: None) -> None:
        """Forget the KV of all prompts, except in files. Running requests go on, and compute theirs again.

        on_step: called after each step until then
        """
        with self._between_steps(on_step):
            self.scheduler.drop_kv()

    def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Prepare for a trainer that sends weights, see `atom.weights.transfers.InitInfo`.

        It waits for the trainer, if that sends by NCCL. RequestError if it does not come, or cannot be served.
        """
        self._need_updates().init(init_info)

    def start_weight_update(self, on_step: Callable[[], object] = lambda: None) -> None:
        """Begin an update of several parts: no step runs until `finish_weight_update`, requests wait.

        on_step: called after each step until then
        """
        updates = self._need_updates()
        with self._between_steps(on_step):
            updates.start()
        self._set_halted()

    def update_weights(
        self,
        update: Mapping[str, Any] | List[tuple[str, Tensor]],
        version: str | None = None,
        *,
        keep_cache: bool = False,
        on_step: Callable[[], object] = lambda: None,
    ) -> None:
        """Update weights in place, between two steps; running requests go on with the new ones.

        RequestError names a tensor that does not fit, and nothing has changed. WeightsIncompleteError: it failed
        half-way; all requests end with an error, and no other is served until all that it named has been updated.

        update: tensors by the names that a checkpoint has them by, or as `atom.weights.transfers.UpdateInfo` has it
          where they are; all of the update, or a part of one that was started
        version, keep_cache: as in `finish_weight_update`, of an update that was not started
        on_step: called after each step until then
        """
        updates = self._need_updates()
        info = UpdateInfo.read(update) if isinstance(update, Mapping) else None
        if info is not None:
            version, keep_cache = info.version if version is None else version, keep_cache or info.keep_cache
        if updates.is_open and (version is not None or keep_cache):
            raise RequestError("an update in parts is under way: finish_weight_update takes its version and keep_cache")
        with self._between_steps(on_step):
            is_whole = not updates.is_open
            with self._ending_requests():
                updates.add(info or list(update))  # type: ignore[arg-type]
            if is_whole:
                self._use_weights(version, keep_cache=keep_cache)

    def finish_weight_update(self, version: str | None = None, *, keep_cache: bool = False) -> None:
        """Finish an update of several parts; requests go on. WeightsIncompleteError as of `update_weights`.

        version: a name of the weights; None: the number of updates so far
        keep_cache: keep the KV that the old weights have computed, also of running requests; else it is forgotten, and
          requests that go on compute theirs again
        """
        updates = self._need_updates()
        try:
            with self._ending_requests():
                updates.finish()
            self._use_weights(version, keep_cache=keep_cache)
        finally:
            self._set_halted()

    def _use_weights(self, version: str | None, *, keep_cache: bool) -> None:
        """Sample with the weights of an update that has ended."""
        assert self._weights is not None, "it has ended"
        if not keep_cache:
            self.scheduler.drop_kv()
        self._name_weights(str(self._weights.num_updates) if version is None else version)

    @contextmanager
    def _ending_requests(self) -> Iterator[None]:
        """End all requests with an error if an update of the weights fails half-way."""
        try:
            yield
        except WeightsIncompleteError as error:
            for sequence in list(self.scheduler.sequences.values()):
                self._fail(sequence, error)
            self.scheduler.drop_kv()
            self._set_halted()
            raise

    def _need_updates(self) -> WeightUpdates:
        if self._weights is None:
            raise RequestError("the weights of this engine cannot be updated")
        if self._files is not None:
            raise RequestError("KV in files outlives weights: leave serve.kv_cache_dir out to update them")
        if self._sleeper is not None and not self._sleeper.has_weights:
            raise RequestError("the engine sleeps, without weights: wake_up with tags=weights takes their memory again")
        return self._weights

    def _need_whole_weights(self) -> None:
        if fault := self.weights_fault:
            raise WeightsIncompleteError(fault)

    def _name_weights(self, version: str) -> None:
        for sequence in self.scheduler.sequences.values():
            self._end_span(sequence)
        self.weight_version = version

    def _end_span(self, sequence: Sequence) -> None:
        """Record that the present weights have sampled a sequence's newest tokens."""
        spans, end = sequence.weight_versions, len(sequence.output)
        start = spans[-1].end if spans else 0
        if spans and spans[-1].version == self.weight_version:
            spans[-1] = spans[-1]._replace(end=end)
        elif end > start:
            spans.append(WeightSpan(self.weight_version, start, end))

    @contextmanager
    def _halt(self, mode: str, on_step: Callable[[], object]) -> Iterator[None]:
        """End, finish or keep requests by a mode of `pause`. No step runs within, or later if it pauses or sleeps."""
        if mode == "wait" and self.is_updating:
            raise RequestError("mode=wait: the weights are being updated, and no request can end before that has")
        self.scheduler.is_paused = True
        try:
            for id in list(self._requests) if mode == "abort" else ():
                self.abort(id)
            self._is_halted = mode != "wait"
            self._step_while(lambda: self._pending or (mode == "wait" and self.scheduler.num_running), on_step)
            self._is_halted = True
            yield
        finally:
            self._set_halted()

    @contextmanager
    def _between_steps(self, on_step: Callable[[], object]) -> Iterator[None]:
        """Have no step run meanwhile."""
        self._is_halted = True
        try:
            self._step_while(lambda: self._pending, on_step)
            yield
        finally:
            self._set_halted()

    def _set_halted(self) -> None:
        """Start no step if the engine is paused, sleeps or is updated; else start steps again."""
        self._is_halted = self.is_paused or self.is_sleeping or self.is_updating
        self.scheduler.is_paused = self._is_halted

    def _step_while(self, goes_on: Callable[[], object], on_step: Callable[[], object]) -> None:
        while goes_on():
            ended = self.step()  # first, since it gives away the list that `_ended` was
            self._ended += ended
            on_step()

    def _need_sleeper(self) -> tuple[Sleeper, Scheduler]:
        if self._sleeper is None:
            raise RequestError("this engine cannot sleep; set serve.enable_sleep_mode=true")
        assert isinstance(self.scheduler, Scheduler), "several ranks are refused"
        return self._sleeper, self.scheduler

    def start_profile(self) -> None:
        """Start a trace of this thread. ConfigError without a folder for traces, RequestError if one runs."""
        self.profiler.start()

    def stop_profile(self) -> Path:
        """End the trace and write it; its file. RequestError if none runs."""
        return self.profiler.stop()

    def stats(self) -> EngineStats:
        """The engine's load now, and its counts since the start."""
        scheduler, metrics = self.scheduler, self.metrics
        num_used, num_blocks = scheduler.fullest
        num_host_used, num_host = scheduler.host_usage
        retained, images = scheduler.retention, None if self._images is None else self._images.pool
        everyone = [] if self._loras is None else list(scheduler.sequences.values())
        adapters = {(each.adapter.name, each.slot >= 0) for each in everyone if each.adapter is not None}
        return replace(
            metrics,
            scheduler=copy(scheduler.stats),
            finish_reasons=dict(metrics.finish_reasons),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_deferred=scheduler.num_deferred,
            running_adapters=sorted(name for name, is_running in adapters if is_running),
            waiting_adapters=sorted(name for name, is_running in adapters if not is_running),
            num_blocks=num_blocks,
            num_blocks_used=num_used,
            num_retained_blocks=retained.num_claimed,
            num_retained_found=retained.num_found,
            num_retained_overridden=retained.num_overridden,
            num_host_blocks=num_host,
            num_host_blocks_used=num_host_used,
            num_encoded_images=0 if images is None else images.num_encoded,
            num_encoded_patches=0 if images is None else images.num_patches,
            num_image_hits=0 if images is None else images.num_hits,
            num_read_blocks=0 if self._files is None else self._files.num_read,
            num_written_blocks=0 if self._files is None else self._files.num_written,
            weights_fault=self.weights_fault,
        )

    def step(self, on_plan: Callable[[], object] | None = None) -> list[Sequence]:
        """Start as many steps as the runner may run ahead, and commit the oldest.

        Returns the sequences that ended in it, or were aborted since the last one.

        on_plan: called once the step is planned, since the step may take long: `stats` counts what is admitted

        If it fails for some sequences, those end with reason error. If it fails for all, it raises and has not
        taken place: call `step` again, or `end_failed` to end its sequences. An exception of a callback or of
        `on_plan` is raised here; the next step goes on.
        """
        self._emit()
        while len(self._pending) <= self.runner.run_ahead and not self._is_halted:
            if not self._start_step(on_plan):
                break
        if self._files is not None and not self._pending and self.scheduler.has_work:
            self._files.wait(FETCH_SECONDS)
        if self._pending:
            outcomes = [each if isinstance(each, Exception) else each.wait() for _, each in self._pending[0]]
            for (part, _), outcome in zip(self._pending.popleft(), outcomes, strict=True):
                if isinstance(outcome, BeginAgain):
                    continue
                if isinstance(outcome, Exception):
                    self._fail(part.rows[0].sequence, outcome)
                    continue
                num_output = self.metrics.num_output_tokens
                for sequence in self.scheduler.commit(part, outcome, self._take_token):
                    self._end(sequence)
                    del self._streams[sequence.id]
                num_prompt = sum(row.num_tokens for row in part.rows[part.num_decodes :])
                self.metrics.count_step(num_prompt + self.metrics.num_output_tokens - num_output)
            self._emit()
        return self.take_ended()

    def end_failed(self) -> None:
        """End the sequences of a step that raised, with reason error. The next step returns them, and others go on.

        An engine whose next steps raise too has more wrong with it than a request.
        """
        failed, self._failed = self._failed, {}
        for id, error in failed.items():
            if id in self.scheduler.sequences:
                self._fail(self.scheduler.sequences[id], error)
        self._emit()

    def take_ended(self) -> list[Sequence]:
        """Return the sequences that ended and were not returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def _start_step(self, on_plan: Callable[[], object] | None) -> bool:
        """Plan a step and start its parts; whether there is one. What does not start is retracted, whatever raises."""
        self._failed = {}
        plan = self.scheduler.schedule()
        parts: list[Part] = []
        try:
            with self._blame(plan):
                if plan.copies is not None:
                    self.runner.copy(plan.copies)
            if on_plan is not None:  # after the copies, on which later plans rely
                on_plan()
            if not plan.rows:
                return False
            with self._blame(plan):
                execute(self.runner, self.builder, plan, parts, has_suspects=self.scheduler.has_suspects)
        except BaseException:
            started: list[Part] = [(part, outcome) for part, outcome in parts if not isinstance(outcome, Exception)]
            running = {row.sequence for part, _ in started for row in part.rows}
            self.scheduler.retract(take([row for row in plan.rows if row.sequence not in running]))
            if started:  # before an interrupt
                self._pending.append(started)
            raise
        for part, outcome in parts:
            if isinstance(outcome, Exception):
                self.scheduler.retract(part)
        self._pending.append(parts)
        return True

    @contextmanager
    def _blame(self, plan: Plan) -> Iterator[None]:
        """Have `end_failed` end a plan's sequences if this raises."""
        try:
            yield
        except Exception as error:
            self._failed = {row.sequence.id: error for row in plan.rows}
            raise

    def _emit(self) -> None:
        """Call the callbacks; if one raises, the others wait for the next call."""
        while self._moved:
            self._moved.popleft().emit()

    def _detokenizer(self, sequence: Sequence) -> Detokenizer | None:
        tokenizer = self.vocabulary.tokenizer
        prompt = without_placeholders(sequence.prompt) if sequence.images else sequence.prompt
        return None if tokenizer is None else Detokenizer(tokenizer, prompt, sequence.params)

    def _compile_grammar(self, params: SamplingParams) -> list[Matcher]:
        """A matcher for each of the n sequences; none if the answer is not constrained."""
        if params.structured_outputs is None:
            return []
        compiler, wanted = self.grammars.open(), params.structured_outputs
        first = compiler.compile(wanted, params.reasoning, params.tool_calls)
        return [first, *(first.copy() for _ in range(params.n - 1))]

    def _take_token(self, sequence: Sequence) -> str | None:
        """Detokenize a sequence's newest token; its finish reason, if any."""
        stream = self._streams[sequence.id]
        self._moved.append(stream)
        if sequence.first_token_at is None:
            sequence.first_token_at = time.perf_counter()
        self.metrics.num_output_tokens += 1
        try:
            reason = finish_reason(sequence, self.scheduler.limits.max_model_len)
            if sequence.matcher is not None and sequence.matcher.push(sequence.output[-1]):
                reason = "eos"
            return stream.push(reason)
        except Exception as error:  # a tokenizer may be the checkpoint's own code
            sequence.error = describe(error)
            return "error"

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._drop(sequence, "error", describe(error))

    def _drop(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a sequence that has not ended, whatever its state."""
        if sequence.finish_reason is None and self.scheduler.abort(sequence.id, reason):
            sequence.error = error
            self._end(sequence)
            self._moved.append(self._streams.pop(sequence.id))

    def _end(self, sequence: Sequence) -> None:
        """Record the end of a sequence that has its finish reason."""
        stream = self._streams[sequence.id]
        self._end_span(sequence)
        sequence.finished_at = time.perf_counter()
        try:
            stream.finish()
        except Exception as error:
            sequence.finish_reason, sequence.error = "error", sequence.error or describe(error)
        if stream.detokenizer is not None:
            sequence.text, sequence.stop_string = stream.detokenizer.text, stream.detokenizer.stop
        if all(sibling.finished_at for sibling in self._requests[sequence.request_id]):
            del self._requests[sequence.request_id]
            if sequence.adapter is not None:
                self.loras.release(sequence.adapter)
        self.metrics.finish_reasons[str(sequence.finish_reason)] += 1
        self._ended.append(sequence)
