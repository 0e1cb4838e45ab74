"""Which job a command line asks for, and what is refused because it is another job's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sweeping import run_jobs_here

from atom.cli import main
from atom.config import Config
from atom.config.load import load
from atom.config.overrides import rewrite, write_recipe
from atom.config.schema_keys import jobs_of, keys
from atom.errors import ConfigError
from atom.jobs import generate
from atom.jobs.bench import job as bench
from atom.jobs.kind import find_job
from atom.jobs.start import JOBS, check_objective, choose_job, load_job


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("typed", "job"),
    [
        (["job.stage=select_kernels"], "explain"),
        (["job.gpu=h200"], "explain"),
        (["job.prune=30d"], "cache"),
        (["job.import=x.tar", "job.trust=true"], "cache"),
        (["job.num_iters=3", "job.num_prompts=2"], "bench"),
        (["job.num_steps=3"], "profile"),
        (["prompts=hi", "job.output=json"], "generate"),
        (["job.chat=true"], "generate"),
        (["serve.http.port=1"], "serve"),
        (["recipe=smollm2_greedy"], "generate"),
        (["+recipe=smollm2_greedy"], "generate"),
        (["job.recipes=[demo]"], "recipe"),
        (["recipe=smollm2_greedy", "job.stage=fuse_qkv"], "explain"),
        (["seed=1"], "serve"),
        (["job=bench", "seed=1"], "bench"),
    ],
)
def test_a_field_of_one_job_asks_for_it(typed: list[str], job: str):
    assert load_job(choose_job(typed)).job.kind == job


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["job=cache", "job.gpu=h200", "prompts=hi"], "job.gpu is a field of job=explain, plan, and this is job=cache"),
        (["job=cache", "prompts=hi"], "prompts is a field of job=generate, batch, compare, and this is job=cache: leave it out, or write job=generate"),
        (["job.output=json"], "job.output is a field of job=generate, explain, compile, cache, bench, profile, recipe, compare, port, eval, plan,"),
        (["job.num_prompts=4"], "job.num_prompts is a field of job=bench, profile, eval, plan, and this is job=serve"),
        (["job=bench", "job.num_steps=4"], "job.num_steps is a field of job=profile, and this is job=bench"),
        (["job=cache", "job.graph=x.py"], "job.graph is a field of job=serve, batch, generate,"),
        (["job=explain", "sampling.top_k=3"], "sampling.top_k is a field of job=serve, batch, generate, chat, bench, profile, eval, and"),
        (["job=generate", "serve.http={port: 3}"], "serve.http is a field of job=serve, and this is job=generate"),
        (["job=explain", "job.import=x"], "job.import is a field of job=cache, and this is job=explain"),
        (["recipe=smollm2_greedy", "job=explain", "prompts=hi"], "prompts is a field of job=generate, batch, compare,"),
        (["job.gpu=h200", "prompts=hi"], "prompts is a field of job=generate, batch, compare, and this is job=explain"),
        (["prompts=hi", "job.objective=tokens"], "job.objective=tokens is the number by which -m compares jobs: add -m"),
    ],
)  # fmt: skip
def test_a_field_of_another_job_is_refused_by_name(typed: list[str], message: str):
    with pytest.raises(ConfigError) as error:
        load_job(choose_job(typed))
    assert str(error.value).startswith(message)


def test_a_file_of_openais_batch_lines_implies_its_job(tmp_path: Path):
    batch, prompts = tmp_path / "batch.jsonl", tmp_path / "prompts.jsonl"
    batch.write_text('\n{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}}\n')
    prompts.write_text('{"prompt": "Hi"}\n')
    for quote in ("", "'", '"'):
        typed = [f"prompts={quote}@{batch}{quote}", "serve.http.tool_calls=none", "job.output_file=out"]
        assert load_job(choose_job(typed)).job.kind == find_job(typed) == "batch"
    assert find_job([f"prompts=@{prompts}"]) == find_job([f"prompts=@{tmp_path}/none"]) == "generate"
    assert find_job([f"prompts=@{batch}", "job=generate"]) == "generate"
    assert find_job(["job.max_inflight=3", f"prompts=@{prompts}"]) == "batch"


def test_a_job_of_the_users_own_has_the_fields_of_its_kind(tmp_path: Path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "nightly.yaml").write_text("kind: bench\ngpu: h200\nnum_prompts: 3\n")
    typed = ["job=nightly", "job.num_iters=2"]
    job = load_job(choose_job(typed, [str(tmp_path)]), [str(tmp_path)]).job
    assert (job.kind, job.num_prompts, job.num_iters, job.gpu) == ("bench", 3, 2, "h200")
    with pytest.raises(ConfigError, match=r"job\.stage is a field of job=explain, and this is job=bench"):
        load_job([*typed, "job.stage=semantic"], [str(tmp_path)])


@pytest.mark.slow
def test_a_recipe_s_fields_of_other_jobs_are_kept_for_these():
    for job in set(JOBS) - {"recipe"}:
        assert load_job(choose_job(["recipe=smollm2_greedy", f"job={job}"])).job.kind == job


def test_a_saved_recipe_starts_the_same_job_again(tmp_path: Path):
    saved = f"recipe={tmp_path}/r.yaml"
    for typed, job in ((["job.gpu=h200"], "explain"), (["recipe=smollm2_greedy", "job=compile"], "compile")):
        write_recipe(f"{tmp_path}/r.yaml", rewrite(choose_job(typed)), {})
        assert load_job(choose_job([saved])).job.kind == job
        assert load_job(choose_job([saved, "prompts=hi"])).job.kind == "generate", "what is typed decides"


def test_a_run_that_is_no_sweep_resumes_nothing():
    with pytest.raises(ConfigError, match=r"^job.resume=true continues .*: add -m, or job.output_file=FILE$"):
        load_job(["job=generate", "job.resume=true"])


def test_every_job_that_a_field_names_is_there_and_every_job_has_fields():
    named = {job for key in keys(Config) if (jobs := jobs_of(key)) for job in jobs.names}
    assert named == set(JOBS)
    assert all(
        jobs_of(key) for key in keys(Config) if key.startswith("job.") and key not in ("job.kind", "job.save_recipe")
    )
    assert jobs_of("checkpoint") is None and jobs_of("job.nope") is None


QUICK = ["serve.kv_cache_memory=4194304", "sampling.max_tokens=3", "sampling.ignore_eos=true"]


@pytest.mark.slow
def test_an_objective_that_has_no_value_is_an_error(
    checkpoints: Any, quick_limits: None, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    argv = [f"checkpoint={checkpoints('qwen3')}", "level=0", "serve.kv_cache_memory=4194304", "job.num_prompts=1"]
    argv += ["job.input_len=4", "job.output_len=1", "job.num_warmups=0"]
    assert main(["-m", "job=bench", *argv, "job.objective=phases.all.tokens"]) == 0
    assert re.search(r"atom-run: job 0: [\d.]+ s, phases.all.tokens 4; log: ", capsys.readouterr().err)
    assert main(["-m", "job=bench", *argv, "job.objective=mean_tpot_ms"]) == 2
    assert "atom-run: ConfigError: job.objective=mean_tpot_ms has no value in this run" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "job"), [("bench", bench), ("generate", generate)])
def test_every_objective_is_a_number_that_the_job_reports(
    name: str, job: Any, checkpoints: Any, quick_limits: None, capsys: Any
):
    argv = [f"checkpoint={checkpoints('qwen3')}", "level=0", *QUICK]
    workload = ["job.num_prompts=1", "job.input_len=4", "job.num_warmups=0"] if job is bench else ["prompts=[[1,2,3]]"]
    numbers: dict[str, Any] = {}
    assert job.run(load([f"job={name}", *argv, *workload]), numbers.update) == 0
    assert {name: numbers.get(name) for name in job.OBJECTIVES if not isinstance(numbers.get(name), int | float)} == {}


def test_a_job_without_numbers_has_no_objective():
    check_objective("anything", "compile")
