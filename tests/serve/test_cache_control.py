"""What is kept in the prefix cache and said of it: OpenAI's SDK on a real server, and each API over a scripted engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asking
import openai
import pytest
import scripted
import serving
import wire
from openai.types import CompletionUsage
from openai.types.responses import ResponseUsage
from serving import Server

from atom.config import Config
from atom.config.load import load
from atom.runtime.types import PrefixHit, RetainedPrefix
from atom.serve.auth.tenants import read_keys
from atom.serve.engine.frames import Message
from atom.serve.engine.protocol import Admitted, Finish, Output, Outputs, Submit
from atom.serve.http.cache_usage import Written, count_written

BLOCK = 16
KEPT = {"type": "ephemeral"}
LONG = "The quick brown fox jumps over the lazy dog. " * 3
COMPLETION: dict[str, Any] = {"model": "talker", "max_tokens": 1, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks a word up.", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "forget", "parameters": {}}}


@pytest.fixture(scope="module")
def small(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with 64 blocks, and two keys of which one may retain 16."""
    folder = tmp_path_factory.mktemp("small")
    limits = ["serve.num_kvcache_blocks=64", "serve.max_model_len=1024", "serve.cache_retention_share=0.25"]
    with serving.started(talker, folder, *limits, "serve.http.api_keys='one,two'") as server:
        yield server


@pytest.fixture(scope="module")
def one(small: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{small.url}/v1", api_key="one", max_retries=0)


@pytest.fixture(scope="module")
def two(small: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{small.url}/v1", api_key="two", max_retries=0)


def complete(client: openai.OpenAI, prompt: str | list[str], **more: Any) -> openai.types.Completion:
    completion = client.completions.create(**COMPLETION, prompt=prompt, extra_body=more)
    assert completion.usage is not None
    assert CompletionUsage.model_validate(completion.usage.model_dump()) == completion.usage
    return completion


def fill(client: openai.OpenAI, name: str) -> None:
    """Have prompts computed that take all blocks."""
    complete(client, [f"{number} {name} {LONG}" for number in range(9)])


def metrics_of(server: Server) -> dict[str, float]:
    text = asking.send(server, "GET", "/metrics", headers={"Authorization": "Bearer one"}).body
    values = [line.rsplit(" ", 1) for line in text.splitlines() if "retained" in line and line[0] != "#"]
    return {name.partition("{")[0]: float(value) for name, value in values}


def num_cached(completion: openai.types.Completion) -> int:
    assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
    return completion.usage.prompt_tokens_details.cached_tokens or 0


def test_a_prompt_that_is_retained_outlives_others_and_the_metrics_count_it(one: openai.OpenAI, small: Server):
    kept, lost = f"kept {LONG}", f"lost {LONG}"
    written = complete(one, kept, cache_retention={"seconds": 600}).usage
    assert written is not None and written.prompt_tokens_details is not None
    assert written.prompt_tokens_details.cache_write_tokens == len(kept) // BLOCK * BLOCK
    plain = complete(one, lost).usage
    assert plain is not None and plain.prompt_tokens_details is not None
    assert plain.prompt_tokens_details.cache_write_tokens is None
    began = time.time()
    fill(one, "a")
    gone = complete(one, lost, explain=True)
    assert (num_cached(gone), gone.prefix_hit["reason"]) == (0, "evicted")  # type: ignore[attr-defined]
    assert began - 0.001 <= gone.prefix_hit["evicted_at"] <= time.time()  # type: ignore[attr-defined]
    assert num_cached(complete(one, kept)) == (len(kept) - 1) // BLOCK * BLOCK
    wire.wait_until(lambda: metrics_of(small)["atom:kv_blocks_retained_found_total"])  # until a heartbeat
    counts = metrics_of(small)
    assert counts["atom:kv_blocks_retained"] == len(kept) // BLOCK
    assert counts["atom:kv_blocks_retained_overridden_total"] == 0


def test_running_requests_take_what_is_retained_if_nothing_else_is_free(one: openai.OpenAI, two: openai.OpenAI):
    kept = f"another {LONG}"
    complete(two, kept, cache_retention={"seconds": 600, "priority": 0})
    complete(one, LONG * 5, cache_salt="s")  # 43 of 64 blocks
    assert num_cached(complete(two, kept)) > 0
    complete(one, LONG * 7, cache_salt="t")  # 60
    assert num_cached(complete(two, kept)) == 0


def test_a_salt_is_named_to_its_own_key_only(one: openai.OpenAI, two: openai.OpenAI):
    prompt = f"salted {LONG}"
    complete(one, prompt, cache_salt="a")
    hits = [complete(client, prompt, cache_salt="b", explain=True).prefix_hit for client in (one, two)]  # type: ignore[attr-defined]
    assert [hit["reason"] for hit in hits] == ["other_salt", "end_of_prompt"], "the second hits the first's"
    hit = complete(two, prompt, cache_salt="c", explain=True).prefix_hit  # type: ignore[attr-defined]
    assert hit["reason"] == "other_salt", "of its own"
    hit = complete(two, f"salted {LONG[:-9]}!", cache_salt="a", explain=True).prefix_hit  # type: ignore[attr-defined]
    assert hit["reason"] != "different_token", "of the first key's prompt"


def test_a_chat_s_parts_keep_their_beginnings_and_the_message_that_differs_is_named(server: Server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(last: str, *, streams: bool = False) -> Any:
        system = {"role": "system", "content": [{"type": "text", "text": LONG, "cache_control": KEPT}]}
        body: dict[str, Any] = COMPLETION | {"messages": [system, {"role": "user", "content": last}]}
        body["extra_body"] = {"explain": True, "chat_template_kwargs": {"enable_thinking": False}}
        if not streams:
            return client.chat.completions.create(**body)
        *_, end = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        return end

    first = ask("What is the first word?")
    details = first.usage.prompt_tokens_details
    assert len(LONG) - BLOCK < details.cache_write_tokens + details.cached_tokens <= len(LONG) + BLOCK
    second = ask("What is the last word?", streams=True)
    assert second.usage.prompt_tokens_details.cache_write_tokens == 0
    assert (second.prefix_hit["reason"], second.prefix_hit["part"]) == ("different_token", "messages.1")
    assert second.prefix_hit["token"]["text"] == "l"


def test_a_response_says_what_it_wrote_and_where_its_hit_ended(server: Server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "talker", "input": f"respond {LONG}", "max_output_tokens": 1, "temperature": 0}
    more = {"cache_retention": {"seconds": 5}, "explain": True}
    response = client.responses.create(**body, extra_body=more)
    assert response.usage is not None
    assert ResponseUsage.model_validate(response.usage.model_dump()) == response.usage
    details = response.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == response.usage.input_tokens // BLOCK * BLOCK
    *_, last = client.responses.create(**body, extra_body=more, stream=True)
    assert last.response.prefix_hit["reason"] == "end_of_prompt"


# over an engine whose part the test plays


@pytest.fixture(scope="module")
def config(talker: Path) -> Config:
    return load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker]"])


def answer(submit: Submit, hit: PrefixHit | None = None, num_cached: int = 0) -> list[Message]:
    output = Output(submit.id, 0, "a", [1], None, Finish("eos", 1, num_cached, 0.0))
    output.admitted = Admitted(num_cached, hit)
    return [Outputs([output], 1, {})]


def spans_of(config: Config, body: dict[str, Any], path: str) -> tuple[tuple[RetainedPrefix, ...], Submit]:
    response, seen = scripted.post(config, answer, body, path)
    assert response.status_code == 200, response.text
    return seen[0].options.retained, seen[0]


def test_a_tool_s_cache_control_reaches_to_the_end_of_tools_and_system_prompt(config: Config):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "tools": [OTHER, TOOL | {"cache_control": KEPT | {"ttl": "1h"}}]}
    (span,), submit = spans_of(config, body, "/v1/chat/completions")
    assert span.seconds == 3600 and span.priority == 50
    (other,), second = spans_of(
        config, body | {"messages": [messages[0], {"role": "user", "content": "No"}]}, "/v1/chat/completions"
    )
    assert other == span and second.prompt[: span.num_tokens] == submit.prompt[: span.num_tokens]
    assert second.prompt[span.num_tokens] != submit.prompt[span.num_tokens], "the user's first word follows"


def test_what_is_no_form_of_anthropics_is_a_hint_and_null_is_none(config: Config):
    for control in ({"type": "persistent"}, KEPT | {"ttl": "2h"}, {}, None):
        messages = [{"role": "user", "content": "Hello", "cache_control": control}]
        assert spans_of(config, {"messages": messages}, "/v1/chat/completions")[0] == ()


def test_a_prompt_that_was_cut_keeps_nothing(config: Config):
    body = {"messages": [{"role": "user", "content": "Hello", "cache_control": KEPT}]}
    assert len(spans_of(config, body, "/v1/chat/completions")[0]) == 1
    assert spans_of(config, body | {"truncate_prompt_tokens": 5}, "/v1/chat/completions")[0] == ()


def test_each_block_of_a_message_has_its_place_in_the_prompt(config: Config):
    blocks = [{"type": "text", "text": text, "cache_control": KEPT} for text in ("first", "<|im_end|>", "third ", " ")]
    body = {"model": "talker", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    spans, submit = spans_of(config, body, "/v1/messages")
    text = scripted.decode(config, submit.prompt)
    ends = [len(scripted.decode(config, submit.prompt[: span.num_tokens])) for span in spans]
    assert [
        text[:end].endswith(last) for end, last in zip(ends, ("first", "<|im_end|>", "third", "third"), strict=True)
    ]
    assert ends == sorted(ends) and ends[2] == ends[3], "what is blank counts up to the block before it"


def test_counting_tokens_looks_for_no_part(config: Config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.serve.anthropic.prompt.find_parts", None)
    body = {"model": "talker", "messages": [{"role": "user", "content": "Hello"}], "cache_control": KEPT}
    response, _ = scripted.post(config, answer, body, "/v1/messages/count_tokens")
    assert response.status_code == 200


def test_an_explanation_comes_with_each_api_and_only_if_asked_for(config: Config):
    hit = PrefixHit(16, "different_token", 17, 40, 41)
    shown = {"cached_tokens": 16, "reason": "different_token", "index": 17, "engine": 0}
    shown |= {"token": {"id": 40, "text": "I"}, "earlier_token": {"id": 41, "text": "J"}}
    own = {"tenants": read_keys("a"), "headers": {"Authorization": "Bearer a"}}

    def explain(submit: Submit) -> list[Message]:
        return answer(submit, hit if submit.params.explain else None, 16)

    ask = {"model": "talker", "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}
    for path, body, part in (
        ("/v1/completions", {"prompt": LONG}, {}),
        ("/v1/chat/completions", ask, {"part": "messages.0"}),
        ("/v1/messages", ask, {"part": "messages.0"}),
        ("/v1/responses", {"input": LONG}, {"part": "messages.0"}),
    ):
        whole, _ = scripted.post(config, explain, body | {"explain": True}, path, **own)
        assert whole.json()["prefix_hit"] == shown | part, path
        of_anyone, _ = scripted.post(config, explain, body | {"explain": True}, path)
        assert {**of_anyone.json()["prefix_hit"], "earlier_token": shown["earlier_token"]} == shown | part
        assert "earlier_token" not in of_anyone.text
        assert "prefix_hit" not in scripted.post(config, explain, body, path)[0].text
        streamed, _ = scripted.post(config, explain, body | {"explain": True, "stream": True}, path, **own)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        found = [
            each.get("prefix_hit") or (each.get("message") or each.get("response") or {}).get("prefix_hit")
            for each in events
        ]
        assert [each for each in found if each] == [shown | part], path


def test_several_prompts_have_an_explanation_each(config: Config):
    def explain(submit: Submit) -> list[Message]:
        return answer(submit, PrefixHit(0, "evicted", len(submit.prompt), seconds=2.0))

    began = time.time()
    response, _ = scripted.post(config, explain, {"prompt": ["Hello", "you"], "explain": True}, "/v1/completions")
    found = response.json()["prefix_hit"]
    assert [each["index"] for each in found] == [5, 3]
    assert all(began - 2.001 <= each["evicted_at"] <= time.time() - 1.999 for each in found)


def test_a_key_s_name_goes_with_what_it_retains(config: Config):
    body = {"prompt": "Hello", "cache_retention": {"priority": 7}}
    keys = {"tenants": read_keys("a,b"), "headers": {"Authorization": "Bearer b"}}
    _, (submit,) = scripted.post(config, answer, body, "/v1/completions", **keys)
    assert submit.options.tenant == "key2" and submit.params.cache_retention == {"seconds": 300.0, "priority": 7}
    refused, _ = scripted.post(config, answer, {"prompt": "a", "cache_retention": {"seconds": 0}}, "/v1/completions")
    assert refused.status_code == 400 and "cache_retention.seconds" in refused.text


@pytest.mark.parametrize(
    ("spans", "num_cached", "written"),
    [
        ([(40, 300.0)], 0, Written(32, 0)),
        ([(40, 300.0)], 16, Written(16, 0)),
        ([(40, 300.0)], 48, Written()),
        ([(40, 3600.0), (100, 300.0)], 0, Written(64, 32)),
        ([(40, 3600.0), (100, 300.0)], 48, Written(48, 0)),
        ([(100, 3600.0), (40, 300.0)], 16, Written(0, 80)),
    ],
)
def test_written_tokens_are_counted_as_anthropic_counts_them(
    spans: list[tuple[int, float]], num_cached: int, written: Written
):
    assert count_written([RetainedPrefix(*span, 50) for span in spans], num_cached, BLOCK) == written
