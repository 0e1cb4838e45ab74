"""A configuration that is loaded in another process, while this one imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.config.load import load
from atom.jobs import apart


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
        (["-m", "prompts=Hi"], None),
        (["prompts"], None),
    ],
)
def test_only_jobs_that_answer_and_have_no_flags_are_begun_so(argv: list[str], kind: str | None):
    assert apart.find_kind(argv) == kind


def run(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=120)


LOAD = """
import sys
from atom.jobs.apart import load_apart
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


@pytest.mark.parametrize("wrong", ["nosuch=1", "checkpoint=/nowhere", "job.save_recipe=mine"])
def test_what_cannot_be_loaded_there_is_left_to_the_ordinary_way(wrong: str, checkpoints: Any):
    done = run(LOAD, f"checkpoint={checkpoints('llama')}", "job=generate", "prompts=Hi", wrong)
    assert done.stdout.strip() == "None []"
    assert done.stderr == ""


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
