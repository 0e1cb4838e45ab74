"""The jobs as a user runs them: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from atom import LLMEngine, SamplingParams
from atom.assemble import load_weights
from atom.checkpoint import SilentProgress, open_checkpoint
from atom.cli import main
from atom.compiler import compile_graph, semantic_graph
from atom.compiler.saved_graph import show_saved
from atom.config.load import load
from atom.graph import interpret, parse, show
from atom.graph.recipes import leaves
from atom.jobs.generate import conversation
from atom.jobs.prompt_file import Entry
from atom.weights import load as load_tensors

GREEDY = [
    "level=1",
    "sampling.temperature=0",
    "sampling.max_tokens=6",
    "sampling.ignore_eos=true",
    "serve.kv_cache_memory=4194304",
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command line's exit code, stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_json_has_one_object_a_prompt(run: Any, checkpoints: Any, references: Any):
    prompts = [tiny.prompt(5), tiny.prompt(9, seed=1)]
    code, out, err = run(f"checkpoint={checkpoints('llama')}", f"prompts={prompts}", "job.output=json", *GREEDY)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [answer["prompt"] for answer in answers] == prompts
    for prompt, answer in zip(prompts, answers, strict=True):
        tiny.assert_greedy(answer, prompt, references("llama"))
        assert set(answer) == {"prompt", "text", "token_ids", "finish_reason", "num_tokens_input", "num_tokens_output",
                               "ttft", "tpot", "latency"}  # fmt: skip
    assert "KV: " in err


def test_the_checkpoint_s_sampling_counts_where_nobody_else_sets_it(run: Any, checkpoints: Any, tmp_path: Path):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "llama")
    generation = {
        "temperature": 0.6,
        "top_k": 1,
        "max_new_tokens": 4,
        "num_beams": 4,
        "suppress_tokens": [1],
        "min_length": 0,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    given = [f"checkpoint={folder}", "prompts=[[1,2]]", "job.output=json", "level=1", "sampling.ignore_eos=true"]
    code, out, err = run(*given)
    assert (code, json.loads(out)["num_tokens_output"]) == (0, 4)
    assert "sampling as the checkpoint says: temperature 0.6, max_tokens 4, top_k 1; sampling.defaults=none" in err
    assert "though it changes answers in transformers: num_beams 4, suppress_tokens\n" in err
    code, out, err = run(*given, "sampling.max_tokens=3")
    assert (code, json.loads(out)["num_tokens_output"]) == (0, 3)
    assert "says: temperature 0.6, top_k 1; " in err
    code, out, err = run(*given, "sampling.defaults=none")
    assert (code, json.loads(out)["num_tokens_output"]) == (0, 64)
    assert "sampling as" not in err and "num_beams" not in err


def test_a_refused_prompt_is_one_line_and_the_others_are_answered(run: Any, checkpoints: Any):
    prompts = [[1, 2], [1, 999], [3]]
    code, out, err = run(f"checkpoint={checkpoints('llama')}", f"prompts={prompts}", "job.output=json", *GREEDY)
    assert code == 2
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == [[1, 2], [3]]
    assert (
        "atom-run: RequestError: prompt 1: 999 in the prompt is not a token id; they are numbers from 0 to 100\n" in err
    )


def test_text_shows_tokens_without_a_tokenizer_and_then_a_table(run: Any, checkpoints: Any):
    code, out, err = run(f"checkpoint={checkpoints('llama')}", "prompts=[1,2,3]", *GREEDY)
    assert code == 0
    assert re.fullmatch(r"(\d+ ){6}\n", out)
    assert re.search(r"load s +first token s +tokens +tokens/s\n +[\d.]+ +[\d.]+ +6 +[\d.]+\n$", err)


def test_several_answers_are_shown_each_as_a_whole(run: Any, embedded_gguf: Path):
    prompts = '["The capital of France is", "1 + 1 ="]'
    code, out, _ = run(
        "level=1", f"prompts={prompts}", "sampling.temperature=0", "sampling.max_tokens=3", "serve.max_model_len=512"
    )
    assert code == 0
    assert re.fullmatch(r"── prompt 0\n(.+\n)+\n── prompt 1\n(.+\n)+\n", out)


def test_an_answer_has_the_fields_of_its_object(run: Any, checkpoints: Any, tmp_path: Path):
    (tmp_path / "in").write_text('{"id": 7, "prompt": [1, 2]}\n[3]\n')
    code, out, _ = run(f"checkpoint={checkpoints('llama')}", f"prompts=@{tmp_path}/in", "job.output=json", *GREEDY)
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert [*first][:3] == ["id", "prompt", "text"]
    assert (first["id"], first["prompt"], second["prompt"]) == (7, [1, 2], [3])
    assert "id" not in second


def test_messages_are_rendered_by_the_chat_template(run: Any, checkpoints: Any, tmp_path: Path):
    talk = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    entries = [Entry("prompt 0", talk, {"messages": talk}), Entry("prompt 1", "hi", {"prompt": "hi"})]
    plain, begun = (load(["job.chat=true", *more]) for more in ([], ["job.system_prompt=Be brief."]))
    assert [conversation(each, plain) for each in entries] == [talk, talk[:1]]
    pictured = replace(plain, images=["a.png", "b.png"])
    parts = [{"type": "image", "image": "a.png"}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "hi"}]
    assert [conversation(each, pictured) for each in entries] == [talk, [{"role": "user", "content": parts}]]
    assert conversation(entries[1], begun) == [{"role": "system", "content": "Be brief."}, *talk[:1]]
    (tmp_path / "in").write_text(json.dumps({"messages": [{"role": "system", "content": "Be long."}, *talk]}))
    code, _, err = run(f"prompts=@{tmp_path}/in", "job.chat=true", "job.system_prompt=Be brief.")
    assert (code, err) == (
        2,
        f"atom-run: ConfigError: line 1 of {tmp_path}/in begins with a system message: leave out job.system_prompt\n",
    )


def test_answers_are_appended_to_a_file_and_resumed(run: Any, checkpoints: Any, tmp_path: Path):
    file, prompts = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    argv = [f"checkpoint={checkpoints('llama')}", f"prompts=@{prompts}", f"job.output_file={file}", *GREEDY]
    prompts.write_text('{"id": "a", "prompt": [1, 2]}\n{"id": "b", "prompt": [999]}\n')
    file.write_text("what was there")
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert f"RequestError: line 2 of {prompts}: 999 in the prompt is not a token id" in err
    before, line = file.read_text().splitlines()
    assert before == "what was there"
    assert json.loads(line)["id"] == "a"
    file.write_text(f'{line}\n{{"id": "b", "te')  # a process was killed here
    prompts.write_text('{"id": "a", "prompt": [1, 2]}\n{"id": "b", "prompt": [4]}\n')
    code, out, err = run(*argv, "job.resume=true")
    assert (code, out) == (0, "")
    assert f"{file} has the answers to 1 of 2 prompts\n" in err
    kept, new = file.read_text().splitlines()
    assert kept == line
    assert (json.loads(new)["id"], json.loads(new)["prompt"]) == ("b", [4])
    code, out, err = run(*argv, "job.resume=true")
    assert (code, err) == (0, f"atom-run: {file} has the answers to 2 of 2 prompts\n"), "no model is loaded"


def test_a_folder_that_is_not_there_takes_no_answers(run: Any, checkpoints: Any, tmp_path: Path):
    argv = f"checkpoint={checkpoints('llama')}", "prompts=[[1]]", f"job.output_file={tmp_path}/no/out", *GREEDY
    code, _, err = run(*argv)
    assert code == 2  # the checkpoint may be written here, with a progress bar
    assert err.endswith(f"atom-run: ConfigError: job.output_file={tmp_path}/no/out: No such file or directory\n")


@pytest.mark.parametrize("prompts", ["@/no/such/file", None, "[]"])
def test_missing_prompts_are_one_line(run: Any, prompts: str | None, checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    given = [] if prompts is None else [f"prompts={prompts}"]
    code, out, err = run("job=generate", f"checkpoint={checkpoints('llama')}", *given)
    assert (code, out) == (2, "")
    assert err.startswith("atom-run: ConfigError: ") and err.count("\n") == 1


@torch.inference_mode()
def predict(text: str, folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of a semantic text, by the reference interpreter."""
    graph = parse(text)
    tensors = load_tensors(graph.recipes(), open_checkpoint(str(folder)), SilentProgress())
    tokens = list(prompt)
    for _ in range(num_tokens):
        inputs = {"tokens": torch.tensor(tokens), "positions": torch.arange(len(tokens))}
        hidden = interpret(graph, "body", inputs, tensors.__getitem__)
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        last = {node.name: each[-1:] for node, each in zip(graph.programs["head"].inputs, hidden, strict=True)}
        tokens.append(int(interpret(graph, "head", last, tensors.__getitem__).argmax()))
    return tokens[len(prompt) :]


def test_the_text_is_what_runs(run: Any, checkpoints: Any, tmp_path: Path):
    folder, prompt = checkpoints("llama"), tiny.prompt(12)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    plain = LLMEngine(model=str(folder), kv_cache_memory=1 << 22, level=1).generate([prompt], params)[0]["token_ids"]
    _, semantic, _ = run("job=explain", f"checkpoint={folder}", "job.stage=semantic")
    _, lowered, _ = run("job=explain", f"checkpoint={folder}", "job.stage=select_kernels")
    assert predict(semantic, folder, prompt, 10) == plain

    edited = re.sub(
        r'(\w+) = \w+\.gated_activate\((\w+), kind="silu"\)',
        r'\1 = reference.gated_activate(\2, kind="relu")',
        lowered,
        count=1,
    )
    expected = predict(semantic.replace('kind="silu"', 'kind="relu"', 1), folder, prompt, 10)
    assert edited != lowered and expected != plain
    (tmp_path / "mine.py").write_text(edited)
    engine = LLMEngine(model=str(folder), kv_cache_memory=1 << 22, level=1, **{"job.graph": str(tmp_path / "mine.py")})
    assert engine.generate([prompt], params)[0]["token_ids"] == expected


def test_a_text_saved_before_lowering_runs_too(run: Any, checkpoints: Any, tmp_path: Path):
    folder, prompt = checkpoints("llama"), tiny.prompt(12)
    _, text, _ = run("job=explain", f"checkpoint={folder}", "job.stage=fuse_qkv")
    (tmp_path / "mine.py").write_text(text)
    code, out, _ = run(
        f"checkpoint={folder}", f"job.graph={tmp_path}/mine.py", f"prompts={prompt}", "job.output=json", *GREEDY
    )
    assert code == 0
    assert json.loads(out)["token_ids"] == predict(text, folder, prompt, 6)


def test_a_program_that_no_step_runs_changes_no_answer(run: Any, checkpoints: Any, tmp_path: Path):
    folder, prompt = checkpoints("llama"), tiny.prompt(12)
    _, text, _ = run("job=explain", f"checkpoint={folder}", "job.stage=select_kernels")
    (tmp_path / "mine.py").write_text(text + text[text.index("def head(") :].replace("def head(", "def draft("))
    given = [f"checkpoint={folder}", f"prompts={prompt}", "job.output=json", *GREEDY]
    answers = [run(*given, *more) for more in ([], [f"job.graph={tmp_path}/mine.py"])]
    assert [code for code, _, _ in answers] == [0, 0]
    plain, other = (json.loads(out)["token_ids"] for _, out, _ in answers)
    assert other == plain


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("def body(x: bf16[T]):\n    y = nope(x)\n    return y\n", ":2: there is no op 'nope'"),
        ("def body(x: bf16[T]):\n    return x\n", "it has no function head"),
        (
            "def body(x: i64[T]):\n    return x\n\ndef head(hidden: fp32[R, 48]):\n    return hidden\n",
            "body has an input x",
        ),
        (
            "def body(tokens: i64[T]):\n    return tokens\n\ndef head(hidden: fp32[R, 48]):\n    return hidden\n",
            "head takes rows of fp32[48] where body returns rows of i64",
        ),
    ],
)
def test_a_bad_saved_text_is_one_line(run: Any, checkpoints: Any, tmp_path: Path, text: str | None, reason: str):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    code, out, err = run(f"checkpoint={checkpoints('llama')}", f"job.graph={tmp_path}/mine.py", "prompts=[1]")
    assert (code, out) == (2, "")
    assert err.startswith("atom-run: ConfigError: ") and reason in err and err.count("\n") == 1


def test_an_edited_kernel_or_layout_that_does_not_fit_is_one_line(run: Any, checkpoints: Any, tmp_path: Path):
    _, text, _ = run("job=explain", f"checkpoint={checkpoints('llama')}", "job.stage=select_kernels")
    assert "torch.linear(" in text and '"onednn"' in text, "this CPU has oneDNN"
    for edited, reason in [
        (text.replace("torch.linear(", "linear(", 1), "reference.linear takes its weight as it is, without shuffle"),
        (text.replace('"onednn"', '"foo"', 1), 'torch.linear takes shuffle(…, "onednn")'),
        (text.replace("batch", "bat"), "body has an input bat"),
        (text.replace("torch.linear(", "cuda.linear(", 1), "there is no kernel backend 'cuda'"),
        (text.replace("cpp.paged_attention(", "triton.paged_attention(", 1), "runs on cuda, not on cpu"),
    ]:
        (tmp_path / "mine.py").write_text(edited)
        code, out, err = run(f"checkpoint={checkpoints('llama')}", f"job.graph={tmp_path}/mine.py", "prompts=[1]")
        assert (code, out) == (2, "")
        assert reason in err and err.count("\n") == 1


def test_a_text_saved_before_kernels_were_chosen_gets_them(checkpoints: Any, run: Any, tmp_path: Path):
    _, text, _ = run("job=explain", f"checkpoint={checkpoints('llama')}", "job.stage=lower_attention")
    _, chosen, _ = run("job=explain", f"checkpoint={checkpoints('llama')}", "job.stage=split_pieces")
    (tmp_path / "mine.py").write_text(text)
    graph = compile_graph(load([f"checkpoint={checkpoints('llama')}", f"job.graph={tmp_path}/mine.py"]))
    assert show_saved("split_pieces", show(graph)) == chosen


def test_dummy_weights_are_normal(checkpoints: Any):
    config = load([f"checkpoint={checkpoints('llama')}", "load_dummy=true", "dtype=fp32"])
    graph = semantic_graph(config)
    tensors = load_weights(graph, open_checkpoint(str(checkpoints("llama"))), config, SilentProgress())
    values = torch.cat([tensors[recipe].flatten() for recipe in graph.recipes() if not hasattr(recipe, "theta")])
    assert values.mean().abs() < 1e-3 and abs(values.std() - 0.02) < 1e-3


def test_dummy_biases_do_not_choose_the_experts(checkpoints: Any):
    config = load([f"checkpoint={checkpoints('gpt_oss')}", "load_dummy=true", "dtype=fp32"])
    graph = semantic_graph(config)
    tensors = load_weights(graph, open_checkpoint(str(checkpoints("gpt_oss"))), config, SilentProgress())
    biases = [t.flatten() for recipe, t in tensors.items() if any(w.name.endswith("bias") for w in leaves(recipe))]
    assert 0 < torch.cat(biases).std() < 0.001


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_no_traceback(embedded_gguf: Path, tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "atom.cli",
        "level=1",
        "prompts=Tell me a long story.",
        "sampling.max_tokens=8000",
        "sampling.ignore_eos=true",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        err = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in err and err.endswith("atom-run: interrupted\n")
    assert list(tmp_path.iterdir()) == [], "nothing is left in the folder"
