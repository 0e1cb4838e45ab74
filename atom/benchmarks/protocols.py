"""Decode the events of OpenAI's, TGI's, TensorRT-LLM's and DeepSpeed-MII's protocols.

    state = StreamState()
    read_completion(b'{"choices": [{"text": " time", "finish_reason": null}]}', state)     # " time"
    read_completion(b'{"choices": [], "usage": {"completion_tokens": 7}}', state)          # None
    state.output_tokens                                                                    # 7

A reader decodes only the fields that it needs, and counts tokens and notes the end in a `StreamState`. It raises
ProtocolError if the server reports an error, and msgspec.MsgspecError or UnicodeDecodeError if an event is no
JSON or has another form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


class ProtocolError(Exception):
    """A server's answer is an error, or incomplete."""


@dataclass(slots=True)
class StreamState:
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None
    cached_tokens: int = 0  # of the prompt, in the server's prefix cache
    is_ended: bool = False  # whether the server has said so
    token_ids: list[int] = field(default_factory=list)  # of the answer, if the server sends them


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class OpenAIEvent(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Token(msgspec.Struct):
    text: str = ""
    special: bool = False


class Details(msgspec.Struct):
    generated_tokens: int | None = None
    input_length: int | None = None


class TGIEvent(msgspec.Struct):
    token: Token | None = None
    generated_text: str | None = None
    details: Details | None = None
    error: Any = None


class TRTEvent(msgspec.Struct):
    text_output: str | None = None
    error: Any = None


class MIIAnswer(msgspec.Struct):
    choices: list[Choice] = []
    text: str | list[str] = []
    usage: Usage | None = None


decode_openai = msgspec.json.Decoder(OpenAIEvent).decode
decode_tgi = msgspec.json.Decoder(TGIEvent).decode
decode_trt = msgspec.json.Decoder(TRTEvent).decode
decode_mii = msgspec.json.Decoder(MIIAnswer).decode


def read_openai(data: bytes, state: StreamState) -> Choice | None:
    """The first choice of an event, if it has one."""
    if data == b"[DONE]":
        state.is_ended = True
        return None
    event = decode_openai(data)
    check_error(event.error)
    if event.usage is not None:
        take_usage(event.usage, state)
    if not event.choices:
        return None
    choice = event.choices[0]
    state.token_ids += choice.token_ids or ()
    if choice.finish_reason is not None:
        state.is_ended = True
    return choice


def read_completion(data: bytes, state: StreamState) -> str | None:
    """The text of a token; "" for an event without text that does not end the answer: a token of incomplete text."""
    choice = read_openai(data, state)
    if choice is None or (not choice.text and choice.finish_reason is not None):
        return None
    return choice.text or ""


def read_chat(data: bytes, state: StreamState) -> str | None:
    """The text of a token; an event without text has the role or the end, and is no token."""
    choice = read_openai(data, state)
    if choice is None or choice.delta is None:
        return None
    return choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning or None


def read_tgi(data: bytes, state: StreamState) -> str | None:
    event = decode_tgi(data)
    check_error(event.error)
    if event.details is not None:
        state.output_tokens = event.details.generated_tokens
        state.prompt_tokens = event.details.input_length
    if event.generated_text is not None:
        state.is_ended = True
    if event.token is None:
        return None
    return "" if event.token.special else event.token.text


def read_trt_llm(data: bytes, state: StreamState) -> str | None:
    """The text of a token. The stream has no end mark: the client library reports an incomplete response."""
    event = decode_trt(data)
    check_error(event.error)
    state.is_ended = event.text_output is not None
    return event.text_output


def read_mii(body: bytes, state: StreamState) -> str:
    """The text of a whole answer, from MII's OpenAI server or its own."""
    answer = decode_mii(body)
    if answer.usage is not None:
        take_usage(answer.usage, state)
    if answer.choices and answer.choices[0].text is not None:
        return answer.choices[0].text
    texts = [answer.text] if isinstance(answer.text, str) else answer.text
    if not texts:
        raise ProtocolError(f"the answer has neither choices nor text: {body[:200].decode(errors='replace')}")
    return texts[0]


def take_usage(usage: Usage, state: StreamState) -> None:
    state.prompt_tokens, state.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        state.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def check_error(error: Any) -> None:
    if error is not None:
        raise ProtocolError(f"the server reports {msgspec.json.encode(error).decode()}")
