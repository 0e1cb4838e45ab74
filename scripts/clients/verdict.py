"""What came of trying a client, and the table of it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.clients.recorder import Recorder

SECONDS = 600  # that a client may take
SHOWN = 500  # characters of its last words


class Verdict(NamedTuple):
    client: str
    version: str
    tried: str  # what it was to do
    fault: str = ""  # what went wrong; empty: nothing

    @property
    def row(self) -> tuple[str, ...]:
        return self.client, self.version, self.tried, f"FAILED: {self.fault}" if self.fault else "ok"


def make_table(verdicts: Sequence[Verdict]) -> str:
    rows = [("client", "version", "tried", "verdict"), *(each.row for each in verdicts)]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


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
    """The first request that the server did not answer with 200, if there is one."""
    for each in recorder.exchanges:
        if each.status != 200:
            return f"{each.method} {each.path} was answered with {each.status}: {each.answer[:SHOWN]}"
    return ""
