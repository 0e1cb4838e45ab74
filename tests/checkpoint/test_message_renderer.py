"""Each kind of refusal has a small template here, as the real ones are written."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from atom.checkpoint import Tokenizer
from atom.checkpoint.message_renderer import MessageRenderer
from atom.checkpoint.message_rewrites import REWRITES
from atom.errors import RequestError

# one line a message: "role: content", and "role: name(arguments)#id" for a call
LINES = """{% for m in messages %}{% for c in m.tool_calls or [] %}
{{ m.role }}: {{ c.function.name }}({{ c.function.arguments | tojson }})#{{ c.id }}
{% endfor %}{% if m.content or not m.tool_calls %}
{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}"""
SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' and not loop.first %}{{ raise_exception('System first') }}{% endfor %}"
)
ONE_SYSTEM = """{% for m in messages if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('One system') }}{% endif %}
{% endfor %}{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('System first') }}{% endif %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
# as Mistral's: calls and results do not count, so an answer has to stand between a result and the user
ALTERNATE = """{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'system' %}
{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"""
ONE_CALL = "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('One call') }}{% endfor %}"
SHORT_IDS = """{% for m in messages %}{% for id in (m.tool_calls or []) | map(attribute='id') | list + [m.tool_call_id or '123456789'] %}
{% if id | length != 9 %}{{ raise_exception('Ids have 9 characters') }}{% endif %}{% endfor %}{% endfor %}"""
NO_TOOLS = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('No tools') }}{% endfor %}"
FIRST_CALL = LINES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")  # as gpt-oss'
LAST_SYSTEM = """{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}
system: {{ ns.s }}
{% for m in messages if m.role != 'system' %}
{{ m.role }}: {{ m.content }}
{% endfor %}"""
NULL = LINES.replace("m.tool_calls or []", "m.tool_calls or [] if m.content is none")  # as DeepSeek R1's
PARTS = "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}\n\n{% endfor %}"

SYSTEM, USER, AGAIN = (
    {"role": role, "content": text} for role, text in (("system", "Brief."), ("user", "Hi"), ("user", "Well?"))
)
REMINDER = {"role": "system", "content": "Be kind."}
ANSWER, MORE = ({"role": "assistant", "content": text} for text in ("Yes.", "Sure."))


def call(*ids: str, content: Any = "") -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": f"f{id[0]}", "arguments": {}}} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "name": f"f{id[0]}", "content": f"of {id[0]}"}


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(Backend(models.BPE({}, [])), templates={"default": template})


def lines(template: str, *messages: dict[str, Any]) -> list[str]:
    text, _ = tokenizer(template).prepare_chat(list(messages))
    return [line for line in text.splitlines() if line]


CALLS = [USER, call("a1", "b1"), result("b1"), result("a1")]
ALL = [SYSTEM, USER, ANSWER, REMINDER, AGAIN, AGAIN, call("a1", "b1", content="I look."), result("b1"), ANSWER]


def test_messages_that_a_template_takes_are_rendered_as_they_are():
    assert lines(LINES, *ALL) == [
        "system: Brief.",
        "user: Hi",
        "assistant: Yes.",
        "system: Be kind.",
        "user: Well?",
        "user: Well?",
        "assistant: fa({})#a1",
        "assistant: fb({})#b1",
        "assistant: I look.",
        "tool: of b",
        "assistant: Yes.",
    ]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        pytest.param(
            ONE_SYSTEM,
            [SYSTEM, USER, ANSWER, REMINDER, AGAIN],
            ["system: Brief.", "Be kind.", "user: Hi", "assistant: Yes.", "user: Well?"],
            id="a system message in the middle",
        ),
        pytest.param(ONE_SYSTEM, [USER, SYSTEM], ["system: Brief.", "user: Hi"], id="the system's after the user's"),
        pytest.param(
            ALTERNATE + ONE_SYSTEM,
            [SYSTEM, {**REMINDER, "role": "developer"}, USER, AGAIN],
            ["system: Brief.", "Be kind.", "user: Hi", "Well?"],
            id="two instructions and two messages of the user's",
        ),
        pytest.param(ALTERNATE, [USER, ANSWER, MORE], ["user: Hi", "assistant: Yes.", "Sure."], id="two answers"),
        pytest.param(ALTERNATE, [ANSWER, USER], ["user: ", "assistant: Yes.", "user: Hi"], id="an answer in front"),
        pytest.param(
            ALTERNATE,
            [USER, call("a1"), result("a1"), AGAIN],
            ["user: Hi", "assistant: fa({})#SHORT", "tool: of a", "assistant: ", "user: Well?"],
            id="the user's after a result",
        ),
        pytest.param(
            ALTERNATE,
            [USER, call("a1"), AGAIN],
            ["user: Hi", "assistant: fa({})#SHORT", "tool: no result", "assistant: ", "user: Well?"],
            id="a call without a result",
        ),
        pytest.param(
            ONE_CALL,
            CALLS,
            ["user: Hi", "assistant: fa({})#a1", "tool: of a", "assistant: fb({})#b1", "tool: of b"],
            id="two calls in one turn",
        ),
        pytest.param(
            NO_SYSTEM, [SYSTEM, USER, ANSWER], ["user: Brief.", "Hi", "assistant: Yes."], id="no system message"
        ),
        pytest.param(
            NO_TOOLS + ALTERNATE,
            [USER, call("a1", content="I look."), result("a1"), AGAIN],
            ["user: Hi", "assistant: I look.", "Call of fa: {}", "user: Result of fa:", "of a", "Well?"],
            id="no tools",
        ),
        pytest.param(
            NO_TOOLS, [USER, result("a1")], ["user: Hi", "Result of fa:", "of a"], id="a result without a call"
        ),
        pytest.param(
            NO_TOOLS + NO_SYSTEM + ALTERNATE,
            [SYSTEM, USER, AGAIN, call("a1"), result("a1")],
            ["user: Brief.", "Hi", "Well?", "assistant: Call of fa: {}", "user: Result of fa:", "of a"],
            id="neither tools nor a system message nor equal turns",
        ),
    ],
)
def test_messages_that_a_template_refuses_are_rewritten(
    template: str, messages: list[dict[str, Any]], expected: list[str]
):
    with pytest.raises(RequestError):
        tokenizer(template).render_chat(messages)
    short = [each.split("#")[0] for each in expected]
    assert [each.split("#")[0] for each in lines(template + LINES, *messages)] == short


def test_ids_of_calls_become_nine_letters_and_digits_where_a_template_insists_on_them():
    ids = ["call_0", "functions.f:1", "abcDEF123"]
    messages = [USER, call(*ids), *map(result, reversed(ids))]
    assert lines(LINES, *messages)[1].endswith("#call_0")
    template = LINES.replace(
        "{% if m.content", "{% if m.tool_call_id %}{{ m.tool_call_id }} {% endif %}{% if m.content"
    )
    _, *calls, last, middle, first = lines(SHORT_IDS + template, *messages)
    shown = [each.split("#")[1] for each in calls]
    assert [each.split()[0] for each in (first, middle, last)] == shown, "a result has its call's id"
    assert all(len(id) == 9 and id.isalnum() for id in shown) and len(set(shown)) == 3
    assert shown[2] == "abcDEF123", "such an id is kept"
    assert lines(SHORT_IDS + template, *messages)[1:4] == calls, "the same each time, for cached prefixes"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        pytest.param(
            FIRST_CALL,
            CALLS,
            ["user: Hi", "assistant: fa({})#a1", "tool: of a", "assistant: fb({})#b1", "tool: of b"],
            id="calls after the first",
        ),
        pytest.param(
            LAST_SYSTEM,
            [SYSTEM, USER, ANSWER, REMINDER],
            ["system: Brief.", "Be kind.", "user: Hi", "assistant: Yes."],
            id="system messages but the last",
        ),
        pytest.param(
            NULL,
            [USER, call("a1"), result("a1"), call("b1", content="More.")],
            ["user: Hi", "assistant: fa({})#a1", "tool: of a", "assistant: More.", "assistant: fb({})#b1"],
            id="calls in messages whose content is not null",
        ),
        pytest.param(PARTS, [SYSTEM, USER], ["system: Brief.", "user: Hi"], id="contents that are no lists"),
    ],
)
def test_what_a_template_leaves_out_is_shown_by_a_rewrite(
    template: str, messages: list[dict[str, Any]], expected: list[str]
):
    assert [each.split("#")[0] for each in lines(template, *messages)] == [each.split("#")[0] for each in expected]


def test_a_template_that_takes_no_rewrite_says_why_it_refuses_the_messages_as_they_are():
    template = "{{ raise_exception('These ' ~ messages | length ~ ' are wrong') }}"
    with pytest.raises(RequestError, match="the chat template does not take these messages: These 4 are wrong"):
        lines(template, SYSTEM, USER, REMINDER, AGAIN)


def test_a_template_that_leaves_a_text_out_whatever_comes_renders_the_messages_as_they_are():
    assert lines("{{ messages[-1].content }}", USER, ANSWER, AGAIN) == ["Well?"]


def test_a_template_that_shows_results_and_no_calls_renders_the_messages_as_they_are():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert lines(template, USER, call("a1"), result("a1")) == ["user: Hi", "assistant: ", "tool: of a"]
    assert lines(NO_TOOLS + template, USER, call("a1"), result("a1"))[1:] == [
        "assistant: Call of fa: {}",
        "user: Result of fa:",
        "of a",
    ]


def test_what_a_template_leaves_out_is_found_once_for_chats_of_one_form():
    seen: list[list[dict[str, Any]]] = []

    def render(messages: list[dict[str, Any]]) -> str:
        seen.append(messages)
        return " ".join(each["content"] for each in messages)

    renderer = MessageRenderer()
    for num_turns in (3, 4, 5):
        renderer.render(render, [SYSTEM, *[USER, ANSWER] * num_turns])
    assert len(seen) == 4, "three chats, and one with marks"
    renderer.render(render, [USER, SYSTEM])
    assert len(seen) == 6


def test_what_is_known_to_be_left_out_is_not_rendered_again():
    seen: list[int] = []

    def render(messages: list[dict[str, Any]]) -> str:
        seen.append(len(messages))
        return str(messages[-1]["content"])

    renderer = MessageRenderer()
    chat = [SYSTEM, USER, ANSWER, USER, REMINDER, MORE]
    assert renderer.render(render, chat) == ("Sure.", chat)
    seen.clear()
    assert renderer.render(render, chat) == ("Sure.", chat)
    assert seen == [len(chat)]


def test_calls_without_results_are_shown_by_a_template_that_shows_none():
    """An agent that is interrupted goes on with the user's next message."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert lines(template, USER, call("a1"), AGAIN) == ["user: Hi", "assistant: Call of fa: {}", "user: Well?"]


def test_messages_of_other_forms_are_rendered_as_they_are():
    others = [{"content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    assert MessageRenderer().render(lambda messages: "b", others) == ("b", others)


@pytest.mark.timeout(60)
def test_long_chats_are_rewritten_in_linear_time():
    """Were each message compared with all others, or copied again for each, these would take minutes."""
    count = 20_000
    calls = [{"id": f"{at:09}", "function": {"name": "f", "arguments": {}}} for at in range(count)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    users = [{"role": "user", "content": "some words"} for _ in range(count // 4)]
    messages = [*users, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    for rewrite in {rewrite for rewrites in REWRITES for rewrite in rewrites}:
        assert str(rewrite(messages)).count("some words") == len(users)


def test_a_chat_of_spaces_hides_no_loss_of_the_next_chat():
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0}, "a")), templates={"default": LAST_SYSTEM})

    def render(first: str) -> str:
        roles = {"system": first, "user": "Hi", "developer": "Be short."}
        messages = [{"role": role.replace("developer", "system"), "content": text} for role, text in roles.items()]
        return tokenizer.prepare_chat(messages)[0]

    render(" ")
    assert "Be kind." in render("Be kind.") and "Be short." in render("Be kind.")
