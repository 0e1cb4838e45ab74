"""Pieces and artifacts: what is compiled, what is found again, and what a launch says about it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import tiny
from law import assert_same_logits
from probe import logits_of

from atom import LLMEngine, SamplingParams
from atom.cache import Cache
from atom.checkpoint import SilentProgress
from atom.compiler import compile as compiler
from atom.compiler import compile_graph, compile_model, pieces_of
from atom.compiler.artifact import launch_ingredients
from atom.config import Config, load
from atom.errors import UnsupportedError
from atom.graph import show
from atom.kernels import Target, find_target
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.kernels.triton.binary_cache import BinaryCache
from atom.kernels.triton.piece_compiler import TritonCompiler
from atom.pieces import identity, key_of

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("one_compiler")]

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
COMPILED = ["llama_biases"]  # the others of MODEL_FILES are slow
MODEL_FILES = [
    pytest.param(name, marks=() if name in COMPILED else pytest.mark.slow)
    for name in tiny.VARIANTS
    if name in COMPILED or (Path(__file__).parents[2] / "conf" / "model" / f"{name}.yaml").exists()
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


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Pieces whose code is made up, and gives itself: by text."""
    made: dict[str, bytes] = {}

    def compile_nothing(texts: list[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        for text in texts:
            made[text] = f"code of {text}".encode()
            yield text, {"piece.so": made[text]}

    monkeypatch.setattr(compiler, "compile_pieces", compile_nothing)
    monkeypatch.setattr(InductorCompiler, "load", lambda self, folder: (folder / "piece.so").read_bytes)
    return made


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


OTHER_USER = """
import os, sys
from atom.compiler import compile_model
from atom.config import load
from atom import LLMEngine, SamplingParams
def launch():
    engine = LLMEngine(model={model!r}, dtype="fp32", level=2, cache={cache!r}, kv_cache_memory=1 << 22)
    return engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]["token_ids"]
first = launch()  # as root, whose Python others may not read: all is imported now
os.environ["PATH"] = "/nowhere"
os.setresuid(1234, 1234, 1234)
report = compile_model(load(["checkpoint={model}", "dtype=fp32", "level=2", "cache={cache}"])).report
assert report.hit and not report.compiled, report
try:
    open({cache!r} + "/new", "w")
except PermissionError:
    print(launch() == first)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_starts_warm_from_what_root_made_and_may_not_write(
    configure: Configure, checkpoints: Any, cache_folder: Path
):
    compile_model(configure("llama_biases"))
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are root's alone
        cache = shutil.copytree(cache_folder, Path(folder, "cache"), ignore=shutil.ignore_patterns("locks"))
        model = shutil.copytree(checkpoints("llama_biases"), Path(folder, "model"))
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(0o755)
        program = OTHER_USER.format(model=str(model), cache=str(cache))
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
    assert "ignored" not in ended.stderr


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


# faults


def test_what_is_wrong_with_triton_s_entries_is_told_by_the_caller_and_later_on_stderr(
    configure: Configure, tmp_path: Path, no_code: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """The first entry is asked for while a piece is compiled, the second by a step."""
    monkeypatch.setattr(BinaryCache, "current", None)  # put back behind this
    monkeypatch.setattr(TritonCompiler, "load", InductorCompiler.load)
    monkeypatch.setattr(compiler, "find_target", lambda device: Target(device))
    for name in ("first", "second"):
        folder = tmp_path / "triton" / key_of({"file": name})
        folder.mkdir(0o700, parents=True)
    made = compiler.compile_pieces

    def ask(name: str) -> None:
        assert BinaryCache.current is not None and BinaryCache.current.find({"file": name}) == {}

    def compile_and_ask(texts: list[str], device: str) -> Any:
        ask("first")
        return made(texts, device)

    monkeypatch.setattr(compiler, "compile_pieces", compile_and_ask)
    cache = Cache(tmp_path)
    compile_model(configure("llama", "device=cuda", cache=tmp_path), cache=cache)
    (warning,) = cache.warnings
    assert "manifest.json is missing, built anew" in warning and capsys.readouterr().err == ""
    ask("second")
    assert capsys.readouterr().err == f"atom-run: {folder}: manifest.json is missing, built anew\n"


def test_a_damaged_piece_is_built_anew(configure: Configure, tmp_path: Path, no_code: dict[str, bytes]):
    config = configure("llama_biases", cache=tmp_path)
    text = next(iter(compile_model(config).code))
    damaged = tmp_path / "pieces" / key_of(identity(text)) / "piece.so"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    no_code.clear()
    cache = Cache(tmp_path)
    made = compile_model(config, cache=cache)
    assert (made.report.compiled, made.report.hit) == (1, False)
    assert "built anew" in cache.warnings[0]
    assert list(no_code) == [text] and made.code[text]() == no_code[text] == damaged.read_bytes()
    assert compile_model(config).report.hit


def test_a_cache_that_cannot_be_written_is_said_and_does_not_stop(
    configure: Configure, tmp_path: Path, no_code: dict[str, bytes]
):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "below")
    made = compile_model(configure("llama_biases", cache=tmp_path / "file" / "below"), cache=cache)
    assert made.report.compiled == len(made.code) == 3
    assert {text: run() for text, run in made.code.items()} == no_code, "what was compiled is what is loaded"
    assert len(cache.warnings) == 1 and "not kept for the next run" in cache.warnings[0]
    cache.close()


@pytest.mark.slow
def test_two_processes_at_once_compile_once(checkpoints: Any, tmp_path: Path):
    command = [sys.executable, "-m", "atom.cli", "job=compile", f"checkpoint={checkpoints('llama')}", "dtype=fp32",
               f"cache={tmp_path}", "job.output=json"]  # fmt: skip
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate() for process in both]
    told = [json.loads(out) for out, _ in said]
    assert sum(each["compiled"] for each in told) == 3
    assert sum("another process is compiling these pieces" in err for _, err in said) == 1
    assert {each["key"] for each in told} == {told[0]["key"]}
    assert {each["pieces"] for each in told} == {4}


class Recorder(SilentProgress):
    """What is told of tasks; the first of them lets go what others hold: one file at once, the rest a little later."""

    def __init__(self, held: list[IO[str]]) -> None:
        self.told: list[str] = []
        self._held = held

    @contextlib.contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Any]:
        self.told.append(description)
        now, later = self._held[:1], self._held[1:]
        self._held = []
        for file in now:
            file.close()
        threading.Timer(0.3, lambda: [file.close() for file in later]).start()
        with super().task(description, total) as task:
            yield task
        self.told.append(f"end of {description}")


@pytest.mark.parametrize("num_held", [0, 1, 2])
def test_who_waits_for_another_process_is_told_once(num_held: int, configure: Configure, tmp_path: Path, no_code: Any):
    config = configure(cache=tmp_path)
    keys = sorted(key_of(identity(text)) for text in texts_of(config))
    for key in keys:  # makes the files
        with Cache(tmp_path).lock("pieces", key):
            pass
    held = [(tmp_path / "locks" / f"pieces-{key}.lock").open("w") for key in keys[:num_held]]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    progress = Recorder(held)
    assert compile_model(config, progress).report.compiled == 3
    waiting = ["another process is compiling these pieces", "end of another process is compiling these pieces"]
    compiling = ["compiling 3 pieces", "end of compiling 3 pieces"]
    assert progress.told == (waiting if num_held else []) + compiling
    shutil.rmtree(tmp_path / "pieces" / keys[0])
    compile_model(config, progress)
    assert progress.told[-1] == "end of compiling 1 piece"


def test_without_a_compiler_an_open_level_is_1_and_says_so(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(InductorCompiler, "find_missing", lambda self: "a C++ compiler: install g++")
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
