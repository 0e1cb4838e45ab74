"""`POST /v1/completions`: OpenAI's text completions, with vLLM's and lm_eval's extensions.

curl localhost:8000/v1/completions -H "Content-Type: application/json" \\
    -d '{"prompt": "The capital of France is", "max_tokens": 64, "stream": true}'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json, msgpack

from atom.errors import RequestError
from atom.serve.context import Context
from atom.serve.engine.protocol import Output
from atom.serve.http.bodies import Awake, body_route
from atom.serve.http.errors import FieldError
from atom.serve.http.response import ActiveResponse, Choice, EngineRequest
from atom.serve.openai.logprobs import completion_logprobs, prompt_logprobs, raw
from atom.serve.openai.params import check_tokens, sampling_params, split_inputs
from atom.serve.openai.response import OpenAIResponder, finish_reason, last_fields, last_json
from atom.serve.openai.schema import CompletionRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request, context: Awake) -> Response:
        """Continue a prompt, or several."""
        return await Completion(context, body).respond(request)

    return router


class Completion(OpenAIResponder[CompletionRequest]):
    kind = chunk = "text_completion"
    prefix, renders = "cmpl", False

    def make_request(self) -> EngineRequest:
        context, body = self.context, self.body
        params = sampling_params(body, context.config, **self._echo_params())
        inputs = split_inputs("prompt", body.prompt, context.config)
        num_bytes, most = len(inputs) * len(msgpack.encode(params)), context.config.serve.http.max_body
        if num_bytes > most and len(inputs) > 1:
            fault = f"the stop strings, biases, schema or grammar of {len(inputs)} prompts are {num_bytes} bytes in all"
            raise RequestError(f"{fault}, more than {most} (serve.http.max_body); send fewer prompts")
        fits = [context.fit(self._encode(one), params, body.truncate_prompt_tokens) for one in inputs]
        prompts = [prompt for prompt, _ in fits]
        self._first_tokens = [prompt[0] for prompt in prompts]
        self._echoes = [self._echo(*each) if body.echo else "" for each in zip(inputs, prompts, strict=True)]
        return self.engine_request(prompts, [fitted for _, fitted in fits])

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            body = self.body
            has_special = body.add_special_tokens is not False
            return self.context.encode(prompt, add_special_tokens=has_special, truncate=body.truncate_prompt_tokens)
        check_tokens("prompt", prompt, self.context.config)
        return prompt

    def _echo_params(self) -> dict[str, Any]:
        """The params for log probabilities of echoed tokens."""
        body = self.body
        if not body.echo or body.logprobs is None:
            return {}
        if body.stream:
            raise FieldError("echo", "echo with logprobs cannot be streamed")
        if body.prompt_logprobs is not None and body.prompt_logprobs != body.logprobs:
            raise FieldError("prompt_logprobs", "echo reports the prompt's tokens with logprobs; leave out the other")
        return {"prompt_logprobs": body.logprobs}

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> str:
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        return self.context.need_tokenizer().decode(tokens, skip_special_tokens=False)

    def choice(self, choice: Choice) -> dict[str, Any]:
        body, tokenizer = self.body, self.context.tokenizer
        text, tokens, logprobs = choice.text, choice.tokens, list(choice.logprobs)
        if body.max_tokens == 0:
            text, tokens, logprobs = "", [], []
        scored = choice.prompt_logprobs
        echo, first = self._echoes[choice.prompt_index], self._first_tokens[choice.prompt_index]
        fields: dict[str, Any] = {"index": choice.index, "text": echo + text, "logprobs": None}
        if body.logprobs is not None:
            shown = scored if body.echo else []
            fields["logprobs"] = completion_logprobs(
                tokenizer, [*shown, *logprobs], body.logprobs, first, as_ids=bool(body.return_tokens_as_token_ids)
            )
            fields["logprobs"]["top_logprobs"] = raw(fields["logprobs"]["top_logprobs"])
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = raw(prompt_logprobs(tokenizer, scored))
        if body.return_token_ids:
            fields |= {"prompt_token_ids": self._prompts[choice.prompt_index], "token_ids": tokens}
        fields |= last_fields(body, choice)
        return fields | {"finish_reason": "length" if body.max_tokens == 0 else finish_reason(choice)}

    def usage(self, active: ActiveResponse) -> dict[str, Any]:
        usage = active.usage()
        if self.body.max_tokens == 0:  # the one sampled token is not shown
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def open(self, active: ActiveResponse) -> Iterator[bytes]:
        super().open(active)
        self._offsets = [len(self._echoes[choice.prompt_index]) for choice in active.choices]
        self._is_first = [True] * len(active.choices)
        for choice in active.choices if self.body.echo else ():
            yield self._event(choice, self._echoes[choice.prompt_index], [])

    def delta(self, choice: Choice, output: Output) -> bytes:
        index, text, logprobs, reason = choice.index, output.text or "", b"null", b"null"
        num_top, is_empty, offset = self.body.logprobs, self.body.max_tokens == 0, self._offsets[choice.index]
        if num_top is not None and output.logprobs and not is_empty:
            as_ids = bool(self.body.return_tokens_as_token_ids)
            found = completion_logprobs(self.context.tokenizer, output.logprobs, num_top, None, offset, as_ids=as_ids)
            logprobs = json.encode(found)
        self._offsets[index] += len(text)
        if output.finish is not None:
            reason = json.encode("length" if is_empty else finish_reason(choice))
        return self._event(choice, *("", []) if is_empty else (text, output.tokens), logprobs, reason)

    def _event(
        self, choice: Choice, text: str, tokens: list[int], logprobs: bytes = b"null", reason: bytes = b"null"
    ) -> bytes:
        index, ids = choice.index, b""
        if self.body.return_token_ids:
            ids = b',"token_ids":%s' % json.encode(tokens)
            if self._is_first[index]:
                ids += b',"prompt_token_ids":%s' % json.encode(self._prompts[choice.prompt_index])
                self._is_first[index] = False
        if choice.finish is not None:
            ids += last_json(self.body, choice)
        parts = (self._head, index, json.encode(text), logprobs, ids, reason, self.tail())
        return b'%s%d,"text":%s,"logprobs":%s%s,"finish_reason":%s%s' % parts
