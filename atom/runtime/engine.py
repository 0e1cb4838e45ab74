"""Requests in, text out: schedule, execute, commit, with the text and the callbacks of each sequence beside them.

engine = Engine(runner, scheduler, tokenizer=tokenizer, stop_ids=frozenset({2}), seed=0, vocab_size=49152)
request_id = engine.submit(engine.prepare([1, 2, 3], SamplingParams(max_tokens=8)))
while engine.has_work:
    for sequence in engine.step():
        print(sequence.text, sequence.finish_reason)
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from atom.checkpoint import Tokenizer
from atom.config import SamplingParams
from atom.errors import RequestError
from atom.runtime.detokenizer import Detokenizer
from atom.runtime.metrics import Metrics
from atom.runtime.runner import Runner
from atom.runtime.scheduler import Scheduler, finish_reason
from atom.runtime.types import RequestOutput, Sequence, StreamCallback


@dataclass
class _Stream:
    """What is shown of one sequence."""

    sequence: Sequence
    detokenizer: Detokenizer | None
    callback: StreamCallback | None
    num_shown: int = 0  # output tokens that the callback has had
    is_told: bool = False  # of the end
    pending: str = ""  # text that it has not

    def emit(self) -> None:
        """Tell the callback what is new, if that is text or the end."""
        sequence = self.sequence
        finished = sequence.finished_at is not None
        if self.callback is None or self.is_told or not (finished or self.pending or self.detokenizer is None):
            return
        self.is_told = finished
        text = None if self.detokenizer is None else self.pending
        tokens = sequence.output[self.num_shown :]
        self.num_shown, self.pending = len(sequence.output), ""
        reason = sequence.finish_reason if finished else None
        self.callback(RequestOutput(sequence.request_id, sequence.index, text, tokens, reason, finished))


class Engine:
    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None,
        stop_ids: frozenset[int],
        vocab_size: int,
        seed: int,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.vocab_size = vocab_size
        self.metrics = Metrics(scheduler.stats)
        self._streams: dict[str, _Stream] = {}  # by sequence id
        self._requests: dict[str, list[Sequence]] = {}
        self._ended: list[Sequence] = []  # and not returned by `step` yet
        self._moved: deque[_Stream] = deque()  # have something to tell
        self._numbers = itertools.count()
        self._seeds = random.Random(seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._ended) or bool(self._moved)

    def tokenize(self, prompt: str | list[int]) -> list[int]:
        """A prompt's token ids. RequestError where it is empty or names a token that the model does not have."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer; give the prompt as a list of token ids")
            prompt = self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError(f"{prompt!r} is no prompt; a prompt is a string or a list of token ids")
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{token!r} in the prompt is no token id; they are numbers from 0 to {self.vocab_size - 1}"
                )
        return [int(token) for token in prompt]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation in the chat template. RequestError where the checkpoint has none."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise RequestError("the checkpoint has no chat template; give prompts as they are, without job.chat")
        return self.tokenizer.encode_chat(messages)

    def prepare(self, prompt: str | list[int], params: SamplingParams) -> list[Sequence]:
        """The n sequences of a request, nothing queued yet. RequestError where it cannot be served."""
        tokens = self.tokenize(prompt)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop_strings needs a tokenizer, which the checkpoint has not; use stop_token_ids")
        for token in (*(params.stop_token_ids or ()), *(params.logit_bias or ())):
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{token} is no token id; they are numbers from 0 to {self.vocab_size - 1}")
        request_id = f"request-{next(self._numbers)}"
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                id=f"{request_id}-{index}",
                prompt=tokens,
                params=params,
                seed=seed + index,
                request_id=request_id,
                index=index,
                parent=sequences[0] if sequences else None,
                stop_ids=self.stop_ids,
            )
            self.scheduler.check(sequence)
            sequences.append(sequence)
        return sequences

    def submit(self, sequences: list[Sequence], callback: StreamCallback | None = None) -> str:
        """Queue what `prepare` made; the request's id."""
        first = sequences[0]
        for sequence in sequences:
            detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, first.prompt, first.params)
            self._streams[sequence.id] = _Stream(sequence, detokenizer, callback)
            self.scheduler.add(sequence)
        self._requests[first.request_id] = sequences
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += len(first.prompt)
        return first.request_id

    def abort(self, request_id: str) -> None:
        """End a request's sequences that have not finished; unknown ids are none of ours any more."""
        for sequence in self._requests.get(request_id, ()):
            if sequence.finish_reason is None and self.scheduler.abort(sequence.id):
                self._end(sequence)
                self._moved.append(self._streams.pop(sequence.id))
        self._tell()

    def is_running(self, request_id: str) -> bool:
        """Whether a request has sequences that have not ended, or ended without being returned by `step`."""
        return request_id in self._requests or any(sequence.request_id == request_id for sequence in self._ended)

    def step(self) -> list[Sequence]:
        """Run one step: the sequences that ended in it, or were aborted since the last one.

        A step that raises has not taken place. What a callback raises comes out here; the next step goes on.
        """
        self._tell()
        plan = self.scheduler.schedule()
        if plan.rows:
            try:
                sampled = self.runner.execute(plan)
            except BaseException:
                self.scheduler.retract(plan)
                raise
            for sequence in self.scheduler.commit(plan, sampled, self._take_token):
                self._end(sequence)
                del self._streams[sequence.id]
            self._tell()
        return self.take_ended()

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended and were not returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def _tell(self) -> None:
        """Call the callbacks; one that raises leaves the others for the next time."""
        while self._moved:
            self._moved.popleft().emit()

    def _take_token(self, sequence: Sequence) -> str | None:
        """Turn a sequence's newest token to text; the reason to finish, if there is one."""
        stream = self._streams[sequence.id]
        self._moved.append(stream)
        if sequence.first_token_at is None:
            sequence.first_token_at = time.perf_counter()
        self.metrics.num_output_tokens += 1
        reason = finish_reason(sequence, self.scheduler.max_model_len)
        if stream.detokenizer is not None and reason != "eos":
            stream.pending += stream.detokenizer.push(sequence.output[-1])
            if stream.detokenizer.stopped:
                reason = "stop_sequence"
        return reason

    def _end(self, sequence: Sequence) -> None:
        """Close the books of a sequence that has its finish reason."""
        stream = self._streams[sequence.id]
        sequence.finished_at = time.perf_counter()
        if stream.detokenizer is not None:
            stream.pending += stream.detokenizer.finish()
            sequence.text = stream.detokenizer.text
        if all(sibling.finished_at for sibling in self._requests[sequence.request_id]):
            del self._requests[sequence.request_id]
        self.metrics.finish_reasons[str(sequence.finish_reason)] += 1
        self._ended.append(sequence)
