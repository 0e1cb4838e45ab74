"""Artifacts of launches: what misses, and what a miss says. Code is compiled by nobody here: only keys and texts count."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import atom
from atom.cache import Cache, key_of
from atom.compiler import Report, compile_model
from atom.compiler import compile as compiler
from atom.compiler.artifact import publish_artifact, read_artifact, semantic_graph
from atom.config import Config
from atom.config.load import load
from atom.errors import ConfigError
from atom.graph import parse, show
from atom.kernels import Target
from atom.kernels.inductor import piece_compiler as inductor
from atom.passes import lower
from atom.pieces import find_pieces

identity_module = importlib.import_module("atom.pieces.key")  # a function has its name too
PACKAGE = Path(atom.__file__).parent
SOURCES = {  # of which part a file is -> how a reason calls that
    "graph": "sources of the graph",
    "passes": "sources of the passes",
    "kernels": "sources of the kernels",
    "pieces": "sources of the pieces",
    "compiler": "sources of the compiler",
}
NO_INGREDIENTS = (
    "frontend",
    "runtime",
    "serve",
    "llm.py",
    "assemble",
)  # a model's text is one itself, whoever wrote it
OVERRIDES = {  # of a checkpoint in fp32 -> what the reason calls them
    "dtype=bf16": "dtype",
    "dtype=fp16": "dtype",
    "serve.kv_cache_dtype=bf16": "kv_cache_dtype",
    "model.layers=2": "model",
    "model.norm.eps=0.125": "model",
    "model.attention.scale=0.5": "model",
}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def configure(checkpoints: Any, cache: Cache) -> Callable[..., Config]:
    """A configuration of a tiny model in fp32 with these overrides."""
    return lambda *overrides: load(
        [f"checkpoint={checkpoints('llama')}", "dtype=fp32", f"cache={cache.folder}", *overrides]
    )


@pytest.fixture(autouse=True)
def no_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code of pieces is made up, and sources are read anew after each test."""

    def compile_nothing(texts: list[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        return ((text, {"piece.so": text.encode()}) for text in texts)

    monkeypatch.setattr(compiler, "compile_pieces", compile_nothing)
    monkeypatch.setattr(inductor.InductorCompiler, "load", lambda self, folder: lambda *tensors: [])
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power is lost here
    yield
    identity_module.sources_of.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, whose sources are the ones that count."""
    copy = shutil.copytree(PACKAGE, tmp_path / "atom", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identity_module, "PACKAGE", copy)
    return copy


def compiled(config: Config) -> Report:
    identity_module.sources_of.cache_clear()
    return compile_model(config).report


# what misses


def edit(part: Path, generator: random.Random) -> tuple[Path, str | None]:
    """Change a letter of a random source of a part of the package, or add or remove one: which, and what it held."""
    package = part.parent
    file = generator.choice(sorted(part.rglob("*.py")) or [part])
    before = file.read_text()
    act = generator.choice(["letter", "letter", "letter", "add", "remove"])
    if act == "remove" and file.parent != package:
        file.unlink()
    elif act == "add" and file.parent != package:
        file = file.with_name("one_more.py")
        file.write_text("")
        return file, None
    else:
        at = generator.choice([match.start() for match in re.finditer("[a-z]", before)] or [0])
        file.write_text(before[:at] + generator.choice("ABC") + before[at + 1 :])
    return file, before


def restore(file: Path, before: str | None) -> None:
    if before is None:
        file.unlink()
    else:
        file.write_text(before)


@pytest.mark.parametrize("num_changes", [28, pytest.param(200, marks=pytest.mark.slow)])
def test_random_changes_miss_exactly_where_they_matter_and_are_named(
    num_changes: int, configure: Any, cache: Cache, package: Path, monkeypatch: pytest.MonkeyPatch
):
    """A letter of a source, an override, another torch, another CPU: each by itself, against one artifact."""
    generator, reasons = random.Random(0), Counter[str]()
    overrides, parts = itertools.cycle(OVERRIDES), itertools.cycle([*SOURCES, *NO_INGREDIENTS])
    base = configure("model.layers=1")
    configs = {text: configure("model.layers=1", text) for text in OVERRIDES}
    key = compiled(base).key
    for _ in range(num_changes):
        kind = generator.choice(["source", "source", "override", "torch", "CPU"])
        with monkeypatch.context() as patch:
            config, name, file = base, "", None
            if kind == "source":
                file, before = edit(package / next(parts), generator)
                name = SOURCES.get(file.relative_to(package).parts[0], "")
            elif kind == "override":
                text = next(overrides)
                config, name = configs[text], OVERRIDES[text]
            elif kind == "torch":
                patch.setattr(torch, "__version__", f"2.{generator.randrange(100)}.9")
                name = "torch"
            else:
                flags = inductor.instruction_set().split()
                flags.remove(generator.choice(flags))
                patch.setattr(inductor, "instruction_set", lambda flags=flags: " ".join(flags))
                name = "instruction set"
            report = compiled(config)
            if file is not None:
                restore(file, before)
        reasons[name] += 1
        differ = "differ" if name.startswith("sources") else "differs"
        reason = f"{name} {differ} from the nearest artifact, {key[:12]} (llama)" if name else ""
        assert (report.hit, report.reason) == (not name, reason), (kind, file)
        assert (report.key == key) is not bool(name)
        for entry in cache.entries("artifacts"):
            if entry.key != key:
                cache.remove(entry)
    assert compiled(base).hit
    assert set(reasons) == {*OVERRIDES.values(), *SOURCES.values(), "torch", "instruction set", ""}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["dtype=bf16"], "dtype differs"),
        (["dtype=bf16", "serve.kv_cache_dtype=fp32"], "dtype differs"),
        (["dtype=bf16", "serve.kv_cache_dtype=fp16"], "dtype and kv_cache_dtype differ"),
        (["dtype=bf16", "model.layers=2"], "model and dtype differ"),
        (
            ["dtype=bf16", "serve.kv_cache_dtype=fp16", "model.layers=2"],
            "model, dtype and kv_cache_dtype differ",
        ),
    ],
)
def test_a_reason_names_what_differs_and_not_what_follows_from_it(overrides: list[str], named: str, configure: Any):
    key = compiled(configure()).key
    report = compiled(configure(*overrides))
    assert (report.hit, report.reason) == (False, f"{named} from the nearest artifact, {key[:12]} (llama)")
    assert compiled(configure(*overrides)).hit


def test_the_nearest_artifact_differs_in_the_fewest(configure: Any):
    compiled(configure("dtype=bf16", "model.layers=1"))
    nearest = compiled(configure("dtype=bf16")).key
    compiled(configure("dtype=fp16", "serve.kv_cache_dtype=fp32", "model.layers=1"))
    report = compiled(configure("dtype=bf16", "model.norm.eps=0.125"))
    assert report.reason.startswith("model differs from the nearest artifact, ")
    assert compiled(configure("serve.kv_cache_dtype=bf16")).reason == (
        f"dtype differs from the nearest artifact, {nearest[:12]} (llama)"
    )


# artifacts that are there and not used


def truncate(file: Path) -> str:
    os.truncate(file, 100)
    return "graph.py has 100 bytes instead of "


def flip(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "the checksum of graph.py is wrong"


def open_to_others(file: Path) -> str:
    file.chmod(0o646)
    return f"{file} is writable by others (chmod go-w would mend it, if you trust what is there)"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", [truncate, flip, open_to_others])
def test_an_artifact_that_is_not_trusted_is_the_reason_and_is_made_anew(damage: Any, configure: Any, cache: Cache):
    config = configure()
    key = compiled(config).key
    compiled(configure("dtype=bf16"))  # a good one next to it
    fault = damage(cache.folder / "artifacts" / key / "graph.py")
    report = compile_model(config, cache=cache).report
    assert (report.hit, report.compiled) == (False, 0)
    assert report.reason.startswith(f"the artifact is not used: {fault}")
    assert len(cache.warnings) == 1 and fault in cache.warnings[0]
    assert compiled(config).hit


def test_an_empty_cache_and_one_that_nobody_trusts(configure: Any, cache: Cache):
    assert compiled(configure()).reason == "there is no artifact in the cache yet"
    cache.folder.chmod(0o777)
    report = compiled(configure("dtype=bf16"))
    assert report.reason.startswith(f"no artifact in the cache can be used: {cache.folder} is writable by others (")


@pytest.mark.parametrize(("num", "were"), [(1, "1 of its pieces was"), (2, "2 of its pieces were")])
def test_pieces_that_are_gone_or_damaged_are_the_reason(num: int, were: str, configure: Any, cache: Cache):
    config = configure()
    compiled(config)
    for entry in cache.entries("pieces")[:num]:
        cache.remove(entry)
    report = compiled(config)
    assert (report.hit, report.compiled, report.reason) == (False, num, f"{were} not in the cache")
    for entry in cache.entries("pieces")[:num]:
        os.truncate(cache.folder / "pieces" / entry.key / "piece.so", 3)
    report = compiled(config)
    assert (report.hit, report.compiled, report.reason) == (False, num, f"{were} damaged or not to be trusted")


# the recipe


def test_the_recipe_of_an_artifact_starts_it_from_the_cache(configure: Any, cache: Cache):
    said = ["model.layers=2", "dtype=bf16", "serve.kv_cache_dtype=fp32", "serve.http.api_keys=secret", "seed=3"]
    key = compiled(configure(*said, "level=2")).key
    recipe = cache.folder / "artifacts" / key / "recipe.yaml"
    assert "secret" not in recipe.read_text() and "seed" not in recipe.read_text()
    report = compiled(load([f"recipe={recipe}", f"cache={cache.folder}"]))
    assert (report.hit, report.key) == (True, key)
    (entry,) = cache.entries("artifacts")
    assert yaml.safe_load(recipe.read_text())["overrides"] == entry.about["recipe"]


def test_overrides_cannot_be_set(configure: Any):
    with pytest.raises(ConfigError, match="overrides is what the configuration is loaded from and cannot be set"):
        configure("overrides=[a]")


def test_an_artifact_has_all_programs_and_their_pieces(configure: Callable[..., Config], cache: Cache):
    text = show(semantic_graph(configure()))
    draft = """
def draft(hidden: fp32[T, 48]):
    h = rms_norm(hidden, W("draft.norm", fp32[48]), eps=1e-06)
    y = linear(h, W("draft.proj", fp32[48, 48]))
    return y
"""
    graph = lower(parse(text + draft), 2, Target("cpu"))
    publish_artifact(cache, configure(), {"text": "three programs"}, graph, [])
    found = read_artifact(cache, key_of({"text": "three programs"}))
    assert found is not None and list(found.programs) == ["body", "head", "draft"]
    for name, program in graph.programs.items():
        assert find_pieces(program), "there is something to compile"
        assert [each.text for each in find_pieces(found.programs[name])] == [each.text for each in find_pieces(program)]
