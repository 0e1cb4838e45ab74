"""`job=bench` as a user runs it, and its arithmetic under a clock that ticks once a look."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sweeping import run_jobs_here

from atom.assemble import open_engine
from atom.checkpoint import SilentProgress
from atom.cli import main
from atom.config.load import load
from atom.errors import ConfigError
from atom.jobs.bench import job as bench
from atom.jobs.bench import workload
from atom.jobs.bench.workload import WorkloadRequest, open_workload, parse_range
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.measurement.cores import CoreSeconds
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.step.builder import StepBuilder

pytestmark = pytest.mark.usefixtures("quick_limits")

SMALL = ["level=1", "serve.kv_cache_memory=4194304"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `job=bench` with these overrides."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["job=bench", *SMALL, *argv])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def measured(run: Any) -> Callable[..., dict[str, Any]]:
    """The JSON object of `job=bench`."""

    def measured(*argv: str) -> dict[str, Any]:
        code, out, err = run(*argv, "job.output=json")
        assert code == 0, err
        (line,) = out.splitlines()
        return json.loads(line)

    return measured


def test_the_level_is_the_one_that_ran(
    measured: Any, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(InductorCompiler, "find_missing", lambda _: "a C++ compiler: install g++")
    given = ("level=null", f"cache={tmp_path}", "job.num_prompts=1", "job.input_len=3", "job.output_len=2")
    assert measured(f"checkpoint={checkpoints('qwen3')}", *given)["level"] == 1


def test_counts_and_rates_of_requests_of_equal_lengths(measured: Any, checkpoints: Any):
    result = measured(f"checkpoint={checkpoints('qwen3')}", "job.num_prompts=3", "job.input_len=17", "job.output_len=5")
    assert (result["num_prompts"], result["completed"], result["failed"]) == (3, 3, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (51, 15)
    assert result["output_throughput"] == pytest.approx(15 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(66 / result["duration"])
    assert result["output_throughputs"] == [pytest.approx(result["output_throughput"])]
    prefill, decode, both = (result["phases"][name] for name in ("prefill", "decode", "all"))
    assert (prefill["steps"], prefill["tokens"]) == (1, 51)
    assert (decode["steps"], decode["tokens"]) == (4, 12), "the last token of each is never computed"
    assert (both["steps"], both["tokens"]) == (5, 63)
    for key in ("seconds", "limit_seconds"):
        assert prefill[key] + decode[key] == pytest.approx(both[key])
    assert both["seconds"] == pytest.approx(result["duration"]), "no time is left out"
    assert both["share_of_limit"] == pytest.approx(both["limit_seconds"] / both["seconds"])
    assert result["output_throughput_limit"] == pytest.approx(15 / both["limit_seconds"])
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"] <= result["duration"] * 1000
    assert result["limits"]["bandwidth"] > 0 and result["limits"]["flops"] > 0
    assert (result["model"], result["dtype"], result["device"], result["level"]) == ("qwen3", "fp32", "cpu", 1)
    assert set(result["versions"]) == {"atom", "torch", "python"} and result["hardware"] and result["date"]
    assert "job.output_len=5" in result["overrides"]


@pytest.mark.slow
def test_ranges_are_uniform_and_the_same_for_the_same_seed(measured: Any, checkpoints: Any):
    given = [f"checkpoint={checkpoints('llama')}", "job.num_prompts=12", "job.input_len=3-30", "job.output_len=2-6"]
    first, same, other = (measured(*given, f"seed={seed}") for seed in (0, 0, 1))
    sizes = [(result["total_input_tokens"], result["total_output_tokens"]) for result in (first, same, other)]
    assert sizes[0] == sizes[1] != sizes[2]
    assert 12 * 3 < sizes[0][0] < 12 * 30 and 12 * 2 < sizes[0][1] < 12 * 6
    assert first["phases"]["all"]["tokens"] == sum(sizes[0]) - 12


def test_lengths_reach_both_ends_of_a_range_and_prompts_are_of_the_vocabulary(checkpoints: Any):
    given = ["job=bench", f"checkpoint={checkpoints('llama')}", "job.num_prompts=400"]
    config = load([*given, "job.input_len=5-9", "job.output_len=2-3"])
    draw = open_workload(config)
    first, second = (draw(None) for _ in range(2))  # type: ignore[arg-type]
    assert {len(request.prompt) for request in first} == {5, 6, 7, 8, 9}
    assert {request.output_len for request in first} == {2, 3}
    assert {token for request in first for token in request.prompt} == set(range(101))
    lengths = [[(len(request.prompt), request.output_len) for request in requests] for requests in (first, second)]
    assert lengths[0] == lengths[1] and first != second, "nothing of one run is in a prefix cache for the next"


def test_every_answer_has_its_full_length_and_runs_add_up(measured: Any, checkpoints: Any):
    result = measured(
        f"checkpoint={checkpoints('llama')}", "job.num_prompts=2", "job.input_len=4", "sampling.max_tokens=7",
        "job.num_iters=3", "job.num_warmups=0", "sampling.stop_token_ids=[]",
    )  # fmt: skip
    assert (result["completed"], result["total_output_tokens"]) == (6, 3 * 2 * 7)
    assert len(result["output_throughputs"]) == 3
    assert result["phases"]["prefill"]["steps"] == 3
    slowest, fastest = min(result["output_throughputs"]), max(result["output_throughputs"])
    assert slowest <= result["output_throughput"] <= fastest


@pytest.mark.parametrize("output", ["json", "html"])
@pytest.mark.parametrize("waited", [0.05, 0.6])
def test_a_busy_machine_is_named(
    waited: float, output: str, run: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
):
    counts = iter([CoreSeconds(10, 3), CoreSeconds(10 + 1 - waited, 3 + waited)])
    monkeypatch.setattr(bench, "core_seconds", lambda: next(counts))
    sizes = ["job.num_prompts=1", "job.input_len=3", "job.output_len=2", f"job.output={output}"]
    code, out, err = run(f"checkpoint={checkpoints('llama')}", *sizes)
    line = "this machine was busy: threads waited for a core 60% of the time, so the run was too slow"
    assert code == 0 and (f"atom-run: {line}" in err) is (line in out) is (waited == 0.6)
    if output == "json":
        result = json.loads(out)
        assert (result["share_waited_for_cores"], len(result["warnings"])) == (pytest.approx(waited), waited == 0.6)


def test_one_output_token_is_only_a_prefill(measured: Any, checkpoints: Any):
    result = measured(f"checkpoint={checkpoints('llama')}", "job.num_prompts=2", "job.input_len=9", "job.output_len=1")
    assert set(result["phases"]) == {"prefill", "all"}
    assert result["mean_itl_ms"] is result["mean_tpot_ms"] is None


def test_prompts_in_chunks_and_several_answers_are_counted_as_what_they_are(measured: Any, checkpoints: Any):
    result = measured(
        f"checkpoint={checkpoints('llama')}", "job.num_prompts=2", "job.input_len=20", "job.output_len=4",
        "serve.max_num_batched_tokens=8", "sampling.n=2", "sampling.temperature=0.8",
    )  # fmt: skip
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 16)
    assert result["phases"]["prefill"]["steps"] >= 5
    assert result["phases"]["prefill"]["tokens"] >= 40


class Clock:
    """Seconds that pass by one at each look."""

    def __init__(self) -> None:
        self.ticks = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self.ticks))


def test_times_are_those_of_commits_counted_from_the_start(checkpoints: Any, monkeypatch: pytest.MonkeyPatch):
    config = load(["job=bench", f"checkpoint={checkpoints('llama')}", *SMALL, "serve.max_num_batched_tokens=8"])
    engine, clock = open_engine(config, SilentProgress()), Clock()
    for module in (bench, workload):
        monkeypatch.setattr(module, "time", clock)
    ran = bench.answer(engine, [WorkloadRequest([1] * 5, 3), WorkloadRequest([2] * 6, 2)], config)
    # commits at 1: prompt 0 and half of prompt 1; at 2: a decode and the rest; at 3: a decode of each
    first, second = sorted(ran.outputs, key=lambda output: output.prompt_len)
    assert (ran.started, ran.seconds) == (0.0, 3.0)
    assert (first.ttft, first.itl, first.tpot, first.latency) == (1.0, [1.0, 1.0], 1.0, 3.0)
    assert (second.ttft, second.itl, second.tpot, second.latency) == (2.0, [1.0], 1.0, 3.0)
    assert [(list(step.decodes), step.chunks, step.num_sampled) for step in ran.steps] == [
        ([], [(0, 5), (0, 3)], 1),
        ([6], [(3, 3)], 2),
        ([7, 7], [], 2),
    ]
    result = bench.measure([ran])
    assert (result["duration"], result["output_throughput"], result["median_ttft_ms"]) == (3.0, 5 / 3, 1500.0)
    assert [seconds for _, seconds in bench.step_seconds(ran)] == [1.0, 1.0, 1.0]


def test_recording_leaves_the_engine_as_it_was(checkpoints: Any):
    config = load(["job=bench", f"checkpoint={checkpoints('llama')}", *SMALL])
    engine = open_engine(config, SilentProgress())
    bench.answer(engine, [WorkloadRequest([1, 2], 2)], config)
    assert "commit" not in vars(engine.scheduler)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", [[], ["serve.swap_space=65536"]], ids=["pool", "host memory"])
def test_what_an_earlier_run_has_cached_is_computed_again(fields: list[str], checkpoints: Any):
    sizes = ["serve.block_size=4", "serve.num_kvcache_blocks=12", "serve.max_model_len=40"]
    config = load(["job=bench", f"checkpoint={checkpoints('llama')}", *SMALL, *sizes, *fields])
    engine = open_engine(config, SilentProgress())
    engine.scheduler.cache.costs = None  # type: ignore[union-attr]  # it loads whatever there is
    requests = [WorkloadRequest([number] * 21, 2) for number in range(3)]  # more than the pool holds
    runs = [bench.answer(engine, requests, config) for _ in range(2)]
    assert engine.metrics.scheduler.num_prefix_hit_tokens == 0
    for ran in runs:
        assert sum(num_tokens for step in ran.steps for _, num_tokens in step.chunks) == 3 * 21


@pytest.mark.slow
def test_a_sweep_is_an_object_a_run(run: Any, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    given = ["job.num_prompts=1,3", "job.input_len=5", "job.output_len=2", "job.output=json"]
    code, out, _ = run("-m", f"checkpoint={checkpoints('llama')}", *given)
    result = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [each["num_prompts"] for each in result] == [1, 3]
    assert [(each["total_input_tokens"], each["total_output_tokens"]) for each in result] == [(5, 2), (15, 6)]


def test_a_config_is_enough_with_dummy_weights(measured: Any, checkpoints: Any, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((checkpoints("mixtral") / "config.json").read_bytes())
    result = measured(
        f"checkpoint={tmp_path}", "load_dummy=true", "dtype=bf16", "job.num_prompts=1", "job.output_len=3"
    )
    assert (result["completed"], result["dtype"]) == (1, "bf16")


def test_the_table_has_the_numbers_of_the_object(run: Any, checkpoints: Any):
    code, out, err = run(
        f"checkpoint={checkpoints('llama')}", "job.num_prompts=2", "job.input_len=4", "job.output_len=3"
    )
    assert code == 0 and "KV: " in err
    assert out.startswith("llama, fp32, level 1, on ")
    assert "2 requests, 8 tokens in, 6 out, " in out
    assert re.search(
        r"output tokens/s +all tokens/s +requests/s +of the limit\n( +[\d.,]+){3} +[\d.]+% of [\d.,]+\n", out
    )
    for label in ("Time to First Token", "Inter-token Latency", "End-to-end Latency"):
        assert re.search(rf"^{label}( +[\d.,]+){{4}}$", out, re.MULTILINE)
    assert re.search(r"^prefill +1 +8 +[\d.]+ +[\d.,]+ +[\d.,]+ +[\d.]+%$", out, re.MULTILINE)
    assert re.search(r"^decode +2 +4 ", out, re.MULTILINE) and re.search(r"^all +3 +12 ", out, re.MULTILINE)
    assert re.search(r"^limits measured in this run: [\d.,]+ GB/s read, [\d.,]+ TFLOP/s", out, re.MULTILINE)


def test_a_request_that_fails_is_counted_reported_and_an_exit_code(
    run: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
):
    build = StepBuilder.build

    def fail(self: StepBuilder, plan: Any) -> Any:
        if any(len(row.sequence.prompt) == 4 for row in plan.rows):
            raise ValueError("four is too few")
        return build(self, plan)

    monkeypatch.setattr(StepBuilder, "build", fail)
    given = ["job.input_len=4-5", "job.num_prompts=8", "job.output_len=2", "job.num_warmups=0", "job.output=json"]
    code, out, err = run(f"checkpoint={checkpoints('llama')}", *given)
    result = json.loads(out)
    assert code == 1
    assert 0 < result["failed"] < 8 and result["completed"] + result["failed"] == 8
    assert result["total_output_tokens"] == 2 * result["completed"]
    assert re.search(
        rf"^atom-run: {result['failed']} requests failed, the first one with .*four is too few", err, re.MULTILINE
    )


# what cannot be run


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("job.input_len=x", "job.input_len=x: write a number of tokens, as in 128, or a range, as in 100-1024"),
        ("job.output_len=9-3", "job.output_len=9-3: it goes from 1 upwards"),
        ("job.input_len=0", "job.input_len=0: it goes from 1 upwards"),
        ("job.num_prompts=0", "job.num_prompts=0 must be a whole number from 1 to 2147483647"),
        (
            "job.output_len=1-200",
            "job.input_len and job.output_len are 328 tokens, more than serve.max_model_len=256; lower one",
        ),
        (
            "job.dataset_path=/no/such/file",
            "job.dataset_path=/no/such/file: No such file or directory",
        ),
    ],
)
def test_a_mistake_is_one_line(given: str, line: str, run: Any, checkpoints: Any):
    code, out, err = run(f"checkpoint={checkpoints('llama')}", given)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"atom-run: ConfigError: {line}"


def test_conversations_need_a_tokenizer(run: Any, checkpoints: Any, tmp_path: Path):
    (tmp_path / "chats.json").write_text(json.dumps([turns("a question", "an answer")]))
    code, out, err = run(f"checkpoint={checkpoints('llama')}", f"job.dataset_path={tmp_path}/chats.json")
    assert (code, out) == (2, "")
    line = "job.dataset_path needs a tokenizer, which the checkpoint has not; leave it out"
    assert err.splitlines()[-1] == f"atom-run: ConfigError: {line}"


@pytest.mark.parametrize(("text", "range"), [("7", (7, 7)), ("100-1024", (100, 1024)), ("5-5", (5, 5))])
def test_a_length_is_a_number_or_a_range(text: str, range: tuple[int, int]):
    assert parse_range("job.input_len", text) == range


@pytest.mark.parametrize("text", ["", "-", "3-", "-3", "1.5", "3-4-5", "1e3"])
def test_anything_else_is_no_length(text: str):
    with pytest.raises(ConfigError, match=r"^job\.input_len="):
        parse_range("job.input_len", text)


# conversations


def turns(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


class Letters:
    """A token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(map(ord, text))

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(map(ord, messages[0]["content"] + "!!"))


LETTERS = SimpleNamespace(vocabulary=Vocabulary(128, frozenset(), Letters()))  # type: ignore[arg-type]


@pytest.fixture
def converse(checkpoints: Any, tmp_path: Path) -> Callable[..., list[WorkloadRequest]]:
    """The requests of a file with these conversations."""

    def converse(entries: Any, *overrides: str) -> list[WorkloadRequest]:
        path = tmp_path / "conversations.json"
        path.write_text(json.dumps(entries))
        given = ["job=bench", f"checkpoint={checkpoints('llama')}", f"job.dataset_path={path}", *overrides]
        return open_workload(load(given))(LETTERS)  # type: ignore[arg-type]

    return converse


def test_conversations_are_prompts_and_the_lengths_of_their_answers(converse: Any):
    entries = [turns("a question", "the answer"), turns("hi", "too short a prompt"), turns("four", "no"), turns("alone"),
               turns("x" * 300, "beyond what the model takes"), turns("another one", "its own answer", "more")]  # fmt: skip
    requests = converse(entries, "job.num_prompts=2")
    assert sorted((len(prompt), num_out) for prompt, num_out in requests) == [(11, 10), (12, 14)]
    assert all(prompt[0] == 1 for prompt, _ in requests), "with what the tokenizer puts around every text"


def test_an_output_length_and_a_chat_template_take_the_place_of_the_files(converse: Any):
    entries = [turns("a question", "the answer"), turns("four", "no")]
    requests = converse(entries, "job.num_prompts=2", "job.output_len=6", "job.chat=true")
    assert sorted((len(prompt), num_out) for prompt, num_out in requests) == [(6, 6), (12, 6)]


def test_another_seed_is_another_choice(converse: Any):
    entries = [turns("q" * length, "answer") for length in range(4, 44)]
    chosen = [converse(entries, "job.num_prompts=10", f"seed={seed}") for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len({len(prompt) for prompt, _ in chosen[0]}) == 10, "none is taken twice"


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({}, r"job\.dataset_path: .* is not a list of conversations"),
        ([turns("a question", "an answer")], r"has only 1 conversations of a usable length; lower job\.num_prompts=2"),
    ],
)
def test_a_file_that_has_too_little_is_refused(converse: Any, entries: Any, reason: str):
    with pytest.raises(ConfigError, match=reason):
        converse(entries, "job.num_prompts=2")


def test_conversations_run(run: Any, embedded_gguf: Path, tmp_path: Path):
    (tmp_path / "chats.json").write_text(json.dumps([turns("What is the capital of France?", "Paris, of course.")]))
    code, out, err = run(
        f"job.dataset_path={tmp_path}/chats.json", "job.num_prompts=1", "job.num_warmups=0", "job.output=json",
        "serve.max_model_len=128", "serve.kv_cache_memory=8388608",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (7, 5)


def test_prefix_hits_are_reported(measured: Any, checkpoints: Any):
    given = [f"checkpoint={checkpoints('llama')}", "serve.enable_prefix_caching=true", "serve.block_size=4"]
    result = measured(*given, "job.num_prompts=1", "job.input_len=40", "job.output_len=2", "sampling.n=3",
                    "sampling.temperature=1")  # fmt: skip
    assert result["num_prefix_hit_tokens"] == 2 * 36, "of each sibling, all blocks but that of the last token"
    assert result["phases"]["all"]["tokens"] == 40 + 2 * 4 + 3


def test_the_page_draws_every_latency(run: Any, checkpoints: Any):
    given = (f"checkpoint={checkpoints('llama')}", "job.num_prompts=3", "job.input_len=9", "job.output_len=5")
    code, out, err = run(*given, "job.output=html")
    assert code == 0, err
    for label in ("Time to First Token", "Time per Output Token", "Inter-token Latency", "End-to-end Latency"):
        assert f"<h2>{label}" in out
    points = [len(each.split()) - 1 for each in re.findall(r'<polyline points="([^"]*)"', out)]
    assert points == [3, 3, 3 * 4, 3], "requests, and tokens after the first"
    assert "% of the limit</text>" in out
