"""`job=eval`: perplexity against transformers' own loss, divergences against plain torch, and sweeps."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import worded
from sweeping import run_jobs_here

from atom.cli import main
from atom.errors import CapacityError
from atom.jobs.eval.job import OBJECTIVES, run
from atom.jobs.eval.score import map_logits
from atom.jobs.start import load_job

Evaluated = Callable[..., dict[str, Any]]
Windows = list[tuple[list[int], int]]  # tokens, and from which one on they are scored


def windows_of(tokens: Sequence[int], length: int, stride: int) -> Windows:
    """Windows and labels as on transformers' page on perplexity."""
    found, last = [], 0
    for start in range(0, len(tokens), stride):
        end = min(start + length, len(tokens))
        found.append(([*tokens[start:end]], max(end - start - (end - last), 1)))
        last = end
        if end == len(tokens):
            break
    return [(window, first) for window, first in found if first < len(window)]


def loss_of(model: Any, windows: Windows) -> float:
    """transformers' own mean loss, in nats, of the labels of windows."""
    total, num = 0.0, 0
    for tokens, first in windows:
        labels = torch.tensor([[-100] * first + tokens[first:]])
        with torch.no_grad():
            total += float(model(torch.tensor([tokens]), labels=labels).loss) * (len(tokens) - first)
        num += len(tokens) - first
    return total / num


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
@pytest.mark.parametrize("stride", [24, 7])
def test_perplexities_are_those_of_transformers(
    checkpoints: Any, evaluated: Evaluated, texts: dict[str, list[int]], tmp_path: Path, name: str, stride: int
):
    folder = worded.copy(checkpoints(name), tmp_path / name)
    result = evaluated(folder, f"job.stride={stride}")
    model = tiny.reference(folder)
    windows = {path: windows_of(tokens, 24, stride) for path, tokens in texts.items()}
    for path, tokens in texts.items():
        loss, found = loss_of(model, windows[path]), result["texts"][path]
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        num_bytes = len(Path(path).read_bytes())
        assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) * len(tokens) / num_bytes, rel=1e-4)
        assert found["scored_tokens"] == sum(len(each) - first for each, first in windows[path])
    every = [window for each in windows.values() for window in each]
    assert result["all"]["perplexity"] == pytest.approx(math.exp(loss_of(model, every)), rel=1e-4)
    num_bytes = sum(len(Path(path).read_bytes()) for path in texts)
    bits = sum(loss_of(model, windows[path]) * len(tokens) for path, tokens in texts.items()) / math.log(2)
    assert result["all"]["bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-4)


def test_each_window_begins_with_bos_if_texts_do(
    checkpoints: Any, evaluated: Evaluated, texts: dict[str, list[int]], tmp_path: Path
):
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama", bos=100)
    path, tokens = next(iter(texts.items()))
    result = evaluated(folder, f"job.texts=[{path}]")
    windows: Windows = [([100, *tokens[start : start + 23]], 1) for start in range(0, len(tokens), 23)]
    assert result["scored_tokens"] == len(tokens)
    assert result["all"]["perplexity"] == pytest.approx(math.exp(loss_of(tiny.reference(folder), windows)), rel=1e-4)


def assert_divergence(result: dict[str, Any], ours: Any, theirs: Any, windows: Windows) -> None:
    """KL and agreement are those of two models of transformers, by torch's own functions."""
    rows: tuple[list[Any], list[Any]] = [], []
    for each, model in zip(rows, (ours, theirs), strict=True):
        each += [tiny.logits(model, tokens)[first - 1 : -1].double() for tokens, first in windows]
    log_q, log_p = (torch.cat(each).log_softmax(-1) for each in rows)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    found = result["all"]
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-9)
    assert found["max_kl"] == pytest.approx(float(kl.max()), rel=1e-3, abs=1e-8)
    assert found["agreement"] == pytest.approx(float((log_q.argmax(-1) == log_p.argmax(-1)).double().mean()))
    ratio = math.exp(loss_of(ours, windows) - loss_of(theirs, windows))
    assert found["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)
    assert found["reference_perplexity"] == pytest.approx(math.exp(loss_of(theirs, windows)), rel=1e-4)


@pytest.mark.parametrize("reference", ["transformers", "model.norm.eps=1e-5"])
def test_divergences_are_those_of_plain_torch(
    checkpoints: Any, evaluated: Evaluated, texts: dict[str, list[int]], tmp_path: Path, reference: str
):
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama")
    result = evaluated(folder, "model.norm.eps=1e-2", f"job.reference={reference}")
    own = tiny.reference(folder) if reference == "transformers" else tiny.reference(folder, rms_norm_eps=1e-5)
    models = tiny.reference(folder, rms_norm_eps=1e-2), own
    assert_divergence(result, *models, [each for tokens in texts.values() for each in windows_of(tokens, 24, 24)])
    assert result["all"]["kl"] > 1e-4 and result["all"]["agreement"] < 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_compiler")
@pytest.mark.parametrize("overrides", [["level=2"], ["level=1", "parallel=tp2"], ["level=1", "serve.method=ngram"]])
def test_levels_and_ranks_predict_the_same(
    checkpoints: Any, evaluated: Evaluated, tmp_path: Path, overrides: list[str]
):
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama")
    result = evaluated(folder, *overrides, "job.reference=transformers")["all"]
    assert result["kl"] < 1e-6 and result["agreement"] == 1.0
    assert result["perplexity_ratio"] == pytest.approx(1, rel=1e-5)


def test_tokens_are_scored_in_whole_windows_of_all_texts(checkpoints: Any, evaluated: Evaluated, tmp_path: Path):
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama")
    result = evaluated(folder, "job.num_tokens=24")
    assert [each["scored_tokens"] for each in result["texts"].values()] == [23, 23]


def test_logits_leave_no_file_and_need_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = map_logits(tmp_path, 3, 5)
    kept[2] = torch.arange(5)
    assert kept.sum() == 10 and kept.shape == (3, 5) and not [*tmp_path.iterdir()]
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**9))
    with pytest.raises(
        CapacityError, match=r"^job.reference keeps 4.0 GB of logits, and .* has 1.0 GB free: lower job"
    ):
        map_logits(tmp_path, 1000, 10**6)


@pytest.mark.slow
def test_a_sweep_has_quality_speed_and_bytes_and_goes_on(
    checkpoints: Any,
    texts: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama")
    argv = ["-m", "job=eval", f"checkpoint={folder}", f"job.texts=[{next(iter(texts))}]", "job.context_len=24"]
    argv += [*(field for field in worded.FAST if field != "level=0"), "level=1", "job.reference=quant=none"]
    assert main([*argv, "quant=none,fp8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = next(at for at, line in enumerate(lines) if line[:2] == ["job", "quant"])
    numbers = ["perplexity", "perplexity_ratio", "kl", "agreement", "output_throughput", "weights_bytes"]
    assert lines[at][2:] == numbers and "±" in lines[at + 1]
    (made,) = tmp_path.glob("multirun/*/*")
    rows = list(csv.DictReader((made / "results.csv").open()))
    assert [line[1] for line in lines[at + 1 : at + 3]] == [row["quant"] for row in rows]
    assert float(rows[0]["perplexity"]) < float(rows[1]["perplexity"]), "the lowest comes first"
    by_format = {row["quant"]: {name: float(row[name]) for name in numbers} for row in rows}
    assert by_format["none"]["kl"] == 0 and by_format["fp8"]["kl"] > 1e-5
    assert by_format["fp8"]["weights_bytes"] < by_format["none"]["weights_bytes"]
    page = (made / "results.html").read_text()
    assert page.count("<svg") == 1 and ">weights, GB<" in page and ">output tokens/s<" in page and ">quant=fp8<" in page

    assert main([*argv, "quant=none,fp8", "job.resume=true"]) == 0
    assert capsys.readouterr().err.count("done before") == 2


def test_numbers_are_reported_and_shown(
    checkpoints: Any, texts: dict[str, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama")
    fields = ["job=eval", f"checkpoint={folder}", f"job.texts=[{','.join(texts)}]", "job.context_len=64", *worded.FAST]
    Path([*texts][1]).write_text(worded.spell(tiny.prompt(80, 5)))  # of two batches: the error is known
    numbers: dict[str, Any] = {}
    assert run(load_job([*fields, "job.reference=level=0"]), numbers.update) == 0
    missing = [name for name in OBJECTIVES if not isinstance(numbers.get(name), int | float)]
    assert missing == ["tasks.*"]
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["windows of 64 tokens, without overlap; ±: standard errors", "reference: level=0"]
    assert [line.split()[0] for line in out[5:8]] == [*texts, "all"]
    assert main([*fields, "job.output=json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["texts"]) == {*texts} and result["reference"] is None and "kl" not in result["all"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["job.texts=[]"], "ConfigError: job.texts=[] leaves nothing to evaluate: name a text, or job.tasks"),
        (["job.texts=[nowhere.txt]"], "ConfigError: job.texts: nowhere.txt: No such file or directory; give a file (built-in texts: human-eval, sonnets)"),
        (["job.stride=25"], "ConfigError: job.stride=25 is more than the 24 tokens of a text that a window has"),
        (["job.context_len=256"], "ConfigError: job.context_len=256: a window has at most 255 tokens"),
        (["job.reference=quant=nothing"], "ConfigError: job.reference: "),
        (["job.reference=job.limit=1"], "ConfigError: job.reference: job.limit=1 applies to the comparison"),
        (["job.reference=transformers", "load_dummy=true"], "ConfigError: job.reference=transformers compares a checkpoint's weights"),
        (["job.output=html"], "ConfigError: job.output=html: job=eval has no page"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_one_line(
    checkpoints: Any,
    texts: dict[str, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    message: str,
):
    folder = worded.copy(checkpoints("llama"), tmp_path / "llama")
    fields = [f"checkpoint={folder}", f"job.texts=[{next(iter(texts))}]", "job.context_len=24", *worded.FAST]
    assert main(["job=eval", *fields, *overrides]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "Error" in line)
    assert message in line


def test_a_checkpoint_without_a_tokenizer_is_one_line(checkpoints: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["job=eval", f"checkpoint={checkpoints('llama')}", "job.texts=[pyproject.toml]", *worded.FAST]) == 2
    assert "ConfigError: job.texts: the checkpoint has no tokenizer" in capsys.readouterr().err
