"""Print a message for the user, as a line on stderr.

say("compiling 3 pieces")           # atom-run: compiling 3 pieces
"""

from __future__ import annotations

import sys

PREFIX = "atom-run: "


def say(line: str) -> None:
    """Print a line in one write, since other threads print too."""
    print(f"{PREFIX}{line}\n", end="", file=sys.stderr, flush=True)
