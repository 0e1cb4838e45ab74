"""`job=compile` as a user runs it: what it prints, warns of and refuses. The code of pieces is made up."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.cache import Cache
from atom.cli import main
from atom.compiler import Compiled
from atom.compiler import compile as compiler
from atom.errors import ArtifactError
from atom.graph import Recipe
from atom.jobs import compile as job
from atom.kernels import Target
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.kernels.triton.compile.piece_compiler import TritonCompiler
from atom.weights import load_dummy

FIRST = "there is no artifact in the cache yet"


def compile_nothing(texts: list[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    return ((text, {"piece.so": text.encode()}) for text in texts)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def run(
    cache: Cache, checkpoints: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `job=compile` of a tiny model with these overrides."""
    monkeypatch.setattr(compiler, "compile_pieces", compile_nothing)
    monkeypatch.setattr(InductorCompiler, "load", lambda self, folder: lambda *tensors: [])
    checkpoint = checkpoints("llama")

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["job=compile", f"checkpoint={checkpoint}", f"cache={cache.folder}", *argv])
        return (code, *capsys.readouterr())

    return run


def test_a_miss_and_a_hit_as_lines(run: Any, cache: Cache):
    code, out, err = run()
    (entry,) = cache.entries("artifacts")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, f"key       {entry.key}")
    assert lines[1:3] == [f"          miss: {FIRST}", "pieces    4, 3 of them distinct, 3 compiled"]
    seconds = r"seconds   key \d+\.\d\d, graph \d+\.\d\d, pieces \d+\.\d\d, publish \d+\.\d\d"
    assert len(lines) == 4 and re.fullmatch(seconds, lines[3])
    started, done = (line for line in err.splitlines() if not line.endswith(".cpp"))  # a library, once a process
    assert started == "atom-run: compiling 3 pieces" and re.fullmatch(rf"{started}: done in \d+\.\d s", done)
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.splitlines()[1:3] == ["          hit", "pieces    4, 3 of them distinct, 0 compiled"]


def test_json_has_the_fields_of_the_report(run: Any, cache: Cache):
    code, out, _ = run("job.output=json")
    fields = json.loads(out)
    assert code == 0 and list(fields) == ["key", "hit", "reason", "pieces", "compiled", "seconds"]
    assert (fields["hit"], fields["reason"], fields["pieces"], fields["compiled"]) == (False, FIRST, 4, 3)
    assert list(fields["seconds"]) == ["key", "graph", "pieces", "publish"]
    assert fields["key"] == cache.entries("artifacts")[0].key


def test_each_stage_of_a_pipeline_is_compiled(run: Any, cache: Cache):
    code, out, _ = run("parallel.pipeline=3", "job.output=json")
    stages = json.loads(out)["stages"]
    assert code == 0 and {each["key"] for each in stages} == {entry.key for entry in cache.entries("artifacts")}
    code, out, _ = run("parallel.pipeline=3")
    assert [line for line in out.splitlines() if line.startswith(("stage ", "          hit"))] == [
        line for stage in range(3) for line in (f"stage     {stage}", "          hit")
    ]


def test_what_is_wrong_with_the_cache_folder_is_reported(run: Any, cache: Cache):
    run()
    damaged = cache.folder / "pieces" / cache.entries("pieces")[0].key
    os.truncate(damaged / "piece.so", 3)
    code, out, err = run()
    size = (damaged / "piece.so").stat().st_size
    reason = f"piece.so has 3 bytes instead of {size:,}, built anew"
    assert code == 0 and err.endswith(f"\natom-run: {damaged}: {reason}\n")
    assert "          miss: 1 of its pieces was damaged or not to be trusted" in out.splitlines()


def test_a_folder_that_takes_nothing_is_reported_too(run: Any, tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, out, err = run(f"cache={tmp_path}/file/below")
    assert code == 0 and "3 compiled" in out, err
    what = "takes no entries (Not a directory): what is built is not kept for the next run"
    assert err.splitlines()[-1] == f"atom-run: {tmp_path}/file/below {what}"


def test_warnings_come_before_an_error(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(texts: list[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        yield texts[0], {"piece.so": b"x"}
        raise ArtifactError("compiling failed: no space")

    monkeypatch.setattr(compiler, "compile_pieces", fail)
    (tmp_path / "file").write_text("")
    code, out, err = run(f"cache={tmp_path}/file/below")
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if line.startswith("atom-run: ")]
    assert len(lines) == 3 and lines[0] == "atom-run: compiling 3 pieces" and " takes no entries " in lines[1]
    assert lines[2] == "atom-run: ArtifactError: compiling failed: no space"


@pytest.mark.parametrize("level", [0, 1])
def test_a_level_without_pieces_is_refused(level: int, run: Any, cache: Cache):
    message = f"atom-run: ConfigError: level={level} has nothing to compile; pieces begin at level=2\n"
    assert run(f"level={level}") == (2, "", message)
    assert not cache.folder.exists()


@pytest.mark.parametrize("overrides", [[], ["level=2"]])
def test_without_a_compiler_the_error_names_what_to_install_and_what_is_cached_needs_none(
    overrides: list[str], run: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as without:
        without.setattr(InductorCompiler, "find_missing", lambda self: "a C++ compiler: install g++")
        message = "3 pieces are not in the cache, and compiling pieces needs a C++ compiler: install g++"
        assert run(*overrides) == (2, "", f"atom-run: UnsupportedError: job=compile: {message}\n")
    run()
    monkeypatch.setattr(InductorCompiler, "find_missing", lambda self: "a C++ compiler: install g++")
    assert run(*overrides)[1].splitlines()[1] == "          hit"
    cache.remove(cache.entries("pieces")[0])
    message = message.replace("3 pieces are", "1 piece is")
    assert run(*overrides) == (2, "", f"atom-run: UnsupportedError: job=compile: {message}\n")


def test_for_a_gpu_the_model_is_compiled_once_and_its_kernels_for_random_weights(
    run: Any, monkeypatch: pytest.MonkeyPatch
):
    """Here the GPU is made up, and what opens it notes what it is given."""
    monkeypatch.setattr("atom.kernels.triton.compile.binary_cache.BinaryCache.current", None)  # put back after this
    opened: list[tuple[Compiled, dict[Recipe, torch.Tensor]]] = []
    read: list[str] = []
    monkeypatch.setattr(compiler, "find_target", lambda device: Target(device))
    monkeypatch.setattr("atom.runtime.memory.left_for_kv", lambda graph, serve: 1 << 30)
    monkeypatch.setattr(compiler, "read_artifact", lambda cache, key: read.append(key))
    monkeypatch.setattr(
        job, "open_runner", lambda compiled, tensors, config, progress: opened.append((compiled, tensors))
    )
    monkeypatch.setattr(job, "load_dummy", lambda recipes, seed, device: load_dummy(recipes, seed, "cpu"))
    monkeypatch.setattr(TritonCompiler, "load", lambda self, folder: lambda *tensors: [])
    code, out, _ = run("device=cuda", "job.output=json")
    fields = json.loads(out)
    assert code == 0 and read == [fields["key"]]
    ((compiled, tensors),) = opened
    assert (fields["hit"], fields["compiled"]) == (False, len(compiled.code))
    assert tensors.keys() == set(compiled.graph.recipes())


def test_for_a_gpu_what_does_not_fit_is_refused_before_anything_is_compiled(run: Any, cache: Cache, monkeypatch: Any):
    monkeypatch.setattr("atom.kernels.triton.compile.binary_cache.BinaryCache.current", None)  # put back after this
    monkeypatch.setattr(compiler, "find_target", lambda device: Target(device))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 10, 1 << 30))
    code, out, err = run("device=cuda")
    assert (code, out) == (1, "") and "CapacityError: the weights take" in err
    assert cache.entries() == []


def test_a_saved_text_is_compiled_without_an_artifact(run: Any, cache: Cache, tmp_path: Path):
    (tmp_path / "graph.py").write_text(run("job=explain", "job.stage=semantic")[1])
    code, out, _ = run(f"job.graph={tmp_path}/graph.py")
    lines = [
        "key       none",
        "          miss: a saved text has no artifact",
        "pieces    4, 3 of them distinct, 3 compiled",
    ]
    assert code == 0 and out.splitlines()[:3] == lines
    assert len(cache.entries("pieces")) == 3 and cache.entries("artifacts") == []
