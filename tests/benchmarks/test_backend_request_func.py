from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest
from benchmarks.stub_server import Answer, Asked, Reply, Stub, answering, completion_events, serving, sse

from atom.benchmarks.backend_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput
from atom.measurement.metrics import RequestFuncOutput

OPENAI = ("vllm", "openai", "sglang", "lmdeploy", "scalellm")
PATHS = {
    "openai-chat": "/v1/chat/completions",
    "tgi": "/generate_stream",
    "tensorrt-llm": "/v2/models/ensemble/generate_stream",
}
TRIES = 50
TEXTS = ["Once", " upon", " a", " time"]
STREAMED = {  # what each protocol's server sends for TEXTS
    **dict.fromkeys(OPENAI, completion_events(TEXTS, prompt_tokens=9)),
    "openai-chat": completion_events(TEXTS, prompt_tokens=9, chat=True),
    "tgi": [sse({"token": {"id": 5, "text": text, "special": False}, "generated_text": None}) for text in TEXTS[:3]]
    + [sse({"token": {"text": " time"}, "generated_text": "Once upon a time", "details": {"generated_tokens": 4}})],
    "tensorrt-llm": [sse({"model_name": "ensemble", "text_output": text}) for text in TEXTS],
}


def ask(backend: str, answer: Answer, **options: Any) -> tuple[RequestFuncOutput, Stub]:
    """One request to a server that answers so."""

    async def run(url: str) -> RequestFuncOutput:
        request = RequestFuncInput("Tell", url, prompt_len=7, output_len=4, model="m", **options)
        async with aiohttp.ClientSession() as session:
            return await ASYNC_REQUEST_FUNCS[backend](request, session)

    with serving(answer) as stub:
        return asyncio.run(run(stub.url + PATHS.get(backend, "/v1/completions"))), stub


def test_there_is_a_function_for_each_backend_of_the_guide():
    assert set(ASYNC_REQUEST_FUNCS) == {*OPENAI, "openai-chat", "tgi", "tensorrt-llm", "deepspeed-mii"}


@pytest.mark.parametrize("backend", STREAMED)
def test_every_token_of_a_stream_is_counted_and_timed(backend: str):
    output, stub = ask(backend, answering(STREAMED[backend]))
    assert (output.success, output.error, output.generated_text) == (True, "", "Once upon a time")
    assert output.ttft is not None and len(output.itl) == 3
    assert 0 < output.ttft <= output.ttft + sum(output.itl) <= output.latency
    assert stub.asked[0].path == PATHS.get(backend, "/v1/completions")


@pytest.mark.parametrize(
    ("backend", "counts"),
    [*((name, (9, 4)) for name in (*OPENAI, "openai-chat")), ("tgi", (7, 4)), ("tensorrt-llm", (7, None))],
)
def test_the_servers_counts_win(backend: str, counts: tuple[int, int | None]):
    output, _ = ask(backend, answering(STREAMED[backend]))
    assert (output.prompt_len, output.output_tokens) == counts


@pytest.mark.parametrize(
    ("backend", "body"),
    [
        (
            "vllm",
            {"model": "m", "prompt": "Tell", "max_tokens": 4, "temperature": 0.0, "stream": True, "ignore_eos": True,
             "stream_options": {"include_usage": True}},
        ),
        (
            "openai-chat",
            {"model": "m", "messages": [{"role": "user", "content": "Tell"}], "max_completion_tokens": 4,
             "temperature": 0.0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}},
        ),
        (
            "tensorrt-llm",
            {"text_input": "Tell", "max_tokens": 4, "min_length": 4, "temperature": 0.0, "top_p": 1.0, "stream": True},
        ),
    ],
)  # fmt: skip
def test_what_a_request_with_ignore_eos_asks_for(backend: str, body: dict[str, Any]):
    _, stub = ask(backend, answering(STREAMED[backend]), ignore_eos=True)
    assert stub.asked[0].json() == body


@pytest.mark.parametrize(
    ("backend", "body"),
    [
        ("tgi", {"inputs": "Tell", "parameters": {"max_new_tokens": 4, "do_sample": False, "details": True}}),
        ("deepspeed-mii", {"model": "m", "prompt": "Tell", "max_tokens": 4, "temperature": 0.01, "top_p": 1.0}),
    ],
)
def test_what_a_request_asks_of_the_others(backend: str, body: dict[str, Any]):
    _, stub = ask(backend, answering(STREAMED.get(backend, [b"{}"])))
    assert stub.asked[0].json() == body
    assert "ignore_eos" not in ask("openai", answering(STREAMED["openai"]))[1].asked[0].json()


@pytest.mark.parametrize(
    ("body", "text", "tokens"),
    [
        ({"choices": [{"text": "Once upon"}], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}, "Once upon", 2),
        ({"text": ["Once upon"]}, "Once upon", None),
        ({"text": "Once upon"}, "Once upon", None),
    ],
)
def test_an_answer_in_one_piece_has_a_latency_only(body: Any, text: str, tokens: int | None):
    async def answer(asked: Asked, reply: Reply) -> None:
        await asyncio.sleep(0.05)
        await reply.whole(200, json.dumps(body).encode())

    output, _ = ask("deepspeed-mii", answer)
    assert (output.success, output.generated_text, output.output_tokens) == (True, text, tokens)
    assert (output.ttft, output.itl, output.tpot) == (None, [], None)
    assert output.latency >= 0.05


@pytest.mark.parametrize("backend", STREAMED)
def test_times_are_those_at_which_the_server_sends(backend: str):
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.start()
        events = STREAMED[backend]
        is_token = [b"Once" in each or b"upon" in each or b" a" in each or b"time" in each for each in events]
        first = is_token.index(True)
        for at, event in enumerate(events):
            await asyncio.sleep(0.1 if at == first else 0.04 if is_token[at] else 0)
            await reply.send(event)
        await asyncio.sleep(0.06)
        await reply.end()

    for _ in range(TRIES):  # other processes may keep the client from reading at once
        output, _ = ask(backend, answer)
        assert output.ttft is not None and len(output.itl) == 3
        came = list(itertools.accumulate([output.ttft, *output.itl, output.latency - output.ttft - sum(output.itl)]))
        due = [0.1, 0.14, 0.18, 0.22, 0.28]
        assert all(at + 0.001 >= expected for at, expected in zip(came, due, strict=True)), came
        if all(at < expected + 0.03 for at, expected in zip(came, due, strict=True)):
            return
    raise AssertionError(came)


def test_a_stream_may_end_with_its_finish_reason():
    output, _ = ask("vllm", answering(STREAMED["vllm"][:-1]))  # without [DONE]
    assert (output.success, output.output_tokens) == (True, 4)


def test_a_special_token_of_tgi_is_a_token_without_text():
    last = {"token": {"text": "</s>", "special": True}, "generated_text": "Once", "details": {"input_length": 9}}
    output, _ = ask("tgi", answering([STREAMED["tgi"][0], sse(last)]))
    assert (output.success, output.generated_text, len(output.itl), output.prompt_len) == (True, "Once", 1, 9)


def test_tokens_that_arrive_together_count_one_by_one():
    output, _ = ask("vllm", answering([b"".join(STREAMED["vllm"])]))
    assert (output.success, output.output_tokens, output.itl) == (True, 4, [0.0, 0.0, 0.0])


def test_comments_and_carriage_returns_and_cut_events_change_nothing():
    stream = b": ping\n\n" + b"".join(STREAMED["vllm"]).replace(b"\n", b"\r\n")
    output, _ = ask("vllm", answering([stream[at : at + 5] for at in range(0, len(stream), 5)]))
    assert (output.success, output.generated_text, output.output_tokens) == (True, "Once upon a time", 4)


def test_reasoning_is_answer_too():
    deltas = [{"role": "assistant"}, {"reasoning_content": "Hm"}, {"reasoning": "."}, {"content": "Yes"}]
    events = [sse({"choices": [{"delta": each, "finish_reason": None}]}) for each in deltas]
    output, _ = ask("openai-chat", answering([*events, sse(b"[DONE]")]))
    assert (output.success, output.generated_text, len(output.itl)) == (True, "Hm.Yes", 2)


def test_a_token_without_text_is_a_token_in_a_completion_and_none_in_a_chat():
    texts = ["a", "", "b"]
    assert len(ask("vllm", answering(completion_events(texts)))[0].itl) == 2
    assert len(ask("openai-chat", answering(completion_events(texts, chat=True)))[0].itl) == 1


def broken(kind: str) -> Answer:
    async def answer(asked: Asked, reply: Reply) -> None:
        if kind == "500":
            return await reply.whole(500, b'{"error": {"message": "out of\\nmemory"}}')
        if kind == "not http":
            reply.writer.write(b"garbage\r\n\r\n")
            return reply.cut()
        if kind == "closed at once":
            return reply.cut()
        await reply.start()
        await reply.send(STREAMED["vllm"][0])
        if kind == "closed within":
            return reply.cut()
        if kind == "error event":
            await reply.send(sse({"error": {"message": "the engine died"}}))
        if kind == "no json":
            await reply.send(sse(b"{oops"))
        if kind == "no utf-8":
            await reply.send(sse(b'{"choices": [{"text": "\xff"}]}'))
        if kind == "no text":
            await reply.send(sse({"choices": [{"text": 5}]}))
        await reply.end()

    return answer


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("500", 'HTTP 500 Told: {"error": {"message": "out of\\nmemory"}}'),
        ("not http", "400, message"),
        ("closed at once", "ServerDisconnectedError"),
        ("closed within", "ClientPayloadError"),
        ("error event", 'the server reports {"message":"the engine died"}'),
        ("no json", "the server sent what its protocol does not know: "),  # and msgspec's words for it
        ("no utf-8", "the server sent what its protocol does not know: "),
        ("no text", "the server sent what its protocol does not know: "),
        ("ended early", "the stream ended early, after 1 tokens"),
    ],
)
def test_what_goes_wrong_is_an_error_of_one_line(kind: str, error: str):
    output, _ = ask("vllm", broken(kind))
    assert not output.success
    assert error in output.error
    assert "\n" not in output.error


@pytest.mark.parametrize("backend", ["tgi", "tensorrt-llm"])
def test_the_error_events_of_the_other_protocols(backend: str):
    output, _ = ask(backend, answering([STREAMED[backend][0], sse({"error": "overloaded"})]))
    assert (output.success, output.error) == (False, 'the server reports "overloaded"')


def test_an_answer_without_a_token_cannot_be_timed():
    output, _ = ask("vllm", answering([sse(b"[DONE]")]))
    assert (output.success, output.error) == (False, "the answer brought no token, so that there is nothing to time")


def test_an_answer_in_one_piece_of_another_shape_is_an_error():
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.whole(200, b'{"response": "x"}')

    output, _ = ask("deepspeed-mii", answer)
    assert output.error == 'the answer has neither choices nor text: {"response": "x"}'


def test_a_server_that_is_not_there_is_an_error():
    async def run() -> RequestFuncOutput:
        async with aiohttp.ClientSession() as session:
            request = RequestFuncInput("Tell", "http://127.0.0.1:1/v1/completions", 7, 4, "m")
            return await ASYNC_REQUEST_FUNCS["vllm"](request, session)

    assert asyncio.run(run()).error.startswith("ClientConnectorError: ")
