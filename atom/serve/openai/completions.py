"""`POST /v1/completions`: OpenAI's text completions, with vLLM's and lm_eval's extensions.

curl localhost:8000/v1/completions -H "Content-Type: application/json" \\
    -d '{"prompt": "The capital of France is", "max_tokens": 64, "stream": true}'
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json, msgpack

from atom.config import SamplingParams
from atom.errors import RequestError
from atom.serve.bodies import body_route
from atom.serve.context import Context
from atom.serve.errors import FieldError, json_response
from atom.serve.ids import new_id
from atom.serve.openai.logprobs import completion_logprobs, prompt_logprobs, raw
from atom.serve.openai.params import check_tokens, find_form, sampling_params
from atom.serve.openai.schema import CompletionRequest
from atom.serve.response import Answering, Choice, best
from atom.serve.sse import DONE, EventStream, event, until_gone


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await Completion(context, body).answer(request)

    return router


class Completion:
    def __init__(self, context: Context, body: CompletionRequest) -> None:
        self._context, self._body = context, body
        self._started = time.perf_counter()
        self._model = context.begin(body.model)
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._echoes: list[str] = []  # the text before each prompt's answers

    async def answer(self, request: Request) -> Response:
        context, body = self._context, self._body
        prompts, each = await context.work(request.state.num_bytes, self._ask)
        request.state.log |= {"model": self._model, "user": body.user, "id": self._id}
        salt = (body.cache_salt or "").encode()
        stream = context.client.submit(prompts, each, id=self._id, salt=salt, priority=body.priority or 0)
        form = find_form(body)
        answering = Answering(context, stream, prompts, each[0].n, self._started, form and form.field)
        leave = partial(context.client.abort, stream)
        if body.stream:
            await answering.begin(request.receive, leave)
            return EventStream(self._events(request, answering), leave)
        try:
            choices = await until_gone(request.receive, answering.collect())
        finally:
            leave()
        kept = best(choices, each[0].n, body.n or 1)
        request.state.log |= answering.record(usage := self._usage(answering))

        def tell() -> Response:
            told = [self._choice(choice, prompts[choice.place]) for choice in kept]
            return json_response(self._head() | {"choices": told, "usage": usage})

        return await answering.write(tell)

    def _ask(self) -> tuple[list[list[int]], list[SamplingParams]]:
        """The tokens of each prompt, and how its answers are sampled."""
        context, body = self._context, self._body
        params = sampling_params(body, context.config, **self._scored())
        given = self._prompts()
        num_bytes, most = len(given) * len(msgpack.encode(params)), context.config.serve.http.max_body
        if num_bytes > most and len(given) > 1:
            told = f"the stop strings, biases, schema or grammar of {len(given)} prompts are {num_bytes} bytes in all"
            raise RequestError(f"{told}, more than {most} (serve.http.max_body); send fewer prompts")
        fits = [context.fit(self._encode(one), params, body.truncate_prompt_tokens) for one in given]
        prompts, each = [prompt for prompt, _ in fits], [fitted for _, fitted in fits]
        if body.echo:
            self._echoes = [self._echo(one, prompt) for one, prompt in zip(given, prompts, strict=True)]
        return prompts, each

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _prompts(self) -> list[str | list[int]]:
        """The prompts of the body in any of its forms."""
        prompt: Any = self._body.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        limit = self._context.config.serve.http.max_queue
        if not prompt or len(prompt) > limit:
            raise FieldError("prompt", f"{len(prompt)} prompts in one request; it takes 1 to {limit}")
        return list(prompt)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._context.encode(prompt, truncate=self._body.truncate_prompt_tokens)
        check_tokens("prompt", prompt, self._context.config)
        return prompt

    def _scored(self) -> dict[str, Any]:
        """The params for log probabilities of echoed tokens."""
        body = self._body
        if not body.echo or body.logprobs is None:
            return {}
        if body.stream:
            raise FieldError("echo", "echo with logprobs cannot be streamed")
        if body.prompt_logprobs is not None and body.prompt_logprobs != body.logprobs:
            raise FieldError("prompt_logprobs", "echo reports the prompt's tokens with logprobs; leave out the other")
        return {"prompt_logprobs": body.logprobs}

    def _echo(self, given: str | list[int], prompt: list[int]) -> str:
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return self._context.need_tokenizer().decode(prompt, skip_special_tokens=False)

    def _choice(self, choice: Choice, prompt: list[int]) -> dict[str, Any]:
        body, tokenizer = self._body, self._context.tokenizer
        echo = self._echoes[choice.place] if body.echo else ""
        text, logprobs = choice.text, list(choice.logprobs)
        if body.max_tokens == 0:
            text, logprobs = "", []
        scored = choice.prompt_logprobs
        told: dict[str, Any] = {"index": choice.index, "text": echo + text, "logprobs": None}
        if body.logprobs is not None:
            shown = scored if body.echo else []
            told["logprobs"] = completion_logprobs(tokenizer, [*shown, *logprobs], body.logprobs, prompt[0])
            told["logprobs"]["top_logprobs"] = raw(told["logprobs"]["top_logprobs"])
        if body.prompt_logprobs is not None:
            told["prompt_logprobs"] = raw(prompt_logprobs(tokenizer, scored))
        return told | {"finish_reason": "length" if body.max_tokens == 0 else choice.finish_reason}

    def _usage(self, answering: Answering) -> dict[str, Any]:
        usage = answering.usage()
        if self._body.max_tokens == 0:  # the one sampled token is not shown
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    async def _events(self, request: Request, answering: Answering) -> AsyncIterator[bytes]:
        body, tokenizer = self._body, self._context.tokenizer
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        head = b"data: " + json.encode(self._head())[:-1] + b',"choices":[{"index":'
        tail = b'}],"usage":null}\n\n' if has_usage else b"}]}\n\n"
        offsets = [0] * len(answering.choices)
        for choice in answering.choices if body.echo else ():
            offsets[choice.index] = len(self._echoes[choice.place])
            echo = json.encode(self._echoes[choice.place])
            yield b'%s%d,"text":%s,"logprobs":null,"finish_reason":null%s' % (head, choice.index, echo, tail)
        try:
            async for item in answering.outputs():
                if item is None:
                    yield b""
                    continue
                choice, output = item
                text, logprobs, is_empty = output.text or "", b"null", body.max_tokens == 0
                if body.logprobs is not None and output.logprobs and not is_empty:
                    told = completion_logprobs(tokenizer, output.logprobs, body.logprobs, None, offsets[choice.index])
                    logprobs = json.encode(told)
                offsets[choice.index] += len(text)
                reason = b"null"
                if output.finish is not None:
                    reason = json.encode("length" if is_empty else choice.finish_reason)
                shown = json.encode("" if is_empty else text)
                yield b'%s%d,"text":%s,"logprobs":%s,"finish_reason":%s%s' % (
                    head,
                    choice.index,
                    shown,
                    logprobs,
                    reason,
                    tail,
                )
        except Exception as error:
            request.state.log |= answering.record(self._usage(answering), error)
            yield event(self._context.report(error))
            return
        request.state.log |= answering.record(usage := self._usage(answering))
        if has_usage:
            yield event(self._head() | {"choices": [], "usage": usage})
        yield DONE
