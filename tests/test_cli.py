from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweeping import run_jobs_here

import atom
from atom.cli import main
from atom.config import Config
from atom.config.recipes import read_recipe
from atom.config.schema_keys import keys
from atom.errors import EngineDeadError

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[1]
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
Job = Callable[[Config], int]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Job], list[Config]]:
    """Puts a function in the place of job=generate; the configurations that it is run with."""
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)

    def install(run: Job = lambda config: 0) -> list[Config]:
        seen: list[Config] = []

        def record(config: Config) -> int:
            seen.append(config)
            return run(config)

        for name in ("generate", "serve"):
            module: Any = types.ModuleType(f"atom.jobs.{name}")
            module.run, module.OBJECTIVES = lambda config, *_: record(config), ()
            monkeypatch.setitem(sys.modules, f"atom.jobs.{name}", module)
        return seen

    return install


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atom", *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=options.pop("cwd", ROOT), timeout=60, **options)


def raising(error: BaseException) -> Job:
    def job(config: Config) -> int:
        raise error

    return job


def test_a_job_gets_its_configuration_and_gives_the_exit_code(job: Any):
    seen = job(lambda config: 3)
    assert main(["prompts=What is 2+2?", "level=0", "model=llama"]) == 3
    assert [(config.prompts, config.level, config.model.name) for config in seen] == [("What is 2+2?", 0, "llama")]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["foo=1"], "atom-run: ConfigError: foo: there is no such field; there are: checkpoint, "),
        (["checkpoint=/nowhere"], "atom-run: CheckpointError: no checkpoint '/nowhere'"),
        (
            ["parallel=tp8", "device=cpu"],
            "atom-run: UnsupportedError: parallel.tensor=8 does not divide 9 heads with 3 of",
        ),
        (["sampling.n=0"], "atom-run: RequestError: n=0 must be a whole number from 1 to 128"),
        (["job=explian"], "atom-run: ConfigError: job=explian: there is no such choice (did you mean explain?)"),
        (["level=0,1"], "atom-run: ConfigError: 'level=0,1' is a sweep: add -m"),
        (
            ["--port", "80"],
            "atom-run: ConfigError: --port as in vLLM: write serve.http.port=80, or start python -m atom.e",
        ),
        (["--seed=3"], "atom-run: ConfigError: --seed as in vLLM: write seed=3, or"),
        (
            ["bench", "serve", "--model", "x"],
            "atom-run: ConfigError: bench serve as in vLLM: start python -m atom.benchmarks.benchmark_serving, with its flags",
        ),
        (
            ["bench", "latency", "--model", "x", "--batch-size", "4", "--input-len=32", "--profile"],
            "atom-run: ConfigError: --model, --batch-size, --input-len as in vLLM: write job=bench checkpoint=x "
            "job.num_prompts=4 job.input_len=32; leave out what is not here: --profile",
        ),
        (
            ["--default-chat-template-kwargs", '{"a": 1}'],
            "atom-run: ConfigError: --default-chat-template-kwargs as in vLLM: "
            "write serve.http.chat_template_kwargs='{\"a\": 1}', or",
        ),
        (["--model", "x"], "atom-run: ConfigError: --model as in vLLM: write checkpoint=x, or"),
        (["--api-key", "sesame"], "atom-run: ConfigError: --api-key as in vLLM: write serve.http.api_keys=…, or"),
        (["serve", "a/b"], "atom-run: ConfigError: 'serve' is not an override; write job=serve checkpoint=a/b"),
        (
            ["serve", "serve.http.api_keys=sesame"],
            "atom-run: ConfigError: 'serve' is not an override; write job=serve\n",
        ),
        (
            ["model=a/b"],
            "atom-run: ConfigError: model=a/b: model is the name of a file in conf/model; write checkpoint=a/b",
        ),
        (
            ["serve", "a/b", "-pp", "2"],
            "atom-run: ConfigError: -pp as in vLLM: write job=serve checkpoint=a/b parallel.pipeline=2, or start",
        ),
        (
            ["-hf", "org/name-GGUF:Q4_K_M"],
            "atom-run: ConfigError: -hf as in llama.cpp: write checkpoint=org/name-GGUF:Q4_K_M\n",
        ),
        (["-c", "4096"], "atom-run: ConfigError: -c as in llama.cpp: write serve.max_model_len=4096\n"),
        (
            ["-m", "a.gguf", "-c", "4096", "-t", "2", "--port", "8080", "-fa", "level=1"],
            "atom-run: ConfigError: -m, -c, -t, --port, -fa as in llama.cpp: "
            "write OMP_NUM_THREADS=2 atom-run checkpoint=a.gguf serve.max_model_len=4096 serve.http.port=8080\n",
        ),
        (
            ["-m", "a.gguf", "--mirostat", "2", "-fa", "on", "--grammar-file", "x", "--no-webui"],
            "atom-run: ConfigError: -m, -fa as in llama.cpp: write checkpoint=a.gguf; "
            "leave out what is not here: --mirostat, --grammar-file, --no-webui\n",
        ),
        (
            ["-m", "a.gguf", "-md", "b.gguf", "--draft-max", "4"],
            "atom-run: ConfigError: -m, -md, --draft-max as in llama.cpp: write checkpoint=a.gguf "
            "serve.method=draft serve.draft_model=b.gguf serve.num_speculative_tokens=4\n",
        ),
        (["-cnv", "-p", "Tell me a joke"], "atom-run: ConfigError: -cnv, -p as in llama.cpp: write job=chat\n"),
        (
            ["chat", "--system-prompt", "Be brief."],
            "atom-run: ConfigError: --system-prompt as in llama.cpp: write job=chat job.system_prompt='Be brief.'\n",
        ),
        (["-p", "Tell me a joke"], "atom-run: ConfigError: -p as in llama.cpp: write prompts='Tell me a joke'\n"),
        (["-ngl"], "atom-run: ConfigError: -ngl as in llama.cpp: write device=cuda\n"),
        (["--mlock"], "atom-run: ConfigError: --mlock as in llama.cpp: nothing is needed for that\n"),
        (["--temp", "0.2"], "atom-run: ConfigError: --temp as in llama.cpp: write sampling.temperature=0.2\n"),
        (
            ["Tell me a joke"],
            "atom-run: ConfigError: 'Tell me a joke' is not an override; write prompts='Tell me a joke'\n",
        ),
        (["-tp2"], "atom-run: ConfigError: -tp as in vLLM: write parallel.tensor=2, or start python -m atom.entry"),
        (["--bogus"], "atom-run: ConfigError: unrecognized arguments: --bogus; see atom-run --help"),
        (["--cfg", "job", "-m"], "atom-run: ConfigError: only one of"),
        (["--cfg", "nope"], "atom-run: ConfigError: argument --cfg/-c: invalid choice"),
        (["-cn", "x"], "atom-run: ConfigError: --config-name"),
        (["--config-dir", "/nowhere"], "atom-run: ConfigError: config dir /nowhere: there is no such folder"),
        (["--cfg", "job", "+foo=1"], "atom-run: ConfigError: foo: there is no such field; there are: checkpoint, "),
        (["--cfg", "job", "++sampling.foo=1"], "atom-run: ConfigError: sampling.foo: there is no such field"),
        (
            ["serve=null"],
            "atom-run: ConfigError: serve=null: it takes the name of a file; leave it out for its default",
        ),
        (["--cfg", "hydra", "job=null"], "atom-run: ConfigError: job=null: it takes the name of a file"),
        ([f"seed={'9' * 4301}"], "atom-run: ConfigError: seed: a number has more digits than any field takes"),
        (
            [f"prompts=[{'1,' * 40_000}1]"],
            "atom-run: ConfigError: prompts: there are more than 4,096 items; prompts=@FILE takes any number\n",
        ),
        (["--resolve"], "atom-run: ConfigError: --resolve is for --cfg: write --cfg job --resolve"),
        (["--cfg", "job", "-p", "nope"], "atom-run: ConfigError: nope: there is no such field"),
        (["-m", "prompts=hi", "level=0,5"], "atom-run: ConfigError: level=5: there is no such choice"),
        (["-m", "seed=interval(0,1)"], "atom-run: ConfigError: BasicSweeper does not support"),
        (
            ["-m", "seed=1,2", "job.save_recipe=x"],
            "atom-run: ConfigError: job.save_recipe writes the recipe of one run",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], line: str, capsys: Any, job: Any):
    seen = job()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line)
    assert (err.count("\n"), out, seen) == (1, "", [])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EngineDeadError("it stopped\nhere"), 1, "atom-run: EngineDeadError: it stopped; here\n"),
        (OSError(28, "No space left on device", "/x"), 1, "atom-run: [Errno 28] No space left on device: '/x'\n"),
        (KeyboardInterrupt(), 130, "atom-run: interrupted\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_other_errors_that_we_foresee_are_one_line(error: BaseException, code: int, line: str, capsys: Any, job: Any):
    job(raising(error))
    assert main([]) == code
    assert capsys.readouterr().err == line


def test_a_bug_shows_where_it_is(job: Any):
    job(raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main([])


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "atom.cli", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert (ended.returncode, ended.stderr) == (1, "atom-run: [Errno 28] No space left on device\n")


def test_a_reader_that_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "atom.cli", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(write)
    assert ended.stderr == ""


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_a_stream_that_was_closed_at_the_start_is_dev_null_for_children_too(closed: tuple[int, ...], tmp_path: Path):
    seen = tmp_path / "seen"
    code = f"""
import os, subprocess, sys
from atom.jobs.report import report
def work():
    print("lost", file=sys.stderr)
    print("lost", file=sys.__stderr__)
    with open({str(seen)!r}, "wb") as file:
        subprocess.run(["readlink", *(f"/proc/self/fd/{{each}}" for each in {closed})], stdout=file)
    return 7
sys.exit(report(work))
"""
    shell = 'exec "$@" ' + " ".join(f"{each}{'<' if not each else '>'}&-" for each in closed)
    done = subprocess.run(["sh", "-c", shell, "sh", sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")
    assert set(seen.read_text().split()) - {str(seen)} == {"/dev/null"}


def test_ctrl_c_ends_with_130(tmp_path: Path):
    program = "import sys, time, types\nfrom atom.cli import main\nmodule = types.ModuleType('x')\n"
    program += "module.run = lambda *_: (print('ready', flush=True), time.sleep(30))\n"
    program += "sys.modules['atom.jobs.serve'] = module\nsys.exit(main([]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "atom-run: interrupted\n")


def test_a_sweep_runs_each_choice(capsys: Any, job: Any):
    seen = job(lambda config: print(config.level, config.model.name) or 0)
    assert main(["-m", "level=0,1", "model=llama,qwen2", 'prompts=["a, b", "costs ${5}"]']) == 0
    out, err = capsys.readouterr()
    assert out == "0 llama\n0 qwen2\n1 llama\n1 qwen2\n"
    assert err.splitlines()[1] == r"atom-run: job 0: level=0 model=llama prompts=['a, b','costs \${5}']"
    assert {tuple(config.prompts) for config in seen} == {("a, b", "costs ${5}")}
    assert os.listdir() == ["multirun"]


@pytest.mark.slow
def test_a_sweep_chooses_the_model_file_for_each_checkpoint(tmp_path: Path, job: Any):
    for name, architecture in (("a", "LlamaForCausalLM"), ("b", "Qwen3ForCausalLM")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**TINY, "architectures": [architecture]}))
    seen = job()
    assert main(["-m", "prompts=hi", f"checkpoint={tmp_path}/a,{tmp_path}/b"]) == 0
    assert [config.model.name for config in seen] == ["llama", "qwen3"]


@pytest.mark.slow
def test_a_job_of_a_sweep_that_fails_leaves_the_others(capsys: Any, job: Any):
    seen = job(lambda config: config.seed % 3)
    assert main(["-m", "prompts=hi", "seed=3,2,4"]) == 2, "the exit code of the first that failed"
    assert [config.seed for config in seen] == [3, 2, 4]
    err = capsys.readouterr().err
    assert "atom-run: job 1: failed with exit code 2; log: " in err
    assert err.endswith("atom-run: 2 of 3 jobs failed: job 1, job 2\n")


@pytest.mark.slow
def test_a_choice_that_is_not_supported_leaves_the_others(capsys: Any, job: Any):
    seen = job()
    assert main(["-m", "prompts=hi", "parallel.tensor=2,3", "device=cpu"]) == 2
    assert [config.parallel.tensor for config in seen] == [3]
    assert "atom-run: UnsupportedError: parallel.tensor=2 does not divide 9 heads" in capsys.readouterr().err


@pytest.mark.slow
def test_hydras_own_choices_work_in_a_sweep(job: Any):
    seen = job()
    assert main(["-m", "prompts=hi", "seed=range(1,3)"]) == 0
    assert main(["-m", "prompts=hi", "model=glob(qwen?)"]) == 0
    assert [config.seed for config in seen[:2]] == [1, 2]
    assert [config.model.name for config in seen[2:]] == ["qwen2", "qwen3"]


@pytest.mark.slow
def test_a_config_dir_counts_in_a_run_and_in_a_sweep(tmp_path: Path, job: Any):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [llama, _self_]\nauto: false\nmax_position: 7\n")
    seen = job()
    assert main(["--config-dir", str(tmp_path), "model=mine"]) == 0
    assert main(["-m", "prompts=hi", "model=mine,llama", "--config-dir", str(tmp_path)]) == 0
    assert [config.model.max_position for config in seen] == [7, 7, 8192]


@pytest.mark.slow
def test_several_config_dirs_count_in_a_run_a_sweep_and_what_hydra_shows(tmp_path: Path, job: Any):
    for name, parent in (("one", "llama"), ("two", "one")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / f"{name}.yaml").write_text(f"defaults: [{parent}, _self_]\nauto: false\n")
    dirs = ["--config-dir", f"{tmp_path}/two", "-cd", f"{tmp_path}/one"]
    seen = job()
    assert main([*dirs, "model=two"]) == 0
    assert main(["-m", "prompts=hi", "model=one,two", *dirs]) == 0
    assert [config.model.name for config in seen] == ["two", "one", "two"]
    assert "model/two" in run("--info", "defaults", "model=two", *dirs).stdout


@pytest.mark.slow
def test_hydras_search_path_counts_in_the_jobs_of_a_sweep(tmp_path: Path, job: Any):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [llama, _self_]\nauto: false\n")
    seen = job()
    assert main(["-m", "prompts=hi", "model=mine,llama", f"hydra.searchpath=[file://{tmp_path}]"]) == 0
    assert [config.model.name for config in seen] == ["mine", "llama"]


def test_a_recipe_is_saved_and_runs_again(tmp_path: Path, job: Any):
    seen = job()
    (tmp_path / "first.yaml").write_text("overrides: [seed=1, level=0]")
    assert main(["recipe=first.yaml", "prompts=it's, ${5}", "seed=2", "job.save_recipe=second.yaml"]) == 0
    assert read_recipe("second.yaml").overrides == [
        "seed=1",
        "level=0",
        "job=generate",
        r"prompts='it\'s, \${5}'",
        "seed=2",
    ]
    assert main(["recipe=second.yaml"]) == 0
    assert (seen[1].prompts, seen[1].seed, seen[1].level) == ("it's, ${5}", 2, 0)
    assert "model: smollm2" in Path("second.yaml").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("said", ["serve.http.api_keys=open,sesame", "serve.http={api_keys: sesame}"])
def test_a_recipe_is_saved_without_keys_with_a_note_on_stderr(said: str, job: Any, capsys: Any):
    seen = job()
    assert main([said, "seed=1", "job.save_recipe=shared.yaml"]) == 0
    assert str(seen[0].serve.http.api_keys).endswith("sesame"), "the run itself has them"
    assert read_recipe("shared.yaml").overrides == ["job=serve", "seed=1"]
    assert "atom-run: shared.yaml is without serve.http.api_keys" in capsys.readouterr().err


def test_a_recipe_keeps_the_name_of_a_file_of_keys(job: Any, capsys: Any):
    job()
    assert main(["serve.http.api_keys=@keys.txt", "job.save_recipe=shared.yaml"]) == 0
    assert read_recipe("shared.yaml").overrides == ["job=serve", "serve.http.api_keys='@keys.txt'"]
    assert "api_keys" not in capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", [["job"], ["job", "--resolve"], ["job", "-p", "serve.http.api_keys"]])
@pytest.mark.parametrize(
    ("said", "environment", "shown"),
    [
        (["serve.http.api_keys=sesame"], None, "***"),
        (["serve.http={api_keys: sesame}"], None, "***"),
        ([], "sesame", "***"),
        (["serve.http.api_keys=@keys.txt"], "sesame", "@keys.txt"),
        ([], "@keys.txt", "@keys.txt"),
    ],
)
@pytest.mark.parametrize("name", ["ATOM_API_KEYS", "VLLM_API_KEY"])
def test_cfg_hides_keys(
    flags: list[str],
    said: list[str],
    environment: str | None,
    shown: str,
    name: str,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    for each in ("ATOM_API_KEYS", "VLLM_API_KEY"):
        monkeypatch.delenv(each, raising=False)
    if environment is not None:
        monkeypatch.setenv(name, environment)
    assert main(["--cfg", *flags, *said]) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out
    assert shown in out or (flags == ["job"] and "${oc.env:ATOM_API_KEYS,${oc.env:VLLM_API_KEY,null}}" in out)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--cfg=all", "--info=all"])
def test_what_hydra_shows_hides_keys_too(flag: str):
    ended = run(flag, "serve.http.api_keys=sesame")
    assert ended.returncode == 0 and "sesame" not in ended.stdout + ended.stderr
    assert "api_keys: '***'" in ended.stdout


def test_cfg_shows_the_model_that_auto_means(tmp_path: Path, capsys: Any):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert main(["--cfg", "job", f"checkpoint={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "name: qwen3" in out and "qk_norm: per_head" in out and "intermediate_size: 80" not in out
    assert main(["--cfg", "job", "--resolve", "-p", "model.attention", f"checkpoint={tmp_path}"]) == 0
    assert "heads: 4" in capsys.readouterr().out


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--cfg", "hydra"], "output_subdir: null"),
        (["--cfg", "all"], "name: atom-run"),
        (["--info", "defaults-tree"], "model: auto"),
        (["--hydra-help"], "hydra/launcher: basic"),
        (["--shell-completion", "install=bash"], "hydra_bash_completion"),
    ],
)
def test_hydras_flags_mean_what_they_mean_to_hydra(argv: list[str], expected: str):
    ended = run(*argv)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert expected in ended.stdout


@pytest.mark.slow
def test_an_error_of_hydra_is_one_line_too():
    ended = run("--info", "defaults", "job=x")
    assert (ended.returncode, ended.stdout) == (2, "")
    jobs = ", ".join(sorted(path.stem for path in (ROOT / "conf" / "job").glob("*.yaml")))
    assert ended.stderr == f"atom-run: ConfigError: job=x: there is no such choice; choices: {jobs}\n"


def test_tab_completes_groups_and_fields():
    for typed, expected in (
        (
            "job=",
            " ".join(f"job={path.stem}" for path in sorted((ROOT / "conf" / "job").glob("*.yaml"))),
        ),
        ("serve.max_num_s", "serve.max_num_seqs="),
    ):
        env = {**os.environ, "COMP_LINE": f"atom-run {typed}", "COMP_POINT": "99"}
        assert run("-sc", "query=bash", env=env).stdout.strip() == expected


def test_version_is_the_packages():
    ended = run("--version")
    assert (ended.stdout, ended.returncode) == (f"atom-run {atom.__version__}\n", 0)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_groups_fields_and_examples(flag: str, capsys: Any):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    assert "\n  model: afmoe, alice_ai, apertus," in out
    assert "\n  job.gpu is one of a100, b200, h100," in out
    assert (
        "checkpoint=null                     folder, .gguf file, hub id or address, owner/name:Q4_K_M; null: the embedded one\n"
        in out
    )
    assert "dtype=auto                          auto | bf16 | fp16 | fp32; auto: the checkpoint's\n" in out
    listed = {line.split("=")[0].strip() for line in out.split("Fields\n")[1].splitlines()}
    elsewhere = ("model.", "passes.", "advanced.")
    set_by_load = {"job.kind", "hf", "generation", "overrides", "config_dirs", "draft", "other_models"}
    own = {key for key in keys(Config) if not key.startswith(elsewhere)} - set_by_load
    assert own <= listed and "generation" not in listed
    assert not [each for each in listed if each.startswith(elsewhere)], "what hardly anyone sets"
    assert "atom-run --cfg job -p advanced" in out
    for line in (
        'serve.http.cors=[]                  origins whose pages may read answers; "*": all',
        "level=null                          null | 0 | 1 | 2 | 3; 0 reference ops, 1 kernels, 2 compiled, 3 CUDA graphs; ",
        "job.stage=null                      explain: print the whole text after this pass\n",
        "job.num_prompts=8                   bench, profile, eval, plan: requests, all at once\n",
        "for job=serve:\n  serve.http.host=",
    ):
        assert line in out
    assert out.split("Examples\n")[1].count("atom-run ") == 7
    assert max(map(len, out.splitlines())) <= 160


@pytest.mark.parametrize(("argv", "limit"), [(["--help"], 250), (["--cfg", "job"], 800)])
def test_questions_are_answered_with_few_modules_imported(argv: list[str], limit: int):
    program = (
        f"import sys; from atom.cli import main; code = main({argv}); print('torch' in sys.modules, len(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    has_torch, num_modules = ended.stdout.splitlines()[-1].split()
    assert has_torch == "False" and int(num_modules) < limit  # 162 and 562; torch has 1,500


@pytest.mark.slow
def test_answers_to_prompts_wait_for_no_server_to_be_imported():
    program = "import sys, atom.jobs.generate; print([name for name in ('fastapi', 'uvicorn') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
