"""Whole batches: real routes and processes, and an engine that computes nothing (tests/serve/stub_engine.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response as OpenAIResponse
from serve.stub_engine import EXITS
from serving import STUB

from atom.config.load import load
from atom.errors import CapacityError, EngineDeadError
from atom.serve.batch import run as batch_run
from atom.serve.batch.lines import BatchFault, BatchRequest, read_lines
from atom.serve.batch.results import Response, Results, keep_answered
from atom.serve.batch.run import Batch


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


class Run:
    """A batch in a folder: its lines, results and exit code."""

    def __init__(self, talker: Path, folder: Path, stub: dict[str, Any], *overrides: str) -> None:
        self.config = load(
            [f"checkpoint={talker}", "job=batch", "serve.http.served_model_name=[talker]", "dtype=fp32", *overrides]
        )
        self.path, self.input = folder / "out.jsonl", folder / "in.jsonl"
        self.worker = (sys.executable, str(STUB), json.dumps(stub), "--engine")
        self.num_read = 0

    def __call__(self, *lines: dict[str, Any]) -> int:
        self.input.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        answered = keep_answered(self.path)
        with self.input.open("rb") as file, self.path.open("ab") as output:
            found = self.count(read_lines(file, answered, 1 << 20))
            self.batch = Batch(self.config, found, len(lines), Results(output), self.worker)
            return asyncio.run(self.batch.run())

    def count(self, lines: Iterator[BatchRequest | BatchFault]) -> Iterator[BatchRequest | BatchFault]:
        for each in lines:
            self.num_read += 1
            yield each

    @property
    def results(self) -> dict[str, Any]:
        return {line["custom_id"]: line for line in map(json.loads, self.path.read_text().splitlines())}

    def body(self, custom_id: str) -> Any:
        return self.results[custom_id]["response"]["body"]


def test_the_servers_routes_answer_each_line(talker: Path, tmp_path: Path):
    run = Run(talker, tmp_path, {"step_seconds": 0.001}, "serve.pooler_config.pooling_type=LAST")
    messages = [{"role": "user", "content": "Hi"}]
    code = run(
        request("chat", "/v1/chat/completions", messages=messages, max_tokens=3, n=2),
        request("text", prompt="Hi", max_tokens=2),
        request("response", "/v1/responses", input="Hi", max_output_tokens=16),
        request("hot", prompt="Hi", temperature=-1),
        request("other", prompt="Hi", model="other"),
        request("nowhere", "/v1/models"),
    )
    assert code == 2
    chat = ChatCompletion.model_validate(run.body("chat"))
    assert [choice.message.content for choice in chat.choices] == ["word word word "] * 2 and chat.model == "talker"
    assert Completion.model_validate(run.body("text")).choices[0].text == "word word "
    assert OpenAIResponse.model_validate(run.body("response")).output_text.startswith("word word ")
    failed = {name: each["response"]["status_code"] for name, each in run.results.items() if each["response"]}
    assert failed == {"chat": 200, "text": 200, "response": 200, "hot": 400, "other": 404}
    assert run.body("hot")["error"]["param"] == "temperature"
    assert run.results["nowhere"]["error"]["code"] == "invalid_url"
    assert run(request("chat"), request("text"), request("response"), request("hot", prompt="Hi", max_tokens=1)) == 0
    assert len(run.path.read_text().splitlines()) == 4, "what failed has left the file"


def test_ctrl_c_leaves_whole_lines_and_the_next_run_answers_the_others(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Run(talker, tmp_path, {"step_seconds": 0.01}, "job.max_inflight=4")
    lines = [request(str(number), prompt="Hi", max_tokens=1 + number % 3) for number in range(20)]
    write = Results.write

    def write_and_stop(self: Results, *args: Any) -> None:
        write(self, *args)
        if self.num_answered == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Results, "write", write_and_stop)
        assert run(*lines) == 130
    num_answered = len(run.results)
    assert 8 <= num_answered <= 8 + 4 and num_answered <= run.num_read <= num_answered + 4, "no more is read ahead"
    run.num_read = 0
    assert run(*lines) == 0 and run.num_read == 20 - num_answered
    assert sorted(run.results, key=int) == [str(number) for number in range(20)]
    assert len(run.path.read_text().splitlines()) == 20


def test_the_lines_of_an_engine_that_dies_are_not_written(talker: Path, tmp_path: Path):
    run = Run(talker, tmp_path, {"step_seconds": 0.01}, "job.max_inflight=2")
    lines = [request("a", prompt="Hi", max_tokens=100), request("b", prompt="Hi", max_tokens=1)]
    with pytest.raises(EngineDeadError, match="the engine's process has ended"):
        run(*lines, request("poison", prompt=[EXITS], max_tokens=5), request("c", prompt="Hi"))
    assert run.results.keys() == {"b"}, "the next run answers the others"


def test_a_line_for_which_there_is_no_room_yet_is_sent_again(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    post, sent = batch_run.post, list[str]()

    async def refuse_at_first(app: Any, path: str, body: bytes) -> Response:
        sent.append(json.loads(body)["prompt"])
        return Response(429, "req-1", b"{}") if sent.count("Wait") in (1, 2, 3) else await post(app, path, body)

    monkeypatch.setattr(batch_run, "post", refuse_at_first)
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.01)
    assert Run(talker, tmp_path, {})(request("a", prompt="Wait", max_tokens=1)) == 0
    assert sent == ["Wait"] * 4


def test_the_lines_of_an_engine_that_dies_are_sent_to_another(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Run(talker, tmp_path, {"step_seconds": 0.01}, "job.max_inflight=5", "parallel.replicas=2")
    write = Results.write

    def write_and_kill(self: Results, *args: Any) -> None:
        write(self, *args)
        if self.num_answered == 1:
            os.kill(run.batch._engines[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]

    monkeypatch.setattr(Results, "write", write_and_kill)
    lines = [request(str(number), prompt="Hi", max_tokens=50) for number in range(4)]
    assert run(request("first", prompt="Hi", max_tokens=1), *lines) == 0
    assert len(run.results) == 5


def test_an_engine_that_cannot_load_ends_the_batch_with_its_reason(talker: Path, tmp_path: Path):
    run = Run(talker, tmp_path, {"no_memory": True})
    with pytest.raises(CapacityError, match=r"lower serve\.kv_cache_memory") as raised:
        run(request("a", prompt="Hi"))
    assert raised.value.exit_code == 2 and run.results == {}


def test_a_full_disk_ends_the_batch(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "write", fail)
    run = Run(talker, tmp_path, {"step_seconds": 0.001})
    with pytest.raises(OSError, match="No space left"):
        run(*(request(str(number), prompt="Hi", max_tokens=1) for number in range(3)))
