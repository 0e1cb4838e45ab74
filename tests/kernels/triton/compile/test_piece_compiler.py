"""The module of a piece for a GPU, loaded as it stands in its entry."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pieces.text import TEXT

from atom.cache import Cache
from atom.errors import ArtifactError
from atom.kernels.triton.compile.codegen import write_source
from atom.kernels.triton.compile.piece_compiler import TritonCompiler


@pytest.mark.parametrize("source", ["run = 1 +", "from triton import nothing", "import torch", "\0"])
def test_a_source_that_is_none_raises(source: str, tmp_path: Path):
    (tmp_path / "piece.py").write_text(source)
    with pytest.raises(ArtifactError, match=rf"^{tmp_path}: this piece cannot be loaded: .+$"):
        TritonCompiler().load(tmp_path)


def test_loading_a_source_changes_nothing_in_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    cache, key = Cache(tmp_path), "ab" * 16
    folder = cache.publish("pieces", key, {"piece.py": write_source(TEXT).encode()}, {})
    TritonCompiler().load(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "piece.py"]
    assert cache.verify("pieces", key) is None


def test_another_source_in_the_same_place_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for answer in (1, 2):
        (tmp_path / "piece.py").write_text(f"def run():\n    return {answer}\n")
        assert TritonCompiler().load(tmp_path)() == answer
