"""Tasks of lm_eval on an engine, against lm_eval's own model of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import serving
import worded
from lm_eval_docs import DOCS

from atom import LLMEngine
from atom.cli import main
from atom.jobs.eval.job import evaluate
from atom.jobs.start import load_job

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
"""
KINDS = {
    "choose": """\
doc_to_text: "{{question}}"
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "write": """\
doc_to_text: "{{question}}"
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "roll": """\
doc_to_text: ""
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices[0]}}, and so on, and so on, and so on."
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


def test_without_lm_eval_a_line_says_what_to_install(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "atom.jobs.eval.harness", raising=False)
    assert main(["job=eval", f"checkpoint={checkpoints('llama')}", "job.tasks=[hellaswag]", *worded.FAST]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "Error" in line)
    assert "ConfigError: job.tasks needs lm_eval (" in line and line.endswith("): pip install 'atom-run[eval]'")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save_talker(tmp_path_factory.mktemp("checkpoints") / "talker")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of the tasks; skips without lm_eval."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    pytest.importorskip("lm_eval")
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(f"{json.dumps(doc)}\n" for doc in DOCS))
    for name, rest in KINDS.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    return [str(tmp_path / f"{name}.yaml") for name in KINDS]


def fields_of(folder: Path) -> list[str]:
    return ["job=eval", f"checkpoint={folder}", *worded.FAST, "serve.max_model_len=64"]


@pytest.mark.slow
def test_tasks_are_those_of_transformers(talker: Path, tasks: list[str], monkeypatch: pytest.MonkeyPatch):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from atom.jobs.eval.harness import AtomLM

    engine = LLMEngine(str(talker), dtype="fp32", level=0, max_model_len=64, kv_cache_memory=1 << 22)
    ours = AtomLM(engine.complete, engine.tokenizer, engine.config.limits.max_model_len)
    theirs = HFLM(pretrained=str(talker), dtype="float32", device="cpu", batch_size=1, max_length=62)
    manager = TaskManager(include_path=str(Path(tasks[0]).parent))
    answered = [
        simple_evaluate(each, tasks=[*KINDS], task_manager=manager, log_samples=True) for each in (ours, theirs)
    ]
    for name in KINDS:
        pairs = zip(*(each["samples"][name] for each in answered), strict=True)
        for own, other in pairs:
            for mine, expected in zip(own["resps"], other["resps"], strict=True):
                if name == "write":
                    assert mine == expected
                elif name == "roll":
                    assert mine[0] == pytest.approx(expected[0], rel=1e-4)
                else:
                    assert mine[0][0] == pytest.approx(expected[0][0], abs=1e-3) and mine[0][1] == expected[0][1]

    found = evaluate(load_job([*fields_of(talker), f"job.tasks=[{','.join(tasks)}]"]))["tasks"]
    own = theirs_of(answered[1])
    assert found["choose"] == pytest.approx(own["choose"]) and found["roll"] == pytest.approx(own["roll"], rel=1e-4)
    assert found["write"] == own["write"]
    engine.close()


def theirs_of(answered: Any) -> dict[str, dict[str, float]]:
    """The numbers of lm_eval by our names, without those that it has no number for."""
    return {
        task: {
            key.partition(",")[0].replace("_stderr", "_error"): value
            for key, value in values.items()
            if "," in key and isinstance(value, int | float)
        }
        for task, values in answered["results"].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["job.tasks=[nothing_of_the_kind]"], "ConfigError: job.tasks: lm_eval has no task nothing_of_the_kind; `lm_eval ls tasks` lists them"),
        (["job.tasks=[nowhere.yaml]"], "ConfigError: job.tasks: nowhere.yaml: No such file or directory"),
    ],
)  # fmt: skip
def test_what_lm_eval_lacks_is_one_line(
    talker: Path, tasks: list[str], capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
):
    assert main([*fields_of(talker), *overrides]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "Error" in line)
    assert message in line


@pytest.mark.slow
def test_generation_of_a_task_becomes_sampling_parameters(tasks: list[str]):
    from atom.errors import ConfigError
    from atom.jobs.eval.harness import params_of

    greedy = params_of({"until": "\n", "max_gen_toks": 7, "do_sample": False, "temperature": 0.7})
    assert (greedy.temperature, greedy.max_tokens, greedy.stop_strings) == (0.0, 7, ["\n"])
    drawn = params_of({"until": ["a", ""], "do_sample": True, "top_p": 0.9})
    assert (drawn.temperature, drawn.max_tokens, drawn.top_p, drawn.stop_strings) == (1.0, 256, 0.9, ["a"])
    assert params_of({"temperature": 0.5}).temperature == 0.5 and params_of({}).temperature == 0.0
    with pytest.raises(ConfigError, match=r"^generation_kwargs of a task: num_beams is not supported here$"):
        params_of({"num_beams": 4})
