"""Decode and check request bodies in bounds, and find the models that they name.

    router = APIRouter(tags=["text"], route_class=body_route(context))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request, context: Named) -> Response: ...

A route whose body has a `model` takes the context of that model: `Named`, or `Awake` if it needs the model's engines,
which are woken up before and kept awake until the answer is sent. A stream has its head after comment_seconds of that.

FastAPI decodes and checks in the event loop. Even in a thread, each would hold the interpreter's lock until it is done.
So a long body is read in a thread, and its values are counted before it is decoded: a long text costs no more than a
short one, but 8 MB of empty lists take seconds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, get_type_hints

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atom.config import AdvancedConfig
from atom.config.spelling import did_you_mean
from atom.embeddings import pooling_of
from atom.errors import RequestError
from atom.serve.context import Context
from atom.serve.engine.client import QueueFullError
from atom.serve.http.errors import shown
from atom.serve.http.sse import until_gone
from atom.serve.http.waking import WakingStream
from atom.serve.llama_cpp import FIELDS
from atom.serve.openai.schema import PooledRequest
from atom.serve.refused_fields import REFUSED
from atom.serve.vllm import INSTEAD

CHUNK = 1 << 18  # bytes that are counted at a time
HINTS = 4  # faults whose field is compared with those that there are
GUIDED = "guided_"  # of vLLM's former names: guided_json, guided_regex, guided_choice, guided_grammar


def _chosen() -> None:
    """`BodyRoute` finds it."""


def _awake() -> None:
    """`BodyRoute` finds it, and has it woken up."""


Named = Annotated[Context, Depends(_chosen)]
Awake = Annotated[Context, Depends(_awake)]


class BodyRoute(APIRoute):
    """A route whose endpoint takes a `body`, and perhaps the `request` and the `context` of the model."""

    context: Context

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        hints = get_type_hints(self.endpoint, include_extras=True)
        if "body" not in hints:
            return super().get_route_handler()
        context, endpoint, model = self.context, self.endpoint, hints["body"]
        needs_engine = hints.get("context") is Awake
        assert ("context" in hints) == ("model" in model.model_fields), "the body's model is to be found"

        async def handle(request: Request) -> Response:
            data = await request.body()
            request.state.num_bytes = len(data)
            if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
                fault = f"compressed bodies are not supported; send it without Content-Encoding: {shown(coding)}"
                raise HTTPException(415, fault)
            kind = request.headers.get("content-type", "")
            body = await context.work(len(data), partial(read_body, data, kind, model, context.config.advanced))
            arguments = {"body": body, "request": request}
            if "context" in hints:
                found = arguments["context"] = self.find(request, vars(body)["model"])
                if issubclass(model, PooledRequest):
                    pooling_of(found.config)
            given = {name: arguments[name] for name in hints if name in arguments}
            if needs_engine and (waking := self.wake(request, found)) is not None:
                silence = context.config.advanced.comment_seconds if vars(body).get("stream") else None
                await wait_for_wake(request, waking, silence)
                if not waking.done():
                    assert silence is not None, "others wait to the end"
                    return WakingStream(request, waking, lambda: endpoint(**given), context.report, silence)
                await waking
            answer: Response = await endpoint(**given)
            return answer

        return handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as kept:
            scope.setdefault("state", {})["kept_awake"] = kept
            await super().handle(scope, receive, send)

    def find(self, request: Request, model: str | None) -> Context:
        """The context of a model. EngineDeadError if no requests may come; ModelNotFoundError."""
        self.context.begin()
        found, tenant = self.context.shared.find(request.state.tenant, model), request.state.tenant
        found.model_for(tenant, model)
        return found

    def wake(self, request: Request, context: Context) -> asyncio.Task[None] | None:
        """Keep a model awake until the request has been answered; what waits for it first, None if it is awake.

        LimitError if its key may not wake it.
        """
        model, kept, tenant = context.served, request.state.kept_awake, request.state.tenant
        if model is None:
            return None
        if model.acquire_now():
            kept.callback(model.release)
            return None
        tenant.begin()
        kept.callback(tenant.end)
        request.state.has_begun = True

        async def acquire() -> None:
            began = time.perf_counter()
            try:
                await model.acquire(tenant.name if context.are_several else "")
            except QueueFullError as error:
                context.count_rejection(tenant, error)
                raise
            kept.callback(model.release)
            request.state.waking_seconds = time.perf_counter() - began

        return asyncio.create_task(acquire())


async def wait_for_wake(request: Request, waking: asyncio.Task[None], seconds: float | None) -> None:
    """Wait for a model, for this many seconds at most. ClientDisconnect if the client leaves."""
    try:
        await until_gone(request.receive, asyncio.wait((waking,), timeout=seconds))
    except BaseException:
        waking.cancel()
        raise


def body_route(context: Context) -> type[APIRoute]:
    """Make the class of routes that take bodies."""
    return type("BodyRoute", (BodyRoute,), {"context": context})


def read_body(data: bytes, kind: str, model: type[BaseModel], limits: AdvancedConfig) -> BaseModel:
    """Decode and check a body.

    RequestValidationError or HTTPException, as FastAPI raises them, if it is no JSON of this model; RequestError
    if it has too many values.

    kind: its Content-Type
    """
    value: Any = {} if getattr(model, "may_be_left_out", False) else None
    if data and not is_json(kind):
        raise RequestValidationError([{"type": "not_json", "loc": ("body",), "ctx": {"kind": kind}}])
    if data:
        check_size(data, limits)
        try:
            value = json.loads(data)
        except json.JSONDecodeError as error:
            fault = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
            raise RequestValidationError([fault]) from error
        except (ValueError, RecursionError) as error:
            raise HTTPException(400) from error
    if value is None:
        raise RequestValidationError([{"type": "missing", "loc": ("body",)}])
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults: list[Any] = [fault | {"loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        for fault in faults[:HINTS]:
            fault["msg"] = instead_of(fault, model) or fault["msg"] + hint(fault, model)
        raise RequestValidationError(faults, body=value) from None


def instead_of(fault: Any, model: type[BaseModel]) -> str | None:
    """What to send in place of a known field of chats that is refused."""
    name = unknown_field(fault)
    return REFUSED.get(name) if name is not None and "tools" in model.model_fields else None


def unknown_field(fault: Any) -> str | None:
    """The name of a field that the body's model does not have; dotted, if it is a field of a field."""
    return ".".join(map(str, fault["loc"][1:])) if fault["type"] == "extra_forbidden" else None


def hint(fault: Any, model: type[BaseModel]) -> str:
    """What may be meant by a field of the body that the model does not have."""
    if (name := unknown_field(fault)) is None:
        return ""
    if instead := INSTEAD.get(name):
        return f"; {instead}"
    if "." in name:
        return ""
    if name.startswith(GUIDED) and "structured_outputs" in model.model_fields:
        return f', take structured_outputs: {{"{name.removeprefix(GUIDED)[:16]}": …}}'
    if (other := FIELDS.get(name)) in model.model_fields:
        return f" (did you mean {other}?)"
    return did_you_mean(name[:64], model.model_fields)


def is_json(kind: str) -> bool:
    main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def check_size(data: bytes, limits: AdvancedConfig) -> None:
    """Raise RequestError if a JSON text has more values or items than the limits."""
    num_quotes = num_opened = num_commas = 0
    for chunk in unescaped(data):
        parts = chunk.split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])  # the parts outside of strings
        num_quotes += len(parts) - 1
        num_opened += outside.count(b"[") + outside.count(b"{")
        num_commas += outside.count(b",")
        if num_quotes // 2 + num_opened > limits.max_items:
            items = f"{limits.max_items} texts, names, lists and objects (advanced.max_items)"
            raise RequestError(f"the body has more than {items}; send fewer at a time")
        if num_commas >= limits.max_values:
            raise RequestError(f"the body has more than {limits.max_values} values (advanced.max_values); send fewer")


def unescaped(data: bytes) -> Iterator[bytes]:
    """A JSON text without its escaped backslashes and quotes, in chunks, since a long call would hold the lock."""
    start = 0
    while start < len(data):
        chunk = data[start : start + CHUNK]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and len(chunk) == CHUNK:
            chunk = chunk[:-1]  # the character that it escapes is in the next chunk
        start += len(chunk)
        yield chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
