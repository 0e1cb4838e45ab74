"""vLLM's sources, read and not imported: where it is installed, or in the folder that VLLM_SOURCES names."""

from __future__ import annotations

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest


@cache
def sources() -> Path:
    """vLLM's package; the test is skipped without one."""
    given, found = os.environ.get("VLLM_SOURCES"), find_spec("vllm")
    if given is None and (found is None or found.origin is None):
        pytest.skip("vLLM is not installed, and VLLM_SOURCES names no folder")
    return Path(given) if given else Path(str(found.origin)).parent  # type: ignore[union-attr]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((sources() / file).read_text())


def version() -> str:
    """As 0.26.0; of an unreleased state, with what follows."""
    (value,) = (
        ast.literal_eval(node.value)
        for node in tree("_version.py").body
        if isinstance(node, ast.Assign) and "__version__" in [getattr(each, "id", None) for each in node.targets]
    )
    return str(value)
