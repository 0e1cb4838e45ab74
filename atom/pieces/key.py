"""The key of a piece: a hash of all that its code depends on.

key_of(identity(piece.text, find_target("cuda")))     # 32 hex digits
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from atom.cache import digest
from atom.kernels import Target, find_piece_compiler, find_versions

CPU = Target("cpu")
PACKAGE = Path(__file__).parents[1]


def identity(text: str, target: Target = CPU) -> dict[str, str]:
    """All ingredients of a piece's code, in words; equal ones have equal code."""
    return {
        "text": digest(text),
        **find_versions(target.device),
        **find_piece_compiler(target.device).ingredients(target),
        "sources": sources_of("dtypes.py", "graph/ops", "kernels", "pieces"),
    }


@cache
def sources_of(*parts: str) -> str:
    """A digest of the sources of these parts of atom, files or folders."""
    files = [
        file
        for part in parts
        for file in ([PACKAGE / part] if part.endswith(".py") else (PACKAGE / part).rglob("*.py"))
    ]
    return digest("".join(f"{file.relative_to(PACKAGE)}\n{file.read_text()}" for file in sorted(files)))
