"""Real servers for tests: `atom-run` as a process of its own, on a tiny random checkpoint that chats.

server = serving.start(serving.save_talker(tmp_path / "talker"), tmp_path, "serve.http.max_queue=1")
urllib.request.urlopen(server.url + "/health")
server.process.kill()
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
import wire
from serve.stub_servers import Forked, Forks
from tokenizers import decoders, models, pre_tokenizers

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]  # tokens 256, 257, 258; a byte's token is below
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # 259 … 262: tokens of their own, but text
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
START_SECONDS = 120  # on a busy machine
STUB = Path(__file__).parent / "serve" / "stub_engine.py"
PATHS = os.environ.get("PYTHONPATH")


class Server(NamedTuple):
    url: str  # http://127.0.0.1:PORT
    process: subprocess.Popen[bytes] | Forked
    log: Path  # its stderr


Start = Callable[..., Server]  # start_server(*overrides)


def save_talker(folder: Path) -> Path:
    """A checkpoint with random weights, a tokenizer of bytes, and a chat template with tools and reasoning."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(WORDS)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = transformers.Qwen3Config(
        vocab_size=264,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=257,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.parameters():
        tensor.data += torch.randn_like(tensor) * 0.2
    model.save_pretrained(folder)
    return folder


def start(checkpoint: Path, folder: Path, *overrides: str, stub: dict[str, Any] | None = None) -> Server:
    """Start a server and wait until it serves; the caller ends it. Its log is in the folder.

    Its cache is the user's, which has the libraries that it loads.

    stub: options of an engine that computes nothing (serve/stub_engine.py), in a server that is forked
        (serve/stub_servers.py); None: a real one.
    """
    server = launch(checkpoint, folder, *overrides, stub=stub)
    return server._replace(url=wait_for_url(server))


@contextlib.contextmanager
def started(checkpoint: Path, folder: Path, *overrides: str, stub: dict[str, Any] | None = None) -> Iterator[Server]:
    """`start`, and the end of it, whatever happens."""
    server = launch(checkpoint, folder, *overrides, stub=stub)
    try:
        yield server._replace(url=wait_for_url(server))
    finally:
        server.process.kill()  # its engine ends when the socket to it closes
        server.process.wait()


def launch(
    checkpoint: Path, folder: Path, *overrides: str, stub: dict[str, Any] | None = None, stderr: Any = None
) -> Server:
    """The same, not waited for: its url is empty. stderr: in place of the log"""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    options = [f"checkpoint={checkpoint}", "serve.http.served_model_name=[talker]"]
    options += ["serve.http.host=127.0.0.1", "serve.http.port=0"]
    options += ["level=1", "dtype=fp32", "serve.kv_cache_memory=16777216", "sampling.max_tokens=256", *overrides]
    with log.open("wb") if stderr is None else contextlib.nullcontext(stderr) as file:
        if stub is not None and os.environ.get("PYTHONPATH") == PATHS:  # with others, other packages are found
            process = forks().start([json.dumps(stub), *options], file if isinstance(file, int) else file.fileno())
            return Server("", process, log)
        program = ["-m", "atom.cli", "job=serve"] if stub is None else [str(STUB), json.dumps(stub)]
        process = subprocess.Popen(
            [sys.executable, *program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file
        )
    return Server("", process, log)


@functools.cache
def forks() -> Forks:
    return Forks()


def wait_for_url(server: Server) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        if found := re.search(r" at (https?://127\.0\.0\.1:\d+)\S* ", server.log.read_text()):
            return found[1]
        time.sleep(0.05)
    server.process.kill()
    raise AssertionError(f"the server did not start: {server.log.read_text()}")


def log_lines(server: Server) -> list[str]:
    """The whole lines of a server's log so far.

    A thread of the server writes them, so the line about an event may follow the event: wait for it, or for the end of
    the process.
    """
    whole, _, _ = server.log.read_text().rpartition("\n")
    return whole.splitlines()


def log_entries(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The entries of a log of JSON so far that have these fields."""
    entries = [json.loads(line) for line in log_lines(server) if line.startswith("{")]
    return [entry for entry in entries if fields.items() <= entry.items()]


def wait_for_line(server: Server, text: str) -> str:
    """The first line of a server's log that has a text, once it is there."""

    def found() -> list[str]:
        return [line for line in log_lines(server) if text in line]

    wire.wait_until(found)
    return found()[0]


def wait_for_entry(server: Server, **fields: Any) -> dict[str, Any]:
    """The only entry of a log of JSON that has these fields, once it is there."""
    wire.wait_until(lambda: log_entries(server, **fields))
    (entry,) = log_entries(server, **fields)
    return entry


def family(server: Server) -> list[int]:
    """The server's processes, itself excluded."""
    found, left = [], [server.process.pid]
    while left:
        pid = left.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        left += map(int, children)
        found += map(int, children)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses where a process listens; none once it has ended."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:  # closed since
            continue
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:
            if is_alive(pid):
                raise
            return set()
        for line in lines:
            _, local, _, state, *rest = line.split()
            if rest[5] in inodes and (state == "0A" or table.startswith("udp")):
                address, _, port = local.partition(":")
                host = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
                found.add((host, int(port, 16)))
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
