"""Respond to chats, completions and messages: submit, stream or collect, log, leave.

    class Chat(Responder): ...                    # reads a body, and writes outputs in the form of its API
    return await Chat(context, body).respond(request)

`ActiveResponse` is a running request: its stream, the choices so far, its times and its usage.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from atom.errors import AtomError, RequestError
from atom.runtime.kv.retention import retained_prefixes
from atom.runtime.types import NO_OPTIONS, Logprobs, RequestOptions
from atom.sampling_params import SamplingParams
from atom.serve.auth.tenants import LimitError, Tenant
from atom.serve.context import Context
from atom.serve.engine.client import QueueFullError
from atom.serve.engine.protocol import Admitted, Finish, Output, Tapped
from atom.serve.engine.replicas import PIN
from atom.serve.engine.stream import RequestStream
from atom.serve.http.cache_usage import Written, count_written, retains
from atom.serve.http.errors import MAX_MESSAGE, body_at, constraint_error, json_response, shown, status_of
from atom.serve.http.sse import EventStream, event, until_gone
from atom.serve.http.tapped import tapped_bytes
from atom.serve.prompt_parts import Part, describe_hit

SHORT = 1024  # log probabilities, or bytes of embeddings: to write so many is faster than to wake a thread
REFUSED = f"{RequestError.__name__}: "  # prefix of the engine's message for an error of the request


@dataclass
class EngineRequest:
    """The request to the engine that a body becomes."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # of each prompt; n of all is the same
    user: str | None  # for the log
    options: RequestOptions = NO_OPTIONS  # but for what its key says
    num_kept: int = 1  # of the n answers to each prompt, the most likely
    constraint_field: str | None = None  # the field that constrains the answer, dotted; the engine may refuse it
    budget_field: str | None = None  # the field that limits its reasoning, the same
    parts: Sequence[Part] = ()  # of the only prompt, if they are needed


@dataclass
class Choice:
    """One answer to one prompt."""

    prompt_index: int
    index: int  # among all of the request's
    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)  # as the texts, of an answer that is not streamed
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    embedding: bytes = b""  # fp32[H]
    taps: dict[str, Tapped] = field(default_factory=dict)  # by names of layers
    admitted: Admitted | None = None
    finish: Finish | None = None
    seconds: float = 0.0  # from the request's arrival to its end
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def num_cached(self) -> int:
        """Tokens of its prompt that were cached, 0 before it is admitted."""
        return 0 if self.admitted is None else self.admitted.num_cached

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        return sum(each.logprob for each in self.logprobs) / max(len(self.logprobs), 1)


class ActiveResponse:
    def __init__(
        self, context: Context, stream: RequestStream, request: EngineRequest, tenant: Tenant, started: float
    ) -> None:
        """started: perf_counter when the request arrived."""
        self._context, self._stream, self._tenant, self._started = context, stream, tenant, started
        self.request = request
        self._num_answers = num_answers = request.params[0].n  # to each prompt
        self._metrics = context.metrics
        self._first_outputs: list[Output] | None = None  # from `begin`
        self._first_at = 0.0
        self._prompt_sizes = list(map(len, request.prompts))
        self.num_prompt = sum(self._prompt_sizes)
        self.choices = [Choice(index // num_answers, index) for index in range(len(request.prompts) * num_answers)]
        self._metrics.record_request(self.num_prompt, request.params)
        tenant.charge(num_prompt=self.num_prompt)

    async def begin(self, receive: Receive) -> None:
        """Wait for the first outputs, for comment_seconds at most; `collect` or `outputs` returns them later.

        AtomError if the engine refuses the request or dies, ClientDisconnect if the client leaves.
        """
        silence = self._context.config.advanced.comment_seconds
        self._first_outputs = await until_gone(receive, self._next(silence))

    async def collect(self) -> list[Choice]:
        """Wait for all choices. AtomError if the engine refuses the request or dies."""
        while self._first_outputs is not None or not self._stream.is_done:
            for output in await self._next():
                choice = self._record(output)
                choice.tokens += output.tokens
                if output.text:
                    choice.texts.append(output.text)
                if output.logprobs:
                    choice.logprobs += output.logprobs
        self._raise_errors()
        return self.choices

    async def outputs(self) -> AsyncIterator[tuple[Choice, Output] | None]:
        """Each output with its choice; None if nothing has come for comment_seconds."""
        stream, silence = self._stream, self._context.config.advanced.comment_seconds
        while self._first_outputs is not None or not stream.is_done:
            outputs = await self._next(silence)
            if not outputs:
                yield None
            for output in outputs:
                choice = self._record(output)
                if output.finish is None or output.finish.reason != "error":  # errors are raised below
                    yield choice, output
        self._raise_errors()

    async def write(self, make: Callable[[], Response]) -> Response:
        """Make the response, in a thread if it has many numbers."""
        lists = [each for choice in self.choices for each in (choice.logprobs, choice.prompt_logprobs) if each]
        size = sum(len(each) * (1 + len(each[-1].top if each[-1] else ())) for each in lists)
        size += sum(len(choice.embedding) for choice in self.choices)
        size += sum(len(states.data) for choice in self.choices for states in choice.taps.values())
        return make() if size <= SHORT else await asyncio.to_thread(make)

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before that."""
        return self._first_at - self._started if self._first_at else None

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts that were cached, as far as they are admitted."""
        return sum(choice.num_cached for choice in self.choices[:: self._num_answers])

    def written(self) -> Written | None:
        """Tokens of the prompts that were computed and are kept; None if the request keeps nothing."""
        serve, request = self._context.config.serve, self.request
        if not retains(serve):
            return None
        prompts = zip(request.prompts, request.params, self.choices[:: self._num_answers], strict=True)
        spans = [
            (retained_prefixes(request.options.retained, params, len(prompt)), choice)
            for prompt, params, choice in prompts
        ]
        if not any(retained for retained, _ in spans):
            return None
        admitted = [(retained, choice) for retained, choice in spans if choice.admitted is not None]
        counts = [count_written(retained, choice.num_cached, serve.block_size) for retained, choice in admitted]
        return Written(sum(each.short for each in counts), sum(each.long for each in counts))

    def prefix_hits(self) -> dict[str, Any]:
        """The field of a response that explains the hits of its prompts; empty if the request does not ask for it."""
        request, firsts = self.request, self.choices[:: self._num_answers]
        has_own = bool(self._tenant.name or request.options.salt)  # prompts, apart from those of others
        found = [
            describe_hit(self._context, hit, prompt, request.parts, self._stream.engine, shows_earlier=has_own)
            for prompt, choice in zip(request.prompts, firsts, strict=True)
            if choice.admitted is not None and (hit := choice.admitted.hit) is not None
        ]
        return {"prefix_hit": found[0] if len(request.prompts) == 1 else found} if found else {}

    def usage(self) -> dict[str, Any]:
        """Token counts of the whole request, and its times in seconds."""
        now = time.perf_counter()
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        written = self.written()
        spans = [choice for choice in self.choices if choice.num_tokens > 1]
        decode = sum(choice.last_at - choice.first_at for choice in spans)
        ends = [choice.finish for choice in self.choices if choice.finish is not None]
        accepted = {"accepted_prediction_tokens": sum(finish.num_accepted for finish in ends)}
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt + num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.num_cached,
                **({} if written is None else {"cache_write_tokens": written.total}),
            },
            **({"completion_tokens_details": accepted} if self._context.config.serve.method else {}),
            "ttft_s": round(now - self._started if self.ttft is None else self.ttft, 6),
            "tpot_s": round(decode / max(sum(choice.num_tokens - 1 for choice in spans), 1), 6),
            "latency_s": round(now - self._started, 6),
        }

    def log_fields(self, usage: dict[str, Any], error: Exception | None = None) -> dict[str, Any]:
        """The fields of the request's log line. error: that ended it; with none, what has no end was aborted."""
        cause = "abort" if error is None else "error"
        reasons = [cause if choice.finish is None else choice.finish.reason for choice in self.choices]
        fields = {"usage": usage, "finish_reasons": reasons}
        return fields if error is None else fields | {"error": shown(str(error) or type(error).__name__, MAX_MESSAGE)}

    def abort(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Count what has not ended when the client leaves; the fields of the request's log line."""
        self._metrics.count_ends("abort", sum(choice.finish is None for choice in self.choices))
        return self.log_fields(usage)

    async def _next(self, seconds: float | None = None) -> list[Output]:
        outputs, self._first_outputs = self._first_outputs, None
        if outputs is not None:
            return outputs
        try:
            return await self._stream.next(seconds)
        except RequestError as error:
            raise self._request_error(str(error)) from None
        except AtomError:
            self._metrics.count_ends("error", sum(choice.finish is None for choice in self.choices))
            raise

    def _request_error(self, message: str) -> RequestError:
        fields = {
            "structured_outputs": self.request.constraint_field,
            "thinking_token_budget": self.request.budget_field,
            "taps": "taps",
            "steer": "steer",
        }
        given = ((field, name) for name, field in fields.items() if field and message.startswith(name))
        return next((constraint_error(field, message, name) for field, name in given), RequestError(message))

    def _record(self, output: Output) -> Choice:
        """Record an output's times and counts."""
        choice = self.choices[self._stream.prompt_index[output.id] * self._num_answers + output.index]
        metrics, now = self._metrics, time.perf_counter()
        choice.prompt_logprobs += output.prompt_logprobs or ()
        choice.embedding = output.embedding or choice.embedding
        choice.taps = output.taps or choice.taps
        choice.admitted = output.admitted or choice.admitted
        if output.tokens:
            metrics.generation_tokens.inc(len(output.tokens))
            self._tenant.charge(num_output=len(output.tokens))
            if not choice.num_tokens:
                metrics.ttft.observe(now - self._started)
                choice.first_at = now
                self._first_at = self._first_at or now
            else:
                metrics.itl.observe(now - choice.last_at)
            choice.num_tokens += len(output.tokens)
            choice.last_at = now
        if output.finish is not None:
            choice.finish, choice.seconds = output.finish, now - self._started
            metrics.record_end(output.finish, self._prompt_sizes[choice.prompt_index], choice.seconds)
            first = choice.prompt_index * self._num_answers
            siblings = self.choices[first : first + self._num_answers]
            if all(each.finish is not None for each in siblings):
                metrics.longest.observe(max(each.num_tokens for each in siblings))
            if choice.num_tokens > 1:
                metrics.tpot.observe((choice.last_at - choice.first_at) / (choice.num_tokens - 1))
        return choice

    def _raise_errors(self) -> None:
        failed = [choice.finish for choice in self.choices if choice.finish and choice.finish.reason == "error"]
        errors = sorted(finish.error or "" for finish in failed)
        if refused := [error for error in errors if error.startswith(REFUSED)]:
            raise self._request_error(refused[0].removeprefix(REFUSED))
        if errors:
            raise AtomError(f"the engine could not run this request: {errors[-1]}")


def best(choices: list[Choice], num_answers: int, num_kept: int) -> list[Choice]:
    """Select the `num_kept` most likely of the `num_answers` choices of each prompt, and renumber them."""
    if num_answers == num_kept:
        return choices
    kept = []
    for start in range(0, len(choices), num_answers):
        ranked = sorted(choices[start : start + num_answers], key=lambda choice: -choice.mean_logprob)
        kept += ranked[:num_kept]
    for index, choice in enumerate(kept):
        choice.index = index
    return kept


class Responder(ABC):
    """Serves one request. Each API has a subclass that reads its body and writes its response."""

    renders = True  # a chat template, which takes a thread even for a short body
    waits = True  # send the head of a stream after the first output, so that a refusal still has its own status
    keep_alive = b""  # the event after comment_seconds of silence; none: empty lines

    def __init__(self, context: Context, model: str | None, id: str, *, is_streamed: bool | None) -> None:
        """EngineDeadError of `Context.begin`. model: as the request names it"""
        self._started = time.perf_counter()
        self.context, self.id, self.is_streamed = context, id, is_streamed
        self._asked_model, self.model = model, ""  # which `respond` sets
        self.active: ActiveResponse  # the same
        context.begin()

    @abstractmethod
    def make_request(self) -> EngineRequest:
        """Make the engine's request. RequestError if the body cannot be served."""

    @abstractmethod
    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def open(self, active: ActiveResponse) -> Iterable[bytes]:
        """The events before the first output."""
        return ()

    def error(self, body: dict[str, Any]) -> bytes:
        """The event that ends a stream with an error."""
        return event(body)

    def delta(self, choice: Choice, output: Output) -> bytes:
        """The event of an output; empty if all of it is held back."""
        return b""

    def close(self, usage: dict[str, Any]) -> Iterable[bytes]:
        """The events after the last output."""
        return ()

    def usage(self, active: ActiveResponse) -> dict[str, Any]:
        return active.usage()

    async def respond(self, request: Request) -> Response:
        context, engines, tenant = self.context, self.context.engines, request.state.tenant
        self.model = context.model_for(tenant, self._asked_model)
        self._started -= getattr(request.state, "waking_seconds", 0.0)  # its time to the first token has them
        pin = engines.pinned(request.headers.get(PIN))
        size, make = request.state.num_bytes, self.make_request
        with ExitStack() as left:
            if not getattr(request.state, "has_begun", False):  # before its model was woken up
                tenant.begin()
                left.callback(tenant.end)
            submission = await (context.in_thread(make) if self.renders else context.work(size, make))
            request.state.log |= {"model": self.model, "user": submission.user, "id": self.id}
            options = replace(
                submission.options,
                priority=tenant.prioritize(submission.options.priority),
                tenant=tenant.name if context.are_several else "",
                weight=tenant.limits.weight,
                adapter=context.adapter(self.model),
            )
            if options.taps:
                self._hold_taps(submission, tenant, left)
            try:
                stream = engines.submit(submission.prompts, submission.params, options, id=self.id, pin=pin)
            except QueueFullError as error:
                context.count_rejection(tenant, error)
                raise
            tenant.accept()
            left.callback(engines.abort, stream)
            request.state.log["engine"] = stream.engine
            self.active = active = ActiveResponse(context, stream, submission, tenant, self._started)
            request.state.active = active  # for its span
            try:
                if self.is_streamed:
                    if self.waits:
                        await active.begin(request.receive)
                    left.callback(self._record_end, request, active)
                    return EventStream(self._events(request, active), left.pop_all().close)
                choices = await until_gone(request.receive, active.collect())
            except ClientDisconnect:
                self._record_end(request, active)
                raise
            kept = best(choices, submission.params[0].n, submission.num_kept)
            request.state.log |= active.log_fields(usage := self.usage(active))
            return await active.write(lambda: json_response(self.response_body(kept, usage)))

    def _hold_taps(self, submission: EngineRequest, tenant: Tenant, left: ExitStack) -> None:
        """Count what the request taps until its answer is made. FieldError, LimitError if that is too much."""
        context, taps = self.context, submission.options.taps
        size = tapped_bytes(taps, submission.prompts, submission.params, math.prod(context.config.model.layer_shape))
        try:
            left.enter_context(context.shared.running_taps.hold(size))
        except LimitError as error:
            tenant.refuse(error.limit)
            raise

    def _record_end(self, request: Request, active: ActiveResponse) -> None:
        """Record how an answer has ended, unless that has been done: then its client has left."""
        if "finish_reasons" not in request.state.log:
            request.state.log |= active.abort(self.usage(active))

    async def _events(self, request: Request, active: ActiveResponse) -> AsyncIterator[bytes]:
        for data in self.open(active):
            yield data
        try:
            async for item in active.outputs():
                if item is None:
                    yield self.keep_alive
                elif data := self.delta(*item):
                    yield data
        except Exception as error:
            request.state.log |= active.log_fields(self.usage(active), error)
            path, status, body = request.scope["path"], status_of(error), self.context.report(error)
            yield self.error(body_at(path, status, body, request.state.request_id))
            return
        request.state.log |= active.log_fields(usage := self.usage(active))
        for data in self.close(usage):
            yield data
