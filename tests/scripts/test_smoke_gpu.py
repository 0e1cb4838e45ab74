"""scripts/smoke_gpu.py says which path failed, whatever way it fails, and that none did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import smoke_gpu, smoke_paths
from scripts.smoke_paths import Part, judge

RESULT = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({result!r})"
STUBS = {  # what a path's process does
    "dense": RESULT.format(result=json.dumps(["ok", "error 1.0%", "H200"])),
    "fp8": RESULT.format(result=json.dumps(["failed", "prompts: 9.00% is over", "H200"])),
    "latents": "import os; print('last words', flush=True); os.kill(os.getpid(), 11)",
    "ngram": "import time; time.sleep(600)",
    "grammar": RESULT.format(result=json.dumps(["skipped", "(llguidance is not installed)", "H200"])),
}


def run_stubs(monkeypatch: pytest.MonkeyPatch, capsys: Any, *given: str) -> tuple[int, list[str]]:
    """The exit status, and the lines that are printed."""

    def command_of(device: str, cache: str | None) -> smoke_gpu.Command:
        def command(name: str, result: Path) -> Sequence[str]:
            return [sys.executable, "-S", "-c", STUBS[name], str(result)]

        return command

    monkeypatch.setattr(smoke_gpu, "command_of", command_of)
    monkeypatch.setattr(sys, "argv", ["smoke_gpu.py", *given])
    status = smoke_gpu.main()
    return status, capsys.readouterr().out.splitlines()


def test_paths_are_those_that_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert sorted(smoke_gpu.NAMES) == sorted(smoke_paths.PATHS)
    assert run_stubs(monkeypatch, capsys, "--list") == (0, [*smoke_gpu.NAMES])


def test_a_path_that_crashes_or_is_wrong_fails_no_other(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    status, lines = run_stubs(monkeypatch, capsys, "--only", "dense,fp8,latents,grammar")
    result = {line.split()[0]: line for line in lines[:4]}
    assert status == 1
    assert "ok" in result["dense"].split() and result["dense"].endswith("error 1.0%")
    assert "failed" in result["fp8"].split() and result["fp8"].endswith("prompts: 9.00% is over")
    assert result["latents"].endswith("its process ended with -11") and "last words" in lines
    assert "skipped" in result["grammar"].split() and result["grammar"].endswith("(llguidance is not installed)")
    assert lines[-1].startswith("FAILED: 4 paths in ")
    assert lines[-1].endswith(" s (H200); failed: fp8, latents; skipped: grammar")


def test_a_path_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    status, lines = run_stubs(monkeypatch, capsys, "--only", "ngram", "--seconds", "0.5")
    assert status == 1
    assert lines[0].endswith("has not ended in 0.5 s") and lines[-1].endswith("failed: ngram")


def test_no_path_outlives_the_script(tmp_path: Path):
    """It is terminated once the process of a path has written its id."""
    program = f"""
import sys; sys.path.insert(0, {str(smoke_gpu.ROOT)!r})
from scripts import smoke_gpu
code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
smoke_gpu.command_of = lambda *_: lambda name, result: [sys.executable, "-S", "-c", code, {str(tmp_path / "id")!r}]
sys.argv = ["smoke_gpu.py", "--only", "dense,fp8", "--jobs", "1"]
smoke_gpu.main()
"""
    script = subprocess.Popen([sys.executable, "-c", program])
    while not (tmp_path / "id").exists() or not (tmp_path / "id").read_text():
        assert script.poll() is None
        time.sleep(0.01)
    script.terminate()
    assert script.wait() == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "id").read_text()), 0)


def test_a_skipped_path_is_named_where_all_others_passed(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    status, lines = run_stubs(monkeypatch, capsys, "--only", "dense,grammar", "--jobs", "1")
    assert status == 0
    assert lines[-1].startswith("passed: 2 paths in ") and lines[-1].endswith(" s (H200); skipped: grammar")


def test_a_path_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    with pytest.raises(SystemExit) as ended:
        run_stubs(monkeypatch, capsys, "--only", "dense,fp9")
    assert ended.value.code == 2 and "there is no path fp9; paths: fp8-block-experts, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_logits_that_are_a_thousandth_off_fail(factor: float, monkeypatch: pytest.MonkeyPatch):
    """A path itself, with the CPU's kernels in place of the GPU's."""
    logits_of = smoke_paths.logits_of

    def off(engine: Any, tokens: list[int]) -> torch.Tensor:
        return logits_of(engine, tokens) * (factor if engine.config.level == 1 else 1)

    monkeypatch.setattr(smoke_paths, "logits_of", off)
    status, about = smoke_gpu.run_path("level-3", "cpu", None)
    if factor == 1:
        assert status == "ok" and about.startswith("error "), about
    else:
        assert (status, about) == ("failed", "prompt of 100 from 0 on: an error of 0.001 is over 0.0001"), about


def test_an_engine_in_bf16_may_be_as_far_off_as_the_reference_in_bf16():
    exact = torch.rand(64, 100) + 1

    def part(what: str, error: float) -> Part:
        return Part(what, exact * (1 + error), exact, exact * 1.01)

    said = judge([part("prompt of 64 from 0 on", 0.01), part("answer 1 of 1 at a time", 0.012)])
    assert said == "prompts 1.00% (CPU 1.00%), answers 1.20% (CPU 1.00%), answer 1 of 1 at a time 1.20 times"
    with pytest.raises(AssertionError, match=r"answers 1\.30% \(CPU 1\.00%\): over 1\.25 times$"):
        judge([part("prompt of 64 from 0 on", 0.01), part("answer 1 of 1 at a time", 0.013)])
    with pytest.raises(AssertionError, match=r"answer 2 of 4 at a time 3\.00 times: over 2 times$"):
        judge([part(f"answer {place} of 4 at a time", 0.03 if place == 2 else 0.01) for place in (1, 2, 3, 4)])
    wrong = part("answer 1 of 1 at a time", 0.01)
    wrong.ours[3, 4] = float("nan")
    with pytest.raises(AssertionError, match="not all numbers are finite"):
        judge([wrong])
