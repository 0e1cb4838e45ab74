"""A piece that cannot be loaded is one that is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atom.cache import Cache, key_of
from atom.compiler import compile as compiler
from atom.compiler import compile_model
from atom.config import Config
from atom.config.load import load
from atom.errors import ArtifactError, UnsupportedError
from atom.kernels.backend import PieceCode
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.pieces import identity

CODE = b"code that is made up"


@pytest.mark.parametrize("content", [b"", b"this is no library", b"\x7fELF" + bytes(1000)])
def test_what_is_no_code_raises(content: bytes, tmp_path: Path):
    (tmp_path / "piece.so").write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"^{tmp_path}: this piece cannot be loaded: .+$"):
        InductorCompiler().load(tmp_path)


@pytest.fixture
def config(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """A model of three pieces; each has the same code, which is made up and can be loaded, for none of them is run."""
    load_library = InductorCompiler.load

    def make(texts: Sequence[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        for text in texts:
            yield text, {"piece.so": CODE}

    def load_code(self: InductorCompiler, folder: Path) -> PieceCode:
        is_made_up = (folder / "piece.so").read_bytes() == CODE
        return (lambda *tensors: []) if is_made_up else load_library(self, folder)

    monkeypatch.setattr(compiler, "compile_pieces", make)
    monkeypatch.setattr(InductorCompiler, "load", load_code)
    return load([f"checkpoint={checkpoints('llama')}", "dtype=fp32", "level=2", f"cache={tmp_path / 'cache'}"])


@pytest.fixture
def unfit(config: Config) -> Path:
    """The folder of the second of its pieces: whole, its checksum right, and no code for this machine."""
    cache = Cache(Path(str(config.cache)))
    other = cache.folder.with_name("other")  # no piece in the cache has been loaded by this process
    made = compile_model(replace(config, cache=str(other)))
    assert made.report.compiled == 3
    shutil.copytree(other, cache.folder)
    key = key_of(identity(list(made.code)[1]))
    entry = cache.describe("pieces", key)
    assert entry is not None
    cache.remove(entry)
    return cache.publish("pieces", key, {"piece.so": b"this is no library"}, entry.about)


def test_a_piece_that_cannot_be_loaded_is_built_anew(config: Config, unfit: Path):
    cache = Cache(Path(str(config.cache)))
    made = compile_model(config, cache=cache)
    assert (made.report.hit, made.report.compiled, len(made.code)) == (False, 1, 3)
    (warning,) = cache.warnings
    assert warning.startswith(f"{unfit}: this piece cannot be loaded: ") and warning.endswith(", built anew")
    assert (unfit / "piece.so").read_bytes() == CODE
    again = Cache(Path(str(config.cache)))
    assert compile_model(config, cache=again).report.hit and not again.warnings


def test_without_a_compiler_it_is_as_if_it_were_not_there(config: Config, unfit: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(InductorCompiler, "find_missing", lambda self: "a C++ compiler: install g++")
    cache = Cache(Path(str(config.cache)))
    assert compile_model(replace(config, level=None), cache=cache).code == {}
    assert ["cannot be loaded" in line for line in cache.warnings] == [True, False]
    assert cache.warnings[1].endswith("until then this runs at level 1, which is slower")
    with pytest.raises(UnsupportedError, match=r"^level=2: compiling pieces needs a C\+\+ compiler: install g\+\+"):
        compile_model(config)


def test_a_piece_that_cannot_be_loaded_or_removed_raises_the_first_fault(
    config: Config, unfit: Path, monkeypatch: pytest.MonkeyPatch
):
    def remove(*_: object) -> None:
        raise ArtifactError("not allowed")

    monkeypatch.setattr(Cache, "remove", remove)
    with pytest.raises(ArtifactError, match=rf"^{unfit}: this piece cannot be loaded: "):
        compile_model(config)
