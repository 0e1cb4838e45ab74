"""curl, with the two commands of ROCm/ATOM's serving guide (1.5), in which host and model are this server's."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from serving import Server

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")

CHAT = """\
curl --silent --show-error http://localhost:8000/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "deepseek-ai/DeepSeek-R1",
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 128
  }'
"""
COMPLETION = """\
curl --silent --show-error http://localhost:8000/v1/completions \\
  -H "Content-Type: application/json" \\
  -d '{
    "prompt": "The capital of France is",
    "max_tokens": 64,
    "stream": true
  }'
"""


def run(command: str, server: Server) -> str:
    here = command.replace("http://localhost:8000", server.url).replace("deepseek-ai/DeepSeek-R1", "talker")
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_the_guides_chat(server: Server):
    answer = json.loads(run(CHAT, server))
    assert (answer["object"], answer["model"]) == ("chat.completion", "talker")
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    usage = answer["usage"]
    assert 1 <= usage["completion_tokens"] <= 128
    assert {"ttft_s", "tpot_s", "latency_s"} <= set(usage)


def test_the_guides_streamed_completion(server: Server):
    *events, done, rest = run(COMPLETION, server).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    reason = chunks[-1]["choices"][0]["finish_reason"]
    assert reason in ("stop", "length")
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text or reason == "stop", "a random model may draw the end first"
