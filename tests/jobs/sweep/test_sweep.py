"""Sweeps: jobs in processes of their own, resumed ones, and plugins of Hydra's that pick jobs or run them elsewhere."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sweeping import run_jobs_here

from atom.cli import main
from atom.jobs.sweep.sweep import ASKED, find_folder, fixed_part

ROOT = Path(__file__).parents[3]
PLUGINS = '''
"""A sweeper that takes the better of two levels, as optuna's would, and a launcher of processes, as submitit's."""
import os, pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf, open_dict


class Better(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        fixed = [text for text in arguments if not text.startswith("level=")]
        runs = [self.launcher.launch([[*fixed, f"level={level}"]], initial_job_idx=level)[0] for level in (0, 1)]
        values = [float(run.return_value) for run in runs]
        results = {"best_value": max(values), "values": values}
        OmegaConf.save(OmegaConf.create(results), f"{self.config.hydra.sweep.dir}/optimization_results.yaml")


class Elsewhere(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def run_job(self, overrides, number):
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return run_job(hydra_context=self.hydra_context, task_function=self.task_function, config=config,
                       job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir")

    def launch(self, job_overrides, initial_job_idx):
        setup_globals()
        ended = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            folder = Path(self.config.hydra.sweep.dir)
            if (child := os.fork()) == 0:
                log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1), os.dup2(log, 2)
                (folder / f"{number}.result").write_bytes(pickle.dumps(self.run_job(overrides, number)))
                os._exit(0)
            os.waitpid(child, 0)
            ended.append(pickle.loads((folder / f"{number}.result").read_bytes()))
        return ended


@dataclass
class BetterConf:
    _target_: str = "hydra_plugins.of_the_test.Better"


@dataclass
class ElsewhereConf:
    _target_: str = "hydra_plugins.of_the_test.Elsewhere"


ConfigStore.instance().store(group="hydra/sweeper", name="better", node=BetterConf)
ConfigStore.instance().store(group="hydra/launcher", name="elsewhere", node=ElsewhereConf)
'''
QUICK = ["serve.kv_cache_memory=4194304", "sampling.max_tokens=3", "sampling.ignore_eos=true", "prompts=[[1,2,3]]"]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A command line in a process that has the plugins, in an empty folder."""
    (tmp_path / "plugins" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "plugins" / "hydra_plugins" / "of_the_test.py").write_text(PLUGINS)
    (tmp_path / "here").mkdir()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}/plugins", "COLUMNS": "200"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "import sys; from atom.cli import main; sys.exit(main())", *argv]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "here", timeout=200, env=env)

    return run


@pytest.mark.slow
def test_a_sweeper_gets_the_objective_and_what_it_finds_is_shown_and_kept(run: Any, checkpoints: Any, tmp_path: Path):
    ended = run(
        "-m", "hydra/sweeper=better", f"checkpoint={checkpoints('qwen3')}", "level=0,1", "job.objective=tokens", *QUICK
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert ended.stdout.endswith("best_value: 3.0\nvalues:\n- 3.0\n- 3.0\n")
    assert re.search(r"atom-run: job 0: [\d.]+ s, tokens 3; log: ", ended.stderr)
    (results,) = (tmp_path / "here" / "multirun").glob("*/*/optimization_results.yaml")
    assert f"atom-run: what the sweep writes is in {results.parent}\n" in ended.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "hydra/sweeper=better compares jobs by a number: give job.objective=NAME, a number that job=generate reports"),
        (["job.objective=tokns"], "job.objective=tokns: job=generate reports no such number (did you mean tokens?); there are: load_s"),
        (["job.objective=?"], "job.objective=?: job=generate reports no such number; there are: load_seconds, first_token_seconds,"),
    ],
)  # fmt: skip
def test_a_sweeper_without_an_objective_is_refused_before_any_job(
    typed: list[str], message: str, run: Any, tmp_path: Path
):
    ended = run("-m", "hydra/sweeper=better", "level=0,1", "prompts=hi", *typed)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"atom-run: ConfigError: {message}") and ended.stderr.count("\n") == 1
    assert os.listdir(tmp_path / "here") == []


@pytest.mark.slow
def test_what_jobs_write_elsewhere_is_kept_and_shown(run: Any, checkpoints: Any, tmp_path: Path):
    ended = run(
        "-m", "hydra/launcher=elsewhere", f"checkpoint={checkpoints('qwen3')}", "level=0,1", "job.output=json", *QUICK
    )
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [answer["num_tokens_output"] for answer in answers] == [3, 3]
    (folder,) = (tmp_path / "here" / "multirun").glob("*/*")
    assert re.findall(r"^atom-run: (job \d): checkpoint", ended.stderr, re.MULTILINE) == ["job 0", "job 1"]
    assert f"atom-run: what the sweep writes is in {folder}\n" in ended.stderr
    (out,) = (folder / "jobs").glob("0-*.out")
    assert (folder / "0.log").is_file() and out.read_text() == ended.stdout.splitlines(True)[0]


@pytest.mark.slow
def test_a_job_elsewhere_that_fails_leaves_the_others_and_its_exit_code_is_the_sweeps(run: Any, checkpoints: Any):
    ended = run(
        "-m",
        "hydra/launcher=elsewhere",
        f"checkpoint={checkpoints('qwen3')}",
        "level=0",
        *QUICK,
        "prompts=[[999]],[[1]]",
    )
    assert ended.returncode == 2
    assert "atom-run: RequestError: prompt 0: 999 in the prompt is not a token id" in ended.stderr
    assert ended.stderr.endswith("atom-run: 1 of 2 jobs failed: job 0\n") and "Traceback" not in ended.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("launcher=joblib", " is a plugin of Hydra that is not installed: pip install hydra-joblib-launcher"),
        ("launcher=submitit_slurm", " is a plugin of Hydra that is not installed: pip install hydra-submitit-launcher"),
        ("sweeper=optuna", " is a plugin of Hydra that is not installed: pip install hydra-optuna-sweeper"),
        (
            "launcher=jobliv",
            ": there is no such choice (did you mean joblib?); choices: basic, joblib (pip install "
            "hydra-joblib-launcher), submitit_local (pip install hydra-submitit-launcher), ",
        ),
        ("launcher=submitit", ": there is no such choice (did you mean submitit_slurm?); choices: "),
        ("sweeper=optun", ": there is no such choice (did you mean optuna?); choices: basic, optuna (pip "),
    ],
)
@pytest.mark.skipif(find_spec("hydra_plugins") is not None, reason="plugins are installed")
@pytest.mark.parametrize("options", [["-m"], []])
def test_a_plugin_that_is_not_installed_is_named_with_its_package(
    typed: str, message: str, options: list[str], capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main([*options, f"hydra/{typed}", "job=explain", "level=0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"atom-run: ConfigError: hydra/{typed}{message}") and err.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("objective", [[], ["job.objective=weights_bytes"]])
def test_explained_formats_are_a_table_of_their_bytes_and_limits(
    objective: list[str], checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    folder, formats = checkpoints("llama"), "quant=none,fp8"
    argv = ["-m", "job=explain", f"checkpoint={folder}", formats, "device=cpu", "dtype=bf16", "level=1", "job.gpu=h200"]
    assert main([*argv, *objective]) == 0
    (path,) = tmp_path.glob("multirun/*/*/results.csv")
    rows = {row["quant"]: row for row in csv.DictReader(path.open())}
    assert [*rows] == ["fp8", "none"], "less is better, or more tokens a second"
    linears = [each for name, each in load_file(folder / "model.safetensors").items() if name.endswith("_proj.weight")]
    saved = float(rows["none"]["weights_bytes"]) - float(rows["fp8"]["weights_bytes"])
    assert saved == sum(each.numel() - 4 * len(each) for each in linears), "a byte a number, but 4 a row for its scale"
    for name in ("decode_limit", "prefill_limit"):
        assert float(rows["fp8"][name]) >= float(rows["none"][name]) > 0
    lines = (line.split() for line in capsys.readouterr().out.splitlines())
    header = next(line for line in lines if line[:2] == ["job", "quant"])
    assert header[2] == ("weights_bytes" if objective else "decode_limit")
    of_memory = {"fits", "kv_tokens", "kv_sequences", "weights_bytes", "active_weights_bytes"}
    assert {*header[2:]} == {"decode_limit", "prefill_limit", *of_memory}


def test_layouts_that_do_not_fit_come_last_and_their_page_says_that_it_is_computed(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    weights = 2 * sum(each.numel() for each in load_file(checkpoints("llama") / "model.safetensors").values())
    (tmp_path / "small.yaml").write_text(f"memory: {weights * 3 // 4}\nbandwidth: 1e12\n")
    argv = ["-m", "job=explain", f"checkpoint={checkpoints('llama')}", "device=cpu", "dtype=bf16", "level=1"]
    argv += ["serve.max_model_len=64"]
    assert main([*argv, "job.gpu=small.yaml", "parallel=tp1,tp2"]) == 0
    (folder,) = tmp_path.glob("multirun/*/*")
    rows = [(row["parallel"], row["fits"]) for row in csv.DictReader((folder / "results.csv").open())]
    assert rows == [("tp2", "1"), ("tp1", "0")]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    head, two, one = table[table.index(next(line for line in table if line[:1] == ["job"])) :][:3]
    assert head[:2] == ["job", "parallel"] and "decode_limit_per_gpu" in head
    assert (two[head.index("fits")], one[head.index("fits")]) == ("yes", "no")
    assert one[head.index("kv_sequences")] == "0" and int(two[head.index("kv_sequences")]) > 0
    page = (folder / "results.html").read_text()
    assert "Computed for small.yaml from config.json, not measured" in page and "Measured on" not in page


@pytest.mark.slow
def test_an_error_of_a_plugin_is_one_line(run: Any, tmp_path: Path):
    path = tmp_path / "plugins" / "hydra_plugins" / "of_the_test.py"
    path.write_text(PLUGINS.replace("        ended = []\n", "        raise RuntimeError('there is no queue')\n"))
    ended = run("-m", "hydra/launcher=elsewhere", "job=explain", "level=0,1")
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    line = ended.stderr.splitlines()[-1]
    assert (
        line
        == "atom-run: AtomError: hydra/sweeper=basic with hydra/launcher=elsewhere: RuntimeError: there is no queue"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["level=glob(*)", "prompts=hi"], "level=glob(*) is not a choice: glob finds files of a group, and level is none"),
        (["model=glob(nope*)", "prompts=hi"], "model=glob(nope*) is not a choice: none of afmoe, "),
        (["seed=range(3,3)", "prompts=hi"], "seed=range(3,3) is not a choice: there is nothing from its start to its end"),
        (["job=serve"], "job=serve runs until it is stopped, so -m would never come to the next one; leave out -m, or name another"),
        (["level=0,1"], "job=serve runs until it is stopped"),
        (["job=explain,serve"], "job=serve runs until it is stopped"),
        (["job=glob(s*)"], "job=serve runs until it is stopped"),
        (["job=explain", "level=0,1", "prompts=hi"], "prompts is a field of job=generate, compare, and this is job=explain"),
        (["job=compile", "job.objective=tokens"], "job.objective is a field of job=generate, explain, bench, eval, and this is job=com"),
        (["prompts=hi", "hydra.sweep.dir=/dev/null/x"], "hydra.sweep.dir=/dev/null/x cannot be written: Not a directory"),
        (["prompts=hi", "serve=null"], "serve=null: it takes the name of a file; leave it out for its default"),
        (["prompts=hi", "job.objective=tokns"], "job.objective=tokns: job=generate reports no such number (did you mean tokens?)"),
    ],
)  # fmt: skip
def test_a_sweep_that_would_do_nothing_or_never_end_is_refused(argv: list[str], message: str, capsys: Any):
    assert main(["-m", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"atom-run: ConfigError: {message}"), err
    assert (err.count("\n"), out) == (1, "")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_fails_no_other_job(
    checkpoints: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_jobs_here(monkeypatch)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    locations = ["org/name", str(tmp_path / "broken"), str(checkpoints("qwen3")), str(tmp_path / "empty")]
    assert main(["-m", "job=explain", f"checkpoint={','.join(locations)}"]) != 0
    err = capsys.readouterr().err
    assert "atom-run: 3 of 4 jobs failed: job 0, job 1, job 3" in err
    assert "empty has no config.json" in err
    assert re.search(r"broken/config\.json", err)


@pytest.mark.slow
def test_a_recipe_may_hold_fields_of_other_jobs_in_a_sweep_too(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    assert main(["-m", "recipe=smollm2_greedy", "job=explain", "job.stage=semantic", "level=0,1"]) == 0
    assert capsys.readouterr().out.count("def body(") == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_optunas_sweeper_gets_the_objectives_and_its_trials_are_the_table(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    options = [each for each in QUICK if not each.startswith("sampling.max_tokens=")]
    options += [
        f"checkpoint={checkpoints('qwen3')}",
        "level=0",
        "job.objective=tokens",
        "sampling.max_tokens=choice(2,4)",
    ]
    trials, found = run_optuna(options, 10, tmp_path, monkeypatch)
    tokens = [each["numbers"]["tokens"] for each in trials]
    assert len(tokens) == 10 and tokens == sorted(tokens, reverse=True) and {*tokens} == {2, 4}
    assert all(f"sampling.max_tokens={each['numbers']['tokens']}" in each["overrides"] for each in trials)
    assert found.endswith("best_params:\n  sampling.max_tokens: 4\nbest_value: 4.0\n")
    assert found in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("embedded_gguf")
def test_optuna_finds_the_faster_of_two_levels_in_ten_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["job=bench", "job.num_prompts=1", "job.input_len=8", "job.output_len=8", "device=cpu"]
    options += ["job.objective=output_throughput", "level=choice(0,1)"]
    trials, found = run_optuna(options, 10, tmp_path, monkeypatch)
    by_level = {
        level: [each["numbers"]["output_throughput"] for each in trials if f"level={level}" in each["overrides"]]
        for level in (0, 1)
    }
    assert len(by_level[0]) + len(by_level[1]) == 10 and all(by_level.values())
    assert f"best_params:\n  level: 1\nbest_value: {max(by_level[1])}\n" in found


def run_optuna(
    options: list[str], num_trials: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], str]:
    """The trials of a sweep by Optuna that looks for the greatest objective, and what it writes of the best."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper")
    monkeypatch.chdir(folder)
    run_jobs_here(monkeypatch)
    sweeper = {"direction": "maximize", "n_trials": num_trials, "sampler.seed": 0}
    argv = ["hydra/sweeper=optuna", *(f"hydra.sweeper.{name}={value}" for name, value in sweeper.items())]
    assert main(["-m", *argv, "hydra.sweep.dir=kept", *options]) == 0
    trials: list[dict[str, Any]] = json.loads((folder / "kept" / "results.json").read_text())
    return trials, (folder / "kept" / "optimization_results.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launchers_of_processes_run_all_jobs(launcher: str, run: Any, checkpoints: Any, tmp_path: Path):
    plugin = launcher.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason=f"pip install hydra-{plugin}-launcher")
    argv = [f"hydra/launcher={launcher}", f"checkpoint={checkpoints('qwen3')}", "level=0,1", *QUICK]
    ended = run("-m", *argv, "prompts=[[1,2]],[[999]]", "hydra.sweep.dir=kept")
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    results = json.loads((tmp_path / "here" / "kept" / "results.json").read_text())
    assert sorted((each["number"], each["code"]) for each in results) == [(0, 0), (1, 2), (2, 0), (3, 2)]
    assert ended.stderr.endswith("atom-run: 2 of 4 jobs failed: job 1, job 3\n")


def test_a_sweep_goes_on_where_its_like_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Of the same overrides, but for the choices that are swept; a later sweep of others stays as it is."""
    monkeypatch.chdir(tmp_path)
    mine, others = ["job=bench", "level=1,2", "seed=1"], ["job=bench", "level=1,2", "seed=2"]
    for day, texts in ((1, mine), (2, others)):
        folder = find_folder(texts, datetime(2026, 1, day), False)
        folder.mkdir(parents=True)
        (folder / ASKED).write_text(json.dumps(fixed_part(texts)))
    later = datetime(2026, 1, 3)
    assert find_folder([*mine, "job.resume=true"], later, True) == tmp_path / "multirun/2026-01-01/00-00-00"
    assert find_folder(["job=bench", "level=1,2,3", "seed=1"], later, True).parent.name == "2026-01-01"
    ranked = ["seed=1", "job=bench", "level=1,2", "job.objective=p99_ttft_ms", "job.output=json", "cache=/elsewhere"]
    assert find_folder(ranked, later, True).parent.name == "2026-01-01", "what the jobs compute is the same"
    assert capsys.readouterr().err == ""
    assert find_folder(["job=bench", "level=1,2"], later, True).parent.name == "2026-01-03"
    assert "has no such sweep to go on with" in capsys.readouterr().err
    assert find_folder(["hydra.sweep.dir=kept", *mine], later, True) == tmp_path / "kept"
