"""Every field of every body does what it says: two requests whose answers differ by it, or its refusal by name.

A field that is added to `atom.serve.openai.schema` fails here until it has a row.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asking
import pytest
import serving
import tokenizers
import torch
import wire
from asking import CHAT, COMPLETIONS, Answer
from safetensors.torch import save_file
from serving import Server
from tokenizers import processors

from atom.serve.openai import schema

TOKENIZE, DETOKENIZE, EMBEDDINGS = "/tokenize", "/detokenize", "/v1/embeddings"
SCORE, RERANK = "/score", "/rerank"
A, B, C, EOS, END_OF_TEXT = "64", "65", "66", "257", "258"  # tokens of the talker's
COMPLETION: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 8, "temperature": 0}
EMBEDDED: dict[str, Any] = {"input": "Hello there"}
SCORED: dict[str, Any] = {"text_1": "Hello there", "text_2": ["Hello", "Bread"]}
RANKED: dict[str, Any] = {"query": "Hello there", "documents": ["Bread", "Hello"]}
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 8,
    "temperature": 0,
}
SAMPLED = {"temperature": 1, "seed": 1}
ABC = {"structured_outputs": {"regex": "abcdef"}}  # an answer that is known
TERSE = {"logit_bias": dict.fromkeys(("197", "198", "201", "220", "259"), -100)}  # no space in JSON, and no thinking
ENDS = {"logit_bias": {EOS: 100}}  # an answer that ends at once
FIRST_A = {
    "allowed_token_ids": [64, 65, 257],
    "logit_bias": {A: 100, B: 50},
}  # a, where it may be, then b, then the end

EFFORT = {"reasoning_effort": "low"}
EFFORT_OF = {"effort": "low"}
# an answer of nothing but the token that begins reasoning, which ends where something else ends it
THINKS: dict[str, Any] = {"logit_bias": {"259": 100}, "ignore_eos": True, "return_token_ids": True}
THREE = [259, 259, 259, 259, 260, 259, 260, 259]  # the first one begins it; and then the budget is spent
PARTS = [{"type": "text", "text": "Good"}, {"type": "text", "text": "night"}]

Row = Callable[[Server], None]


@pytest.fixture(scope="module")
def odd(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One sequence at a time, a prefix cache, a BOS before every text, a template that shows all it is given."""
    folder = tmp_path_factory.mktemp("odd")
    checkpoint = folder / "talker"
    shutil.copytree(talker, checkpoint)
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", int(END_OF_TEXT))]
    )
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    template = folder / "template.jinja"
    template.write_text("{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}")
    settings = ["serve.enable_prefix_caching=true", "serve.max_num_seqs=1", f"serve.http.chat_template={template}"]
    settings.append("serve.pooler_config.pooling_type=LAST")
    save_file({"model.layers.0": torch.randn(48)}, folder / "calm.safetensors")
    settings += ["passes.taps=[model.layers.0]", f"passes.steer={{calm: '{folder / 'calm.safetensors'}'}}"]
    server = serving.start(checkpoint, folder, *settings)
    yield server
    server.process.kill()
    server.process.wait()


def differs(path: str, one: dict[str, Any], other: dict[str, Any]) -> Row:
    """Both are served, and what they make is not the same."""

    def check(server: Server) -> None:
        first, second = (asking.post(server, path, body) for body in (one, other))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert essence(first) != essence(second)

    return check


def makes(path: str, one: dict[str, Any], other: dict[str, Any], read: Callable[[Answer], Any], *expected: Any) -> Row:
    """What is read of each answer is what is expected of it."""

    def check(server: Server) -> None:
        first, second = (asking.post(server, path, body) for body in (one, other))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert (read(first), read(second)) == expected
        assert expected[0] != expected[1]

    return check


def refuses(path: str, body: dict[str, Any], param: str, status: int = 400) -> Row:
    """It is refused by name, where the field leaves no other choice."""

    def check(server: Server) -> None:
        answer = asking.post(server, path, body)
        assert (answer.status, answer.error["param"]) == (status, param), answer.body
        assert param in answer.error["message"]

    return check


def shape_of_tap(answer: Answer) -> Any:
    """The columns of the hidden states that a choice has; None: it has none."""
    taps = answer.choices[0].get("taps")
    return None if taps is None else taps["model.layers.0"]["shape"][-1]


def is_label(path: str, model: type[schema.Body], field: str, one: dict[str, Any], other: dict[str, Any]) -> Row:
    """The schema calls it a label or a hint, and the answer is the same with another."""

    def check(server: Server) -> None:
        assert str(model.model_fields[field].description).startswith(("a label", "a hint"))
        is_same(path, one, other)(server)

    return check


def is_same(path: str, one: dict[str, Any], other: dict[str, Any]) -> Row:
    def check(server: Server) -> None:
        first, second = (asking.post(server, path, body) for body in (one, other))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert essence(first) == essence(second)

    return check


def reaches_template(more: dict[str, Any], num_tokens: int) -> Row:
    """The prompt of a chat is so many tokens longer for it."""

    def check(server: Server) -> None:
        plain, longer = (tokens_in(asking.post(server, CHAT, body)) for body in (TALK, TALK | more))
        assert longer - plain == num_tokens

    return check


def first_token(logprobs: dict[str, Any]) -> str:
    return str(logprobs["content"][0]["token"] if "content" in logprobs else logprobs["tokens"][0])


def hints(field: str, one: Any, other: Any, path: str = CHAT) -> Row:
    """A field of a chat or a completion that is a label or a hint: the answer is that without it."""
    model, base = (schema.ChatRequest, TALK) if path == CHAT else (schema.CompletionRequest, COMPLETION)
    return both(
        is_label(path, model, field, base | {field: one}, base | {field: other}),
        is_same(path, base, base | {field: one}),
    )


def both(*rows: Row) -> Row:
    def check(server: Server) -> None:
        for row in rows:
            row(server)

    return check


def essence(answer: Answer) -> Any:
    """What an answer says: no ids, no times."""
    if isinstance(answer.body, str):
        return [event["choices"] for event in events_of(answer)]
    if "choices" not in answer.body:
        return answer.body
    choices = json.loads(json.dumps(answer.choices))
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    return choices


def num_written(answer: Answer) -> int | None:
    """Tokens that a request which keeps its prompt has left in the cache; None if it keeps nothing."""
    found: int | None = answer.usage["prompt_tokens_details"].get("cache_write_tokens")
    return found


def text(answer: Answer) -> str:
    return answer.text


def tokens_in(answer: Answer) -> int:
    return int(answer.usage["prompt_tokens"])


def tokens_out(answer: Answer) -> int:
    return int(answer.usage["completion_tokens"])


def finish_reason(answer: Answer) -> str:
    return str(answer.choices[0]["finish_reason"])


def reads_differ(path: str, one: dict[str, Any], other: dict[str, Any], read: Callable[[Answer], Any]) -> Row:
    def check(server: Server) -> None:
        first, second = (asking.post(server, path, body) for body in (one, other))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert read(first) != read(second)

    return check


def events_of(answer: Answer) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.body.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def has_usage(answer: Answer) -> bool:
    return bool(events_of(answer)[-1].get("usage"))


def reaches_log(path: str, base: dict[str, Any]) -> Row:
    """The server's log names the user of the one request."""

    def check(server: Server) -> None:
        asking.post(server, path, base | {"user": f"somebody at {path}"})
        asking.post(server, path, base | {"user": f"another at {path}"})
        serving.wait_for_entry(server, user=f"another at {path}")
        assert len(serving.log_entries(server, user=f"somebody at {path}")) == 1

    return check


def salts(path: str, base: dict[str, Any]) -> Row:
    """What is cached under one salt is found under that one only."""

    def check(server: Server) -> None:
        def cached(salt: str) -> bool:
            answer = asking.post(server, path, base | {"cache_salt": salt})
            return int(answer.usage["prompt_tokens_details"]["cached_tokens"]) > 0

        assert [cached("a"), cached("a"), cached("b"), cached("b")] == [False, True, False, True]

    return check


def numbers(answer: Answer) -> list[Any]:
    return [each["embedding"] for each in answer.body["data"]]


def length(answer: Answer) -> float:
    return round(math.hypot(*answer.body["data"][0]["embedding"]), 3)


def scores(answer: Answer) -> list[float]:
    """The scores of an answer, those of documents in their order."""
    if "data" in answer.body:
        return [round(each["score"], 3) for each in answer.body["data"]]
    ranked = sorted(answer.body["results"], key=lambda each: each["index"])
    return [round(each["relevance_score"], 3) for each in ranked]


def scores_apart(path: str, one: dict[str, Any], other: dict[str, Any]) -> Row:
    """Both are scored, and not alike."""

    def check(server: Server) -> None:
        first, second = (asking.post(server, path, body) for body in (one, other))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert scores(first) != scores(second)

    return check


def compares(path: str, base: dict[str, Any], first: str, second: str) -> dict[str, Row]:
    """The fields of all comparisons. first, second: what the base calls its texts"""
    return {
        "model": refuses(path, base | {"model": "nobody"}, "model", 404),
        "truncate_prompt_tokens": scores_apart(path, base, base | {"truncate_prompt_tokens": 2}),
        "max_tokens_per_query": scores_apart(path, base, base | {"max_tokens_per_query": 2}),
        "max_tokens_per_doc": scores_apart(path, base, base | {"max_tokens_per_doc": 2}),
        "request_id": makes(
            path,
            base | {"request_id": "mine"},
            base | {"request_id": "my/0"},
            lambda it: it.body["id"].partition("-")[2],
            "mine",
            "my/0",
        ),
        "cache_salt": salts(path, {first: f"compared at {path} " * 20, second: ["a"]}),
        # the model of this server has no template for pairs, of which test_classify.py has
        "instruction": refuses(path, base | {"instruction": "Find facts"}, "instruction"),
        "chat_template_kwargs": refuses(path, base | {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        "priority": goes_first(path, {first: "a", second: ["b"]}, num_prompts=2),
        "user": reaches_log(path, base),
    }


def embeds_apart(one: dict[str, Any], other: dict[str, Any]) -> Row:
    """Both are embedded, and not as the same numbers."""

    def check(server: Server) -> None:
        first, second = (asking.post(server, EMBEDDINGS, body) for body in (one, other))
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert numbers(first) != numbers(second)

    return check


def keeps_length(field: str) -> Row:
    """Embeddings have the length 1 unless it is false."""

    def check(server: Server) -> None:
        answers = [asking.post(server, EMBEDDINGS, EMBEDDED | more) for more in ({}, {field: True}, {field: False})]
        assert length(answers[0]) == length(answers[1]) == 1 != length(answers[2])

    return check


def goes_first(path: str, base: dict[str, Any], num_prompts: int = 1) -> Row:
    """Of two that wait, the one that came later is served first, since its number is lower."""

    def check(server: Server) -> None:
        answers: dict[int, Answer] = {}

        def ask(priority: int) -> threading.Thread:
            def run() -> None:
                answers[priority] = asking.post(server, path, base | {"priority": priority})

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        running = []
        with asking.begin(server, COMPLETIONS, COMPLETION | {"max_tokens": 7000, "ignore_eos": True}):  # leaves no room
            for priority in (5, 1):
                running.append(ask(priority))
                wire.wait_until(lambda: asking.num_waiting(server) == num_prompts * len(running))
        for thread in running:
            thread.join()
        first, second = (serving.wait_for_entry(server, id=answers[priority].body["id"]) for priority in (1, 5))
        entries = serving.log_entries(server)
        assert entries.index(first) < entries.index(second)

    return check


def schema_of(**properties: Any) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": closed}}


def tool(name: str = "look_up", **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"word": {"enum": ["cat"]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def limits_thinking(path: str, base: dict[str, Any], limit: Callable[[int], dict[str, Any]]) -> Row:
    """Three tokens of reasoning, or as many as there are. limit: what says so"""
    thinks = base | THINKS
    return both(
        makes(path, thinks | limit(3), thinks | limit(-1), lambda it: it.choices[0]["token_ids"], THREE, [259] * 8),
        refuses(path, thinks | limit(-2), next(iter(limit(-2)))),
    )


def repeats(detection: dict[str, int], count: int) -> Row:
    """An answer of one letter, again and again, ends after so many."""
    asked = COMPLETION | only(A) | {"repetition_detection": {"min_count": 2} | detection}

    def check(server: Server) -> None:
        assert text(asking.post(server, COMPLETIONS, asked)) == "a" * count

    return check


def generation(path: str, base: dict[str, Any]) -> dict[str, Row]:
    """The fields that completions and chats share, for one of the two."""
    sampled = base | SAMPLED
    long = base | {"max_tokens": 60, "ignore_eos": True}
    known = base | ABC
    words = {"type": "string", "enum": ["yes"]}
    return {
        "model": both(
            refuses(path, base | {"model": "nobody"}, "model", 404),
            lambda server: assert_served(server, path, base | {"model": "talker"}),
        ),
        "temperature": differs(path, sampled | {"temperature": 0}, sampled),
        "top_p": differs(path, sampled, sampled | {"top_p": 1e-6}),
        "top_k": differs(path, sampled, sampled | {"top_k": 1}),
        "min_p": differs(path, sampled, sampled | {"min_p": 1.0}),
        "min_tokens": makes(
            path, base | ENDS, base | ENDS | {"min_tokens": 5}, lambda it: tokens_out(it) > 5, False, True
        ),
        "stop": makes(path, known, known | {"stop": ["never", "de"]}, text, "abcdef", "abc"),
        "include_stop_str_in_output": makes(
            path,
            known | {"stop": "de"},
            known | {"stop": "de", "include_stop_str_in_output": True},
            text,
            "abc",
            "abcde",
        ),
        "stop_token_ids": makes(path, known, known | {"stop_token_ids": [int(C)]}, text, "abcdef", "ab"),
        "allowed_token_ids": both(
            makes(path, base | only(A), base | only(B), text, "a" * 8, "b" * 8),
            refuses(path, base | {"allowed_token_ids": [264]}, "allowed_token_ids"),
            refuses(path, base | {"allowed_token_ids": []}, "allowed_token_ids"),
            refuses(path, base | only(A) | {"regex": "a"}, "allowed_token_ids"),
        ),
        "bad_words": both(
            makes(path, base | FIRST_A, base | FIRST_A | {"bad_words": ["aa"]}, text, "a" * 8, "ab" * 4),
            makes(
                path,
                base | FIRST_A | {"bad_words": ["a"]},
                base | FIRST_A | {"bad_words": ["aab", "aaa", "c"]},
                text,
                "b" * 8,
                "aa",  # and nothing may follow but the end
            ),
            refuses(path, base | {"bad_words": [""]}, "bad_words"),
        ),
        "return_token_ids": makes(
            path,
            known,
            known | {"return_token_ids": True},
            lambda it: it.choices[0].get("token_ids"),
            None,
            [64, 65, 66, 67, 68, 69],
        ),
        "return_tokens_as_token_ids": makes(
            path,
            known | {"logprobs": True if path == CHAT else 1},
            known | {"logprobs": True if path == CHAT else 1, "return_tokens_as_token_ids": True},
            lambda it: first_token(it.choices[0]["logprobs"]),
            "a",
            "token_id:64",
        ),
        "return_weight_versions": makes(
            path,
            known,
            known | {"return_weight_versions": True},
            lambda it: it.choices[0].get("weight_versions"),
            None,
            [{"version": "default", "start": 0, "end": 6}],
        ),
        "request_id": both(
            makes(
                path,
                base | {"request_id": "mine"},
                base | {"request_id": "my/0"},
                lambda it: it.body["id"].partition("-")[2],
                "mine",
                "my/0",
            ),
            refuses(path, base | {"request_id": "a b"}, "request_id"),
        ),
        "ignore_eos": makes(path, base | ENDS, base | ENDS | {"ignore_eos": True}, finish_reason, "stop", "length"),
        "skip_special_tokens": makes(
            path,
            base | {"logit_bias": {END_OF_TEXT: 100}},
            base | {"logit_bias": {END_OF_TEXT: 100}, "skip_special_tokens": False},
            text,
            "",
            "<|endoftext|>" * 8,
        ),
        "stream": makes(
            path,
            base | {"stream": False},
            base | {"stream": True},
            lambda it: it.headers["content-type"].partition(";")[0],
            "application/json",
            "text/event-stream",
        ),
        "stream_options": both(
            makes(
                path,
                base | {"stream": True},
                base | {"stream": True, "stream_options": {"include_usage": True}},
                has_usage,
                False,
                True,
            ),
            refuses(path, base | {"stream_options": {"include_usage": True}}, "stream_options"),
        ),
        "seed": differs(path, sampled, sampled | {"seed": 2}),
        "n": both(
            makes(path, sampled, sampled | {"n": 3}, lambda it: len(it.choices), 1, 3),
            refuses(path, base | {"n": 17}, "n"),
        ),
        "best_of": both(
            makes(path, long, long | {"best_of": 3}, lambda it: (len(it.choices), tokens_out(it)), (1, 60), (1, 180)),
            refuses(path, base | {"best_of": 17}, "best_of"),
            refuses(path, base | {"n": 3, "best_of": 2}, "best_of"),
            refuses(path, base | {"best_of": 2, "stream": True}, "best_of"),
        ),
        "prompt_logprobs": both(
            reads_differ(
                path, base, base | {"prompt_logprobs": 1}, lambda it: "prompt_logprobs" in json.dumps(it.body)
            ),
            refuses(path, base | {"prompt_logprobs": 21}, "prompt_logprobs"),
            refuses(path, base | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ),
        "presence_penalty": differs(path, long, long | {"presence_penalty": 2}),
        "frequency_penalty": differs(path, long, long | {"frequency_penalty": 2}),
        "repetition_penalty": differs(path, long, long | {"repetition_penalty": 3}),
        "logit_bias": both(
            makes(path, base | {"logit_bias": {A: 100}}, base | {"logit_bias": {B: 100}}, text, "a" * 8, "b" * 8),
            refuses(path, base | {"logit_bias": {"264": 1}}, "logit_bias"),
            refuses(path, base | {"logit_bias": {"a": 1}}, "logit_bias"),
        ),
        "truncate_prompt_tokens": makes(
            path, base | {"truncate_prompt_tokens": 5}, base | {"truncate_prompt_tokens": 3}, tokens_in, 5, 3
        ),
        "thinking_token_budget": limits_thinking(path, base, lambda count: {"thinking_token_budget": count}),
        "thinking_budget": both(
            limits_thinking(path, base, lambda count: {"thinking_budget": count}),
            is_same(path, base | {"thinking_budget": 0}, base | {"thinking_budget": 0, "thinking_token_budget": 0}),
            refuses(path, base | {"thinking_budget": 0, "thinking_token_budget": 1}, "thinking_token_budget"),
        ),
        "repetition_detection": both(
            makes(
                path,
                base | only(A),
                base | only(A) | {"repetition_detection": {"max_pattern_size": 1, "min_count": 3}},
                lambda it: (text(it), finish_reason(it)),
                ("a" * 8, "length"),
                ("aaa", "repetition"),
            ),
            refuses(path, base | {"repetition_detection": {"max_pattern_size": 1}}, "repetition_detection"),
            refuses(path, base | {"repetition_detection": {"max_size": 1}}, "repetition_detection"),
        ),
        "cache_retention": both(
            makes(path, base, base | {"cache_retention": {}}, num_written, None, 0),
            refuses(path, base | {"cache_retention": 300}, "cache_retention"),
        ),
        "taps": both(
            makes(path, base, base | {"taps": {"model.layers.0": "all"}}, shape_of_tap, None, 48),
            refuses(path, base | {"taps": ["model.layers.1"]}, "taps"),
        ),
        "steer": both(
            differs(path, base, base | {"steer": {"calm": 100}}),
            is_same(path, base, base | {"steer": {"calm": 0}}),
            refuses(path, base | {"steer": ["wild"]}, "steer"),
        ),
        "explain": makes(
            path, base | {"explain": False}, base | {"explain": True}, lambda it: "prefix_hit" in it.body, False, True
        ),
        "cache_salt": salts(path, base | long_prompt(path)),
        "priority": goes_first(path, base),
        "user": reaches_log(path, base),
        "response_format": makes(
            path,
            base | TERSE | {"response_format": {"type": "text"}},
            base | TERSE | {"response_format": {"type": "json_object"}},
            lambda it: it.text.startswith("{"),
            False,
            True,
        ),
        "structured_outputs": both(
            makes(
                path,
                base | {"structured_outputs": {"regex": "a{3}"}},
                base | {"structured_outputs": {"choice": ["bb"]}},
                text,
                "aaa",
                "bb",
            ),
            refuses(path, base | {"structured_outputs": {}}, "structured_outputs"),
        ),
        "regex": both(
            makes(path, base | {"regex": "a{3}"}, base | {"regex": "b{2}"}, text, "aaa", "bb"),
            refuses(path, base | {"regex": "a", "response_format": schema_of(a=words)}, "response_format"),
        ),
        "grammar": makes(path, base | {"grammar": 'start: "a" "b"'}, base | {"grammar": 'start: "c"'}, text, "ab", "c"),
        "store": hints("store", True, False, path),
        "metadata": both(
            hints("metadata", {"team": "a"}, {str(number): "b" for number in range(16)}, path),
            refuses(path, base | {"metadata": {"team": 1}}, "metadata"),
            refuses(path, base | {"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
        ),
        "client_metadata": hints("client_metadata", {"turn_id": "a"}, {"turn_id": "b"}, path),
        "service_tier": hints("service_tier", "auto", "priority", path),
        "safety_identifier": hints("safety_identifier", "a", "b", path),
        "prompt_cache_key": hints("prompt_cache_key", "a", "b", path),
        "prompt_cache_retention": hints("prompt_cache_retention", "in_memory", "24h", path),
        "prompt_cache_options": hints("prompt_cache_options", {"mode": "implicit"}, {"ttl": "30m"}, path),
    }


def assert_served(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = asking.post(server, path, body)
    assert answer.status == 200, answer.body
    assert answer.body["model"] == body["model"]
    events = asking.stream(server, path, body | {"stream_options": {"include_usage": True}})
    assert len(events) > 1 and {each["model"] for each in events} == {body["model"]}


def long_prompt(path: str) -> dict[str, Any]:
    """Of some blocks, and no other test's."""
    said = f"A text of several blocks that is sent only to {path}. " * 3
    return {"prompt": said} if path == COMPLETIONS else {"messages": [{"role": "user", "content": said}]}


def says(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def only(token: str) -> dict[str, Any]:
    return {"allowed_token_ids": [int(token)], "ignore_eos": True}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def called(**more: Any) -> dict[str, Any]:
    """What the assistant said: a call."""
    call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "cat"}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call | more]}


def called_custom(**more: Any) -> dict[str, Any]:
    """What the assistant said: a call of a custom tool."""
    call = {"id": "call-1", "type": "custom", "custom": {"name": "edit", "input": "a b"}}
    return {"role": "assistant", "content": None, "tool_calls": [call | more]}


def called_both(first: int, second: int) -> dict[str, Any]:
    (one,), (other,) = called(index=first)["tool_calls"], called_custom(index=second)["tool_calls"]
    return {"role": "assistant", "tool_calls": [one, other]}


def called_twice(first: int, second: int) -> dict[str, Any]:
    (one,), (other,) = (called(id=f"call-{place}", index=place)["tool_calls"] for place in (first, second))
    return {"role": "assistant", "tool_calls": [one | {"id": "call-1"}, other | {"id": "call-2"}]}


def shown(one: dict[str, Any], other: dict[str, Any]) -> Row:
    """What the template is given differs."""
    return differs(TOKENIZE, one, other)


def structured(one: dict[str, Any], other: dict[str, Any], *expected: Any) -> Row:
    bodies = [COMPLETION | TERSE | {"max_tokens": 60, "structured_outputs": value} for value in (one, other)]
    return makes(COMPLETIONS, bodies[0], bodies[1], text, *expected)


PATCH = {"name": "edit", "arguments": '{"input": "a b"}'}
TALK_ALONE = {"messages": TALK["messages"]}
BASES = {CHAT: TALK, TOKENIZE: TALK_ALONE}
OPENAIS = {  # an answer of OpenAI's as its SDK sends it back
    "role": "assistant",
    "content": "a",
    "annotations": [],
    "refusal": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
FORCED = TALK | TERSE | {"max_tokens": 400, "tools": [tool(), tool("other")], "tool_choice": "required"}
EAGER = {"logit_bias": TERSE["logit_bias"] | {"11": 60}}  # a comma, wherever one may stand
ONE = {"enum": [1]}


def json_text(answer: Answer) -> Any:
    return json.loads(answer.text)


def calls(answer: Answer) -> list[str]:
    return [call["function"]["name"] for call in answer.choices[0]["message"].get("tool_calls", [])]


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}, **more}


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def formed(**changes: Any) -> dict[str, Any]:
    """A chat whose answer is a JSON schema's, with changes of what says so."""
    form = schema_of(a=ONE)
    return TALK | TERSE | {"max_tokens": 200, "response_format": form | {"json_schema": form["json_schema"] | changes}}


PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
FRAMES = {"type": "video", "video": ["data:,", "data:,"]}
CLIP = {"url": "data:video/jpeg;base64,aaaa,aaaa"}
ROWS: dict[type[schema.Body], dict[str, Row]] = {
    schema.CompletionRequest: generation(COMPLETIONS, COMPLETION)
    | {
        "prompt": differs(COMPLETIONS, COMPLETION, COMPLETION | {"prompt": [1, 2, 3]}),
        "max_tokens": both(
            makes(COMPLETIONS, COMPLETION | {"max_tokens": 2}, COMPLETION | {"max_tokens": 3}, tokens_out, 2, 3),
            refuses(COMPLETIONS, COMPLETION | {"max_tokens": 0}, "max_tokens"),
        ),
        "logprobs": both(
            reads_differ(
                COMPLETIONS,
                COMPLETION | {"logprobs": 1},
                COMPLETION | {"logprobs": 2},
                lambda it: max(len(top) for top in it.choices[0]["logprobs"]["top_logprobs"]),
            ),
            refuses(COMPLETIONS, COMPLETION | {"logprobs": 21}, "logprobs"),
        ),
        "echo": both(
            makes(
                COMPLETIONS,
                COMPLETION | ABC,
                COMPLETION | ABC | {"echo": True},
                text,
                "abcdef",
                "Hello thereabcdef",
            ),
            refuses(COMPLETIONS, COMPLETION | {"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ),
        "add_special_tokens": makes(
            COMPLETIONS, COMPLETION, COMPLETION | {"add_special_tokens": False}, tokens_in, 12, 11
        ),
        "suffix": refuses(COMPLETIONS, COMPLETION | {"suffix": "b"}, "suffix"),
    },
    schema.ChatRequest: generation(CHAT, TALK)
    | {
        "messages": both(
            differs(CHAT, TALK, TALK | {"messages": [user("Good night")]}),
            refuses(CHAT, {"max_tokens": 1}, "messages"),
        ),
        "prompt": both(
            differs(CHAT, TALK, {"prompt": [user("Good night")], "max_tokens": 8, "temperature": 0}),
            refuses(CHAT, TALK | {"prompt": [user("Good night")]}, "messages"),
        ),
        "max_tokens": makes(CHAT, TALK | {"max_tokens": 2}, TALK | {"max_tokens": 3}, tokens_out, 2, 3),
        "max_completion_tokens": makes(CHAT, TALK, TALK | {"max_completion_tokens": 3}, tokens_out, 8, 3),
        "logprobs": makes(
            CHAT, TALK, TALK | {"logprobs": True}, lambda it: it.choices[0]["logprobs"] is not None, False, True
        ),
        "top_logprobs": both(
            makes(
                CHAT,
                TALK | {"logprobs": True},
                TALK | {"logprobs": True, "top_logprobs": 2},
                lambda it: len(it.choices[0]["logprobs"]["content"][0]["top_logprobs"]),
                0,
                2,
            ),
            is_same(CHAT, TALK, TALK | {"top_logprobs": 0}),
            refuses(CHAT, TALK | {"top_logprobs": 2}, "top_logprobs"),
            refuses(CHAT, TALK | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ),
        "tools": reads_differ(CHAT, TALK, TALK | {"tools": [tool()]}, tokens_in),
        "tool_choice": both(
            makes(CHAT, FORCED | {"tool_choice": "auto"}, FORCED, lambda it: len(calls(it)) > 0, False, True),
            *(is_same(CHAT, TALK, TALK | {"tool_choice": choice, "tools": []}) for choice in ("auto", "none")),
            *(is_same(CHAT, TALK, TALK | {"tool_choice": choice}) for choice in ("auto", "none")),
            refuses(CHAT, TALK | {"tool_choice": "required"}, "tool_choice"),
            refuses(CHAT, TALK | {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
            refuses(CHAT, TALK | {"tool_choice": allowed("look_up")}, "tool_choice"),
        ),
        "parallel_tool_calls": makes(
            CHAT,
            FORCED | EAGER,
            FORCED | EAGER | {"parallel_tool_calls": False},
            lambda it: len(calls(it)) > 1,
            True,
            False,
        ),
        "chat_template_kwargs": both(
            reads_differ(CHAT, TALK, TALK | {"chat_template_kwargs": {"enable_thinking": False}}, tokens_in),
            refuses(CHAT, TALK | {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ),
        "add_generation_prompt": makes(
            CHAT,
            says(user("a"), max_tokens=4),
            says(user("a"), max_tokens=4, add_generation_prompt=False),
            tokens_in,
            len("?user\na?\n?assistant\n"),
            len("?user\na?\n"),
        ),
        "continue_final_message": both(
            makes(
                CHAT,
                says(user("a"), max_tokens=4, add_generation_prompt=False),
                says(user("a"), max_tokens=4, add_generation_prompt=False, continue_final_message=True),
                tokens_in,
                len("?user\na?\n"),
                len("?user\na"),
            ),
            refuses(CHAT, TALK | {"continue_final_message": True}, "continue_final_message"),
        ),
        "add_special_tokens": both(
            is_same(CHAT, TALK, TALK | {"add_special_tokens": False}),
            refuses(CHAT, TALK | {"add_special_tokens": True}, "add_special_tokens"),
        ),
        "reasoning_effort": both(
            reaches_template(EFFORT, len("low")),
            reaches_template(EFFORT | {"chat_template_kwargs": {"reasoning_effort": "fully"}}, len("fully")),
            refuses(CHAT, TALK | {"reasoning_effort": "huge"}, "reasoning_effort"),
        ),
        "reasoning": refuses(CHAT, TALK | {"thinking_budget": 1, "reasoning": {"max_tokens": 2}}, "thinking_budget"),
        "modalities": both(
            is_same(CHAT, TALK, TALK | {"modalities": ["text"]}),
            refuses(CHAT, TALK | {"modalities": ["text", "audio"]}, "modalities"),
            refuses(CHAT, TALK | {"modalities": []}, "modalities"),
        ),
        "prediction": both(
            hints("prediction", {"type": "content", "content": "Hello"}, {"type": "content", "content": PARTS}),
            refuses(CHAT, TALK | {"prediction": {"type": "file", "content": "Hello"}}, "prediction"),
        ),
        "verbosity": both(hints("verbosity", "low", "high"), refuses(CHAT, TALK | {"verbosity": "no"}, "verbosity")),
    },
    schema.RepetitionDetection: {
        "max_pattern_size": both(repeats({"max_pattern_size": 0}, 8), repeats({"max_pattern_size": 3}, 2)),
        "min_pattern_size": both(
            repeats({"max_pattern_size": 3, "min_pattern_size": 0}, 2),
            repeats({"max_pattern_size": 3, "min_pattern_size": 3}, 6),
        ),
        "min_count": both(
            repeats({"max_pattern_size": 1, "min_count": 4}, 4),
            refuses(COMPLETIONS, COMPLETION | {"repetition_detection": {"min_count": -1}}, "repetition_detection"),
        ),
    },
    schema.CacheRetention: {
        "seconds": both(
            is_same(COMPLETIONS, COMPLETION, COMPLETION | {"cache_retention": {"seconds": 0.5}}),
            refuses(COMPLETIONS, COMPLETION | {"cache_retention": {"seconds": 0}}, "cache_retention"),
        ),
        "priority": both(
            is_same(COMPLETIONS, COMPLETION, COMPLETION | {"cache_retention": {"priority": 0}}),
            refuses(COMPLETIONS, COMPLETION | {"cache_retention": {"priority": 101}}, "cache_retention"),
        ),
    },
    schema.ReasoningLimit: {
        "effort": both(
            reaches_template({"reasoning": EFFORT_OF}, len("low")),
            reaches_template(EFFORT | {"reasoning": EFFORT_OF}, len("low")),
            refuses(CHAT, TALK | EFFORT | {"reasoning": {"effort": "high"}}, "reasoning_effort"),
        ),
        "max_tokens": limits_thinking(CHAT, TALK, lambda count: {"reasoning": {"max_tokens": count}}),
    },
    schema.Prediction: {
        "type": refuses(CHAT, TALK | {"prediction": {"type": "file", "content": "Hello"}}, "prediction"),
        "content": is_label(
            CHAT,
            schema.Prediction,
            "content",
            TALK | {"prediction": {"type": "content", "content": "Hello"}},
            TALK | {"prediction": {"type": "content", "content": PARTS}},
        ),
    },
    schema.StreamOptions: {
        "include_obfuscation": is_label(
            COMPLETIONS,
            schema.StreamOptions,
            "include_obfuscation",
            COMPLETION | {"stream": True, "stream_options": {"include_obfuscation": True}},
            COMPLETION | {"stream": True, "stream_options": {"include_obfuscation": False}},
        ),
        "include_usage": makes(
            COMPLETIONS,
            COMPLETION | {"stream": True, "stream_options": {"include_usage": False}},
            COMPLETION | {"stream": True, "stream_options": {"include_usage": True}},
            has_usage,
            False,
            True,
        ),
        "continuous_usage_stats": makes(
            COMPLETIONS,
            COMPLETION | {"stream": True, "stream_options": {"include_usage": True}},
            COMPLETION | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            lambda answer: all(event["usage"] for event in events_of(answer)),
            False,
            True,
        ),
    },
    schema.ResponseFormat: {
        "type": makes(
            CHAT,
            TALK | TERSE | {"response_format": {"type": "text"}},
            TALK | TERSE | {"response_format": {"type": "json_object"}},
            lambda it: it.text.startswith("{"),
            False,
            True,
        ),
        "json_schema": both(
            makes(
                CHAT, formed(), formed(schema=schema_of(b=ONE)["json_schema"]["schema"]), json_text, {"a": 1}, {"b": 1}
            ),
            refuses(CHAT, TALK | {"response_format": {"type": "json_schema"}}, "response_format"),
        ),
    },
    schema.JSONSchema: {
        "name": both(
            is_label(CHAT, schema.JSONSchema, "name", formed(), formed(name="another")),
            refuses(CHAT, formed(name="n" * 65), "response_format"),
        ),
        "description": both(
            is_label(CHAT, schema.JSONSchema, "description", formed(), formed(description="Say 7.")),
            refuses(CHAT, formed(description=1), "response_format"),
        ),
        "schema_": makes(
            CHAT, formed(), formed(schema=schema_of(b=ONE)["json_schema"]["schema"]), json_text, {"a": 1}, {"b": 1}
        ),
        "strict": is_label(CHAT, schema.JSONSchema, "strict", formed(strict=False), formed(strict=True)),
    },
    schema.StructuredOutputs: {
        "json_": structured({"json": {"const": 1}}, {"json": '{"const": 2}'}, "1", "2"),
        "json_object": makes(
            COMPLETIONS,
            COMPLETION,
            COMPLETION | {"structured_outputs": {"json_object": True}},
            lambda it: it.text.startswith("{"),
            False,
            True,
        ),
        "regex": structured({"regex": "a{3}"}, {"regex": "b{2}"}, "aaa", "bb"),
        "choice": structured({"choice": ["yes"]}, {"choice": ["no"]}, "yes", "no"),
        "grammar": structured({"grammar": 'start: "a" "b"'}, {"grammar": 'start: "c"'}, "ab", "c"),
    },
    schema.ChatMessage: {
        "role": shown(says({"role": "user", "content": "a"}), says({"role": "assistant", "content": "a"})),
        "content": shown(says(user("a")), says(user("b"))),
        "name": shown(says(user("a")), says(user("a", name="Ada"))),
        "tool_calls": shown(says(called(), user("a")), says({"role": "assistant", "content": ""}, user("a"))),
        "tool_call_id": shown(
            says({"role": "tool", "content": "a", "tool_call_id": "1"}),
            says({"role": "tool", "content": "a", "tool_call_id": "2"}),
        ),
        "reasoning_content": shown(
            says({"role": "assistant", "content": "a"}),
            says({"role": "assistant", "content": "a", "reasoning_content": "b"}),
        ),
        "reasoning": both(
            shown(
                says({"role": "assistant", "content": "a"}),
                says({"role": "assistant", "content": "a", "reasoning": "b"}),
            ),
            is_same(
                TOKENIZE,
                says({"role": "assistant", "content": "a", "reasoning_content": "b"}),
                says({"role": "assistant", "content": "a", "reasoning": "b"}),
            ),
        ),
        "provider_specific_fields": is_label(
            TOKENIZE,
            schema.ChatMessage,
            "provider_specific_fields",
            says(OPENAIS),
            says(OPENAIS | {"provider_specific_fields": {"reasoning": "b"}}),
        ),
        "type": both(
            is_label(TOKENIZE, schema.ChatMessage, "type", says(user("a")), says(user("a", type="text"))),
            refuses(TOKENIZE, says(user("a", type="image_url")), "messages"),
        ),
        **{
            name: refuses(TOKENIZE, says({"role": "assistant", "content": "a", name: {"a": 1}}), "messages")
            for name in ("audio", "function_call")
        },
        "parsed": is_label(
            TOKENIZE, schema.ChatMessage, "parsed", says(OPENAIS), says(OPENAIS | {"parsed": {"word": "cat"}})
        ),
        "refusal": is_same(
            TOKENIZE,
            says({"role": "assistant", "content": "a"}),
            says({"role": "assistant", "content": None, "refusal": "a"}),
        ),
        "id": is_label(TOKENIZE, schema.ChatMessage, "id", says(user("a", id="msg_1")), says(user("a"))),
        "cache_control": is_same(
            TOKENIZE,
            says(user("a", cache_control={"type": "ephemeral"})),
            says(user("a")),
        ),
        "annotations": both(
            is_label(TOKENIZE, schema.ChatMessage, "annotations", says(OPENAIS), says(OPENAIS | {"annotations": [{}]})),
            refuses(TOKENIZE, says(OPENAIS | {"annotations": {"a": 1}}), "messages"),
        ),
    },
    schema.TextPart: {
        "type": refuses(TOKENIZE, says(user([{"type": "image_url", "text": "a"}])), "messages"),
        "text": shown(says(user([{"type": "text", "text": "a"}])), says(user([{"type": "text", "text": "b"}]))),
        "cache_control": makes(
            CHAT,
            TALK | says(user([{"type": "text", "text": "a"}])),
            TALK | says(user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])),
            num_written,
            None,
            0,
        ),
        "prompt_cache_breakpoint": is_label(
            TOKENIZE,
            schema.TextPart,
            "prompt_cache_breakpoint",
            says(user([{"type": "text", "text": "a"}])),
            says(user([{"type": "text", "text": "a", "prompt_cache_breakpoint": {"type": "ephemeral"}}])),
        ),
    },
    schema.ImagePart: {  # what they do is in test_images.py: this model reads no images
        name: refuses(TOKENIZE, says(user([PICTURE | {name: 1}])), "messages")
        for name in ("type", "image_url", "cache_control", "prompt_cache_breakpoint", "uuid")
    },
    schema.ImageURL: {
        name: refuses(TOKENIZE, says(user([PICTURE | {"image_url": {"url": "data:,", name: 1}}])), "messages")
        for name in ("url", "detail")
    },
    schema.VideoPart: {
        name: refuses(TOKENIZE, says(user([FRAMES | {name: "1"}])), "messages") for name in ("type", "video", "fps")
    },
    schema.VideoURLPart: {
        name: refuses(TOKENIZE, says(user([{"type": "video_url", "video_url": CLIP} | {name: 1}])), "messages")
        for name in ("type", "video_url")
    },
    schema.VideoURL: {
        name: refuses(TOKENIZE, says(user([{"type": "video_url", "video_url": CLIP | {name: "1"}}])), "messages")
        for name in ("url", "fps")
    },
    schema.RefusalPart: {
        name: is_same(
            TOKENIZE,
            says({"role": "assistant", "content": "a"}),
            says({"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}),
        )
        for name in ("type", "refusal")
    },
    schema.ToolCallMessage: {
        "id": shown(says(called()), says(called(id="call-2"))),
        "type": refuses(TOKENIZE, says(called(type="computer")), "messages"),
        "function": shown(says(called()), says(called(function={"name": "look_up", "arguments": "{}"}))),
        "index": shown(says(called_twice(0, 1)), says(called_twice(1, 0))),
    },
    schema.CustomCallMessage: {
        "id": shown(says(called_custom()), says(called_custom(id="call-2"))),
        "type": refuses(TOKENIZE, says(called(type="custom")), "messages"),
        "custom": is_same(TOKENIZE, says(called_custom()), says(called(function=PATCH))),
        "index": shown(says(called_both(0, 1)), says(called_both(1, 0))),
    },
    schema.CustomCall: {
        "name": shown(says(called_custom()), says(called_custom(custom={"name": "other", "input": "a b"}))),
        "input": shown(says(called_custom()), says(called_custom(custom={"name": "edit", "input": "c"}))),
    },
    schema.FunctionCall: {
        "name": shown(says(called()), says(called(function={"name": "other", "arguments": '{"word": "cat"}'}))),
        "arguments": both(
            shown(says(called()), says(called(function={"name": "look_up", "arguments": '{"word": "dog"}'}))),
            shown(says(called()), says(called(function={"name": "look_up", "arguments": '{"word": "ca'}))),
        ),
        "parsed_arguments": is_label(
            TOKENIZE,
            schema.FunctionCall,
            "parsed_arguments",
            says(called(function=PATCH)),
            says(called(function=PATCH | {"parsed_arguments": {"input": "c"}})),
        ),
    },
    schema.Tool: {
        "type": both(
            *(
                refuses(path, base | {"tools": [{"type": "functions", "function": {"name": "f"}}]}, "tools")
                for path, base in BASES.items()
            ),
            *(
                is_same(path, base, base | {"tools": [{"type": kind, kind: {"name": "f"}}]})
                for path, base in BASES.items()
                for kind in ("custom", "web_search")
            ),
        ),
        "cache_control": is_same(
            TOKENIZE,
            says(user("a"), tools=[tool()]),
            says(user("a"), tools=[tool() | {"cache_control": {"type": "ephemeral"}}]),
        ),
        "function": shown(says(user("a"), tools=[tool()]), says(user("a"), tools=[tool("other")])),
    },
    schema.Function: {
        "name": shown(says(user("a"), tools=[tool()]), says(user("a"), tools=[tool("other")])),
        "description": shown(says(user("a"), tools=[tool()]), says(user("a"), tools=[tool(description="Looks up.")])),
        "parameters": shown(says(user("a"), tools=[tool()]), says(user("a"), tools=[tool(parameters={})])),
        "strict": both(
            *(
                is_label(
                    CHAT, schema.Function, "strict", asked | {"tools": [tool()]}, asked | {"tools": [tool(strict=True)]}
                )
                for asked in (TALK, FORCED)
            )
        ),
    },
    schema.AllowedChoice: {
        "type": refuses(CHAT, FORCED | {"tool_choice": allowed("other") | {"type": "allowed"}}, "tool_choice"),
        "allowed_tools": refuses(CHAT, FORCED | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    },
    schema.AllowedTools: {
        "mode": both(
            makes(
                CHAT,
                FORCED | {"tool_choice": allowed("other", mode="auto")},
                FORCED | {"tool_choice": allowed("other")},
                lambda it: len(calls(it)) > 0,
                False,
                True,
            ),
            refuses(CHAT, FORCED | {"tool_choice": allowed("other", mode="none")}, "tool_choice"),
        ),
        "tools": both(
            makes(
                CHAT,
                FORCED | {"tool_choice": allowed("look_up")},
                FORCED | {"tool_choice": allowed("other")},
                lambda it: set(calls(it)),
                {"look_up"},
                {"other"},
            ),
            is_same(CHAT, FORCED, FORCED | {"tool_choice": allowed("look_up", "other")}),
            refuses(CHAT, FORCED | {"tool_choice": allowed("other", "nothing")}, "tool_choice"),
            refuses(CHAT, FORCED | {"tool_choice": allowed()}, "tool_choice"),
        ),
    },
    schema.NamedTool: {
        "type": refuses(CHAT, FORCED | {"tool_choice": {"type": "tool", "function": {"name": "other"}}}, "tool_choice"),
        "function": makes(
            CHAT,
            FORCED | {"tool_choice": named("look_up")},
            FORCED | {"tool_choice": named("other")},
            calls,
            ["look_up"],
            ["other"],
        ),
    },
    schema.NamedFunction: {
        "name": both(
            makes(
                CHAT,
                FORCED | {"tool_choice": named("look_up")},
                FORCED | {"tool_choice": named("other")},
                calls,
                ["look_up"],
                ["other"],
            ),
            refuses(CHAT, FORCED | {"tool_choice": named("nothing")}, "tool_choice"),
        )
    },
    schema.EmbeddingRequest: {
        "model": refuses(EMBEDDINGS, EMBEDDED | {"model": "nobody"}, "model", 404),
        "input": both(
            embeds_apart({"input": "a"}, {"input": "b"}),
            makes(EMBEDDINGS, {"input": "a"}, {"input": ["a", "b"]}, lambda it: len(it.body["data"]), 1, 2),
            makes(EMBEDDINGS, {"input": [64, 65]}, {"input": [[64], [65, 66]]}, tokens_in, 2, 3),
        ),
        "encoding_format": makes(
            EMBEDDINGS, EMBEDDED, EMBEDDED | {"encoding_format": "base64"}, lambda it: type(numbers(it)[0]), list, str
        ),
        "dimensions": makes(
            EMBEDDINGS, EMBEDDED | {"dimensions": 3}, EMBEDDED | {"dimensions": 2}, lambda it: len(numbers(it)[0]), 3, 2
        ),
        "normalize": keeps_length("normalize"),
        "use_activation": keeps_length("use_activation"),
        "truncate_prompt_tokens": makes(
            EMBEDDINGS, {"input": [64, 65, 66]}, {"input": [64, 65, 66], "truncate_prompt_tokens": 2}, tokens_in, 3, 2
        ),
        "add_special_tokens": makes(EMBEDDINGS, EMBEDDED, EMBEDDED | {"add_special_tokens": False}, tokens_in, 12, 11),
        "request_id": makes(
            EMBEDDINGS,
            EMBEDDED | {"request_id": "mine"},
            EMBEDDED | {"request_id": "my/0"},
            lambda it: it.body["id"].partition("-")[2],
            "mine",
            "my/0",
        ),
        "cache_salt": salts(EMBEDDINGS, {"input": "embedded " * 30}),
        "priority": goes_first(EMBEDDINGS, EMBEDDED),
        "user": reaches_log(EMBEDDINGS, EMBEDDED),
    },
    schema.ScoreRequest: {
        **compares(SCORE, SCORED, "text_1", "text_2"),
        "text_1": scores_apart(SCORE, SCORED, SCORED | {"text_1": "Bread"}),
        "text_2": makes(SCORE, SCORED, SCORED | {"text_2": "Bread"}, lambda it: len(scores(it)), 2, 1),
        "data_1": scores_apart(SCORE, {"data_1": "a", "data_2": "b"}, {"data_1": "c", "data_2": "b"}),
        "data_2": scores_apart(SCORE, {"data_1": "a", "data_2": "b"}, {"data_1": "a", "data_2": "c"}),
        "queries": scores_apart(SCORE, {"queries": "a", "documents": "b"}, {"queries": "c", "documents": "b"}),
        "documents": scores_apart(SCORE, {"queries": "a", "documents": "b"}, {"queries": "a", "documents": "c"}),
        "items": scores_apart(SCORE, {"queries": "a", "items": "b"}, {"queries": "a", "items": "c"}),
    },
    schema.RerankRequest: {
        **compares(RERANK, RANKED, "query", "documents"),
        "query": scores_apart(RERANK, RANKED, RANKED | {"query": "Bread"}),
        "documents": makes(RERANK, RANKED, RANKED | {"documents": ["a"]}, lambda it: len(scores(it)), 2, 1),
        "top_n": makes(RERANK, RANKED | {"top_n": 0}, RANKED | {"top_n": 1}, lambda it: len(scores(it)), 2, 1),
        "return_documents": makes(
            RERANK,
            RANKED,
            RANKED | {"return_documents": False},
            lambda it: "document" in it.body["results"][0],
            True,
            False,
        ),
    },
    schema.RerankText: {
        "text": makes(
            RERANK,
            RANKED | {"documents": [{"text": "Bread"}]},
            RANKED | {"documents": [{"text": "a"}]},
            lambda it: it.body["results"][0]["document"]["text"],
            "Bread",
            "a",
        )
    },
    schema.TokenizeRequest: {
        "model": refuses(TOKENIZE, {"prompt": "a", "model": "nobody"}, "model", 404),
        "prompt": differs(TOKENIZE, {"prompt": "a"}, {"prompt": "b"}),
        "messages": differs(TOKENIZE, says(user("a")), says(user("b"))),
        "tools": both(
            shown(says(user("a")), says(user("a"), tools=[tool()])),
            refuses(TOKENIZE, {"prompt": "a", "tools": [tool()]}, "tools"),
        ),
        "chat_template_kwargs": both(
            shown(says(user("a")), says(user("a"), chat_template_kwargs={"enable_thinking": False})),
            refuses(TOKENIZE, {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ),
        "add_generation_prompt": both(
            differs(TOKENIZE, says(user("a")), says(user("a"), add_generation_prompt=False)),
            refuses(TOKENIZE, {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ),
        "continue_final_message": both(
            differs(
                TOKENIZE,
                says(user("a"), add_generation_prompt=False),
                says(user("a"), add_generation_prompt=False, continue_final_message=True),
            ),
            refuses(TOKENIZE, says(user("a"), continue_final_message=True), "continue_final_message"),
            refuses(TOKENIZE, {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ),
        "add_special_tokens": both(
            makes(
                TOKENIZE,
                {"prompt": "a"},
                {"prompt": "a", "add_special_tokens": False},
                lambda it: it.body["tokens"],
                [int(END_OF_TEXT), int(A)],
                [int(A)],
            ),
            refuses(TOKENIZE, says(user("a"), add_special_tokens=True), "add_special_tokens"),
        ),
        "return_token_strs": makes(
            TOKENIZE,
            {"prompt": "a b", "add_special_tokens": False},
            {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True},
            lambda it: it.body.get("token_strs"),
            None,
            ["a", "Ġ", "b"],
        ),
    },
    schema.DetokenizeRequest: {
        "model": refuses(DETOKENIZE, {"tokens": [1], "model": "nobody"}, "model", 404),
        "tokens": both(
            makes(
                DETOKENIZE,
                {"tokens": [int(A)]},
                {"tokens": [int(B), int(EOS)]},
                lambda it: it.body["prompt"],
                "a",
                "b<|im_end|>",
            ),
            refuses(DETOKENIZE, {"tokens": [264]}, "tokens"),
        ),
    },
}

# those that the other server shows
AT_ODD = {"taps", "steer", "cache_salt", "priority", "add_special_tokens", "reasoning_effort", "effort"} | {
    f"{model.__name__}.{name}"
    for model in (
        schema.ChatMessage,
        schema.ToolCallMessage,
        schema.CustomCallMessage,
        schema.CustomCall,
        schema.Function,
    )
    for name in model.model_fields
}
NAMES = [f"{model.__name__}.{name}" for model, rows in ROWS.items() for name in rows]


@pytest.mark.parametrize("name", NAMES)
def test_a_field_has_its_effect(name: str, request: pytest.FixtureRequest):
    model, field = name.split(".")
    is_odd = bool({name, field} & AT_ODD)
    server: Server = request.getfixturevalue("odd" if is_odd else "server")
    ROWS[getattr(schema, model)][field](server)


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, COMPLETION), (CHAT, TALK)])
@pytest.mark.parametrize("more", [{}, ABC, {"n": 2, "temperature": 1, "seed": 1}], ids=["plain", "held", "two"])
def test_streamed_token_ids_are_those_of_the_whole_answer(
    server: Server, path: str, base: dict[str, Any], more: dict[str, Any]
):
    asked = base | more | {"return_token_ids": True}
    whole = asking.post(server, path, asked)
    events = events_of(asking.post(server, path, asked | {"stream": True}))
    prompts = [found for each in (*events, *(event["choices"][0] for event in events))
               if (found := each.get("prompt_token_ids"))]  # fmt: skip
    text, of_chat = base.get("prompt"), {key: base[key] for key in base if key == "messages"}
    prompt = asking.post(server, TOKENIZE, {"prompt": text} if text else of_chat).body["tokens"]
    assert prompts == [prompt] * len(whole.choices)
    assert whole.body.get("prompt_token_ids", whole.choices[0].get("prompt_token_ids")) == prompt
    for choice in whole.choices:
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [id for each in chunks for id in each.get("token_ids", ())] == choice["token_ids"]
    assert sum(len(choice["token_ids"]) for choice in whole.choices) == tokens_out(whole)


def test_an_id_is_refused_while_another_request_has_it(server: Server):
    asked = COMPLETION | {"request_id": "twice"}
    with asking.begin(server, COMPLETIONS, asked | {"max_tokens": 7000, "ignore_eos": True}):
        wire.wait_until(lambda: asking.post(server, COMPLETIONS, asked).status == 400)
        answer = asking.post(server, COMPLETIONS, asked)
        assert "the request id cmpl-twice is in use; choose another" in answer.error["message"]
        assert asking.post(server, CHAT, TALK | {"request_id": "twice"}).status == 200, "a chat's has another prefix"
    wire.wait_until(lambda: asking.post(server, COMPLETIONS, asked).status == 200)


def test_a_template_without_reasoning_effort_does_not_get_it(server: Server):
    is_same(CHAT, TALK, TALK | EFFORT)(server)


@pytest.mark.parametrize(
    "more",
    [
        {"audio": {"format": "wav", "voice": "ash"}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"web_search_options": {}},
        {"moderation": {"model": "m"}},
        {"modalities": ["audio"]},
    ],
    ids=lambda more: next(reversed(more)),
)
def test_what_would_change_an_answer_and_is_not_built_is_refused_by_name(server: Server, more: dict[str, Any]):
    refuses(CHAT, TALK | more, next(reversed(more)))(server)


def test_every_field_of_every_body_has_a_row():
    bodies = {each for each in vars(schema).values() if isinstance(each, type) and issubclass(each, schema.Body)}
    bodies -= {schema.Body, schema.Sampling, schema.Generation}  # whose fields their children have
    bodies -= {schema.MediaPart, schema.Picture, schema.Clip, schema.PooledRequest, schema.ComparisonRequest}
    bodies -= {schema.ClassifyRequest, schema.PoolingRequest}  # of routes for classifiers
    bodies -= {schema.LoadAdapterRequest, schema.UnloadAdapterRequest}  # of routes that test_lora asks
    bodies -= {schema.ModelRequest}  # of routes that test_models asks
    bodies -= {schema.AbortRequest, schema.VersionRequest}  # of routes that test_pause asks
    bodies -= {schema.TransferRequest, schema.UpdateRequest, schema.FinishRequest}  # of those that test_trainers asks
    assert {each.__name__: set(each.model_fields) for each in bodies} == {
        each.__name__: set(rows) for each, rows in ROWS.items()
    }


def test_a_prompt_is_read_with_its_special_tokens_and_a_message_is_text(server: Server):
    messages = [
        str(model.model_fields["prompt"].description) for model in (schema.CompletionRequest, schema.TokenizeRequest)
    ]
    assert all("special token" in each for each in messages)
    assert asking.post(server, TOKENIZE, {"prompt": "a<|im_end|>"}).body["tokens"] == [int(A), int(EOS)]
    usage = asking.post(server, COMPLETIONS, COMPLETION | {"prompt": "a<|im_end|>"}).usage
    assert usage["prompt_tokens"] == 2
    spelt, plain = (asking.post(server, CHAT, TALK | says(user(text))).usage for text in ("a<|im_end|>", "a"))
    assert spelt["prompt_tokens"] - plain["prompt_tokens"] == len("<|im_end|>"), "a byte each"
