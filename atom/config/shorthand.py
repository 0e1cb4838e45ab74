"""Write jobs, checkpoints and prompts of a command line as overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from atom.config.folders import CONF


def as_overrides(words: Sequence[str]) -> list[str]:
    """Words without a key as overrides: a job; a checkpoint, which may have any name after a job; a prompt."""
    if words[:1] == ["run"] and len(words) in (2, 3):  # as in Ollama's `run MODEL` and `run MODEL PROMPT`
        prompts = [f"prompts={shlex.quote(each)}" for each in words[2:]]
        return ["job.chat=true" if prompts else "job=chat", f"checkpoint={words[1]}", *prompts]
    jobs = [word for word in words if re.fullmatch(r"\w+", word) and (CONF / "job" / f"{word}.yaml").is_file()]
    is_command = words[:1] == jobs and len(words) == 2  # as in `serve MODEL`
    keys = ["job" if word in jobs else "checkpoint" if is_command or may_be_checkpoint(word) else "" for word in words]
    pairs = [f"{key}={word}" if key else word for key, word in zip(keys, words, strict=True)]
    return [
        f"prompts={shlex.quote(each)}" if re.search(r"\w\s+\w", each) and "=" not in each else each for each in pairs
    ]


def may_be_checkpoint(text: str) -> bool:
    """Whether a word looks like a folder, a hub id, an address, or a GGUF file."""
    is_path = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|(/|~/|\.{1,2}/|https?://)\S+|\S+\.gguf", text) is not None
    return is_path or Path(text, "config.json").is_file()
