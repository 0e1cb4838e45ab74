"""Blocks of pages in docs/ that are written from the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def check_block(page: str, name: str, expected: str, request: pytest.FixtureRequest) -> None:
    """Compare the block `name` of a page with the expected text; with `--update-golden`, write it there first."""
    path = DOCS / page
    begin, end = f"<!-- {name}, written by scripts/test --update-golden -->\n", f"<!-- end of {name} -->\n"
    before, rest = path.read_text().split(begin)
    written, after = rest.split(end)
    if request.config.getoption("--update-golden"):
        path.write_text(before + begin + expected + end + after)
        written = expected
    assert written == expected
