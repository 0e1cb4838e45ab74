"""What came of trying a client, and the table of it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.clients.recorder import Recorder

SECONDS = 600  # that a client may take
SHOWN = 500  # characters of its last words
# what a refusal says that is part of the protocol: Anthropic's SDK asks so whether the server keeps conversations
NEGOTIATED = "thread_unsupported_request"


class Verdict(NamedTuple):
    client: str
    version: str
    tried: str  # what it was to do
    fault: str = ""  # what went wrong; empty: nothing


def make_table(verdicts: Sequence[Verdict]) -> str:
    """A row for each, and after the table what went wrong."""
    rows = [("client", "version", "tried", "verdict")]
    rows += [(each.client, each.version, each.tried, "FAILED" if each.fault else "ok") for each in verdicts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + [f"{each.client}: {each.fault}" for each in verdicts if each.fault])


class Ended(NamedTuple):
    out: str
    fault: str


def run_client(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Ended:
    """Run a client in a folder, to its end: what it printed, and why it failed if it did."""
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Ended("", f"it took more than {SECONDS} s")
    said = " ".join(f"{ended.stdout}\n{ended.stderr}".split())
    return Ended(ended.stdout, f"exit code {ended.returncode}: … {said[-SHOWN:]}" if ended.returncode else "")


def find_refused(recorder: Recorder) -> str:
    """The first request that the server did not answer with 200, if there is one, but for what is negotiated."""
    for each in recorder.exchanges:
        if each.status != 200 and NEGOTIATED not in each.answer:
            return f"{each.method} {each.path} was answered with {each.status}: {each.answer[:SHOWN]}"
    return ""
