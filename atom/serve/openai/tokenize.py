"""`POST /tokenize` and `/detokenize`, as vLLM has them.

curl localhost:8000/tokenize -H "Content-Type: application/json" -d '{"prompt": "Hello"}'
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from atom.serve.chat_template import encode_conversation
from atom.serve.context import Context
from atom.serve.errors import FieldError, json_response
from atom.serve.openai.params import check_tokens
from atom.serve.openai.schema import DetokenizeRequest, TokenizeRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["text"])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of a conversation in the chat template."""
        context.begin(body.model)
        if (body.messages is None) == (body.prompt is None):
            raise FieldError("prompt", "give one of prompt and messages")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise FieldError("add_special_tokens", "add_special_tokens is for a prompt; a template brings its own")
            told = await encode_conversation(context, body.messages, body.tools, body.chat_template_kwargs)
            tokens = told.tokens
        else:
            for name in ("tools", "chat_template_kwargs"):
                if getattr(body, name) is not None:
                    raise FieldError(name, f"{name} is for messages")
            tokens = await context.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return json_response(
            {"count": len(tokens), "max_model_len": context.config.serve.max_model_len, "tokens": tokens}
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        context.begin(body.model)
        tokenizer = context.need_tokenizer()
        check_tokens("tokens", body.tokens, context.config)
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return router
