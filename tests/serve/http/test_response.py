"""What becomes of an answer that the engine refuses, gives up, or is slow with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scripted
from asking import CHAT, COMPLETIONS
from scripted import Said

from atom.config import Config
from atom.config.load import load
from atom.runtime.types import Logprobs
from atom.serve.engine.frames import Message
from atom.serve.engine.protocol import Finish, Output, Outputs, Refused, Submit
from atom.serve.http.response import Choice, best
from atom.serve.openai.response import finish_reason

ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello"},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
}


@pytest.fixture(scope="module")
def config(talker: Path) -> Config:
    return load([f"checkpoint={talker}", "serve.http.served_model_name=[talker]", "advanced.comment_seconds=0.05"])


def refuse(submit: Submit) -> list[Message]:
    return [Refused(submit.id, "structured_outputs: this is no grammar")]


def give_up(error: str) -> Any:
    """Says a word, and then that it cannot go on."""
    finish = Finish("error", 1, 0, 0.0, None, error)
    return lambda submit: [
        Outputs([Output(submit.id, 0, "Hel", [1])], 1, {}),
        Outputs([Output(submit.id, 0, "", [], None, finish)], 1, {}),
    ]


FORCED = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


@pytest.mark.parametrize("body", [{"grammar": "x"}, FORCED], ids=["constraint", "tools"])
def test_what_the_engine_refuses_for_another_reason_does_not_name_the_constraint(config: Config, body: dict[str, Any]):
    def refuse_words(submit: Submit) -> list[Any]:
        return [Refused(submit.id, "bad_words: '' has no token; give a word")]

    response, _ = scripted.post(config, refuse_words, ASKED[CHAT] | body, CHAT)
    assert (response.status_code, response.json()["error"]["param"]) == (400, None)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_the_engine_refuses_is_no_stream_yet(config: Config, path: str, is_streamed: bool):
    body = ASKED[path] | {"grammar": "x", "stream": is_streamed}
    response, _ = scripted.post(config, refuse, body, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "grammar")
    assert error["message"] == "grammar: this is no grammar"


SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "objct"}}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, ASKED[CHAT] | {"response_format": SCHEMA}, "response_format.json_schema"),
        (CHAT, ASKED[CHAT] | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, ASKED[CHAT] | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, ASKED[CHAT] | FORCED, "tools"),
        ("/v1/responses", {"input": "Hello", "text": {"format": SCHEMA["json_schema"] | {"type": "json_schema"}}},
         "text.format.schema"),
        ("/v1/responses", {"input": "Hello", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_constraint_is_refused_under_the_name_of_its_field(
    config: Config, path: str, body: dict[str, Any], field: str
):
    response, _ = scripted.post(config, refuse, body, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field.partition(".")[0])
    assert error["message"] == f"{field}: this is no grammar"


def test_a_forced_call_that_the_engine_refuses_names_the_tools(config: Config):
    response, _ = scripted.post(config, refuse, ASKED[CHAT] | FORCED, CHAT)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [("RequestError: it is too complex", 400, "invalid_request_error"), ("ValueError: broken", 500, "server_error")],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_that_ends_in_an_error(config: Config, path: str, error: str, status: int, kind: str):
    body = ASKED[path] | {"regex": "x"}
    response, _ = scripted.post(config, give_up(error), body, path)
    refusal = response.json()["error"]
    assert (response.status_code, refusal["type"]) == (status, kind)
    assert refusal["message"] == ("it is too complex" if status == 400 else "internal error, the server's log has it")
    streamed, _ = scripted.post(config, give_up(error), body | {"stream": True}, path)
    *chunks, last = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line]
    assert (streamed.status_code, last) == (200, {"error": refusal})
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_event_counts_the_tokens_so_far_where_a_request_wants_it(config: Config, path: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = ASKED[path] | {"stream": True, "stream_options": options}
    response, _ = scripted.post(config, Said(["a", "b", "c"]), body, path)
    chunks = [json.loads(line[6:]) for line in response.text.strip().split("\n\n")[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    last = chunks[-1]["usage"]
    assert counts[-3:] == [1, 2, 3] and last["completion_tokens"] == 3
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["prompt_tokens"]}
    assert all(
        chunk["usage"]["total_tokens"] == last["prompt_tokens"] + n for chunk, n in zip(chunks, counts, strict=False)
    )


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "arguments"),
    [
        ("required", ["[{", '"na'], []),
        ("required", ['[{"name": "f", "arg', 'uments": {"city": "Pa', "ri"], ['{"city": "Pari']),
        ("required", ['[{"name": "f", "arguments": {}}', ', {"na'], ["{}"]),
        ("required", ['[{"name": "f", "arguments": {}}', ', {"name": "f", "arguments": {"a'], ["{}", '{"a']),
        (NAMED, ["{", '"city": "Pa', "ri"], ['{"city": "Pari']),
        (NAMED, [" "], []),
    ],
)
def test_a_forced_call_that_max_tokens_cuts_off_is_a_call_and_no_content(
    config: Config, choice: Any, said: list[str], arguments: list[str], streams: bool
):
    body = ASKED[CHAT] | FORCED | {"tool_choice": choice, "stream": streams}
    response, _ = scripted.post(config, Said(said, "max_tokens"), body, CHAT)
    if not streams:
        (answered,) = response.json()["choices"]
        message, calls = answered["message"], [call["function"] for call in answered["message"].get("tool_calls", [])]
        content = message["content"] or ""
    else:
        chunks = [json.loads(line[6:]) for line in response.text.strip().split("\n\n")[:-1]]
        calls, content = list[dict[str, Any]](), ""
        for (answered,) in (chunk["choices"] for chunk in chunks):
            content += answered["delta"].get("content", "")
            for delta in answered["delta"].get("tool_calls", []):
                if "id" in delta:
                    calls.append({"name": delta["function"]["name"], "arguments": ""})
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    assert content.strip() == ""
    assert calls == [{"name": "f", "arguments": each} for each in arguments]
    assert answered["finish_reason"] == ("tool_calls" if arguments == ["{}"] else "length")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_empty_lines_break_the_silence_before_each_token(config: Config, path: str):
    response, _ = scripted.post(config, Said(["a", "b"], pause=0.2), ASKED[path] | {"stream": True}, path)
    first, second, rest = response.text.split('"a"')[0], response.text.split('"a"')[1], response.text.split('"b"')[1]
    assert first.startswith("\n\n")
    assert "\n\n\n\n" in second.partition('"b"')[0]
    assert "\n\n\n\n" not in rest and rest.endswith("data: [DONE]\n\n")


def test_the_reasons_of_the_engine_become_openais_words():
    reasons = ["eos", "stop_sequence", "stop_7", "max_tokens", "abort"]
    choices = [Choice(0, 0, finish=Finish(reason, 1, 0, 0.0)) for reason in reasons]
    assert [*map(finish_reason, choices)] == ["stop", "stop", "stop", "length", "abort"]


def test_the_best_are_chosen_for_each_prompt_by_their_mean_log_probability():
    def choice(place: int, *logprobs: float) -> Choice:
        return Choice(place, 0, logprobs=[Logprobs(1, each, 1, []) for each in logprobs])

    first = [choice(0, -3.0), choice(0, -1.0, -2.0), choice(0, -2.0)]
    second = [choice(1, -1.0), choice(1, -9.0), choice(1, -0.5)]
    kept = best([*first, *second], 3, 2)
    assert kept == [first[1], first[2], second[2], second[0]]
    assert [each.index for each in kept] == [0, 1, 2, 3]
