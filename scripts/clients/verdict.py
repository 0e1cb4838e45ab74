"""What came of trying a client, and the table of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
