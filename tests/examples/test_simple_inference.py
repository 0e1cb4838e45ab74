"""The guide's first script: what it asks, in which template, and what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from atom.examples.simple_inference import PROMPTS, main

Asked = list[tuple[list[Any], SamplingParams]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is generated from: prompts and sampling params of each call."""
    calls: Asked = []
    generate = LLMEngine.generate

    def record(self: LLMEngine, prompts: Any, params: Any = None, **others: Any) -> Any:
        calls.append((prompts, params))
        return generate(self, prompts, params, **others)

    monkeypatch.setattr(LLMEngine, "generate", record)
    return calls


def as_text(tokens: list[int], talker: Path) -> str:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(talker / "tokenizer.json")).decode(tokens)


def test_it_warms_up_and_answers_four_prompts_together(
    talker: Path, flags: list[str], asked: Asked, capsys: pytest.CaptureFixture[str]
):
    assert main(flags) == 0
    out, err = capsys.readouterr()
    (warmed, brief), (prompts, params) = asked
    assert (warmed, len(prompts)) == (prompts, 4)
    assert (brief.temperature, params.temperature) == (0.6, 0.6)
    assert brief.max_tokens < params.max_tokens
    assert [as_text(prompt, talker) for prompt in prompts] == [f"[user]{text}[assistant]" for text in PROMPTS], (
        "in the checkpoint's template, with enable_thinking"
    )
    assert re.findall(r"^Prompt: (.*)\nCompletion: ", out, re.MULTILINE) == list(PROMPTS)
    assert "no token has been drafted" in out + err


def test_two_prompts_are_english_and_two_chinese():
    is_chinese = [bool(re.search(r"[\u4e00-\u9fff]", text)) for text in PROMPTS]
    assert sorted(is_chinese) == [False, False, True, True]


@pytest.mark.slow
def test_without_a_template_the_prompts_are_plain(
    talker: Path, flags: list[str], asked: Asked, capsys: pytest.CaptureFixture[str]
):
    (talker / "tokenizer_config.json").write_text("{}")
    assert main([*flags, "--temperature", "0"]) == 0
    assert asked[1][0] == list(PROMPTS)
    assert asked[1][1].temperature == 0


def test_a_template_that_fails_is_one_line(talker: Path, flags: list[str], capsys: pytest.CaptureFixture[str]):
    (talker / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ raise_exception('no') }}"}))
    assert main(flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "atom-run: RequestError: the chat template does not take these messages: no"


def test_a_checkpoint_without_a_tokenizer_is_one_line(
    talker: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    (talker / "tokenizer.json").unlink()
    (talker / "tokenizer_config.json").unlink()
    assert main(flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("atom-run: RequestError: prompt 0: the checkpoint has no tokenizer")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--temperature", "-1"], "atom-run: RequestError: temperature=-1.0 must be a finite number from 0\n"),
        (
            ["--temperature=warm"],
            "atom-run: ConfigError: argument --temperature: invalid float value: 'warm'; see python",
        ),
        (["--temprature=1"], "atom-run: ConfigError: unrecognized arguments: --temprature=1 (did you mean --temper"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line)
    assert (err.count("\n"), out) == (1, "")
