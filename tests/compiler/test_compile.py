"""Pieces and artifacts: what is compiled, what is found again, and what a launch says about it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
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
from probe import assert_logits, logits_of

from atom import LLMEngine, SamplingParams
from atom.cache import Cache, key_of
from atom.checkpoint import SilentProgress
from atom.cli import main
from atom.compiler import compile as compiler
from atom.compiler import compile_graph, compile_model, pieces_of
from atom.compiler.artifact import launch_ingredients
from atom.config import Config
from atom.config.load import load
from atom.errors import PassError, UnsupportedError
from atom.graph import show
from atom.kernels import Target, find_target
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.kernels.triton.compile.binary_cache import BinaryCache
from atom.kernels.triton.compile.piece_compiler import TritonCompiler
from atom.pieces import PieceError, identity

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("one_compiler")]

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
MODEL_FILES = ["llama_biases", *tiny.MODEL_FILES]

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


TRACED = """
from atom.compiler import compile as compiler
from atom.graph import parse
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.kernels.registry import trace_calls

def load_trace(compiler, folder):
    (program,) = parse((folder / "piece.so").read_text(), "piece").programs.values()
    return lambda *inputs: [*trace_calls(program)(*inputs)]

InductorCompiler.load = load_trace
"""


@pytest.fixture
def traced_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces whose code is their text, and runs what Inductor is given to compile."""
    made = {}
    with monkeypatch.context() as patch:
        patch.setattr(InductorCompiler, "load", InductorCompiler.load)  # put back after this
        exec(TRACED, made)
        load = InductorCompiler.load
    monkeypatch.setattr(InductorCompiler, "load", load)
    monkeypatch.setattr(
        compiler, "compile_pieces", lambda texts, _: ((text, {"piece.so": text.encode()}) for text in texts)
    )


def assert_numbers_of_transformers(name: str, cache: Path, checkpoints: Any, references: Any) -> None:
    """The logits and greedy tokens of an engine at level 2 are those of transformers."""
    fields = {"dtype": "fp32", "level": 2, "kv_cache_memory": 1 << 22, "cache": str(cache)}
    engine = LLMEngine(model=str(checkpoints(name)), max_num_batched_tokens=64, **fields)
    tokens = tiny.prompt(100)
    assert_logits(engine, tokens, references(name))
    prompts = [tiny.prompt(length, seed=length) for length in (1, 17, 40)]
    for prompt, answer in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        tiny.assert_greedy(answer, prompt, references(name))
    engine.close()


@pytest.mark.sampled(64)
@pytest.mark.parametrize("name", MODEL_FILES)
def test_pieces_give_the_logits_and_tokens_of_transformers(
    name: str, checkpoints: Any, references: Any, traced_code: None, tmp_path: Path
):
    assert_numbers_of_transformers(name, tmp_path, checkpoints, references)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODEL_FILES)
def test_compiled_pieces_give_the_logits_and_tokens_of_transformers(
    name: str, checkpoints: Any, references: Any, cache_folder: Path
):
    assert_numbers_of_transformers(name, cache_folder, checkpoints, references)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", tiny.MODEL_FILES)
def test_compiled_pieces_in_fp16_are_as_near_to_float32_as_transformers(
    name: str, checkpoints: Any, references: Any, cache_folder: Path
):
    fields = {"dtype": "fp16", "level": 2, "kv_cache_memory": 1 << 22, "cache": str(cache_folder)}
    engine = LLMEngine(model=str(checkpoints(name)), **fields)
    tiny.assert_fp16(checkpoints(name), references(name), lambda tokens: logits_of(engine, tokens))
    engine.close()


# what is shared


def test_equal_layers_share_one_piece(configure: Configure):
    graph = compile_graph(configure())
    assert len(pieces_of(graph)) == 4, "before the first attention, between two of three, after the last"
    assert len({piece.text for piece in pieces_of(graph)}) == 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_deeper_model_compiles_nothing_new(name: str, configure: Configure):
    assert texts_of(configure(name, "model.layers=7")) == texts_of(configure(name))


def test_another_family_shares_equal_pieces(configure: Configure):
    assert texts_of(configure("mistral", "model.norm.eps=1e-6")) == texts_of(configure())


def test_a_text_has_no_names_and_steps(configure: Configure):
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


def test_a_second_compilation_is_a_hit_with_the_same_graph(configure: Configure, tmp_path: Path, no_code: Any):
    first, second = (compile_model(configure("llama_biases", cache=tmp_path)) for _ in range(2))
    assert (second.report.hit, second.report.reason, second.report.compiled) == (True, "", 0)
    assert show(second.graph) == re.sub(r"; cpp: [^;\n]*(?=; piece)", "", show(first.graph)), "but for reasons"
    assert list(second.code) == list(first.code) and len(second.code) == second.report.distinct == 3


LAUNCH = """
import sys
{stub}
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
from atom.config.load import load
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


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_starts_warm_from_what_root_made_and_may_not_write(
    configure: Configure, checkpoints: Any, cache_folder: Path
):
    compile_model(configure("llama_biases"))
    with tempfile.TemporaryDirectory() as folder:  # only root can read pytest's own folders
        cache = shutil.copytree(cache_folder, Path(folder, "cache"), ignore=shutil.ignore_patterns("locks"))
        model = shutil.copytree(checkpoints("llama_biases"), Path(folder, "model"))
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(0o755)
        program = OTHER_USER.format(model=str(model), cache=str(cache))
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
    assert "ignored" not in ended.stderr


def assert_launches_warm(cache: Path, moved: Path, checkpoints: Any, references: Any, stub: str = "") -> None:
    """From a copy of the cache folder, in which nothing is written."""
    shutil.copytree(cache, moved)
    shutil.rmtree(moved / "locks")
    before = sorted(path for path in moved.rglob("*"))
    program = LAUNCH.format(model=str(checkpoints("llama_biases")), cache=str(moved), stub=stub)
    environment = {**os.environ, "PATH": "/nowhere"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    tiny.assert_greedy({"token_ids": json.loads(ended.stdout)}, [1, 2, 3], references("llama_biases"))
    assert sorted(path for path in moved.rglob("*")) == before


def test_a_warm_launch_needs_no_compiler_no_pass_and_no_inductor(
    configure: Configure, checkpoints: Any, references: Any, traced_code: None, tmp_path: Path
):
    compile_model(configure("llama_biases", cache=tmp_path / "cache"))
    assert_launches_warm(tmp_path / "cache", tmp_path / "moved", checkpoints, references, TRACED)


@pytest.mark.slow
def test_a_warm_launch_of_compiled_code_needs_no_compiler_no_pass_and_no_inductor(
    configure: Configure, checkpoints: Any, references: Any, cache_folder: Path, tmp_path: Path
):
    compile_model(configure("llama_biases"))
    assert_launches_warm(cache_folder, tmp_path / "moved", checkpoints, references)


# faults


def test_warnings_about_triton_s_entries_are_the_caller_s_and_later_on_stderr(
    configure: Configure, tmp_path: Path, no_code: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """The first entry is asked for while a piece is compiled, the second by a step."""
    monkeypatch.setattr(BinaryCache, "current", None)  # put back after this
    monkeypatch.setattr(TritonCompiler, "load", InductorCompiler.load)
    monkeypatch.setattr(compiler, "find_target", lambda device: Target(device))
    for name in ("first", "second"):
        folder = tmp_path / "binaries" / key_of({"file": name})
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


def test_a_cache_that_cannot_be_written_is_a_warning_and_does_not_stop(
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
    reports = [json.loads(out) for out, _ in said]
    assert sum(each["compiled"] for each in reports) == 3
    assert sum("another process is compiling these pieces" in err for _, err in said) == 1
    assert {each["key"] for each in reports} == {reports[0]["key"]}
    assert {each["pieces"] for each in reports} == {4}


class Recorder(SilentProgress):
    """What is reported of tasks; the first of them lets go what others hold: one file at once, the rest a little later."""

    def __init__(self, held: list[IO[str]]) -> None:
        self.reported: list[str] = []
        self._held = held

    @contextlib.contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Any]:
        self.reported.append(description)
        now, later = self._held[:1], self._held[1:]
        self._held = []
        for file in now:
            file.close()
        threading.Timer(0.3, lambda: [file.close() for file in later]).start()
        with super().task(description, total) as task:
            yield task
        self.reported.append(f"end of {description}")


@pytest.mark.parametrize("num_held", [0, 1, 2])
def test_waiting_for_another_process_is_shown_once(num_held: int, configure: Configure, tmp_path: Path, no_code: Any):
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
    assert progress.reported == (waiting if num_held else []) + compiling
    shutil.rmtree(tmp_path / "pieces" / keys[0])
    compile_model(config, progress)
    assert progress.reported[-1] == "end of compiling 1 piece"


def test_without_a_compiler_an_open_level_is_1_with_a_warning(
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


# a piece that is wrong

WRONG = "a compiled piece of add is nan off at 17 rows"
AT_LEVEL_1 = f"{WRONG}: this runs at level 1, which is slower; job=compile tries it again"
AT_LEVEL_2 = rf"^level=2: {WRONG}; take level=1, or have job=compile try it again$"


@pytest.fixture
def failing(no_code: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The code of the last of some pieces is wrong. How many were to be compiled, by launch."""
    counts: list[int] = []
    compile_rightly = compiler.compile_pieces

    def fail(texts: list[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        counts.append(len(texts))
        yield from compile_rightly(texts[:-1], device)
        raise PieceError(texts[-1], WRONG)

    monkeypatch.setattr(compiler, "compile_pieces", fail)
    return counts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wrong_piece_of_an_open_level_is_level_1_at_once_the_next_time(
    device: str, configure: Configure, tmp_path: Path, failing: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiler, "find_target", lambda device: Target(device))
    config = replace(configure("llama", f"device={device}", cache=tmp_path), level=None)
    level_1 = show(compile_graph(replace(config, level=1)))
    for _ in range(2):
        cache = Cache(tmp_path)
        made = compile_model(config, cache=cache)
        assert (made.code, made.level, made.report.pieces, cache.warnings) == ({}, 1, 0, [AT_LEVEL_1])
        assert show(made.graph) == level_1
    assert failing == [{"cpu": 3, "cuda": 1}[device]], "it is not tried again"
    (entry,) = cache.entries("failures")
    assert entry.about["reason"] == WRONG and not cache.holds("pieces", entry.key) and not cache.entries("artifacts")


def test_a_wrong_piece_of_a_level_that_was_asked_for_ends_the_run(
    configure: Configure, tmp_path: Path, failing: list[int]
):
    for _ in range(2):
        cache = Cache(tmp_path)
        with pytest.raises(PassError, match=AT_LEVEL_2):
            compile_model(configure(cache=tmp_path), cache=cache)
        assert cache.warnings == []
    assert failing == [3]


def test_job_compile_tries_a_wrong_piece_again(
    configure: Configure, tmp_path: Path, failing: list[int], monkeypatch: pytest.MonkeyPatch
):
    job = replace(configure("llama", "job=compile", cache=tmp_path), level=None)
    for _ in range(2):
        with pytest.raises(PassError, match=rf"^job=compile: {WRONG}; level=1 runs without it$"):
            compile_model(job)
    assert failing == [3, 1]
    monkeypatch.setattr(compiler, "compile_pieces", lambda texts, _: ((text, {"piece.so": b"right"}) for text in texts))
    made = compile_model(job)
    assert (made.report.compiled, made.level, Cache(tmp_path).entries("failures")) == (1, 2, [])
    assert compile_model(replace(configure(cache=tmp_path), level=None)).report.hit


def test_a_wrong_piece_is_a_warning_where_nothing_can_be_kept(configure: Configure, tmp_path: Path, failing: list[int]):
    (tmp_path / "file").write_text("")
    config = replace(configure(cache=tmp_path / "file" / "below"), level=None)
    cache = Cache(tmp_path / "file" / "below")
    assert compile_model(config, cache=cache).level == 1
    assert ["not kept for the next run" in line for line in cache.warnings] == [True, False]
    assert cache.warnings[1] == AT_LEVEL_1
    cache.close()


def test_who_has_waited_for_another_process_takes_its_word(
    configure: Configure, tmp_path: Path, failing: list[int], monkeypatch: pytest.MonkeyPatch
):
    """The other one has found out between this one's look at the cache and its turn."""
    config = replace(configure(cache=tmp_path), level=None)
    lock = compiler._locked

    @contextlib.contextmanager
    def lock_late(*given: Any) -> Iterator[None]:
        monkeypatch.setattr(compiler, "_locked", lock)
        compile_model(config)
        with lock(*given):
            yield

    monkeypatch.setattr(compiler, "_locked", lock_late)
    assert compile_model(config).level == 1
    assert failing == [3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_text_whose_piece_is_wrong_answers_at_level_1(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = [f"checkpoint={checkpoints('llama')}", "dtype=fp16", "device=cpu", f"cache={tmp_path}/cache"]
    assert main(["job=explain", *given, "job.stage=fuse_norm_linear"]) == 0
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if " = embedding(" in line)
    name = first.split()[0]
    more = [
        f"    {name}_large = scale({name}, by=1000000.0)",
        f"    {name}_again = scale({name}_large, by=1e-06)",
    ]
    head, tail = text.split(f"{first}\n")
    (tmp_path / "mine.py").write_text(
        head + "\n".join([first, *more]) + "\n" + re.sub(rf"\b{name}\b", f"{name}_again", tail)
    )
    for _ in range(2):
        code = main(
            [*given, f"job.graph={tmp_path}/mine.py", "prompts=[1,2,3]", "job.output=json", "sampling.max_tokens=2"]
        )
        out, err = capsys.readouterr()
        assert code == 0 and len(json.loads(out)["token_ids"]) == 2
        assert re.search(
            r"^atom-run: a compiled piece of .*scale.* is \S+ off at 1 rows: this runs at level 1", err, re.MULTILINE
        )
