"""Send one request by its backend's protocol and time its tokens.

    request = RequestFuncInput("Once upon a time", "http://localhost:8000/v1/completions", 4, 128, "org/model")
    async with aiohttp.ClientSession() as session:
        output = await ASYNC_REQUEST_FUNCS["vllm"](request, session)
    output.success, output.ttft, output.itl, output.generated_text, output.error

The time is taken once for each chunk from the socket, before it is decoded. A failed request has its reason in the
output's `error`; nothing is raised.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from atom.benchmarks import protocols
from atom.benchmarks.benchmark_utils import one_line
from atom.benchmarks.sse import EventReader
from atom.measurement.metrics import RequestFuncOutput

if TYPE_CHECKING:
    import aiohttp

ERROR_LENGTH = 500  # characters of a server's answer that an error quotes


Prompt = str | list[int]  # text, or token ids if the protocol takes them


class Exchange(NamedTuple):
    """A turn of a conversation that was answered."""

    prompt: Prompt
    answer: Prompt


@dataclass(slots=True)
class RequestFuncInput:
    """A turn of a conversation, and what was said before it."""

    prompt: Prompt  # of this turn
    api_url: str
    prompt_len: int  # tokens, as we count them; with the history, once it is known
    output_len: int  # tokens asked for
    model: str
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # fields that replace or follow the protocol's
    id: str = ""  # sent as x-request-id; empty: the server makes one
    delay: float = 0.0  # seconds from the answer before it; of a first turn, from its arrival
    return_token_ids: bool = False  # ask for the answer's token ids, which the next turn's prompt repeats
    history: tuple[Exchange, ...] = ()

    def after(self, before: RequestFuncInput, output: RequestFuncOutput) -> RequestFuncInput:
        """This turn with the history that the one before it and the answer to that make."""
        answer = output.token_ids if isinstance(before.prompt, list) else output.generated_text
        history = (*before.history, Exchange(before.prompt, answer))
        num_said = output.prompt_len + (before.output_len if output.output_tokens is None else output.output_tokens)
        return replace(self, history=history, prompt_len=num_said + self.prompt_len)

    def joined(self) -> Prompt:
        """The history and the prompt in one."""
        parts: list[Any] = [*itertools.chain.from_iterable(self.history), self.prompt]
        return "".join(parts) if isinstance(self.prompt, str) else list(itertools.chain.from_iterable(parts))


RequestFunc = Callable[[RequestFuncInput, "aiohttp.ClientSession"], Awaitable[RequestFuncOutput]]
Read = Callable[[bytes, protocols.StreamState], str | None]


async def async_request_openai_completions(
    request: RequestFuncInput, session: aiohttp.ClientSession
) -> RequestFuncOutput:
    """POST /v1/completions, streamed."""
    payload = {"model": request.model, "prompt": request.joined(), "max_tokens": request.output_len, **OPENAI}
    ids = {"return_token_ids": True} if request.return_token_ids else {}
    return await stream(request, session, payload | ids | ignore_eos(request), protocols.read_completion)


async def async_request_openai_chat_completions(
    request: RequestFuncInput, session: aiohttp.ClientSession
) -> RequestFuncOutput:
    """POST /v1/chat/completions, streamed, with each turn's prompt as a message of the user."""
    roles, texts = (
        itertools.cycle(("user", "assistant")),
        (*itertools.chain.from_iterable(request.history), request.prompt),
    )
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    payload = {"model": request.model, "messages": messages, "max_completion_tokens": request.output_len, **OPENAI}
    return await stream(request, session, payload | ignore_eos(request), protocols.read_chat)


async def async_request_tgi(request: RequestFuncInput, session: aiohttp.ClientSession) -> RequestFuncOutput:
    """POST /generate_stream of text-generation-inference; greedy, since it takes no temperature of 0."""
    parameters = {"max_new_tokens": request.output_len, "do_sample": False, "details": True}
    return await stream(request, session, {"inputs": request.joined(), "parameters": parameters}, protocols.read_tgi)


async def async_request_trt_llm(request: RequestFuncInput, session: aiohttp.ClientSession) -> RequestFuncOutput:
    """POST …/generate_stream of Triton's TensorRT-LLM backend, which sends one token an event."""
    payload = {"text_input": request.joined(), "max_tokens": request.output_len, "temperature": 0.0, "top_p": 1.0}
    shortest = {"min_length": request.output_len} if request.ignore_eos else {}
    return await stream(request, session, payload | shortest | {"stream": True}, protocols.read_trt_llm)


async def async_request_deepspeed_mii(request: RequestFuncInput, session: aiohttp.ClientSession) -> RequestFuncOutput:
    """POST /v1/completions of DeepSpeed-MII, which does not stream: only the latency is known."""
    payload: dict[str, Any] = {"model": request.model, "prompt": request.joined(), "max_tokens": request.output_len}
    payload |= {"temperature": 0.01, "top_p": 1.0}  # it takes no temperature of 0
    output = RequestFuncOutput(prompt_len=request.prompt_len)

    async def read(response: aiohttp.ClientResponse, started: float) -> None:
        body = await response.read()
        output.latency = time.perf_counter() - started
        state = protocols.StreamState()
        output.generated_text = protocols.read_mii(body, state)
        take_counts(output, state)

    return await post(request, session, payload, output, read)


OPENAI: Mapping[str, Any] = {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}

ASYNC_REQUEST_FUNCS: Mapping[str, RequestFunc] = {
    "tgi": async_request_tgi,
    "vllm": async_request_openai_completions,
    "lmdeploy": async_request_openai_completions,
    "deepspeed-mii": async_request_deepspeed_mii,
    "openai": async_request_openai_completions,
    "openai-chat": async_request_openai_chat_completions,
    "tensorrt-llm": async_request_trt_llm,
    "scalellm": async_request_openai_completions,
    "sglang": async_request_openai_completions,
}


def ignore_eos(request: RequestFuncInput) -> dict[str, bool]:
    return {"ignore_eos": True} if request.ignore_eos else {}  # OpenAI's own server refuses the field


async def stream(
    request: RequestFuncInput, session: aiohttp.ClientSession, payload: Mapping[str, Any], read_event: Read
) -> RequestFuncOutput:
    """Send a request whose answer is streamed. read_event: the text of an event that brings a token, else None."""
    output = RequestFuncOutput(prompt_len=request.prompt_len)

    async def read(response: aiohttp.ClientResponse, started: float) -> None:
        events, state = EventReader(), protocols.StreamState()
        texts: list[str] = []
        last = started
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            for data in events.feed(chunk):
                text = read_event(data, state)
                if text is None:
                    continue
                if output.ttft is None:
                    output.ttft = now - started
                else:
                    output.itl.append(now - last)
                last = now
                texts.append(text)
        output.latency = time.perf_counter() - started
        output.generated_text, output.token_ids = "".join(texts), state.token_ids
        take_counts(output, state)
        if not state.is_ended:
            raise protocols.ProtocolError(f"the stream ended early, after {len(texts)} tokens")
        if request.return_token_ids and not state.token_ids:
            raise protocols.ProtocolError(
                "the server does not return token_ids, which the next turn's prompt needs; --backend openai sends texts"
            )
        if output.ttft is None:
            raise protocols.ProtocolError("the answer brought no token, so that there is nothing to time")

    return await post(request, session, payload, output, read)


async def post(
    request: RequestFuncInput,
    session: aiohttp.ClientSession,
    payload: Mapping[str, Any],
    output: RequestFuncOutput,
    read: Callable[[aiohttp.ClientResponse, float], Awaitable[None]],
) -> RequestFuncOutput:
    """Send a request and have `read` fill the output; a failure becomes its error."""
    import aiohttp  # the session has it loaded

    body = msgspec.json.encode({**payload, **request.extra_body})
    headers = {"Content-Type": "application/json"} | ({"x-request-id": request.id} if request.id else {})
    output.started = started = time.perf_counter()
    try:
        async with session.post(request.api_url, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:ERROR_LENGTH]
                raise protocols.ProtocolError(f"HTTP {response.status} {response.reason}: {text}")
            await read(response, started)
        output.success = True
    except protocols.ProtocolError as error:
        output.error = one_line(str(error))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        output.error = one_line(f"the server sent what its protocol does not know: {error}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        output.error = one_line(f"{type(error).__name__}: {error}")
    return output


def take_counts(output: RequestFuncOutput, state: protocols.StreamState) -> None:
    output.output_tokens, output.cached_tokens = state.output_tokens, state.cached_tokens
    output.prompt_len = state.prompt_tokens or output.prompt_len
