"""Format a job's numbers as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection

from rich.table import Table


def make_table(*headings: str, left: Collection[str] = ()) -> Table:
    """A table without lines, its columns flush right but for those of `left`."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def with_error(value: float, error: float | None) -> str:
    """A number with its standard error, of which two digits are shown: 18.09 ± 0.41."""
    if not error or not math.isfinite(value) or not math.isfinite(error):
        return f"{value:.4g}"
    digits = 1 - math.floor(math.log10(error))
    if digits > 5:
        return f"{value:.4g} ± {error:.1g}"
    return f"{value:,.{max(digits, 0)}f} ± {error:,.{max(digits, 0)}f}"
