"""`POST /tokenize` and `/detokenize`, and `GET /tokenizer_info`, as vLLM has them.

curl localhost:8000/tokenize -H "Content-Type: application/json" -d '{"prompt": "Hello"}'
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from atom.serve.chat_template import encode_conversation, shown_tokens
from atom.serve.context import Context
from atom.serve.http.bodies import Named, body_route
from atom.serve.http.errors import FieldError, json_response
from atom.serve.openai.params import check_tokens
from atom.serve.openai.schema import DetokenizeRequest, TokenizeRequest
from atom.serve.openai.tools import offered_tools


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["text"], route_class=body_route(context))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request, context: Named) -> Response:
        """The token ids of a text, or of a conversation in the chat template."""
        context.begin()
        if (body.messages is None) == (body.prompt is None):
            raise FieldError("prompt", "give one of prompt and messages")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise FieldError("add_special_tokens", "add_special_tokens is for a prompt; a template brings its own")
            encode_chat = partial(
                encode_conversation,
                context,
                body.messages,
                offered_tools(context, body.tools),
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
            )
            tokens = shown_tokens(context, (await context.in_thread(encode_chat)).tokens)
        else:
            for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
                if getattr(body, name) is not None:
                    raise FieldError(name, f"{name} is for messages")
            text, has_special = body.prompt or "", body.add_special_tokens is not False
            encode = partial(context.encode, text, add_special_tokens=has_special)
            tokens = await context.work(request.state.num_bytes, encode)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": context.config.serve.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = await context.in_thread(partial(spell_tokens, context, tokens))
        return json_response(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request, context: Named) -> Response:
        """The text of token ids, special tokens included."""
        context.begin()
        tokenizer, most = context.need_tokenizer(), context.max_total_tokens
        if len(body.tokens) > most:
            raise FieldError("tokens", f"{len(body.tokens)} tokens; this server takes {most} (max_total_tokens)")

        def decode() -> str:
            check_tokens("tokens", body.tokens, context.config)
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        return json_response({"prompt": await context.work(request.state.num_bytes, decode)})

    if context.config.serve.http.enable_tokenizer_info_endpoint:

        @router.get("/tokenizer_info")
        async def tokenizer_info(request: Request, model: str | None = None) -> Response:
            """What a tokenizer_config.json would say: special tokens and the chat template."""
            context.begin()
            found = context.shared.find(request.state.tenant, model)
            length = found.config.serve.max_model_len
            return json_response({**found.need_tokenizer().describe(), "model_max_length": length})

    return router


def spell_tokens(context: Context, tokens: list[int]) -> list[str | None]:
    tokenizer = context.need_tokenizer()
    return [tokenizer.piece(id) for id in tokens]
