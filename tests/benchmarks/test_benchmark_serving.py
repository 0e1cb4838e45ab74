from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stub_server import Answer, Asked, Reply, Stub, answering, completion_events, obeying, serving
from tokenizers import Tokenizer as Reference

from atom.benchmarks import client
from atom.benchmarks.benchmark_serving import find_free_path, main
from atom.benchmarks.compare import name_key

SMALL = ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "5", "--disable-tqdm"]


def flags(stub: Stub, model: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--base-url", stub.url, "--dataset-name", "random", *SMALL, *more]


def saved(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_a_measurement_from_flags_to_file(tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = ["--ignore-eos", "--max_concurrency", "2", "--goodput", "e2el:60000", "--metric-percentiles", "50,90",
            "--percentile-metrics", "ttft,e2el", "--metadata", "version=7", "--save-result", "--save-detailed",
            "--result-dir"]  # fmt: skip
    with serving(answering(completion_events([" a"] * 5, prompt_tokens=12))) as stub:
        assert main(flags(stub, tokenizer_folder, *more, str(tmp_path))) == 0
    shown = capsys.readouterr()
    result = saved(tmp_path)
    for line in ("Successful requests:                     6", "P90 E2EL (ms):", "Request goodput (req/s):"):
        assert line in shown.out
    assert "TPOT" not in shown.out and "P99" not in shown.out
    assert {each.json()["ignore_eos"] for each in stub.of("POST")} == {True}

    expected = {
        "backend": "vllm", "model_id": str(tokenizer_folder), "tokenizer_id": str(tokenizer_folder), "num_prompts": 6,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2, "metadata": {"version": "7"}, "version": "7",
        "completed": 6, "failed": 0, "total_input_tokens": 72, "total_output_tokens": 30, "hardware_of": "client",
        "input_lens": [12] * 6, "output_lens": [5] * 6, "generated_texts": [" a" * 5] * 6, "errors": [""] * 6,
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    starts = result["start_times"]
    assert len(starts) == 6 and 0 <= max(starts) - min(starts) < result["duration"]
    duration = result["duration"]
    assert result["request_throughput"] == result["request_goodput"] == pytest.approx(6 / duration)
    assert result["output_throughput"] == pytest.approx(30 / duration)
    assert result["total_token_throughput"] == pytest.approx(102 / duration)
    ttfts, itls = result["ttfts"], result["itls"]
    assert result["mean_ttft_ms"] == pytest.approx(sum(ttfts) / 6 * 1000)
    assert result["mean_tpot_ms"] == pytest.approx((result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 4)
    assert result["mean_itl_ms"] == pytest.approx(sum(map(sum, itls)) / 24 * 1000)
    every = {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p99") for name in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    assert every <= result.keys() and len(result["hardware"]) > 4 and len(result["date"]) == 15


def test_lists_of_requests_are_saved_where_they_are_asked_for(tokenizer_folder: Path, tmp_path: Path):
    """As `vllm bench serve` does (vllm/benchmarks/serve.py removes these keys where --save-detailed is not given)."""
    lists = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"} | {"turns"}
    more = ["--save-result", "--label", "mine", "--result-dir"]
    with serving(answering(completion_events([" a"] * 5, prompt_tokens=12))) as stub:
        assert main(flags(stub, tokenizer_folder, *more, str(tmp_path / "few"))) == 0
        assert main(flags(stub, tokenizer_folder, "--save-detailed", *more, str(tmp_path / "all"))) == 0
    few, all_of_it = saved(tmp_path / "few"), saved(tmp_path / "all")
    assert all_of_it.keys() - few.keys() == lists and few["label"] == "mine"
    assert next((tmp_path / "few").glob("mine-infqps-*.json"))


def test_runs_that_end_in_the_same_second_keep_their_own_files(tmp_path: Path):
    assert find_free_path(tmp_path, "vllm-4qps-m-20261127-120000") == tmp_path / "vllm-4qps-m-20261127-120000.json"
    (tmp_path / "vllm-4qps-m-20261127-120000.json").touch()
    (tmp_path / "vllm-4qps-m-20261127-120000-2.json").touch()
    third = find_free_path(tmp_path, "vllm-4qps-m-20261127-120000")
    assert third == tmp_path / "vllm-4qps-m-20261127-120000-3.json"
    assert name_key(third.stem) == "vllm-4qps-m", "compare matches it with those of other days"


def test_requests_are_numbered_after_the_prefix(tmp_path: Path):
    with serving(obeying()) as stub:
        assert main(flags(stub, tmp_path, "--request-id-prefix", "run-7-")) == 0
        first, *rest = [each.headers.get("x-request-id") for each in stub.of("POST")]
        assert (first, sorted(map(str, rest))) == (None, [f"run-7-{at}" for at in range(6)]), "the first one warms up"
        assert main(flags(stub, tmp_path)) == 0
        assert not any("x-request-id" in each.headers for each in stub.of("POST")[7:])


@pytest.mark.parametrize("names_model", [True, False])
def test_a_server_that_is_starting_is_waited_for(
    names_model: bool, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(client, "RETRY", 0.05)
    models = {"data": [{"id": "served", "root": str(tokenizer_folder)}]}
    with serving(failing(0, 2), version=json.dumps(models).encode()) as stub:
        argv = ["--base-url", stub.url, "--dataset-name", "random", *SMALL, "--num-warmups", "0"]
        argv += ["--model", str(tokenizer_folder)] if names_model else []
        assert main([*argv, "--ready-check-timeout-sec", "20"]) == 0
        assert len(stub.of("POST")) == 3 + 1 + 6
        assert capsys.readouterr().err.count("waiting 20 s for the server at most: a test request to ") == 1
        assert main(argv) == 0
        assert len(stub.of("POST")) == 3 + 1 + 6 + 6, "nobody waits, nothing warms up"
    argv = ["--port", "1", "--dataset-name", "random", *SMALL, "--ready-check-timeout-sec", "1"]
    assert main([*argv, "--model", str(tokenizer_folder)] if names_model else argv) == 1
    assert "is the server up" in capsys.readouterr().err.splitlines()[-1]


def test_prompts_have_the_length_that_the_server_counts(tokenizer_folder: Path, reference_tokenizer: Reference):
    with serving(answering(completion_events([" a"] * 5, prompt_tokens=12))) as stub:
        assert main(flags(stub, tokenizer_folder)) == 0
    prompts = [each.json()["prompt"] for each in stub.of("POST")]
    assert [len(reference_tokenizer.encode(each).ids) for each in prompts] == [12] * 7


def test_prefixes_repeat_and_requests_ramp_up_with_the_fields_given(tokenizer_folder: Path, tmp_path: Path):
    more = ["--dataset-name", "prefix_repetition", "--num-prompts", "7", "--prefix-repetition-num-prefixes", "3",
            "--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "20",
            "--prefix-repetition-output-len", "5", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50",
            "--ramp-up-end-rps", "100", "--temperature", "0.7", "--extra-body", '{"seed": 3}',
            "--save-result", "--save-detailed", "--result-dir", str(tmp_path)]  # fmt: skip
    with serving(answering(completion_events([" a"] * 5, prompt_tokens=50))) as stub:
        assert main(flags(stub, tokenizer_folder, *more)) == 0
    bodies = [each.json() for each in stub.of("POST")][1:]  # the first one warms up
    starts = Counter(body["prompt"][:40] for body in bodies)
    assert sorted(starts.values()) == [2, 2, 2]  # 7 // 3 of each, as in vLLM
    assert {(body["temperature"], body["seed"], body["max_tokens"]) for body in bodies} == {(0.7, 3, 5)}
    result = saved(tmp_path)
    assert result["input_lens"] == [50] * 6 and result["extra_body"] == {"temperature": 0.7, "seed": 3}
    assert (result["ramp_up_strategy"], result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == ("linear", 50, 100)
    assert next(tmp_path.glob("vllm-ramp-up-linear-50qps-100qps-*.json"))


@pytest.mark.parametrize("data", ["random", "prefix_repetition", "custom"])
def test_warm_ups_leave_no_synthetic_prompt_in_the_servers_prefix_cache(
    data: str, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"it was prompt {at}"}) + "\n" for at in range(6)))
    more = ["--dataset-name", data, "--num-warmups", "4", "--prefix-repetition-prefix-len", "30",
            "--prefix-repetition-suffix-len", "20", "--prefix-repetition-num-prefixes", "3",
            "--dataset-path", str(path)]  # fmt: skip
    with serving(answering(completion_events([" a"] * 5, prompt_tokens=12, cached_tokens=8))) as stub:
        assert main(flags(stub, tokenizer_folder, *more, "--save-result", "--result-dir", str(tmp_path / "out"))) == 0
    prompts = [each.json()["prompt"] for each in stub.of("POST")]
    before, counted = prompts[:4], prompts[4:]
    assert len(counted) == len(set(counted)) == 6
    if data == "custom":  # a file may have no more prompts than are counted
        assert len(set(before)) == 1 and before[0] in counted
    else:
        assert not {each[:20] for each in before} & {each[:20] for each in counted}
    new = {"random": "; prompts of an earlier run are new with another --seed"}.get(data, "")
    err = capsys.readouterr().err.splitlines()
    assert f"48 of 72 prompt tokens came from the server's prefix cache{new}" in err
    assert saved(tmp_path / "out")["total_cached_tokens"] == 48


def test_lengths_are_reported_before_requests_are_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The ratio is ROCm/ATOM's: from this share of a length up to it. In vLLM it is the share to either side."""
    with serving(obeying()) as stub:
        more = ["--num-prompts", "200", "--random-input-len", "10", "--random-range-ratio", "0.8"]
        assert main(flags(stub, tmp_path, *more)) == 0
    assert "all at once; prompts of 8 to 10 tokens, answers of 4 to 5" in capsys.readouterr().err


def test_a_last_token_without_text_is_timed(tmp_path: Path):
    """Half of a character, an end of sequence: the server counts it, no event has it."""
    text, *last = completion_events([" a", ""])
    del last[0]  # the empty text's own event

    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.start()
        await reply.send(text)
        await asyncio.sleep(0.5)
        for event in last:
            await reply.send(event)
        await reply.end()

    with serving(answer) as stub:
        more = ["--random-output-len", "2", "--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
        assert main(flags(stub, tmp_path, *more)) == 0
    result = saved(tmp_path)
    assert (result["output_lens"], result["itls"]) == ([2] * 6, [[]] * 6)
    assert result["median_tpot_ms"] > 25, "the text may have been read late"


def test_a_gguf_file_is_measured_with_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    with serving(obeying()) as stub:
        assert main(flags(stub, model)) == 0
        assert main(flags(stub, model, "--backend", "openai-chat")) == 2
    assert [len(each.json()["prompt"]) for each in stub.of("POST")] == [12] * 7
    refused = (
        f"{model} is a file, and tokenizers are read from none: name a folder or hub id that has it with --tokenizer"
    )
    err = capsys.readouterr().err.splitlines()
    assert err[0] == f"{refused}; random prompts are sent as token ids"
    assert err[-1] == f"benchmark_serving: {refused}"


def test_without_a_tokenizer_token_ids_are_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(obeying()) as stub:
        assert main(flags(stub, tmp_path, "--random-prefix-len", "3")) == 0
    assert [len(each.json()["prompt"]) for each in stub.of("POST")] == [15] * 7
    assert "random prompts are sent as token ids" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--tokenizer", "MODEL"], ["--use-chat-template"], ["--backend", "openai-chat"]])
def test_where_a_tokenizer_is_needed_its_lack_is_an_error(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with serving(obeying()) as stub:
        argv = [str(tmp_path) if each == "MODEL" else each for each in more]
        assert main(flags(stub, tmp_path, *argv)) == 2
    assert stub.asked == []
    assert capsys.readouterr().err.startswith(f"benchmark_serving: {tmp_path} has no tokenizer")


def test_tokens_are_counted_by_the_tokenizer_where_the_server_does_not(
    tokenizer_folder: Path, reference_tokenizer: Reference, tmp_path: Path
):
    texts = [" it was", " the age", " of light"]  # more tokens than events
    count = len(reference_tokenizer.encode("".join(texts), add_special_tokens=False).ids)
    assert count > 3
    with serving(answering(completion_events(texts, prompt_tokens=None))) as stub:
        argv = flags(stub, tokenizer_folder, "--save-result", "--save-detailed", "--result-dir", str(tmp_path))
        assert main(argv) == 0
    assert saved(tmp_path)["output_lens"] == [count] * 6


def test_lengths_that_are_not_those_asked_for_are_reported(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]):
    with serving(answering(completion_events([" a"] * 4, prompt_tokens=13))) as stub:
        assert main(flags(stub, tokenizer_folder, "--ignore-eos")) == 0
    err = capsys.readouterr().err
    assert "6 of 6 prompts have another length for the server: 13, not 12" in err
    assert "6 of 6 answers have another length than asked for: 4, not 5" in err


def failing(first: int, last: int) -> Answer:
    """Fails with 500 from the post number `first` to `last`; 0 is the warm-up."""
    seen = iter(range(10**6))

    async def answer(asked: Asked, reply: Reply) -> None:
        if first <= next(seen) <= last:
            return await reply.whole(500, b"kaputt")
        await obeying()(asked, reply)

    return answer


def test_failed_requests_are_counted_and_the_first_error_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(failing(1, 2)) as stub:
        assert main(flags(stub, tmp_path, "--save-result", "--save-detailed", "--result-dir", str(tmp_path))) == 0
    shown = capsys.readouterr()
    assert "2 of 6 requests failed; the first error: HTTP 500 Told: kaputt" in shown.err
    assert "Failed requests:                         2" in shown.out
    result = saved(tmp_path)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 2, 20)
    assert sorted(result["errors"]) == [""] * 4 + ["HTTP 500 Told: kaputt"] * 2
    assert sorted(result["output_lens"]) == [0, 0, 5, 5, 5, 5]


def test_when_all_requests_fail_nothing_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(failing(1, 6)) as stub:
        assert main(flags(stub, tmp_path, "--save-result", "--result-dir", str(tmp_path))) == 1
    shown = capsys.readouterr()
    assert "benchmark_serving: all 6 requests failed; the first error: HTTP 500 Told: kaputt" in shown.err
    assert (shown.out, list(tmp_path.iterdir())) == ("", [])


def test_a_server_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", str(tmp_path), "--port", "1", "--dataset-name", "random", *SMALL]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("benchmark_serving: a test request to http://127.0.0.1:1/v1/completions failed: ")
    assert last.endswith("is the server up, and are --backend, --endpoint and --model what it expects?")


def test_a_profile_that_cannot_be_stopped_spoils_the_exit_code_not_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async def answer(asked: Asked, reply: Reply) -> None:
        await (reply.whole(500, b"kaputt") if asked.path == "/stop_profile" else obeying()(asked, reply))

    with serving(answer) as stub:
        assert main(flags(stub, tmp_path, "--profile", "--save-result", "--result-dir", str(tmp_path))) == 1
    assert saved(tmp_path)["completed"] == 6
    assert "/stop_profile answers HTTP 500: kaputt" in capsys.readouterr().err


def test_the_model_is_named_as_the_server_names_it(tmp_path: Path):
    with serving(obeying()) as stub:
        main(flags(stub, tmp_path, "--served-model-name", "mine"))
        main(flags(stub, tmp_path))
    assert [each.json()["model"] for each in stub.of("POST")] == ["mine"] * 7 + [str(tmp_path)] * 7


def test_lengths_vary_with_the_ratio_and_a_seed_fixes_them(tmp_path: Path):
    def run(*more: str) -> list[tuple[list[int], int]]:
        with serving(obeying()) as stub:
            main(flags(stub, tmp_path, "--random-input-len", "100", "--random-output-len", "40", *more))
        return sorted((each.json()["prompt"], each.json()["max_tokens"]) for each in stub.of("POST"))

    first, again, other = run("--random-range-ratio", "0.5"), run("--random-range-ratio", "0.5"), run("--seed", "1")
    assert first == again
    assert all(50 <= len(prompt) <= 100 and 20 <= wanted <= 40 for prompt, wanted in first)
    assert len({len(prompt) for prompt, _ in first}) > 2
    assert {(len(prompt), wanted) for prompt, wanted in other} == {(100, 40)}


def test_requests_arrive_at_the_rate(tmp_path: Path):
    with serving(obeying()) as stub:
        started = time.perf_counter()
        assert main(flags(stub, tmp_path, "--request-rate", "20", "--burstiness", "100")) == 0
        assert time.perf_counter() - started >= 5 / 20 * 0.8  # six requests, five gaps, nearly even


@pytest.mark.parametrize(
    ("dataset", "more", "num"),
    [("sharegpt", [], 1), ("sonnet", ["--sonnet-input-len", "300"], 6), ("burstgpt", [], 6),
     ("custom", ["--custom-output-len", "4"], 2), ("hf", ["--hf-output-len", "9"], 1), ("sharegpt", ["--sharegpt-output-len", "7", "--use-chat-template"], 1)],
)  # fmt: skip
def test_every_data_set_is_sent(
    dataset: str, more: list[str], num: int, tokenizer_folder: Path, reference_tokenizer: Reference, tmp_path: Path
):
    turns = [{"value": "was it the age of light"}, {"value": "it was the age of wisdom"}]
    files = {
        "sharegpt": ("a.json", json.dumps([{"conversations": turns}])),
        "custom": ("a.jsonl", '{"prompt": "was it the age"}\n\n{"prompt": "it was"}\n'),
        "hf": ("a.jsonl", json.dumps({"conversations": turns})),
        "sonnet": ("a.txt", "it was the age of wisdom\n" * 50),
        "burstgpt": ("a.csv", "Model,Request tokens,Response tokens\nGPT-4,30,8\n"),
    }
    name, text = files[dataset]
    (tmp_path / name).write_text(text)
    with serving(obeying()) as stub:
        argv = ["--model", str(tokenizer_folder), "--base-url", stub.url, "--num-prompts", "6", "--disable-tqdm"]
        assert main([*argv, "--dataset-name", dataset, "--dataset-path", str(tmp_path / name), *more]) == 0
    asked = [each.json() for each in stub.of("POST")]
    assert len(asked) == num + 1
    answer_len = len(reference_tokenizer.encode(turns[1]["value"], add_special_tokens=False).ids)
    wanted = {"sharegpt": answer_len, "custom": 4, "hf": 9, "sonnet": 150, "burstgpt": 8}[dataset]
    assert {each["max_tokens"] for each in asked} == {7 if "--sharegpt-output-len" in more else wanted}
    assert all(each["prompt"].startswith("<s><user>") == ("--use-chat-template" in more) for each in asked)


def test_the_servers_model_is_taken_where_none_is_named(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]):
    models = {"data": [{"id": "served", "root": str(tokenizer_folder)}, {"id": "other"}]}
    answer = answering(completion_events([" a"] * 5, prompt_tokens=12))
    with serving(answer, version=json.dumps(models).encode()) as stub:
        assert main(["--base-url", stub.url, "--dataset-name", "random", *SMALL]) == 0
        asked = [each.json() for each in stub.of("POST")]
        assert stub.asked[0].path == "/v1/models" and {each["model"] for each in asked} == {"served"}
        assert all(isinstance(each["prompt"], str) for each in asked)  # ids, if there is no tokenizer
    with serving(answer) as stub:
        assert main(["--base-url", stub.url, "--dataset-name", "random", *SMALL]) == 1
    assert "/v1/models names no model (HTTP 404); is the server up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is not valid JSON"), ('{"text": "x"}', 'line 2 has no prompt; write {"prompt": ')],
)
def test_a_line_without_a_prompt_is_named(
    line: str, message: str, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' + line)
    argv = ["--model", str(tokenizer_folder), "--dataset-name", "custom", "--dataset-path", str(tmp_path / "a.jsonl")]
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_data_set_that_is_not_there_is_named(tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", str(tokenizer_folder), "--dataset-path", "/nowhere.json"]) == 2
    assert "--dataset-path /nowhere.json: no such file; sharegpt is read from one" in capsys.readouterr().err


def test_the_names_of_result_files_and_pytorchs_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", "1")
    monkeypatch.chdir(tmp_path)
    with serving(obeying()) as stub:
        main(flags(stub, tmp_path, "--save-result", "--result-filename", "mine.json"))
        main(flags(stub, tmp_path, "--save-result", "--max-concurrency", "3", "--request-rate", "1000"))
    names = sorted(each.name for each in tmp_path.glob("*.json"))
    date = json.loads((tmp_path / "mine.json").read_text())["date"][:8]
    assert names[:2] == ["mine.json", "mine.pytorch.json"]
    assert all(each.startswith(f"vllm-1000qps-concurrency3-{tmp_path.name}-{date}-") for each in names[2:])
    records = json.loads((tmp_path / "mine.pytorch.json").read_text())
    assert {"median_tpot_ms", "output_throughput"} <= {each["metric"]["name"] for each in records}


def test_ctrl_c_is_one_line_and_130(tmp_path: Path):
    async def answer(asked: Asked, reply: Reply) -> None:
        if len(stub.of("POST")) == 1:  # the warm-up
            return await obeying()(asked, reply)
        await reply.start()
        process.send_signal(signal.SIGINT)

    with serving(answer) as stub:
        command = [
            sys.executable,
            "-m",
            "atom.benchmarks.benchmark_serving",
            *flags(stub, tmp_path, "--num-prompts", "1"),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[2:] == ["benchmark_serving: interrupted"]


def test_a_progress_bar_counts_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(obeying()) as stub:
        main([each for each in flags(stub, tmp_path) if each != "--disable-tqdm"])
    shown = capsys.readouterr()
    assert "6/6" in shown.err and "6/6" not in shown.out
