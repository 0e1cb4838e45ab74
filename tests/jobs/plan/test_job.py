"""`job=plan`: sizes and limits by arithmetic, the order of options, errors, traces, and the recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from atom.cli import main
from atom.compiler import compile_graph
from atom.config.load import load, load_gpu, load_settings
from atom.config.schema import ParallelConfig
from atom.errors import ConfigError, UnsupportedError
from atom.graph import show
from atom.jobs.plan import engines, measure
from atom.jobs.plan.candidates import compile_candidate, engine_layouts, find_formats
from atom.jobs.plan.engines import Task, try_layout
from atom.jobs.plan.load import Arrival, load_of_trace, read_load, read_trace
from atom.jobs.plan.shares import Shape, find_shares, measured_share
from atom.jobs.recipe import layout_of
from atom.jobs.sweep.job import Result
from atom.kernels import Target

ROOT = Path(__file__).parents[3]
LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, VOCAB = 3, 64, 4, 2, 176, 304
KV_BYTES = 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS) * 2  # of a token: keys and values in 16 bits
FREQUENCIES = HIDDEN // HEADS // 2 * 4  # bytes of those of rope, which are not stored
BLOCK, CONTEXT = 16, 48  # tokens
LOAD = ("job.num_prompts=4", "job.input_len=32", "job.output_len=16")
GPU = {
    "memory": 1_000_000,
    "bandwidth": 1e9,
    "rates": {"bf16": 1e15},  # so that a step takes as long as it reads
    "all_reduce": {2: {1024: 1e-5}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, and GPUs."""
    folder = tmp_path_factory.mktemp("plan")
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 4096}
    config = transformers.LlamaConfig(**sizes, **heads)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    for name, memory in (("gpu", 1_000_000), ("small", 300_000), ("full", 400_000), ("short", 450_000)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**GPU, "memory": memory}))
    (folder / "fast.yaml").write_text(yaml.safe_dump({**GPU, "bandwidth": 1e12}))
    (folder / "fp8.yaml").write_text(yaml.safe_dump({**GPU, "rates": {"bf16": 1e15, "fp8": 1e15}}))
    return folder


@pytest.fixture(scope="module")
def stored(folder: Path) -> dict[str, int]:
    """The bytes of each tensor in the checkpoint's file."""
    return {name: each.nbytes for name, each in load_file(folder / "model" / "model.safetensors").items()}


def overrides(folder: Path, gpu: str = "gpu", *others: str) -> list[str]:
    given = [] if any(each.startswith("job.trace") for each in others) else LOAD
    return ["job=plan", f"checkpoint={folder / 'model'}", f"job.gpu={folder / gpu}.yaml", *given, *others]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `job=plan` with a GPU and these overrides."""

    def run(gpu: str = "gpu", *others: str) -> tuple[int, str, str]:
        code = main(overrides(folder, gpu, *others))
        return (code, *capsys.readouterr())

    return run


def test_memory_limits_and_estimates_of_one_gpu_and_two(run: Any, stored: dict[str, int]):
    code, out, _ = run("gpu", "job.gpus=2", "job.output=json", "job.price_per_hour=2")
    assert code == 0
    options = {each["layout"]: each for each in json.loads(out)["options"]}
    assert {*options} == {"tp1", "dp2", "tp2", "pp2"}

    norms = sum(size for name, size in stored.items() if "norm" in name)
    embedding = stored["model.embed_tokens.weight"]
    layer = sum(size for name, size in stored.items() if name.startswith("model.layers.0."))
    final = stored["model.norm.weight"]
    whole, head = sum(stored.values()) + FREQUENCIES, stored["lm_head.weight"]
    assert options["tp1"]["weights_bytes"] == [whole]
    on_each = norms + embedding + FREQUENCIES
    assert options["tp2"]["weights_bytes"] == [(whole - on_each) // 2 + on_each]
    assert options["pp2"]["weights_bytes"] == [
        embedding + 2 * layer + FREQUENCIES,
        layer + final + head + FREQUENCIES,
    ]
    assert options["tp1"]["sequence_bytes"] == [CONTEXT * KV_BYTES]
    assert options["tp2"]["sequence_bytes"] == [CONTEXT * KV_BYTES // 2]
    assert options["pp2"]["sequence_bytes"] == [CONTEXT * KV_BYTES * 2 // 3, CONTEXT * KV_BYTES // 3]
    left = int(0.9 * GPU["memory"]) - whole
    blocks = left // (BLOCK * KV_BYTES) - 1  # without that of padding
    assert options["tp1"]["sequences"] == blocks // (CONTEXT // BLOCK)
    assert options["dp2"]["sequences"] == 2 * options["tp1"]["sequences"]

    read = whole - embedding
    decode = 15 * (read + 4 * (32 + 8) * KV_BYTES) / GPU["bandwidth"]  # the first token is the prompt's
    prompts = (read + 4 * 32 * KV_BYTES) / GPU["bandwidth"]
    one = options["tp1"]
    assert one["limit_tokens_per_second"] == pytest.approx(4 * 16 / (decode + prompts), rel=1e-3)
    assert one["limit_ttft_seconds"] == pytest.approx((read + 32 * KV_BYTES) / GPU["bandwidth"], rel=1e-3)
    of_layer = (decode + prompts) / 16 / LAYERS
    part = math.log(of_layer / 96.1e-6) / math.log(192.8e-6 / 96.1e-6)
    share = 0.865 + part * (0.813 - 0.865)  # of 8b-1 and 8b-32, in docs/performance.md
    assert one["share"] == {"value": pytest.approx(share, rel=1e-3), "rows": ["8b-1", "8b-32"]}
    seconds = decode / share + prompts / 0.778  # of 8b-prefill; that of nemotron-nano is of recurrent layers
    assert one["tokens_per_second"] == pytest.approx(4 * 16 / seconds, rel=1e-3)
    assert one["tokens_per_second_of_user"] == pytest.approx(16 / seconds, rel=1e-3)
    assert one["ttft_seconds"] == pytest.approx(one["limit_ttft_seconds"] / 0.778)
    assert one["cost_per_million_tokens"] == pytest.approx(1e6 / one["tokens_per_second"] / 3600 * 2)
    stages = [2 * layer + FREQUENCIES, layer + final + head + FREQUENCIES]
    kept = [2 * KV_BYTES // 3, KV_BYTES // 3]  # of a token, by the layers of a stage
    turns = max(size + 2 * (32 + 8) * each for size, each in zip(stages, kept, strict=True))  # of two requests
    decode = 15 * 2 * turns / GPU["bandwidth"]
    prompts = (sum(stages) + 4 * 32 * KV_BYTES) / GPU["bandwidth"]  # one step, through both stages
    two = options["pp2"]
    seconds = 4 * 16 / two["limit_tokens_per_second"] - two["collective_seconds"]
    assert seconds == pytest.approx(decode + prompts, rel=1e-3)
    # two sums a layer, one of the embedding's rows and one of logits a step; four prompts together
    assert options["tp2"]["collective_seconds"] >= 16 * (2 * LAYERS + 1) * 1e-5


def test_a_prompt_takes_no_less_time_than_the_shortest_decode(run: Any):
    code, out, _ = run("fast", "job.output=json")
    (option,) = json.loads(out)["options"]
    assert code == 0 and option["prompt_share"]["rows"] == ["0.6b-1"]  # whose layers take 10.1 µs / 45%
    assert option["ttft_seconds"] == pytest.approx(LAYERS * 10.1e-6 / 0.453)


def test_options_come_by_cost_and_slow_ones_are_counted(run: Any):
    code, out, _ = run("gpu", "job.gpus=2", "job.output=json", "job.min_user_rate=2150")
    result = json.loads(out)
    costs = [each["gpu_seconds_per_million_tokens"] for each in result["options"]]
    assert code == 0 and costs == sorted(costs) and result["too_slow"]
    assert all(each["tokens_per_second_of_user"] >= 2150 for each in result["options"])
    assert all(each["tokens_per_second_of_user"] < 2150 for each in result["too_slow"])
    for each in result["options"]:
        assert each["gpu_seconds_per_million_tokens"] == pytest.approx(each["gpus"] * 1e6 / each["tokens_per_second"])


@pytest.mark.parametrize(
    ("gpu", "others", "said"),
    [
        ("small", (), "do not hold the weights, which need 2 at least: set job.gpus=2"),
        ("full", (), "hold no sequence of 48 tokens besides the weights: raise job.gpus"),
        ("short", (), "hold 2 sequences of 48 tokens at most (tp1), not 4: raise job.gpus, or lower job.num_prompts"),
        (
            "gpu",
            ("serve.max_num_seqs=3",),
            "job.num_prompts=4 is more than engines take at a time: raise serve.max_num",
        ),
        ("gpu", ("job.min_user_rate=1e9",), "reaches job.min_user_rate=1e+09: estimated are at best"),
        (
            "gpu",
            ("serve.max_model_len=47",),
            "job.input_len and job.output_len are 48 tokens, more than serve.max_model_len=47",
        ),
        ("gpu", ("parallel=tp2",), "job=plan chooses the layout: leave out parallel"),
    ],
)
def test_what_would_fit_is_said_in_one_line(run: Any, gpu: str, others: tuple[str, ...], said: str):
    code, out, err = run(gpu, *others)
    assert code and not out and said in err and err.count("\n") == 1


def test_if_no_layout_runs_its_reason_is_the_error(run: Any, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise UnsupportedError("no kernel has sinks")

    monkeypatch.setattr(engines, "compile_candidate", refuse)
    code, out, err = run("gpu", "job.gpus=2")
    assert code == 2 and not out and "gpu.yaml: no kernel has sinks" in err


def test_the_table_says_where_figures_are_from_and_the_recipe_loads(run: Any, folder: Path, tmp_path: Path):
    recipe = tmp_path / "best.yaml"
    code, out, _ = run("fp8", "job.gpus=2", f"job.save_recipe={recipe}", "quant=none")
    assert code == 0
    assert "docs/performance.md has measured for such shapes on h200" in " ".join(out.split())
    first = next(line.split() for line in out.splitlines() if " as given " in line)
    assert max(map(len, out.splitlines())) <= 160
    config = load([f"recipe={recipe}", "job=explain"])
    parallel, about = config.parallel, yaml.safe_load(recipe.read_text())["about"]
    assert layout_of(parallel) == first[0] and config.serve.kv_cache_dtype.startswith(first[3])
    assert config.serve.max_model_len == CONTEXT and config.quant.fmt == "none"
    assert about["measured"].startswith("not measured") and about["estimated"]["tokens_per_second"] > 0


def test_a_cache_in_fp8_is_that_of_its_own_text(folder: Path):
    config = load(overrides(folder, "fp8"))
    formats, refused = find_formats(config, load_gpu(config.job.gpu), read_load(config))
    assert [(each.quant, each.kv) for each in formats] == [
        ("auto", "bf16"), ("auto", "fp8"), ("fp8", "bf16"), ("fp8", "fp8"),
    ] and not refused  # fmt: skip
    target = Target("cuda", frozenset())
    for parallel in engine_layouts(2, num_experts=0):
        derived = compile_candidate(formats[0], parallel, target).with_kv(formats[1])
        own = compile_candidate(formats[1], parallel, target)
        assert [graph.states() for graph in derived.graphs] == [graph.states() for graph in own.graphs]
        assert derived.config == own.config
        for ours, theirs in zip(derived.costs, own.costs, strict=True):
            for name, costs in theirs.items():
                assert 0 <= costs.num_bytes - ours[name].num_bytes <= 8 * LAYERS, "scales of keys and values"
                assert (ours[name].matmuls, ours[name].attention) == (costs.matmuls, costs.attention)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_layouts_share_the_semantic_text_and_leave_it_as_it_is(
    name: str, folder: Path, checkpoints: Callable[[str], Path]
):
    model = [f"checkpoint={checkpoints(name)}"] if name != "llama" else []
    config = load([*overrides(folder, "gpu"), *model])
    num_experts = max((mlp.experts or 0 for mlp in config.model.mlps), default=0)
    assert (num_experts > 0) == (name == "qwen3_moe")
    (fmt,), _ = find_formats(config, load_gpu(config.job.gpu), read_load(config))
    target, before = Target("cuda", frozenset()), show(fmt.written)
    layouts = [*engine_layouts(2, num_experts=num_experts), ParallelConfig(tensor=2, pipeline=2), ParallelConfig()]
    for parallel in layouts:
        candidate = compile_candidate(fmt, parallel, target)
        own = replace(fmt.config, parallel=parallel, level=1)
        apart = [compile_graph(own, target=target, stage=stage) for stage in range(parallel.pipeline)]
        assert [*map(show, candidate.graphs)] == [*map(show, apart)] and show(fmt.written) == before


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        ("[fp9]", "job.formats: fp9: there is no such choice; choices: auto, "),
        ("[none,fp9]", "job.formats: fp9: there is no such choice"),
        ("[none,budget]", "job.formats: budget is measured when an engine starts, not here; leave it out"),
    ],
)
def test_formats_that_there_are_not(run: Any, formats: str, said: str):
    code, out, err = run("gpu", f"job.formats={formats}")
    assert code == 2 and not out and said in err and err.count("\n") == 1


def test_layouts_are_counted_while_they_are_estimated(run: Any):
    code, _, err = run("gpu", "job.gpus=4")
    assert code == 0 and err.startswith("atom-run: estimating 5 layouts\natom-run: estimating 5 layouts: done in ")


def test_layouts_of_a_mixture():
    layouts = [*engine_layouts(4, num_experts=8)]
    names = [layout_of(each) for each in layouts]
    assert names == [
        "tp2", "tp2_ep", "dp2_ep", "dp2_ep1", "pp2",
        "tp4", "tp4_ep", "dp2_tp2_ep", "dp2_tp2_ep1", "dp4_ep", "dp4_ep1",
        "tp2_pp2", "tp2_pp2_ep", "dp2_pp2_ep", "dp2_pp2_ep1", "pp4",
    ]  # fmt: skip
    for name, each in zip(names, layouts, strict=True):
        assert load_settings([f"parallel={name}"]).parallel == each, "the name is that of parallel="
    dense = [layout_of(each) for each in engine_layouts(6, num_experts=0)]
    assert dense[-4:] == ["tp6", "tp3_pp2", "tp2_pp3", "pp6"]


def test_of_few_experts_several_ranks_have_each():
    names = [layout_of(each) for each in engine_layouts(16, num_experts=8)]
    assert {"tp16_ep8", "dp4_tp4_ep8", "tp8_pp2_ep"} <= {*names} and "tp16_ep" not in names


MOONCAKE = [(0, 100, 20), (1000, 200, 20), (2000, 300, 50), (120_000, 100, 20), (180_000, 300, 40)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length")
    lines = [json.dumps({**dict(zip(names, each, strict=True)), "hash_ids": [1]}) for each in MOONCAKE]
    path.write_text("\n".join(lines))
    return path


def test_a_trace_has_its_busiest_minute_and_mean_lengths(trace: Path, tmp_path: Path):
    arrivals = read_trace(str(trace))
    assert arrivals[1] == Arrival(1.0, 200, 20)
    found = load_of_trace(arrivals, "")
    assert (found.input_len, found.output_len, found.max_len) == (200, 30, 350)
    assert (found.rate, found.mean_rate) == (3 / 60, 5 / 180)
    two = load_of_trace([arrivals[0], arrivals[2]], "")
    assert two.rate == two.mean_rate == 2 / 2, "no minute is busier than the busiest"
    azure = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:{at // 60000:02}:{at % 60000 // 1000:02}.1234567,{i},{o}" for at, i, o in MOONCAKE]
    azure.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert load_of_trace(read_trace(str(azure)), "") == found


def test_a_trace_is_kept_up_with_by_as_few_requests_at_a_time_as_will(run: Any, folder: Path, trace: Path):
    code, out, _ = run("gpu", f"job.trace={trace}", "job.output=json")
    (option,) = json.loads(out)["options"]
    assert code == 0 and option["requests"] == 1
    assert option["gpu_seconds_per_million_tokens"] == pytest.approx(1e6 / (5 / 180 * 30))
    config = load(overrides(folder))
    gpu, own = load_gpu(config.job.gpu), read_load(config)
    formats, _ = find_formats(config, gpu, own)

    def requests_of(load_: Any) -> Any:
        task = Task(config.parallel, formats, 1, gpu, load_, find_shares("gpu", gpu), Target("cuda", frozenset()))
        return try_layout(task).engines[0].runs

    rates = [each / requests_of(own._replace(requests=each))[0].estimate.seconds for each in (5, 6)]
    (found,) = requests_of(own._replace(rate=sum(rates) / 2, mean_rate=1.0))
    assert found.requests == 6
    assert requests_of(own._replace(rate=1e9, mean_rate=1.0)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no request"),
        ('{"timestamp": 0}', "a trace has lines of JSON with timestamp, input_length, output_length, or CSV with"),
        ("a,b\n1,2", "(KeyError: 'TIMESTAMP')"),
        ('{"timestamp": 5, "input_length": 3, "output_length": 4}', "all requests come at once; set job.num_prompts"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, said: str):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"job\.trace") as error:
        load_of_trace(read_trace(str(path)), str(path))
    assert said in str(error.value)


def test_a_share_lies_between_those_of_the_nearest_layers():
    rows = {
        "a": {"bits": 8, "mixture": 0, "recurrent": 0, "layer_seconds": 1e-5, "share": 0.4},
        "b": {"bits": 8, "mixture": 0, "recurrent": 0, "layer_seconds": 1e-3, "share": 0.8},
        "c": {"bits": 16, "mixture": 1, "recurrent": 0, "layer_seconds": 1e-4, "share": 0.7},
        "d": {"bits": 8, "mixture": 1, "recurrent": 1, "layer_seconds": 1e-4, "share": 0.3},
    }

    def share(
        bits: int, mixture: bool, seconds: float, *, recurrent: bool = False, is_least: bool = True
    ) -> tuple[float, tuple[str, ...]]:
        value, names = measured_share(rows, Shape(bits, mixture, recurrent, seconds), is_least=is_least)
        return round(value, 6), names

    assert share(8, False, 1e-4) == (0.6, ("a", "b")), "halfway in the logarithm"
    assert share(8, True, 1e-2) == (0.8, ("b",)), (
        "of a dense model: the only mixture with as many bits has recurrent layers"
    )
    assert share(8, False, 1e-2, recurrent=True) == (0.3, ("d",))
    assert share(16, False, 1e-4) == (0.7, ("c",))
    assert share(8, False, 5e-6) == (0.2, ("a",)), "no less time than the layer of that row: 25 µs"
    assert share(8, False, 5e-6, is_least=False) == (0.4, ("a",))


def test_the_first_few_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    asked = []

    def run_job(sweep: Any, number: int, texts: list[str]) -> Result:
        asked.append(texts)
        result = Result("", sweep.started, number, texts, "", {})
        if number == 1:
            return Result(**{**vars(result), "code": 2, "error": "no such GPU"})
        return Result(**{**vars(result), "numbers": {"output_throughput": 1234.0, "median_ttft_ms": 5.0}})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "run_job", run_job)
    assert main(["-m", *overrides(folder, "gpu", "job.gpus=2", "job.save_recipe=best.yaml")]) == 0
    about = yaml.safe_load(Path("best.yaml").read_text())["about"]
    assert about["measured"]["output_throughput"] in (1234, 2468) and about["measured"]["median_ttft_ms"] == 5
    assert about["measured_on"] and about["estimated"]["tokens_per_second"] > 0
    out, err = capsys.readouterr()
    assert next(line.split()[-1] for line in out.splitlines() if " as stored " in line) in ("1,234", "2,468")
    assert "measured tok/s" in out and "no such GPU" in err and len(asked) == 3
    texts = next(each for each in asked if "parallel.tensor=2" in each)
    assert texts[0] == "job=bench" and {"job.num_prompts=4", "serve.max_model_len=48", "quant=auto"} <= {*texts}
    assert not any(text.startswith(("job=plan", "job.gpu", "parallel.replicas")) for each in asked for text in each)


@pytest.mark.slow
def test_an_option_is_measured_here(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *overrides(folder), "device=cpu", "level=1", "job.output=json"]) == 0
    (option,) = json.loads(capsys.readouterr().out)["options"]
    assert option["measured"]["tokens_per_second"] > 0 and option["measured"]["ttft_seconds"] > 0


@pytest.mark.slow
def test_many_layouts_of_deepseek_v3(tmp_path: Path, capsys: Any):
    (tmp_path / "config.json").write_text((ROOT / "tests" / "configs" / "deepseek_v3.json").read_text())
    argv = ["job=plan", "job.gpu=h200", "job.gpus=16", f"checkpoint={tmp_path}", "job.output=json"]
    assert main(argv) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert len(options) >= 120 and len({each["layout"] for each in options}) >= 60
    assert all(each["gpus"] >= 8 for each in options), "628 GiB of weights do not fit in less"
    unknown = [each["collective_seconds"] is None for each in options]
    assert unknown == sorted(unknown) and any(unknown), "conf/gpu has no sums among 16"


def test_a_page_has_the_table_and_the_frontier(run: Any):
    code, out, _ = run("gpu", "job.output=html")
    assert code == 0 and out.startswith("<!doctype html>")
    assert "<th>left GiB</th><th>MiB/sequence</th>" in out and "<th>TTFT ms</th><th>(limit)</th>" in out
    assert "tokens/s of a GPU" in out and "<polyline" in out and "tp1 as stored, bf16 KV, 4:" in out
