"""Find words to avoid in comments, docstrings, names of functions and pages.

    python scripts/check_words.py [FILE …]     # all that git tracks; exits with 1 if any is found

A word has one plain replacement in technical English; ALLOWED has the phrases in which it is the usual word.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {
    r"\bbehind\b": "after, past or following",
    r"\balone\b": "only",
    r"\bbeside\b": "besides, next to",
    r"\bwhere there (?:is|are)\b": "if there is",
    r"\blikewise\b": "nothing, or the same again",
}
ALLOWED = re.compile(
    r"\bbehind[ -](?:nginx|one port|a (?:reverse )?proxy|a load balancer)\b|\bleft alone\b|\bstand-alone\b",
    re.IGNORECASE,
)


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and the words of functions' names in a Python file, each with its first line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name.replace("_", " ")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.lineno, first.value.value


def find_words(path: Path) -> Iterator[tuple[int, str, str]]:
    """The words to avoid in a file: line, word, what to write."""
    source = path.read_text(encoding="utf-8")
    if not any(re.search(pattern, source.replace("_", " "), re.IGNORECASE) for pattern in WORDS):
        return
    for first, text in prose_of(source) if path.suffix == ".py" else [(1, source)]:
        kept = ALLOWED.sub(lambda match: " " * len(match[0]), text)
        for pattern, instead in WORDS.items():
            for match in re.finditer(pattern, kept, re.IGNORECASE):
                yield first + kept.count("\n", 0, match.start()), match[0], instead


def main(names: list[str]) -> int:
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(name) for name in names] or [ROOT / name for name in tracked.stdout.splitlines()]
    found = [
        f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: '{word}': write {instead}"
        for path in paths
        if "golden" not in path.parts and path.exists()
        for line, word, instead in find_words(path)
    ]
    print("\n".join(sorted(found)), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
