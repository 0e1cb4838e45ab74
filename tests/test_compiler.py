"""Pieces and artifacts: what is compiled, what is found again, and what a launch says about it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from law import assert_same_logits
from probe import logits_of

from atom import LLMEngine, SamplingParams, compiler
from atom.artifact import Cache
from atom.compiler import compile_graph, compile_model, launch_ingredients, pieces_of
from atom.config import Config, load
from atom.errors import UnsupportedError
from atom.graph import show
from atom.kernels import find_target
from atom.pieces import identity, key_of

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
COMPILED = ["llama_biases", "deepseek_v3"]  # the others of MODEL_FILES are slow
MODEL_FILES = [
    pytest.param(name, marks=() if name in COMPILED else pytest.mark.slow)
    for name in tiny.VARIANTS
    if name in COMPILED or (Path(__file__).parents[1] / "conf" / "model" / f"{name}.yaml").exists()
]

Configure = Callable[..., Config]


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def configure(checkpoints: Callable[[str], Path], cache_folder: Path) -> Configure:
    """A configuration of a tiny variant at level 2, in a cache folder of this session."""

    def make(name: str = "llama", *overrides: str, cache: Path = cache_folder) -> Config:
        return load([f"checkpoint={checkpoints(name)}", "dtype=fp32", "level=2", f"cache={cache}", *overrides])

    return make


def texts_of(config: Config) -> set[str]:
    return {piece.text for piece in pieces_of(compile_graph(config))}


def key_for(config: Config) -> str:
    return key_of(launch_ingredients(config, find_target("cpu")))


@pytest.fixture(params=MODEL_FILES)
def engine(request: pytest.FixtureRequest, checkpoints: Any, cache_folder: Path) -> Iterator[tuple[str, LLMEngine]]:
    fields = {"dtype": "fp32", "level": 2, "kv_cache_memory": 1 << 22, "cache": str(cache_folder)}
    engine = LLMEngine(model=str(checkpoints(request.param)), max_num_batched_tokens=64, **fields)
    yield request.param, engine
    engine.close()


@pytest.mark.timeout(900)
def test_compiled_pieces_give_the_logits_and_tokens_of_transformers(engine: Any, references: Any):
    name, engine = engine
    tokens = tiny.prompt(100)
    assert_same_logits(logits_of(engine, tokens), tiny.logits(references(name), tokens))
    prompts = [tiny.prompt(length, seed=length) for length in (1, 17, 40)]
    for prompt, answer in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        tiny.assert_greedy(answer, prompt, references(name))


# what is shared


def test_equal_layers_share_one_piece(configure: Configure):
    graph = compile_graph(configure())
    assert len(pieces_of(graph)) == 4, "before the first attention, between two of three, behind the last"
    assert len({piece.text for piece in pieces_of(graph)}) == 3


def test_a_deeper_model_compiles_nothing_new(configure: Configure):
    assert texts_of(configure("llama", "model.layers=7")) == texts_of(configure())


def test_another_family_shares_equal_pieces(configure: Configure):
    assert texts_of(configure("mistral", "model.norm.eps=1e-6")) == texts_of(configure())


def test_a_text_says_nothing_of_names_and_steps(configure: Configure):
    (text, *_) = sorted(texts_of(configure()))
    assert text.startswith("def piece(x0: ") and "model." not in text and "[T" not in text


def test_what_a_launch_does_not_depend_on_is_not_in_its_key(configure: Configure, checkpoints: Any, tmp_path: Path):
    key = key_for(configure())
    copy = shutil.copytree(checkpoints("llama"), tmp_path / "copy")
    assert key_for(load([f"checkpoint={copy}", "dtype=fp32", "level=2"])) == key
    assert key_for(configure("llama", "serve.max_num_seqs=3", "serve.block_size=4", "seed=9", cache=tmp_path)) == key
    for change in ("dtype=bf16", "level=1", "serve.kv_cache_dtype=bf16", "model.layers=2", "model.norm.eps=0.1"):
        assert key_for(configure("llama", change)) != key


# hits and misses


def test_a_second_compilation_is_a_hit_with_the_same_graph(configure: Configure):
    first, second = (compile_model(configure("llama_biases")) for _ in range(2))
    assert (second.report.hit, second.report.reason, second.report.compiled) == (True, "", 0)
    assert show(second.graph) == show(first.graph)
    assert list(second.code) == list(first.code) and len(second.code) == second.report.distinct == 3


LAUNCH = """
import sys
from atom import LLMEngine, SamplingParams
from atom.passes import pipeline
pipeline.PIPELINE = None  # a pass that is run now fails
engine = LLMEngine(model={model!r}, dtype="fp32", level=2, cache={cache!r}, kv_cache_memory=1 << 22)
(answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
assert "torch._inductor" not in sys.modules
print(answer["token_ids"])
"""


def test_a_warm_launch_needs_no_compiler_no_pass_and_no_inductor(
    configure: Configure, checkpoints: Any, references: Any, cache_folder: Path, tmp_path: Path
):
    """Here from a copy of the cache folder, in which nothing is written."""
    compile_model(configure("llama_biases"))
    moved = shutil.copytree(cache_folder, tmp_path / "moved")
    shutil.rmtree(moved / "locks")
    before = sorted(path for path in moved.rglob("*"))
    program = LAUNCH.format(model=str(checkpoints("llama_biases")), cache=str(moved))
    environment = {**os.environ, "PATH": "/nowhere"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    tiny.assert_greedy({"token_ids": json.loads(ended.stdout)}, [1, 2, 3], references("llama_biases"))
    assert sorted(path for path in moved.rglob("*")) == before


def test_a_miss_names_the_ingredient(configure: Configure, monkeypatch: pytest.MonkeyPatch):
    config = configure("llama_biases")
    key = compile_model(config).report.key
    entries = Cache(Path(str(config.cache))).entries()

    def why(config: Config) -> str:
        return compiler._why(launch_ingredients(config, find_target("cpu")), [e for e in entries if e.key == key])

    nearest = f"differs from the nearest artifact, {key[:12]} (llama)"
    assert why(replace(config, dtype="bf16")) == f"dtype {nearest}"
    monkeypatch.setattr(compiler.torch, "__version__", "9.9.9")
    assert why(config) == f"torch {nearest}"
    monkeypatch.undo()
    for part, name in (
        ("graph", "the graph"),
        ("passes", "the passes"),
        ("kernels", "the kernels"),
        ("pieces", "the pieces"),
    ):
        monkeypatch.setattr(
            compiler, "sources_of", lambda each, part=part: "changed" if each == part else compiler_sources(each)
        )
        assert why(config) == f"sources of {name} {nearest}"
        monkeypatch.undo()
    assert compiler._why(launch_ingredients(config, find_target("cpu")), []) == "there is no artifact in the cache yet"


compiler_sources = compiler.sources_of


def test_200_random_changes_of_one_ingredient_miss_and_say_which(configure: Configure, tmp_path: Path):
    ingredients = launch_ingredients(configure(), find_target("cpu"))
    cache = Cache(tmp_path)
    cache.publish("artifacts", key_of(ingredients), {}, {"name": "base", "ingredients": ingredients})
    generator = random.Random(0)
    for _ in range(200):
        name = generator.choice(list(ingredients))
        changed = ingredients | {name: ingredients[name] + generator.choice("abc0 ")}
        assert cache.find("artifacts", key_of(changed)) is None
        assert compiler._why(changed, cache.entries()).startswith(f"{name} differs from the nearest artifact")
    assert cache.find("artifacts", key_of(dict(reversed(ingredients.items())))) is not None, "order is no ingredient"


# faults


def test_a_damaged_piece_is_built_anew(configure: Configure, cache_folder: Path, tmp_path: Path):
    config = configure("llama_biases")
    text = next(iter(compile_model(config).code))
    folder = shutil.copytree(cache_folder, tmp_path / "damaged")
    damaged = folder / "pieces" / key_of(identity(text)) / "piece.so"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    cache = Cache(folder)
    made = compile_model(replace(config, cache=str(folder)), cache=cache)
    assert (made.report.compiled, made.report.hit) == (1, False)
    assert "built anew" in cache.warnings[0]
    assert compile_model(replace(config, cache=str(folder))).report.hit


def test_a_cache_that_cannot_be_written_is_said_and_does_not_stop(configure: Configure, tmp_path: Path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "below")
    made = compile_model(configure("llama_biases", cache=tmp_path / "file" / "below"), cache=cache)
    assert made.report.compiled == len(made.code) == 3
    assert len(cache.warnings) == 1 and "not kept for the next run" in cache.warnings[0]
    cache.close()


def test_two_processes_at_once_compile_once(checkpoints: Any, tmp_path: Path):
    command = [sys.executable, "-m", "atom.cli", "job=compile", f"checkpoint={checkpoints('llama')}", "dtype=fp32",
               f"cache={tmp_path}", "job.output=json"]  # fmt: skip
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [json.loads(process.communicate()[0]) for process in both]
    assert sum(each["compiled"] for each in told) == 3
    assert {each["key"] for each in told} == {told[0]["key"]}
    assert {each["pieces"] for each in told} == {4}


def test_without_a_compiler_an_open_level_is_1_and_says_so(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiler, "has_compiler", lambda: False)
    cache = Cache(tmp_path)
    config = configure(cache=tmp_path)
    made = compile_model(replace(config, level=None), cache=cache)
    assert (made.code, made.report.pieces) == ({}, 0)
    assert cache.warnings == [
        "compiling pieces needs a C++ compiler: install g++; until then this runs at level 1, which is slower"
    ]
    with pytest.raises(
        UnsupportedError, match=r"^level=2: compiling pieces needs a C\+\+ compiler: install g\+\+, or take level=1$"
    ):
        compile_model(config)
