"""Respond to chats, completions and messages: submit, stream or collect, log, leave.

    class Chat(Responder): ...                    # what is asked, and the outputs in words of the API
    return await Chat(context, body).respond(request)

`Answering` is a request on its way: its stream, what each of its sequences has said so far, its times and its usage.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from atom.errors import AtomError, RequestError
from atom.runtime.types import Logprobs
from atom.sampling_params import SamplingParams
from atom.serve.context import Context
from atom.serve.engine.protocol import Finish, Output
from atom.serve.engine.stream import Stream
from atom.serve.errors import MAX_MESSAGE, FieldError, body_at, json_response, shown, status_of
from atom.serve.sse import EventStream, event, until_gone

FINISH_REASONS = {"eos": "stop", "stop_sequence": "stop", "max_tokens": "length"}  # the engine's reason -> OpenAI's
SHORT = 1024  # log probabilities that are written faster than a thread wakes up
REFUSED = f"{RequestError.__name__}: "  # begins the engine's message for an error of the request


@dataclass
class EngineRequest:
    """What a body asks of the engine."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # of each prompt; n of all is the same
    user: str | None  # for the log
    salt: bytes = b""  # of the prefix cache
    priority: int = 0
    num_kept: int = 1  # of the n answers to each prompt, the most likely
    form: str | None = None  # the field that the engine reads itself, and may refuse: what the answer must match


@dataclass
class Choice:
    """One answer to one prompt."""

    place: int  # of its prompt
    index: int  # among all of the request's
    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    finish: Finish | None = None
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        return None if self.finish is None else finish_reason(self.finish.reason)

    @property
    def mean_logprob(self) -> float:
        return sum(each.logprob for each in self.logprobs) / max(len(self.logprobs), 1)


def finish_reason(reason: str) -> str:
    return "stop" if reason.startswith("stop_") else FINISH_REASONS.get(reason, reason)


class Answering:
    def __init__(self, context: Context, stream: Stream, asked: EngineRequest, started: float) -> None:
        """started: perf_counter when the request arrived."""
        self._context, self._stream, self._form, self._started = context, stream, asked.form, started
        self._num_answers = num_answers = asked.params[0].n  # to each prompt
        self._metrics = context.metrics
        self._early: list[Output] | None = None  # the first outputs, from `begin`
        self._first_at = 0.0
        self.num_prompt = sum(map(len, asked.prompts))
        self.choices = [Choice(index // num_answers, index) for index in range(len(asked.prompts) * num_answers)]
        self._metrics.prompt_tokens.inc(self.num_prompt)

    async def begin(self, receive: Receive, leave: Callable[[], None]) -> None:
        """Wait for the first output, for comment_seconds at most; it is kept for `collect` or `outputs`.

        AtomError where the engine refuses the request or dies, ClientDisconnect where the client leaves: then `leave`
        has been called.
        """
        silence = self._context.config.serve.http.comment_seconds
        try:
            self._early = await until_gone(receive, self._next(silence))
        except BaseException:
            leave()
            raise

    async def collect(self) -> list[Choice]:
        """Wait for all choices. AtomError where the engine refuses the request or dies."""
        while self._early is not None or not self._stream.is_done:
            for output in await self._next():
                choice = self._take(output)
                if output.text:
                    choice.texts.append(output.text)
                if output.logprobs:
                    choice.logprobs += output.logprobs
        self._refuse_faults()
        return self.choices

    async def outputs(self) -> AsyncIterator[tuple[Choice, Output] | None]:
        """Each output with its choice; None where nothing has come for comment_seconds."""
        stream, silence = self._stream, self._context.config.serve.http.comment_seconds
        while self._early is not None or not stream.is_done:
            outputs = await self._next(silence)
            if not outputs:
                yield None
            for output in outputs:
                choice = self._take(output)
                if output.finish is None or output.finish.reason != "error":  # errors are raised below
                    yield choice, output
        self._refuse_faults()

    async def write(self, make: Callable[[], Response]) -> Response:
        """Make the response, in a thread where there are many log probabilities."""
        lists = [each for choice in self.choices for each in (choice.logprobs, choice.prompt_logprobs) if each]
        size = sum(len(each) * (1 + len(each[-1].top if each[-1] else ())) for each in lists)
        return make() if size <= SHORT else await asyncio.to_thread(make)

    def usage(self) -> dict[str, Any]:
        """Token counts of the whole request, and its times in seconds."""
        now = time.perf_counter()
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        firsts = [choice.finish for choice in self.choices[:: self._num_answers] if choice.finish is not None]
        spans = [choice for choice in self.choices if choice.num_tokens > 1]
        decode = sum(choice.last_at - choice.first_at for choice in spans)
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(finish.num_cached for finish in firsts)},
            "ttft_s": round((self._first_at or now) - self._started, 6),
            "tpot_s": round(decode / max(sum(choice.num_tokens - 1 for choice in spans), 1), 6),
            "latency_s": round(now - self._started, 6),
        }

    def record(self, usage: dict[str, Any], error: Exception | None = None) -> dict[str, Any]:
        """The fields of the request's log line."""
        reasons = ["error" if choice.finish is None else choice.finish.reason for choice in self.choices]
        told = {"usage": usage, "finish_reasons": reasons}
        return told if error is None else told | {"error": shown(str(error) or type(error).__name__, MAX_MESSAGE)}

    async def _next(self, seconds: float | None = None) -> list[Output]:
        early, self._early = self._early, None
        if early is not None:
            return early
        try:
            return await self._stream.next(seconds)
        except RequestError as error:
            raise self._refusal(str(error)) from None
        except AtomError:
            self._metrics.requests.labels("error").inc(sum(choice.finish is None for choice in self.choices))
            raise

    def _refusal(self, message: str) -> RequestError:
        return RequestError(message) if self._form is None else FieldError(self._form, shown(message))

    def _take(self, output: Output) -> Choice:
        """Record an output's times and counts."""
        choice = self.choices[self._stream.places[output.id] * self._num_answers + output.index]
        metrics, now = self._metrics, time.perf_counter()
        choice.prompt_logprobs += output.prompt_logprobs or ()
        if output.tokens:
            metrics.generation_tokens.inc(len(output.tokens))
            if not choice.num_tokens:
                metrics.ttft.observe(now - self._started)
                choice.first_at = now
                self._first_at = self._first_at or now
            else:
                metrics.itl.observe(now - choice.last_at)
            choice.num_tokens += len(output.tokens)
            choice.last_at = now
        if output.finish is not None:
            choice.finish = output.finish
            metrics.requests.labels(output.finish.reason).inc()
            metrics.e2e.observe(now - self._started)
            metrics.queue.observe(output.finish.queue)
            if choice.num_tokens > 1:
                metrics.tpot.observe((choice.last_at - choice.first_at) / (choice.num_tokens - 1))
        return choice

    def _refuse_faults(self) -> None:
        failed = [choice.finish for choice in self.choices if choice.finish and choice.finish.reason == "error"]
        errors = sorted(finish.error or "" for finish in failed)
        if refused := [error for error in errors if error.startswith(REFUSED)]:
            raise self._refusal(refused[0].removeprefix(REFUSED))
        if errors:
            raise AtomError(f"the engine could not run this request: {errors[-1]}")


def best(choices: list[Choice], made: int, wanted: int) -> list[Choice]:
    """Select the `wanted` most likely of the `made` choices of each prompt, renumbered."""
    if made == wanted:
        return choices
    kept = []
    for start in range(0, len(choices), made):
        ranked = sorted(choices[start : start + made], key=lambda choice: -choice.mean_logprob)
        kept += ranked[:wanted]
    for index, choice in enumerate(kept):
        choice.index = index
    return kept


class Responder(ABC):
    """The way that every request goes. A class for each API says what it asks and how its answers are written."""

    renders = True  # a template, in a thread however short the body is
    waits = True  # with the head of a stream for the engine's first output: what the engine refuses is no stream yet
    silence = b""  # the event where nothing has come for comment_seconds; none: a comment
    error_event: str | None = None  # the name of an event that tells of an error

    def __init__(self, context: Context, model: str | None, id: str, *, is_streamed: bool | None) -> None:
        """EngineDeadError and ModelNotFoundError of `Context.begin`."""
        self._started = time.perf_counter()
        self.context, self.id, self.is_streamed = context, id, is_streamed
        self.model = context.begin(model)

    @abstractmethod
    def ask(self) -> EngineRequest:
        """What the body asks. RequestError where it cannot be served."""

    @abstractmethod
    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def open(self, answering: Answering) -> Iterable[bytes]:
        """The events before the first output."""

    @abstractmethod
    def delta(self, choice: Choice, output: Output) -> bytes:
        """The event of an output; nothing where all is held back."""

    @abstractmethod
    def close(self, usage: dict[str, Any]) -> Iterable[bytes]:
        """The events behind the last output."""

    def usage(self, answering: Answering) -> dict[str, Any]:
        return answering.usage()

    async def respond(self, request: Request) -> Response:
        context, client = self.context, self.context.client
        asked = await (context.in_thread(self.ask) if self.renders else context.work(request.state.num_bytes, self.ask))
        request.state.log |= {"model": self.model, "user": asked.user, "id": self.id}
        stream = client.submit(asked.prompts, asked.params, id=self.id, salt=asked.salt, priority=asked.priority)
        answering = Answering(context, stream, asked, self._started)
        leave = partial(client.abort, stream)
        if self.is_streamed:
            if self.waits:
                await answering.begin(request.receive, leave)
            return EventStream(self._events(request, answering), leave)
        try:
            choices = await until_gone(request.receive, answering.collect())
        finally:
            leave()
        kept = best(choices, asked.params[0].n, asked.num_kept)
        request.state.log |= answering.record(usage := self.usage(answering))
        return await answering.write(lambda: json_response(self.whole(kept, usage)))

    async def _events(self, request: Request, answering: Answering) -> AsyncIterator[bytes]:
        for data in self.open(answering):
            yield data
        try:
            async for item in answering.outputs():
                if item is None:
                    yield self.silence
                elif data := self.delta(*item):
                    yield data
        except Exception as error:
            request.state.log |= answering.record(self.usage(answering), error)
            path, status, body = request.scope["path"], status_of(error), self.context.report(error)
            yield event(body_at(path, status, body, request.state.request_id), self.error_event)
            return
        request.state.log |= answering.record(usage := self.usage(answering))
        for data in self.close(usage):
            yield data
