"""Servers for the clients: tiny models, one of which reads images, and prepared texts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import serving
import vision

from scripts.clients.scripted_engine import RESULT, TOOLS

SCRIPTED = Path(__file__).with_name("scripted_engine.py")
MAX_MODEL_LEN = 1 << 20  # a token is a byte, and an agent's first request has 200 kB
TEMPLATE = """\
{%- if tools %}TOOLS
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}RESULT{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("TOOLS", TOOLS).replace("RESULT", RESULT)

IMAGE_TOKEN = "<|endoftext|>"  # which stands for an image
SEER_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == "image" %}IMAGE{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("IMAGE", IMAGE_TOKEN)


def save_seer(folder: Path) -> Path:
    """The checkpoint of a tiny model with a tower, and the talker's tokens."""
    talker = serving.save_talker(folder / "talker")
    seer = folder / "seer"
    vision.save("Qwen3VL", seer, vocab_size=264, eos_token_id=257, max_position_embeddings=8192)
    token = 256 + serving.SPECIAL.index(IMAGE_TOKEN)
    for name, changes in {
        "tokenizer_config.json": {"chat_template": SEER_TEMPLATE},
        "config.json": {"image_token_id": token},
        "preprocessor_config.json": {"min_pixels": 64, "max_pixels": 4096},
    }.items():
        own = seer / name if (seer / name).exists() else talker / name
        (seer / name).write_text(json.dumps(json.loads(own.read_text()) | changes))
    shutil.copy(talker / "tokenizer.json", seer)
    return seer


def save_scripted(folder: Path) -> Path:
    """A checkpoint for the scripted engine: the talker's files with a template that marks tools and their results."""
    serving.save_talker(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    start = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    sample = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        sample | {"id": start + at, "content": text} for at, text in enumerate((TOOLS, RESULT))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, changes in {
        "tokenizer_config.json": {"chat_template": TEMPLATE},
        "config.json": {"vocab_size": start + 2, "max_position_embeddings": MAX_MODEL_LEN},
    }.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    return folder


@contextmanager
def serve_script(turns: Sequence[str], folder: Path) -> Iterator[serving.Server]:
    """A server that says turns[number of tool results in the prompt]."""
    script, log = folder / "script.json", folder / "server.log"
    script.write_text(json.dumps({"turns": list(turns), "aside": "A title"}))
    checkpoint = save_scripted(folder / "talker")
    options = [f"checkpoint={checkpoint}", "serve.http.served_model_name=[coder,talker]", "serve.http.host=127.0.0.1"]
    options += ["serve.http.port=0", "level=1", "dtype=fp32", "serve.kv_cache_memory=16777216"]
    with log.open("wb") as file:
        command = [sys.executable, str(SCRIPTED), str(script), *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
    try:
        server = serving.Server("", process, log)
        yield server._replace(url=serving.wait_for_url(server))
    finally:
        process.kill()
        process.wait()
