"""Bodies that nobody would write by hand: what is served ends as it should, the rest is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import asking
import hypothesis
import pytest
from asking import CHAT, COMPLETIONS
from hypothesis import HealthCheck
from hypothesis import strategies as st
from serving import SPECIAL, Server

QUICK = hypothesis.settings(
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
NASTY = [
    "",
    "\0",
    "\ud800",
    "a\udfffb",
    "\ufdd0",
    "\U0010ffff",
    "<|im_end|>",
    "</think>",
    "🙂",
    "{{ 7*7 }}",
    "\\",
    '"',
    " ",
]
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(max_size=12))
HUGE = [
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**400,
    0.0,
    -0.0,
    5e-324,
    1.7e308,
    float("nan"),
    float("inf"),
]
NUMBERS = st.one_of(st.sampled_from(HUGE), st.integers(-3, 300), st.floats(-3, 3))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
TOKENS = st.lists(st.integers(0, 270), max_size=4)
SCHEMAS = st.one_of(
    st.dictionaries(
        st.sampled_from(["type", "properties", "items", "enum", "const", "$ref", "anyOf"]), ANYTHING, max_size=3
    ),
    st.fixed_dictionaries({"const": ANYTHING}),
    st.fixed_dictionaries({"enum": st.lists(ANYTHING, max_size=3)}),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": TEXTS,
    "temperature": st.one_of(st.floats(0, 2), NUMBERS),
    "top_p": st.one_of(st.floats(0.01, 1), NUMBERS),
    "top_k": st.one_of(st.integers(-1, 300), NUMBERS),
    "min_p": st.one_of(st.floats(0, 1), NUMBERS),
    "max_tokens": st.one_of(st.integers(0, 9), st.sampled_from(HUGE[:3])),
    "min_tokens": st.one_of(st.integers(0, 9), NUMBERS),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=18)),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": TOKENS,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.one_of(st.just({"include_usage": True}), ANYTHING),
    "seed": NUMBERS,
    "n": st.one_of(st.integers(1, 3), NUMBERS),
    "best_of": st.one_of(st.integers(1, 3), NUMBERS),
    "prompt_logprobs": st.one_of(st.integers(0, 3), NUMBERS),
    "presence_penalty": st.floats(-2.1, 2.1),
    "frequency_penalty": st.floats(-2.1, 2.1),
    "repetition_penalty": st.one_of(st.floats(1e-6, 3), NUMBERS),
    "logit_bias": st.dictionaries(st.one_of(st.integers(0, 270).map(str), TEXTS), st.floats(-101, 101), max_size=3),
    "truncate_prompt_tokens": st.one_of(st.integers(0, 9), NUMBERS),
    "cache_salt": TEXTS,
    "priority": NUMBERS,
    "user": TEXTS,
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": st.fixed_dictionaries({"name": TEXTS, "schema": SCHEMAS}),
            }
        ),
        ANYTHING,
    ),
    "structured_outputs": st.one_of(
        st.fixed_dictionaries({"json": SCHEMAS}),
        st.fixed_dictionaries({"choice": st.lists(TEXTS, max_size=3)}),
        ANYTHING,
    ),
    "regex": st.one_of(TEXTS, st.sampled_from(["a{999999}", "(a|b)*c", "(a*)*b", "[^\\s\\S]", "(?i)x", "\\p{Greek}+"])),
    "grammar": st.one_of(TEXTS, st.sampled_from(['start: "a" start', "start: start", 'start: /a+/ "b"', "start: "])),
    "unknown": ANYTHING,
}
OWN = {
    COMPLETIONS: {
        "prompt": st.one_of(TEXTS, TOKENS, st.lists(TEXTS, max_size=3), st.lists(TOKENS, max_size=3), ANYTHING),
        "logprobs": st.one_of(st.integers(0, 3), NUMBERS),
        "echo": st.booleans(),
    },
    CHAT: {
        "messages": st.one_of(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
                        "content": st.one_of(
                            TEXTS, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}))
                        ),
                    }
                ),
                max_size=3,
            ),
            ANYTHING,
        ),
        "logprobs": st.booleans(),
        "top_logprobs": st.one_of(st.integers(0, 3), NUMBERS),
        "tools": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries(
                        {"name": st.sampled_from(["f", "g"])}, optional={"description": TEXTS, "parameters": SCHEMAS}
                    ),
                }
            ),
            max_size=2,
        ),
        "tool_choice": st.one_of(
            st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]), ANYTHING
        ),
        "parallel_tool_calls": st.booleans(),
        "chat_template_kwargs": st.dictionaries(
            st.one_of(st.just("enable_thinking"), TEXTS), st.one_of(st.booleans(), TEXTS), max_size=2
        ),
    },
}
GOOD = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body that would be served, with some of its fields changed."""
    fields = FIELDS | OWN[path]
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True))
    return GOOD[path] | {name: draw(fields[name]) for name in names}


def assert_is_in_order(answer: asking.Answer) -> None:
    """It is served, or refused with a reason."""
    assert answer.status < 500, answer.body
    if answer.status >= 400:
        assert answer.error["message"]
    elif "text/event-stream" in answer.headers["content-type"]:
        assert answer.body.endswith("data: [DONE]\n\n")
        assert '"error":{' not in answer.body
    else:
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in answer.choices)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_values_of_fields_bring_the_server_down(path: str, server: Server):
    statuses: list[int] = []

    @QUICK
    @hypothesis.given(body=bodies(path))
    def send(body: dict[str, Any]) -> None:
        answer = asking.post(server, path, body)
        statuses.append(answer.status)
        assert_is_in_order(answer)

    send()
    assert min(statuses.count(200), statuses.count(400)) > 5, "both ways are taken"
    asking.assert_generates(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/messages"])
def test_no_json_brings_the_server_down(path: str, server: Server):
    @QUICK
    @hypothesis.given(body=ANYTHING)
    def send(body: Any) -> None:
        assert 400 <= asking.post(server, path, body).status < 500

    send()
    asking.assert_generates(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/v1/messages"])
def test_no_bytes_bring_the_server_down(path: str, server: Server):
    @QUICK
    @hypothesis.given(data=st.binary(max_size=40))
    def send(data: bytes) -> None:
        assert 400 <= asking.send(server, "POST", path, data).status < 500

    send()
    asking.assert_generates(server)


MEGABYTE = "a" * 1_000_000
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt": (COMPLETIONS, {"prompt": MEGABYTE}),
    "a prompt of ids": (COMPLETIONS, {"prompt": [1] * 500_000}),
    "many prompts": (COMPLETIONS, {"prompt": ["a"] * 200_000}),
    "a stop string": (COMPLETIONS, {"stop": MEGABYTE}),
    "a bias": (COMPLETIONS, {"logit_bias": {str(token): 1 for token in range(80_000)}}),
    "a choice": (COMPLETIONS, {"structured_outputs": {"choice": [MEGABYTE]}}),
    "a schema": (COMPLETIONS, {"structured_outputs": {"json": {"enum": [MEGABYTE]}}}),
    "a message": (CHAT, {"messages": [{"role": "user", "content": MEGABYTE}]}),
    "a tool": (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "description": MEGABYTE}}]}),
    "a role": (CHAT, {"messages": [{"role": MEGABYTE, "content": "a"}]}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LARGE)
def test_a_megabyte_brings_nothing_down(name: str, server: Server):
    path, more = LARGE[name]
    answer = asking.post(server, path, GOOD[path] | more)
    assert_is_in_order(answer)
    assert len(json.dumps(answer.body)) < 10_000
    asking.assert_generates(server)


def ids(text: str) -> list[int]:
    """The talker's tokens of plain ASCII: one a byte."""
    return [byte - 33 if byte > 32 else 188 + byte for byte in text.encode()]


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_special_token_in_a_message_stays_text(special: str, role: str, server: Server):
    start, end = 256, 257
    content = f"a{special}{special}b"
    tokens = asking.post(server, "/tokenize", {"messages": [{"role": role, "content": content}]}).body["tokens"]
    said = [start, *ids(f"{role}\n{content}"), end, *ids("\n")]
    assert tokens == [*said, start, *ids("assistant\n")]
