"""Try client libraries: Python's and Vercel's AI SDK, a process each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.clients.recorder import Recorder, record
from scripts.clients.servers import serve_script
from scripts.clients.verdict import Verdict, find_refused, run_client

HERE = Path(__file__).parent
AI_SDK = ("@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@ai-sdk/open-responses")
# of the loops in python_sdks.py and ai_sdk.mjs
CALL = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TURNS = [CALL, "It is 5."]
LIBRARY = "streams, tools, objects, loop"
SEEING = ("openai", "anthropic")  # those that are tried with images
TRIED = {
    **dict.fromkeys(SEEING, f"{LIBRARY}, images"),
    "guidellm": "synchronous requests",
    "vllm": "vllm bench serve",
    "cohere": "rerank",
    "dify-plugin": "rerank",
}


def try_python(name: str, python: Path, url: str, checkpoint: Path, records: Path, seer: str = "") -> Verdict:
    """Run python_sdks.py for a client.

    python: of its environment
    records: gets its requests and answers
    seer: the URL of a server that reads images; empty: none are sent
    """
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices
    with (
        tempfile.TemporaryDirectory() as folder,
        record(url) as recorder,
        record_loop() as loop,
        record(seer) as images,
    ):
        program = [str(python), "-P", str(HERE / "python_sdks.py"), name]
        ended = run_client([*program, recorder.url, str(checkpoint), loop.url, images.url], Path(folder), environment)
    version = ended.out.partition("\n")[0] or "unknown"
    recorder.exchanges += images.exchanges
    fault = close(recorder, loop, records / f"{name}.jsonl") or ended.fault
    return Verdict(name, version, TRIED.get(name, LIBRARY), fault)


def try_ai_sdk(name: str, version: str, packages: Path, url: str, records: Path) -> Verdict:
    """Run ai_sdk.mjs with a provider. packages: the folder that has node_modules."""
    environment = os.environ | {"AI_SDK_LOG_WARNINGS": "false"}
    with record(url) as recorder, record_loop() as loop:
        command = ["node", str(HERE / "ai_sdk.mjs"), name, recorder.url, loop.url]
        ended = run_client(command, packages, environment)
    fault = close(recorder, loop, records / f"{name.replace('/', '-')}.jsonl") or ended.fault
    return Verdict(name, version, LIBRARY, fault)


@contextmanager
def record_loop() -> Iterator[Recorder]:
    """Record what is asked of a server that calls a tool and then ends."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_script(TURNS, Path(folder)) as server,
        record(server.url) as recorder,
    ):
        yield recorder


def close(recorder: Recorder, loop: Recorder, path: Path) -> str:
    """Keep what was recorded; the first request that was refused, if there is one."""
    recorder.exchanges += loop.exchanges
    recorder.save(path)
    return find_refused(recorder)
