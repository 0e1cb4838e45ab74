"""Format a job's numbers as tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table


def make_table(*headings: str, left: Collection[str] = ()) -> Table:
    """A table without lines, its columns flush right but for those of `left`."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table
