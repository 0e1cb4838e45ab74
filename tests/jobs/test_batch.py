"""`job=batch` as a user runs it; what a batch does is in tests/serve/batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.cli import main

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "max_tokens": 2}}
RESULT = {"id": "1", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}}, "error": None}


@pytest.fixture
def own_log() -> Iterator[None]:
    """Leaves the loggers as they were."""
    loggers = [logging.getLogger(name) for name in ("atom", None)]
    kept = [(each.handlers, each.propagate, each.level) for each in loggers]
    yield
    for each, (handlers, propagate, level) in zip(loggers, kept, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)
    logging.getLogger("atom.access").setLevel(logging.NOTSET)
    logging.captureWarnings(False)


def test_a_batch_is_answered_on_stdout_by_a_real_engine(checkpoints: Any, tmp_path: Path, capfd: Any, own_log: None):
    (tmp_path / "in").write_text(f"{json.dumps(LINE)}\nno JSON\n")
    argv = [f"checkpoint={checkpoints('llama')}", f"prompts=@{tmp_path}/in", "level=0", "serve.kv_cache_memory=4194304"]
    assert main([*argv, "sampling.ignore_eos=true"]) == 2
    out, err = capfd.readouterr()
    fault, result = sorted(map(json.loads, out.splitlines()), key=lambda line: line["error"] is None)
    assert fault["error"]["code"] == "invalid_json_line" and fault["error"]["line"] == 2
    assert result["response"]["body"]["usage"]["completion_tokens"] == 2
    assert err.endswith("atom-run: 1 lines were answered, 1 failed\n")


def test_a_file_that_has_all_answers_needs_no_model(tmp_path: Path, capsys: Any):
    (tmp_path / "in").write_text(json.dumps(LINE))
    output = tmp_path / "out"
    output.write_text(json.dumps(RESULT))
    assert main([f"prompts=@{tmp_path}/in", f"job.output_file={output}"]) == 0
    said = f"atom-run: {output} has the answers to 1 lines\natom-run: 0 lines were answered, 0 failed\n"
    assert capsys.readouterr() == ("", said)
    assert output.read_text() == json.dumps(RESULT) + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prompts=Hi"], "job=batch answers a file of OpenAI's batch lines: give prompts=@FILE"),
        (["prompts=@none"], "none is no file; write the lines to one first"),
        (["prompts=@in", "job.output_file=in"], "in: line 1 is no result of a batch; name another file"),
        (["prompts=@in", "job.output_file=no/out"], "job.output_file=no/out: No such file or directory"),
        (["prompts=@in", "serve.http.port=80"], "serve.http.port is a field of job=serve, and this is job=batch"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(json.dumps(LINE))
    assert main(["job=batch", *argv]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"atom-run: ConfigError: {message}")
    assert Path("in").read_text() == json.dumps(LINE)
