"""A chat in the terminal, on a tiny model with random weights."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import serving
import transformers

from atom.cli import main
from atom.config.load import load
from atom.jobs import chat, generate
from atom.jobs.chat import Chat
from atom.llm import LLMEngine

GIVEN = ("level=1", "dtype=fp32", "serve.kv_cache_memory=16777216", "sampling.temperature=0")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save_talker(tmp_path_factory.mktemp("checkpoints") / "talker")


@pytest.fixture(scope="module")
def engine(talker: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_config(load([f"checkpoint={talker}", "job=chat", *GIVEN]))
    yield engine
    engine.close()


def opened(engine: LLMEngine, talker: Path, *overrides: str) -> Chat:
    return Chat(engine, load([f"checkpoint={talker}", "job=chat", *GIVEN, *overrides]))


def test_a_question_is_sent_with_what_was_said_before(engine: LLMEngine, talker: Path, monkeypatch: Any, capsys: Any):
    sent: list[list[int]] = []
    add = engine.add_request
    monkeypatch.setattr(
        engine, "add_request", lambda prompts, *rest, **more: sent.extend(prompts) or add(prompts, *rest, **more)
    )
    talk = opened(engine, talker, "sampling.max_tokens=8")
    talk.ask("Hello")
    talk.ask("And <|im_end|> again?")
    assert [each["role"] for each in talk.messages] == ["user", "assistant"] * 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(talker)
    first = tokenizer.apply_chat_template(talk.messages[:1], add_generation_prompt=True)["input_ids"]
    assert sent[0] == first
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sent[1].count(end) == 3, "what was typed stays text"
    assert tokenizer.decode(sent[1]) == tokenizer.apply_chat_template(
        talk.messages[:3], add_generation_prompt=True, tokenize=False
    )
    (expected,) = engine.generate([sent[0]], talk.params)
    assert talk.messages[1]["content"] == expected["text"]
    shown = "".join(chat.CONTROL.sub("�", talk.messages[at]["content"]) + "\n" for at in (1, 3))
    assert capsys.readouterr().out.lstrip("\n") == shown.lstrip("\n")


def test_a_system_prompt_begins_every_chat(engine: LLMEngine, talker: Path):
    talk = opened(engine, talker, "job.system_prompt=Be brief.", "sampling.max_tokens=2")
    system = {"role": "system", "content": "Be brief."}
    assert talk.messages == [system]
    talk.ask("Hello")
    assert [each["role"] for each in talk.messages] == ["system", "user", "assistant"]
    talk.clear()
    assert talk.messages == [system]


def test_prompts_as_chats_have_it_and_plain_ones_refuse_it(
    engine: LLMEngine, talker: Path, monkeypatch: Any, capsys: Any
):
    asked: list[list[dict[str, str]]] = []
    monkeypatch.setattr(LLMEngine, "from_config", lambda config, clock: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    monkeypatch.setattr(generate, "encode_conversation", lambda _, messages: asked.append(messages) or [1, 2])
    given = [f"checkpoint={talker}", "prompts=[Hi]", "job.system_prompt=Be brief.", "sampling.max_tokens=1", *GIVEN]
    assert main([*given, "job.chat=true"]) == 0
    assert asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]]
    assert main(given) == 2
    assert (
        "job.system_prompt begins a chat, and prompts are sent as they are; set job.chat=true"
        in capsys.readouterr().err
    )


def test_ctrl_c_stops_the_answer_and_keeps_what_came(engine: LLMEngine, talker: Path, monkeypatch: Any):
    talk = opened(engine, talker, "sampling.ignore_eos=true")
    shown: list[str] = []

    def show(text: str, style: str | None = None) -> None:
        shown.append(text)
        if len(shown) == 20:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(talk, "print", show)
    talk.ask("Talk.")
    assert 20 <= len(shown) < 100 and engine.is_finished()
    assert signal.getsignal(signal.SIGINT) is before
    assert talk.messages[1]["content"] and talk.messages[1]["content"] in "".join(shown)
    talk.params.max_tokens = 3
    shown.clear()
    talk.ask("Go on")
    assert len(talk.messages) == 4


def test_reasoning_is_dim_and_no_part_of_the_history(engine: LLMEngine, talker: Path, monkeypatch: Any):
    talk = opened(engine, talker)
    shown: list[tuple[str, str | None]] = []
    monkeypatch.setattr(talk, "print", lambda text, style=None: shown.append((text, style)) if text else None)
    pieces = ["<think>", "Hm, ", "so", "</think>", "\n\n", "Yes", "."]

    def answer(prompts: Any, params: Any, show: Any) -> list[str]:
        for piece in pieces:
            end = "eos" if piece == "." else None
            sequence = SimpleNamespace(error=None)
            show(SimpleNamespace(text=piece, finished=end is not None, finish_reason=end, sequence=sequence))
        return ["id"]

    monkeypatch.setattr(engine, "add_request", answer)
    talk.ask("Hello")
    thoughts = "".join(text for text, style in shown if style == "dim")
    said = "".join(text for text, style in shown if style is None)
    assert (thoughts.strip(), said.strip()) == ("Hm, so", "Yes.")
    assert talk.messages[1]["content"].strip() == "Yes."


def test_a_model_cannot_steer_the_terminal(engine: LLMEngine, talker: Path, capsys: Any):
    opened(engine, talker).print("a\x1b[2J\x9bb\r\x07\n\tc [bold]d :smile:")
    assert capsys.readouterr().out == "a�[2J�b��\n        c [bold]d :smile:"


def test_lines_are_answered_until_exit(talker: Path, engine: LLMEngine, monkeypatch: Any, capsys: Any):
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(LLMEngine, "from_config", lambda config, clock: engine)
    monkeypatch.setattr(
        Chat, "answer", lambda self: asked.append((self.messages[-1]["content"], len(self.messages))) or ""
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/nothing\n/clear\nthree\n/exit\nfour\n"))
    assert main([f"checkpoint={talker}", "job=chat", *GIVEN]) == 0
    assert asked == [("one", 1), ("two", 3), ("three", 1)]
    assert "/nothing is not a command; /clear begins anew" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_forgotten(engine: LLMEngine, talker: Path, capsys: Any):
    talk = opened(engine, talker)
    talk.ask("word " * 3000)
    assert talk.messages == []
    assert "RequestError: " in capsys.readouterr().err


def test_chat_without_prompts_on_a_terminal_is_a_chat(talker: Path, monkeypatch: Any):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(chat, "run", lambda config: 7)
    assert main([f"checkpoint={talker}", "job.chat=true", *GIVEN]) == 7


def test_an_answer_that_is_cut_off_says_by_what(engine: LLMEngine, talker: Path, capsys: Any):
    opened(engine, talker, "sampling.ignore_eos=true", "sampling.max_tokens=4").ask("Hello")
    assert capsys.readouterr().err == "cut off after 4 tokens (sampling.max_tokens)\n"
    talk = opened(engine, talker, "sampling.ignore_eos=true", "serve.max_model_len=64")
    talk.ask("Hello")
    assert re.fullmatch(r"cut off after \d+ tokens \(serve.max_model_len\)\n", capsys.readouterr().err)
    talk.ask("Hello " * 3000)
    assert capsys.readouterr().err.endswith("; /clear begins anew\n")


def test_ctrl_c_at_the_prompt_says_how_to_end(monkeypatch: Any, capsys: Any):
    typed = iter([KeyboardInterrupt, "Hello", EOFError])

    def read(prompt: str) -> str:
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    assert list(chat.read_lines()) == ["Hello"]
    out, err = capsys.readouterr()
    assert err == f"\n{chat.HELP}\n" and out == "\n"
