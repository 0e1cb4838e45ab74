"""The guide's profiling script: where its traces are, and what is in them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine
from atom.examples.profile_offline import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, and no folder in the environment."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)
    return tmp_path / "here"


def traces(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pt.trace.json.gz"))


def test_a_trace_of_the_batch_is_in_the_folder_of_the_guide(
    folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*flags, "--input-length", "20", "--output_length=3", "--bs", "2"]) == 0
    (trace,) = traces(folder)
    assert trace.parent == folder / "profiler_traces" / "rank_0"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)
    first, second = capsys.readouterr().out.splitlines()
    assert Path(first.removeprefix("trace: ")).resolve() == trace
    assert re.fullmatch(r"40 tokens in, 6 out, [\d.]+ s: [\d.]+ tokens/s with the profiler on", second)


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_another_folder_is_named_by_flag_or_environment(
    way: str, folder: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
):
    if way == "flag":
        flags = [*flags, "--torch-profiler-dir", "my traces"]
    else:
        monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", "my traces")
    assert main([*flags, "--input-length", "4", "--output-length", "1"]) == 0
    assert [trace.parent for trace in traces(folder)] == [folder / "my traces" / "rank_0"]


@pytest.mark.parametrize("kind", [[], ["--random-input"], ["--random_input"]])
def test_each_prompt_is_as_long_as_asked_and_like_no_other(
    kind: list[str], flags: list[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[list[list[int]]] = []
    generate = LLMEngine.generate
    monkeypatch.setattr(
        LLMEngine, "generate", lambda self, prompts, params: asked.append(prompts) or generate(self, prompts, params)
    )
    assert main([*flags, "--input-length", "30", "--output-length", "1", "--bs", "3", *kind]) == 0
    warmed, prompts = asked
    assert warmed == prompts
    assert [len(prompt) for prompt in prompts] == [30, 30, 30]
    assert len({prompt[0] for prompt in prompts}) == 3
    assert all(0 <= token < 300 for prompt in prompts for token in prompt)
    assert (len({*prompts[0]}) > 25) == bool(kind), "text repeats its letters"


def test_without_a_tokenizer_the_input_is_random(talker: Path, flags: list[str], capsys: Any):
    (talker / "tokenizer.json").unlink()
    (talker / "tokenizer_config.json").unlink()
    assert main(flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "atom-run: RequestError: the checkpoint has no tokenizer; add --random-input"
    assert main([*flags, "--random-input", "--output-length", "1"]) == 0


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--bs 0", "atom-run: ConfigError: argument --bs: 0 is not a whole number from 1"),
        ("--input-length x", "atom-run: ConfigError: argument --input-length: x is not a whole number from 1"),
        ("--output_length=-3", "atom-run: ConfigError: argument --output_length: -3 is not a whole number from 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: str, line: str, folder: Path, capsys: Any):
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line)
    assert (err.count("\n"), out, traces(folder)) == (1, "", [])


def test_more_tokens_than_the_model_takes_is_one_line(flags: list[str], capsys: Any):
    assert main([*flags, "--input-length", "600"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("atom-run: RequestError: ") and "max_model_len" in last
