"""Client libraries: those of Python and Vercel's AI SDK, a process each, against servers of the tiny model and a script."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from scripts.clients.recorder import record
from scripts.clients.servers import serve_script
from scripts.clients.verdict import Verdict, find_refused, run_client

HERE = Path(__file__).parent
AI_SDK = ("@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@ai-sdk/open-responses")
# of the loops in python_sdks.py and ai_sdk.mjs
CALL = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TURNS = [CALL, "It is 5."]


def try_python(name: str, python: Path, url: str, checkpoint: Path, records: Path) -> Verdict:
    """Run python_sdks.py for a client. python: of its environment. records: gets its requests and answers."""
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices
    with record(url) as recorder, tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-P", str(HERE / "python_sdks.py"), name, recorder.url, str(checkpoint)]
        ended = run_client(command, Path(folder), environment)
    recorder.save(records / f"{name}.jsonl")
    version = ended.out.partition("\n")[0] or "unknown"
    return Verdict(name, version, "streams, tools, objects", find_refused(recorder) or ended.fault)


def try_ai_sdk(name: str, version: str, packages: Path, url: str, records: Path) -> Verdict:
    """Run ai_sdk.mjs with a provider. packages: the folder that has node_modules."""
    environment = os.environ | {"AI_SDK_LOG_WARNINGS": "false"}
    with tempfile.TemporaryDirectory() as folder, serve_script(TURNS, Path(folder)) as scripted:
        with record(url) as recorder, record(scripted.url) as loop:
            command = ["node", str(HERE / "ai_sdk.mjs"), name, recorder.url, loop.url]
            ended = run_client(command, packages, environment)
    recorder.exchanges += loop.exchanges
    recorder.save(records / f"{name.replace('/', '-')}.jsonl")
    return Verdict(name, version, "streams, tools, objects, loop", find_refused(recorder) or ended.fault)
