"""`job=compare` as a user runs it: sides that agree, and what it says of those that cannot be compared."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom.cli import main
from atom.jobs.compare.sides import load_side
from atom.jobs.start import load_job

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3", "phi3", "glm")
WINDOWED_BY_LENGTH = {"phi3_longrope_long"}  # transformers chooses its angles by the tokens so far, atom by the maximum


def assert_agree(result: dict[str, Any], num_values: int) -> None:
    assert result["agree"], result["findings"][0]
    assert result["values"] >= num_values
    assert not any(each["differing"] for each in result["choices"])
    assert {(*prompt["answer"],) for prompt in result["prompts"]} == {
        (*prompt["expected"],) for prompt in result["prompts"]
    }


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_unharmed_model_agrees_with_transformers(checkpoints: Any, compared: Any, name: str):
    assert_agree(compared(checkpoints(name), "job.b=transformers"), 39)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_level_1_agrees_with_level_0(checkpoints: Any, compared: Any, name: str):
    assert_agree(compared(checkpoints(name), "job.b=level=1"), 30)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_level_1_agrees_with_level_0_in_bf16(checkpoints: Any, compared: Any, name: str):
    result = compared(checkpoints(name), "job.b=level=1", "dtype=bf16")
    assert result["agree"], result["findings"][0]
    assert {each["allowed"] for each in result["layers"]} == {0.08}


@pytest.mark.slow
@pytest.mark.usefixtures("one_compiler")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "bf16"), ("deepseek_v3", "fp32"), ("gpt_oss", "bf16"), ("qwen3_moe", "bf16"), ("gemma3", "fp32")],
)
def test_level_2_agrees_with_level_0(checkpoints: Any, compared: Any, name: str, dtype: str):
    assert compared(checkpoints(name), "job.b=level=2", f"dtype={dtype}")["agree"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(tiny.VARIANTS.keys() - WINDOWED_BY_LENGTH - tiny.PUBLISHED.keys()))
def test_each_variant_agrees_with_transformers(checkpoints: Any, compared: Any, name: str):
    assert compared(checkpoints(name), "job.b=transformers")["agree"]


def test_a_side_without_a_level_runs_at_1(checkpoints: Any):
    config = load_job(["job=compare", "job.b=transformers", f"checkpoint={checkpoints('llama')}"])
    sides = [load_side("b", config, own) for own in ("", "level=2")]
    assert [(side.config.level, side.shown) for side in sides] == [(1, "as it is, level 1"), (2, "level=2")]


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_ranks_agree_with_one(checkpoints: Any, compared: Any, name: str):
    result = compared(checkpoints(name), "job.b='level=1 parallel=tp2'")
    assert_agree(result, 20)
    assert not result["synchronized"]


@pytest.mark.slow
def test_experts_of_the_shared_kind_are_compared_without_it(checkpoints: Any, compared: Any):
    result = compared(checkpoints("deepseek_v2"), "job.b=level=1")
    assert_agree(result, 30)
    assert [each["layer"] for each in result["choices"]] == [1, 2]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], checkpoints: Any) -> Callable[..., tuple[int, str, str]]:
    """The exit code, stdout and stderr of a comparison of tiny llamas."""

    def run(*overrides: str, name: str = "llama") -> tuple[int, str, str]:
        fields = ["dtype=fp32", "level=0", "serve.kv_cache_memory=4194304"]
        code = main(["job=compare", f"checkpoint={checkpoints(name)}", *fields, *overrides])
        return code, *capsys.readouterr()

    return run


PROMPT = "prompts=[[1,2,3,4,5]]"


def test_sides_that_agree_end_with_0(run: Any):
    code, out, _ = run("job.b=level=1", PROMPT)
    assert code == 0
    assert out.startswith("a: as it is\nb: level=1\n")
    assert "values of " in out and "over 12 tokens of 1 prompt: all within the bound\n" in out
    assert "greedy answers: the same 8 tokens after each prompt\n" in out


def test_sides_that_part_end_with_1_and_name_the_line(run: Any):
    code, out, _ = run("job.b=model.norm.eps=1e-3", PROMPT)
    assert code == 1
    assert re.search(r"\nthe first: body's h of layer 0, kernel reference: off by [\d.]+ at .*, allowed 0.0001\n", out)
    assert re.search(r"\n    line 5: h = reference.rms_norm\(x, W\(.*\), eps=0.001\)\n", out)


@pytest.mark.slow
def test_a_bound_may_be_given(run: Any):
    assert run("job.b=model.norm.eps=1e-3", PROMPT, "job.bound=2")[0] == 0


def test_json_has_one_object(run: Any):
    code, out, _ = run("job.b=model.norm.eps=1e-3", PROMPT, "job.output=json")
    result = json.loads(out)
    assert (code, result["agree"], result["judged"]) == (1, False, "b")
    assert result["sides"] == {"a": "as it is", "b": "model.norm.eps=1e-3"}
    assert [each["layer"] for each in result["layers"]] == ["embedding", 0, 1, 2, "head"]
    assert set(result["findings"][0]) == {
        "value", "program", "measure", "line", "text", "layer", "kernel", "passes", "error", "allowed", "prompt", "step", "token", "since",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["job.a=transformers", "job.b=transformers"], "ConfigError: both sides are transformers: set job.a or job.b to"),
        (
            ["job.b=level=1 parallel=tp2", "job.bisect=layers"],
            "ConfigError: job.bisect=layers: values of several ranks are not replaced; passes and kernels work",
        ),
        ([], "ConfigError: both sides are the same: set job.b"),
        (["job.b=dtype=fp32"], "ConfigError: both sides are the same: set job.b"),
        (["job.b=model.norm.epz=1"], "ConfigError: job.b: model.norm.epz: "),
        (["job.b='level=1 \"'"], "ConfigError: job.b: 'level=1 \"': No closing quotation"),
        (["job.b=job.bound=1"], "ConfigError: job.b: job.bound=1 applies to the comparison, not to a side"),
        (["job.b='prompts=[[1]]'"], "ConfigError: job.b: prompts=[[1]] applies to the comparison, not to a side"),
        (["job.b=level=1", "serve.method=ngram"], "ConfigError: job.a: serve.method=ngram: drafts change no token"),
        (["job.b='level=1 serve.method=ngram'"], "ConfigError: job.b: serve.method=ngram: drafts change no token"),
        (["job.b=transformers", "load_dummy=true"], "ConfigError: job.b=transformers compares a checkpoint's weights"),
        (["job.b=level=1", "serve.max_model_len=12"], "ConfigError: job.a: prompt 0 has 5 tokens and 8 of its answer, and serve.max_model_len=12"),
        (["job.b=level=1", "prompts=hi"], "ConfigError: prompts: the checkpoint has no tokenizer"),
        (["job.b=level=1", "prompts=[[1,2],[3,999]]"], "RequestError: prompt 1: 999 in the prompt is not a token id"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(run: Any, overrides: list[str], message: str):
    prompts = [] if any(text.startswith("prompts=") for text in overrides) else [PROMPT]
    code, out, err = run(*overrides, *prompts)
    assert (code, out) == (2, "")
    (line,) = (line for line in err.splitlines() if "Error" in line)
    assert message in line


def test_sides_of_other_tokens_are_one_line(run: Any, tmp_path: Path):
    tiny.save_changed("llama", tmp_path / "other", vocab_size=99)
    code, _, err = run(f"job.b=checkpoint={tmp_path / 'other'}", PROMPT)
    assert code == 2
    assert "the sides have model.vocab=101 and 99: only models of the same shapes are compared" in err


def test_an_architecture_that_transformers_lacks_is_one_line(run: Any, checkpoints: Any, tmp_path: Path):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "new")
    config = json.loads((folder / "config.json").read_text())
    new = {**config, "model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(new))
    code, out, err = run(f"checkpoint={folder}", "model=llama", "job.b=transformers", PROMPT)
    assert (code, out) == (2, "")
    (line,) = (line for line in err.splitlines() if "Error" in line)
    assert "job.b=transformers: no prompt can be compared: " in line and "`brand_new`" in line


@pytest.mark.slow
def test_a_sweep_compares_each_choice(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    monkeypatch.chdir(tmp_path)
    fields = [f"checkpoint={checkpoints('llama')}", "dtype=fp32", "level=0", "serve.kv_cache_memory=4194304", PROMPT]
    code = main(["-m", "job=compare", "job.bound=2,1e-4", "job.b=model.norm.eps=1e-3", *fields])
    assert code == 1
    assert "1 of 2 jobs failed: job 1" in capfd.readouterr().err
