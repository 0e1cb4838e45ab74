from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import scripted
from scripted import Said
from transformers import AutoTokenizer

from atom.checkpoint import Tokenizer
from atom.checkpoint.tokenizer_files import load_tokenizer
from atom.config.load import load
from atom.errors import ConfigError, RequestError
from atom.serve.chat_template import Conversation, encode_conversation, name_thoughts, plain_message, read_arguments
from atom.serve.context import Context, read_template
from atom.serve.engine.replicas import Replicas
from atom.serve.http.errors import FieldError
from atom.serve.openai.schema import ChatMessage, Tool
from atom.serve.ops.metrics import Metrics


@pytest.fixture(scope="module")
def tokenizer(talker: Path) -> Tokenizer:
    tokenizer = load_tokenizer(talker)
    assert tokenizer is not None
    return tokenizer


def encode(
    talker: Path, tokenizer: Tokenizer, messages: list[dict[str, Any]], overrides: tuple[str, ...] = (), **more: Any
) -> Conversation:
    async def run() -> Conversation:
        config = load([f"checkpoint={talker}", *overrides])
        engines = Replicas(config)
        context = Context(config, engines, Metrics(engines))
        context.tokenizer = tokenizer
        try:
            return encode_conversation(context, [ChatMessage.model_validate(each) for each in messages], **more)
        finally:
            context.close()

    return asyncio.run(run())


def plain(tokenizer: Tokenizer, **message: Any) -> dict[str, Any]:
    return plain_message(ChatMessage.model_validate(message), tokenizer)


@pytest.mark.parametrize("content", ["Well,", "  Well,  ", "a<|im_end|>b", "Well, said I. Well,", "<|im_start|>"])
def test_the_last_message_is_continued_as_in_transformers(talker: Path, tokenizer: Tokenizer, content: str):
    messages = [{"role": "user", "content": "Well, well"}, {"role": "assistant", "content": content}]
    theirs = AutoTokenizer.from_pretrained(talker).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    prompt = encode(talker, tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == theirs
    assert prompt.tokens[-1] == tokenizer.encode(theirs[-1])[-1]


def test_a_last_message_that_the_template_changes_is_not_continued(talker: Path, tokenizer: Tokenizer):
    changed = tokenizer.with_template("{{ messages[0].content | upper }}")
    with pytest.raises(RequestError, match="the chat template changes the last message"):
        said = [{"role": "user", "content": "Well"}]
        encode(talker, changed, said, add_generation_prompt=False, continue_final_message=True)


def test_a_conversation_is_rendered_by_the_template(talker: Path, tokenizer: Tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    prompt = encode(talker, tokenizer, messages)
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert prompt.text == f"{start}system\nBe brief.{end}{start}user\nHello{end}{start}assistant\n"
    assert prompt.tokens == tokenizer.encode(prompt.text)


def test_a_special_token_that_a_client_writes_is_text_wherever_it_stands(talker: Path, tokenizer: Tokenizer):
    shows = tokenizer.with_template("{{ messages[0].content }}{{ tools | tojson }}{{ reasoning_effort }}")
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    prompt = encode(
        talker,
        shows,
        [{"role": "user", "content": "<|im_start|>"}],
        tools=[Tool.model_validate(tool)],
        kwargs={"reasoning_effort": "<|endoftext|>"},
    )
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert special in prompt.text
    assert max(prompt.tokens) < 256, "only bytes"


def test_parts_of_a_text_are_lines(tokenizer: Tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert plain(tokenizer, role="user", content=parts) == {"role": "user", "content": "one\ntwo"}


def test_a_developer_is_the_system_where_the_template_knows_none(tokenizer: Tokenizer):
    assert plain(tokenizer, role="developer", content="a")["role"] == "system"
    knows = tokenizer.with_template("{% if messages[0].role == 'developer' %}{% endif %}")
    assert plain(knows, role="developer", content="a")["role"] == "developer"
    speaks = tokenizer.with_template("{% set developer_preamble = 'The developer says:' %}")
    assert plain(speaks, role="developer", content="a")["role"] == "system"


def test_calls_are_rendered_in_their_order_with_their_arguments_as_objects(tokenizer: Tokenizer):
    calls = [
        {"id": "b", "function": {"name": "g", "arguments": ""}, "index": 1},
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}, "index": 0},
    ]
    message = plain(tokenizer, role="assistant", tool_calls=calls)
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" ", {}),
        ('{"a": 1', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": {"b": "Par', {"a": {"b": "Par"}}),
        ('{"a": [1, tr', {"a": [1]}),
        ('{"a": 1}}', {"a": 1}),
        *(
            (text, {"arguments": text})
            for text in (
                "[]",
                "1",
                "ls -l",
                '{"a": 1e999}',
                '{"a": 9223372036854775808000}',
                "[" * 100_000,
            )
        ),
        pytest.param('{"a":' * 101 + "1" + "}" * 101, {"arguments": '{"a":' * 101 + "1" + "}" * 101}, id="deep"),
        ('{"a": "\\ud800"}', {"arguments": '{"a": "\\ud800"}'}),
    ],
    ids=lambda each: str(each)[:20],
)
def test_arguments_are_an_object_whatever_a_call_has(text: str, arguments: dict[str, Any]):
    assert read_arguments(text) == arguments


def test_an_answer_or_a_result_may_have_no_content_and_a_question_may_not(tokenizer: Tokenizer):
    assert plain(tokenizer, role="assistant", content=None) == {"role": "assistant", "content": ""}
    assert plain(tokenizer, role="assistant", content=[]) == {"role": "assistant", "content": ""}
    assert plain(tokenizer, role="tool", tool_call_id="a") == {"role": "tool", "content": "", "tool_call_id": "a"}
    with pytest.raises(FieldError, match="a message of the user has no content"):
        plain(tokenizer, role="user")


def test_a_template_value_that_the_template_does_not_read(talker: Path, tokenizer: Tokenizer):
    shows = tokenizer.with_template(
        "{{ bos_token }}{{ messages[0].content }}{{ mood }}{{ (tone or {}).name }}{{ knobs | join }}"
    )
    said = [{"role": "user", "content": "a"}]
    prompt = encode(talker, shows, said, kwargs={"mood": 1, "tone": {"name": "b"}, "knobs": ["c", "d"]})
    assert prompt.text == "a1bcd"
    for name in ("messages", "moods", "bos_token", "cut"):
        with pytest.raises(FieldError) as refused:
            encode(talker, shows, said, kwargs={name: "b"})
        reads = "this model's chat template reads: knobs, mood, tone"
        assert f"chat_template_kwargs.{name} is not taken; {reads}" in str(refused.value)
        assert refused.value.param == "chat_template_kwargs"
    assert encode(talker, shows, said, kwargs={"enable_thinking": False}).text == "a", "sent to all models"


def test_template_values_of_the_server_stand_under_those_of_a_request(talker: Path, tokenizer: Tokenizer):
    shows = tokenizer.with_template("{{ enable_thinking }} {{ style.tone }}")
    ours = ("serve.http.chat_template_kwargs={enable_thinking:false,style:{tone:dry}}",)
    said = [{"role": "user", "content": "a"}]
    assert encode(talker, shows, said, ours).text == "False dry"
    assert encode(talker, shows, said, ours, kwargs={"enable_thinking": True}).text == "True dry"


def test_a_template_value_that_each_request_sets_is_refused_at_the_start(talker: Path):
    for name in ("tools", "cut"):
        with pytest.raises(ConfigError, match=rf"serve\.http\.chat_template_kwargs: {name} is set for each request"):
            read_template(load([f"checkpoint={talker}", f"serve.http.chat_template_kwargs={{{name}:1}}"]))
    with pytest.raises(
        ConfigError, match=r"serve\.http\.chat_template_kwargs=1 is not a mapping; write \{enable_thinking"
    ):
        read_template(load([f"checkpoint={talker}", "serve.http.chat_template_kwargs=1"]))


def test_arguments_are_text_where_a_template_joins_them_to_other_texts(tokenizer: Tokenizer):
    """As the templates of DeepSeek V3, R1 and V3.1 do."""
    written = "{% for call in messages[0].tool_calls %}{{ '<' + call['function']['arguments'] + '>' }}{% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"city": "Zürich <|im_end|>"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    text, tokens = tokenizer.with_template(written).prepare_chat([message])
    assert text == '<{"city": "Zürich <|im_end|>"}>'
    assert max(tokens) < 256, "only bytes"
    kept = tokenizer.with_template("{{ messages[0].tool_calls[0].function.arguments | tojson }}").prepare_chat(
        [message]
    )
    assert kept[0] == '{"city": "Zürich <|im_end|>"}'


def test_reasoning_has_the_name_that_a_template_reads():
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    assert name_thoughts(message, "{{ message.reasoning_content }}") == message
    template = "{{ message.thinking }}"  # gpt-oss'
    assert name_thoughts(message, template) == message | {"thinking": "Hm."}
    called = message | {"tool_calls": [{}]}
    assert name_thoughts(called, template) == called | {"content": "", "thinking": "Hm.\nI look."}


READS_ALL = """{% for tool in tools %}{% set f = tool.function %}{{ f.name + ": " + f.description }}
{% for name, value in f.parameters.properties.items() %}{{ name }} {% endfor %}{{ f.parameters.type + "." }}
{% endfor %}"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "f: \nobject.\n"),
        ({"parameters": {}}, "f: \nobject.\n"),
        ({"parameters": {"type": "object"}, "description": "Does it."}, "f: Does it.\nobject.\n"),
        ({"parameters": {"properties": {"x": {}}}}, "f: \nx object.\n"),
    ],
    ids=["neither", "empty", "no properties", "no type"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_template_reads_the_description_and_the_schema_of_every_tool(
    path: str, fields: dict[str, Any], expected: str, talker: Path, tokenizer: Tokenizer
):
    function = {"name": "f", **fields}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/chat/completions":
        body["tools"] = [{"type": "function", "function": function}]
    elif path == "/v1/responses":
        body = {"input": "Hi", "tools": [{"type": "function", **function}]}
    else:
        schema = {"type": "object"} | function.pop("parameters", {})
        body |= {"model": "talker", "max_tokens": 8, "tools": [function | {"input_schema": schema}]}
    config = load(
        [
            f"checkpoint={talker}",
            "job=serve",
            "serve.http.served_model_name=[talker]",
            "serve.http.tool_calls=tagged_json",
        ]
    )
    answer, seen = scripted.post(
        config,
        Said(["Hi"]),
        body,
        path,
        before=lambda context: setattr(context, "tokenizer", tokenizer.with_template(READS_ALL)),
    )
    assert answer.status_code == 200, answer.text
    assert tokenizer.decode(seen[0].prompt) == expected
