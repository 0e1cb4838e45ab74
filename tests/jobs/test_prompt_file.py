"""The prompts of a file, and what is left of them once some have answers."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.errors import ConfigError
from atom.jobs.prompt_file import ANSWER_FIELDS, Entry, read_prompts, without_answered
from atom.llm import answer
from atom.runtime.requests.taps import Registered
from atom.runtime.types import Sequence, Tap
from atom.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('["a\\nb", [1, 2]]', ["a\nb", [1, 2]]),
        ("one\n\n  two: [x]  \n", ["one", "  two: [x]  "]),
        ('{"prompt": "a", "id": 3}\n"quoted"\n[4, 5]\n{name}: hi\n17', ["a", "quoted", [4, 5], "{name}: hi", "17"]),
        ('{\n "prompt": "a"\n}\n', ["a"]),
        ('{"prompt": "a\u2028b"}\n', ["a\u2028b"]),
        ('[{"prompt": "a", "id": 3}, "b"]', ["a", "b"]),
    ],
)
def test_prompts_come_from_a_file_and_from_stdin(
    text: str, prompts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "prompts").write_text(text)
    assert [entry.content for entry in read_prompts(f"@{tmp_path}/prompts")] == prompts
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert [entry.content for entry in read_prompts(None)] == prompts


def test_a_prompt_needs_no_file():
    for given, prompts in (("one", ["one"]), ([1, 2, 3], [[1, 2, 3]]), ([[1], "x"], [[1], "x"])):
        assert [entry.content for entry in read_prompts(given)] == prompts


def test_an_object_has_a_prompt_or_messages_and_keeps_its_other_fields(tmp_path: Path):
    talk = [{"role": "user", "content": "hi"}]
    (tmp_path / "in").write_text(f'{json.dumps({"id": 7, "messages": talk})}\n{{"prompt": "x", "tag": null}}\ny')
    assert read_prompts(f"@{tmp_path}/in", is_chat=True) == [
        Entry(f"line 1 of {tmp_path}/in", talk, {"id": 7, "messages": talk}),
        Entry(f"line 2 of {tmp_path}/in", "x", {"prompt": "x", "tag": None}),
        Entry(f"line 3 of {tmp_path}/in", "y", {"prompt": "y"}),
    ]


BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


@pytest.mark.parametrize(
    ("line", "is_chat", "why"),
    [
        ('{"no": 1}', True, 'has neither "prompt" nor "messages"; an object needs one of them'),
        ('{"prompt": "a", "messages": []}', True, 'has both "prompt" and "messages"; an object needs one of them'),
        ('{"messages": [{"role": "user", "content": "a"}]}', False, "add job.chat=true"),
        ('{"messages": []}', True, '"messages" is []; give a list of objects such as {"role": "user", "content": "…"}'),
        ('{"messages": [{"content": "a"}]}', True, "give a list of objects"),
        ('{"prompt": null}', False, '"prompt" is None; give a text or a list of token ids'),
        ('{"prompt": "a", "text": "b"}', False, "has the field text, which its answer has too; rename it"),
        ('{"prompt": "a"', False, "begins like an object and is not valid JSON"),
        ('{ "prompt": "a", }', False, "begins like an object and is not valid JSON"),
        (
            json.dumps(BATCH),
            True,
            "is a line of an OpenAI batch (custom_id, method, url, body); answer it with job=batch",
        ),
    ],
)
def test_other_lines_are_refused_by_their_number(line: str, is_chat: bool, why: str, tmp_path: Path):
    (tmp_path / "in").write_text(f"a text\n\n{line}\n")
    with pytest.raises(ConfigError, match=f"^line 3 of {re.escape(str(tmp_path))}/in.*{re.escape(why)}"):
        read_prompts(f"@{tmp_path}/in", is_chat=is_chat)


def test_a_file_of_one_line_is_refused_by_its_number_too(tmp_path: Path):
    (tmp_path / "in").write_text('{"no": 1}\n')
    with pytest.raises(ConfigError, match=r"^line 1 of "):
        read_prompts(f"@{tmp_path}/in")


def test_the_fields_of_an_answer_are_those_that_an_object_may_not_have():
    params = SamplingParams(n=2, logprobs=1, prompt_logprobs=1)
    tapped = Registered(["model.layers.0"], shape=(4,)).open([Tap("model.layers.0")])
    sequence = Sequence("id", [1], params, tapped=tapped)
    sequence.finished_at, sequence.error = 1.0, "no"
    assert set(answer(sequence)) == ANSWER_FIELDS


def done(**fields: Any) -> str:
    return json.dumps({**fields, "text": "x", "finish_reason": "eos"}) + "\n"


def test_entries_that_a_file_answers_are_left_out(tmp_path: Path):
    file = tmp_path / "out"
    entries = read_prompts([{"id": at, "prompt": "same"} for at in range(3)] + ["twice", "twice"])
    assert without_answered(entries, file, 1) == entries
    file.write_text(done(prompt="same", id=1) + done(prompt="twice") + done(prompt="same", id=2, error="failed"))
    assert without_answered(entries, file, 1) == [entries[0], entries[2], entries[4]]
    file.write_text(done(prompt="same", id=0) + 2 * done(id=1, prompt="same"))
    assert without_answered(entries[:2], file, 2) == [entries[0]]


def test_a_line_that_was_cut_off_leaves_the_file_and_one_of_another_kind_is_refused(tmp_path: Path):
    file, entries = tmp_path / "out", read_prompts(["a", "b"])
    file.write_text(done(prompt="a") + done(prompt="b")[:-9])
    assert without_answered(entries, file, 1) == entries[1:]
    assert file.read_text() == done(prompt="a")
    file.write_text((done(prompt="a") + done(prompt="b")).rstrip())
    assert without_answered(entries, file, 1) == [], "an editor has removed the last line's end"
    for text in (done(prompt="a") + "notes\n", done(prompt="a") + "notes"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="line 2 is not an answer of job=generate; name another file"):
            without_answered(entries, file, 1)
        assert file.read_text() == text
