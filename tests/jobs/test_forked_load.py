"""A configuration that is loaded in another process, while this one imports torch."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.config.load import load
from atom.jobs import forked_load


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["job=generate", "prompts=Hi"], "generate"),
        (["prompts=Hi", "level=0"], "generate"),
        (["job=chat"], "chat"),
        (["recipe=demo"], "generate"),
        (["recipe=demo", "job=serve"], "serve"),
        (["recipe=nosuch"], None),
        (["job=bench", "prompts=Hi"], None),
        (["job.stage=final"], None),
        (["job.stage=final", "job.prune=1d"], None),
        (["job=serve"], "serve"),
        (["checkpoint=/models/x"], "serve"),
        ([], "serve"),
        (["parallel=tp2", "parallel.launcher=torchrun"], None),
        (["recipe={folder}/ranks.yaml"], None),
        (["parallel=dp2", "device=cuda"], "serve"),
        (["-m", "prompts=Hi"], None),
        (["prompts"], None),
    ],
)
def test_only_jobs_that_answer_and_have_no_flags_are_begun_so(argv: list[str], kind: str | None, tmp_path: Path):
    (tmp_path / "ranks.yaml").write_text("overrides: [parallel=tp2, parallel.launcher=torchrun]\n")
    assert forked_load.find_kind([text.format(folder=tmp_path) for text in argv]) == kind


def run(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=120)


LOAD = """
import sys
from atom.jobs.forked_load import load_apart
wait = load_apart(sys.argv[1:])
loaded = wait()
print(repr(loaded and loaded.config), [name for name in ("hydra", "omegaconf", "torch") if name in sys.modules])
"""


def test_it_is_the_same_configuration_and_hydra_stays_away(checkpoints: Any):
    overrides = [
        f"checkpoint={checkpoints('gpt_oss')}",
        "job=generate",
        "prompts=[[1, 2], [3]]",
        "quant=int8",
        "device=cpu",
    ]
    done = run(LOAD, *overrides)
    assert done.stdout.strip() == f"{load(overrides)!r} []", done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", ["nosuch=1", "checkpoint=/nowhere", "job.save_recipe=mine"])
def test_what_cannot_be_loaded_there_is_left_to_the_ordinary_way(wrong: str, checkpoints: Any):
    done = run(LOAD, f"checkpoint={checkpoints('llama')}", "job=generate", "prompts=Hi", wrong)
    assert done.stdout.strip() == "None []"
    assert done.stderr == ""


@pytest.mark.slow
def test_a_command_answers_and_says_what_was_wrong_once(checkpoints: Any, tmp_path: Path):
    heavy = "hydra omegaconf yaml triton sympy torch._dynamo torch._inductor transformers jinja2 fastapi pydantic gguf"
    main = "import sys; from atom.cli import main; code = main(sys.argv[1:]); "
    main += f"print([name for name in {heavy.split()} if name in sys.modules]); sys.exit(code)"
    where = [f"checkpoint={checkpoints('llama')}", "job=generate", "level=0", f"cache={tmp_path}"]
    good = run(main, *where, "prompts=[[1, 2, 3]]", "sampling.max_tokens=3", "sampling.temperature=0")
    assert good.returncode == 0, good.stderr
    assert good.stdout.splitlines()[-1] == "[]" and len(good.stdout.split()) == 4
    assert "opened in" in good.stderr and "imports" in good.stderr
    bad = run(main, *where, "prompts=[[1, 2, 3]]", "nosuch=1")
    assert bad.returncode == 2
    assert [line for line in bad.stderr.splitlines() if "nosuch" in line] == bad.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "flags"),
    [("atom.cli", "{key}={value}"), ("atom.entrypoints.openai_server", "--set {key}={value}")],
)
def test_a_server_imports_neither_torch_nor_hydra(module: str, flags: str, checkpoints: Any, tmp_path: Path):
    heavy = "torch hydra omegaconf triton sympy transformers gguf rich llguidance"
    main = f"import sys; from {module} import main; code = main(sys.argv[1:]); "
    main += f"print([name for name in {heavy.split()} if name in sys.modules]); sys.exit(code)"
    values = {
        "checkpoint": checkpoints("llama"),
        "level": 0,
        "device": "cpu",
        "cache": tmp_path,
        "serve.http.host": "127.0.0.1",
        "serve.http.port": 0,
        "serve.kv_cache_memory": 1 << 20,
    }
    own = " ".join(flags.format(key=key, value=value) for key, value in values.items()).split()
    command = [sys.executable, "-c", main, *own]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines = [*itertools.takewhile(lambda line: "Ctrl-C" not in line, server.stderr)]
    engines = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    server.send_signal(signal.SIGTERM)
    lines += server.stderr.readlines()  # a thread relays those of the engine, some after that line
    said, _ = server.communicate(timeout=60)
    assert (server.returncode, said) == (0, "[]\n"), lines
    assert len(engines) == 1 and any("opened in" in line for line in lines)


@pytest.mark.slow
def test_a_server_that_cannot_be_configured_leaves_no_engine_running(checkpoints: Any):
    code = "import sys; from atom.jobs import forked_load; started = []\n"
    code += "make = forked_load.EngineProcess\n"
    code += "forked_load.EngineProcess = lambda *first, **rest: started.append(make(*first, **rest)) or started[0]\n"
    code += "from atom.cli import main; done = main(sys.argv[1:]); print(done, [each.has_ended() for each in started])"
    done = run(code, f"checkpoint={checkpoints('llama')}", "nosuch=1")
    assert done.stdout == "2 [True]\n"
    assert len(done.stderr.splitlines()) == 1 and "nosuch" in done.stderr


def test_the_engine_is_configured_before_the_server_is_imported(checkpoints: Any):
    code = """
import sys
from atom.jobs import forked_load

started, make, find = [], forked_load.EngineProcess, forked_load.module_of
forked_load.EngineProcess = lambda *first, **rest: started.append(make(*first, **rest)) or started[0]

def module_of(name):
    if name == "serve":
        print(started[0].is_configured, "fastapi" in sys.modules)
        sys.exit(3)
    return find(name)

forked_load.module_of = module_of
forked_load.run_apart(sys.argv[1:])
"""
    done = run(code, f"checkpoint={checkpoints('llama')}", "device=cpu")
    assert (done.returncode, done.stdout) == (3, "True False\n")


def test_the_process_that_loads_ends_with_the_one_that_waits_for_it():
    code = """
import os, signal, time
from atom.jobs.forked_load import end_with
parent, reading = os.getpid(), os.pipe()
if not os.fork():
    end_with(parent)
    os.write(reading[1], b"ready")
    time.sleep(100)
os.read(reading[0], 5)
print(flush=True)
os.kill(parent, signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.communicate(timeout=60) == (b"\n", None), "its child holds the pipe open until it ends"
    assert process.returncode == -signal.SIGKILL
