"""Jobs of sweeps as processes: their results, what makes two jobs equal, GPUs of their own, and how they end."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.config.load import load
from atom.jobs.sweep import job as sweep_job
from atom.jobs.sweep.job import Sweep, ingredients, pinned_gpus, read_result, run_job

ROOT = Path(__file__).parents[3]
QUICK = ["level=0", "serve.kv_cache_memory=4194304", "sampling.max_tokens=3", "sampling.ignore_eos=true"]


def atom_run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "atom", *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=200, env=env)


def wait_until(is_so: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.05)


def sweep_in(folder: Path, *, is_resumed: bool = False) -> Sweep:
    folder.mkdir(exist_ok=True)
    return Sweep(folder, [], folder, "2026-01-01", is_resumed=is_resumed, is_shown=False, pins_gpus=True)


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failure_and_resumed_runs_only_what_is_not_done(checkpoints: Any, tmp_path: Path):
    argv = ["-m", f"checkpoint={checkpoints('qwen3')}", *QUICK, "job.objective=tokens", "hydra.sweep.dir=kept"]
    (tmp_path / "good.txt").write_text("[[1, 2]]")
    (tmp_path / "other.txt").write_text("[[999]]")  # no token of the model
    ended = atom_run(*argv, "prompts=@good.txt,@other.txt", cwd=tmp_path)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    results = json.loads((tmp_path / "kept" / "results.json").read_text())
    assert [(each["number"], each["code"], each["numbers"].get("tokens")) for each in results] == [
        (0, 0, 3),
        (1, 2, None),
    ]
    assert (
        results[1]["error"]
        == "RequestError: prompt 0 of other.txt: 999 in the prompt is not a token id; they are numbers from 0 to 100"
    )
    assert (tmp_path / "kept" / "jobs" / results[1]["log"]).read_text().endswith("they are numbers from 0 to 100\n")
    table = ended.stdout.splitlines()[-3:]
    assert [line.split()[:3] for line in table[1:]] == [["0", "@good.txt", "3"], ["1", "@other.txt", "failed"]]
    (tmp_path / "other.txt").write_text("[[3, 4]]")
    ended = atom_run(*argv, "prompts=@good.txt,@other.txt", "job.resume=true", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "atom-run: job 0: done before, tokens 3; log: " in ended.stderr
    assert ended.stderr.count("KV: ") == 1, "one model was loaded"
    with (tmp_path / "kept" / "results.csv").open() as file:
        assert [(row["number"], row["prompts"], row["tokens"]) for row in csv.DictReader(file)] == [
            ("0", "@good.txt", "3"),
            ("1", "@other.txt", "3"),
        ]


def test_jobs_are_processes_of_their_own(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pids = []
    start = sweep_job.start_python

    def record(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(sweep_job, "start_python", record)
    result = run_job(sweep_in(tmp_path), 4, [f"checkpoint={checkpoints('qwen3')}", *QUICK, "prompts=[[1,2]]"])
    assert (result.code, result.number, result.job, result.numbers["tokens"]) == (0, 4, "generate", 3)
    assert len(pids) == 1 and not Path(f"/proc/{pids[0]}").exists()
    assert read_result(tmp_path / f"4-{result.key}.json") == result


def test_a_job_that_a_signal_ends_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = sweep_job.start_python
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(sweep_job, "start_python", lambda code, **options: start(dies, **options))
    result = run_job(sweep_in(tmp_path), 0, ["prompts=hi"])
    assert (result.code, result.error) == (137, "it was ended by SIGKILL")
    assert (tmp_path / result.log).read_text() == ""


def test_a_job_may_end_with_a_code_that_is_no_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = sweep_job.start_python
    ends = "import os; os.write(2, b'no memory'); os._exit(255)"
    monkeypatch.setattr(sweep_job, "start_python", lambda code, **options: start(ends, **options))
    result = run_job(sweep_in(tmp_path), 0, ["prompts=hi"])
    assert (result.code, result.error) == (255, "no memory")


@pytest.mark.slow
def test_a_job_ends_with_its_sweep(checkpoints: Any, tmp_path: Path):
    argv = [f"checkpoint={checkpoints('qwen3')}", "level=0", "sampling.ignore_eos=true", "sampling.max_tokens=100000"]
    argv += ["prompts=[[1]]", "serve.kv_cache_memory=67108864"]
    argv += [f"hydra.sweep.dir={tmp_path}"]
    command = [sys.executable, "-m", "atom", "-m", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT, text=True) as sweep:
        assert sweep.stderr is not None
        seen = []
        for line in sweep.stderr:
            seen.append(line)
            if "KV: " in line:
                break
        else:
            pytest.fail("".join(seen))
        children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children")
        (job,) = children.read_text().split()
        sweep.kill()
    wait_until(lambda: not Path(f"/proc/{job}").exists() or "State:\tZ" in Path(f"/proc/{job}/status").read_text())


def of(*overrides: str, cwd: Path = ROOT) -> dict[str, str]:
    return ingredients(load(["job=bench", *overrides]), cwd)


def test_equal_jobs_are_those_whose_numbers_follow_from_the_same(tmp_path: Path):
    plain = of("seed=1", "level=1")
    for same in (["level=1", "seed=1"], ["seed=1", "level=1", "job.output=json"], ["seed=1", "level=1", "cache=/x"]):
        assert of(*same) == plain
    for other in (
        ["seed=2", "level=1"],
        ["seed=1", "level=1", "job.num_prompts=3"],
        ["seed=1", "level=1", "quant=int8"],
    ):
        assert of(*other) != plain
    path = tmp_path / "talk.json"
    path.write_text("[]")
    before = of(f"job.dataset_path={path}")
    assert of(f"job.dataset_path={path}") == before
    path.write_text("[ ]")
    assert of(f"job.dataset_path={path}") != before, "another content of the file"
    before = of(f"job.texts=[sonnets,{path}]")
    path.write_text("[  ]")
    assert of(f"job.texts=[sonnets,{path}]") != before, "the same of a text that is scored"


def test_a_result_of_another_version_is_none_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs: list[int] = []
    monkeypatch.setattr(sweep_job, "run_process", lambda *_: runs.append(1) or 0)
    for _ in range(2):
        run_job(sweep_in(tmp_path, is_resumed=True), 0, ["prompts=hi"])
    assert len(runs) == 1
    monkeypatch.setattr(sweep_job, "find_versions", lambda: {"torch": "0.1"})
    run_job(sweep_in(tmp_path, is_resumed=True), 0, ["prompts=hi"])
    assert len(runs) == 2


def test_jobs_at_the_same_time_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep_job, "POLL_SECONDS", 0.01)
    gpus, entered = ["0", "2", "GPU-5"], threading.Event()
    third: list[str] = []

    def hold() -> None:
        with pinned_gpus(tmp_path / "gpus", gpus, 2) as environment:
            third.append(environment["CUDA_VISIBLE_DEVICES"])
            entered.set()

    with pinned_gpus(tmp_path / "gpus", gpus, 1) as one:
        with pinned_gpus(tmp_path / "gpus", gpus, 1) as other:
            assert [one["CUDA_VISIBLE_DEVICES"], other["CUDA_VISIBLE_DEVICES"]] == ["0", "2"]
            waiting = threading.Thread(target=hold)
            waiting.start()
            assert not entered.wait(0.3), "two are wanted, one is free"
        assert entered.wait(60)
        waiting.join()
    assert third == ["2,GPU-5"]
    with pinned_gpus(tmp_path / "gpus", gpus, 8) as all_of_them, pinned_gpus(tmp_path / "gpus", [], 1) as none:
        assert (all_of_them, none) == ({"CUDA_VISIBLE_DEVICES": "0,2,GPU-5"}, {})


def test_what_gpus_a_job_may_have_is_what_this_process_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep_job, "count_devices", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep_job.visible_gpus(load()) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert sweep_job.visible_gpus(load()) == ["4", "GPU-7"]
