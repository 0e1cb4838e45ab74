from __future__ import annotations

import ast
import re
import time
from pathlib import Path
from typing import Any

import pytest
import serving
import wire
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, Start
from vllm_sources import tree

from atom.config.load import load
from atom.runtime.metrics import EngineStats
from atom.serve.auth.tenants import Tenant
from atom.serve.engine.replicas import Replicas
from atom.serve.ops.metrics import Histogram, Metrics


@pytest.fixture(scope="module")
def counted(start_server: Start) -> Server:
    return start_server(stub={"step_seconds": 0.005})


BODY: dict[str, Any] = {"prompt": [0, 9, 9, 9], "max_tokens": 6}


def test_counts_after_known_requests_are_exact(counted: Server):
    before = wire.metrics(counted.url)
    for _ in range(3):
        assert wire.ask(counted.url, "POST", "/v1/completions", BODY | {"n": 2}).status == 200
    assert wire.Stream(counted.url, BODY).read_events()[-1] == "[DONE]"
    assert wire.ask(counted.url, "POST", "/v1/completions", BODY | {"temperature": -1}).status == 400
    assert wire.ask(counted.url, "GET", "/nowhere/at/all").status == 404

    def check() -> bool:  # what the log has of a stream comes just after its end
        after = wire.metrics(counted.url)
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        expected = {
            "atom:prompt_tokens_total": 16,  # a prompt counts once, whatever n
            "atom:generation_tokens_total": 42,
            'atom:request_success_total{finished_reason="max_tokens"}': 7,
            'atom:http_requests_total{path="/v1/completions",status="200"}': 4,
            'atom:http_requests_total{path="/v1/completions",status="400"}': 1,
            'atom:http_requests_total{path="other",status="404"}': 1,
            "atom:time_to_first_token_seconds_count": 7,
            "atom:inter_token_latency_seconds_count": 35,
            "atom:request_time_per_output_token_seconds_count": 7,
            "atom:e2e_request_latency_seconds_count": 7,
            "atom:request_queue_time_seconds_count": 7,
            "atom:request_prefill_time_seconds_count": 7,
            "atom:request_decode_time_seconds_count": 7,
            "atom:request_inference_time_seconds_count": 7,
            "atom:request_prompt_tokens_count": 7,
            "atom:request_prompt_tokens_sum": 28,
            'atom:request_generation_tokens_bucket{le="5.0"}': 0,
            'atom:request_generation_tokens_bucket{le="10.0"}': 7,
            "atom:request_generation_tokens_sum": 42,
            "atom:request_max_num_generation_tokens_count": 4,
            "atom:request_max_num_generation_tokens_sum": 24,
            "atom:request_params_n_sum": 7,
            "atom:request_params_n_count": 4,
            "atom:request_params_max_tokens_sum": 24,
            "atom:request_num_preemptions_count": 7,
            'atom:request_num_preemptions_bucket{le="1.0"}': 7,
            "atom:request_num_preemptions_sum": 0,
            "atom:request_prefill_kv_computed_tokens_sum": 28,
            'atom:e2e_request_latency_seconds_bucket{le="+Inf"}': 7,
            "atom:num_requests_running": 0,
            "atom:num_requests_waiting": 0,
        }
        # the engine's own come with its next heartbeat
        return {name: grown.get(name) for name in expected} == expected and grown["atom:engine_steps_total"] > 0

    wire.wait_until(check)
    after = wire.metrics(counted.url)
    # 5 ms between tokens, or less once the stub has been late
    seconds = after["atom:inter_token_latency_seconds_sum"] - before.get("atom:inter_token_latency_seconds_sum", 0)
    assert 0 < seconds < 30


def test_gauges_follow_what_runs(start_server: Start):
    server = start_server(stub={"step_seconds": 0.01, "max_running": 2})
    streams = [wire.Stream(server.url, {"prompt": [0] * 32, "max_tokens": 4000}) for _ in range(5)]
    wire.wait_until(lambda: wire.metrics(server.url)["atom:num_requests_running"] == 2)
    wire.wait_until(lambda: wire.metrics(server.url)["atom:num_requests_waiting"] == 3)
    metrics = wire.metrics(server.url)
    assert metrics['atom:num_requests_waiting_by_reason{reason="capacity"}'] == 3
    assert metrics['atom:num_requests_waiting_by_reason{reason="deferred"}'] == 0
    assert metrics["atom:kv_cache_blocks"] == 100_000  # as the stub has
    assert metrics["atom:kv_cache_blocks_used"] >= 2 * 3
    assert metrics["atom:kv_cache_usage_perc"] == metrics["atom:kv_cache_blocks_used"] / 100_000
    assert metrics["process_resident_memory_bytes"] > 1 << 20 and metrics["process_open_fds"] > 5
    for stream in streams:
        stream.close()
    wire.wait_until(lambda: not wire.metrics(server.url)["atom:kv_cache_blocks_used"])


def test_names_and_types_are_in_vllms_style(counted: Server):
    text = wire.ask(counted.url, "GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text.body.decode(), re.MULTILINE))
    expected = {
        "atom:num_requests_running": "gauge",
        "atom:num_requests_waiting": "gauge",
        "atom:kv_cache_usage_perc": "gauge",
        "atom:num_preemptions_total": "counter",
        "atom:prefix_cache_queries_total": "counter",
        "atom:prefix_cache_hits_total": "counter",
        "atom:external_prefix_cache_hits_total": "counter",
        "atom:cpu_cache_usage_perc": "gauge",
        "atom:cache_config_info": "gauge",
        "atom:num_requests_waiting_by_reason": "gauge",
        "atom:prefill_budget_tokens": "gauge",
        "atom:iteration_tokens_total": "histogram",
        "atom:request_num_preemptions": "histogram",
        "atom:admission_rejections_total": "counter",
        "atom:prompt_tokens_cached_total": "counter",
        "atom:prompt_tokens_total": "counter",
        "atom:generation_tokens_total": "counter",
        "atom:request_success_total": "counter",
        "atom:time_to_first_token_seconds": "histogram",
        "atom:inter_token_latency_seconds": "histogram",
        "atom:request_time_per_output_token_seconds": "histogram",
        "atom:e2e_request_latency_seconds": "histogram",
        "atom:request_queue_time_seconds": "histogram",
    }
    assert {name: types.get(name) for name in expected} == expected


# what the panels of vLLM's own board ask for, old and new (examples/online_serving/prometheus_grafana/grafana.json)
BOARD = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count e2e_request_latency_seconds_sum prompt_tokens_total
generation_tokens_total time_per_output_token_seconds_bucket inter_token_latency_seconds_bucket num_requests_running
num_requests_waiting time_to_first_token_seconds_bucket gpu_cache_usage_perc kv_cache_usage_perc request_prompt_tokens_bucket
request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_inference_time_seconds_sum request_max_num_generation_tokens_sum
num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total request_params_n_bucket
request_params_max_tokens_bucket request_time_per_output_token_seconds_bucket
"""


@pytest.fixture(scope="module")
def doubled(start_server: Start) -> Server:
    server = start_server("serve.http.vllm_metrics=true", "serve.max_model_len=64", stub={"step_seconds": 0.005})
    for _ in range(2):
        assert wire.ask(server.url, "POST", "/v1/completions", BODY | {"n": 2}).status == 200
    return server


def samples(server: Server, prefix: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of /metrics by name, as Prometheus' own parser reads them."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(wire.ask(server.url, "GET", "/metrics").body.decode()):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                found.setdefault(sample.name.removeprefix(prefix), []).append((sample.labels, sample.value))
    return found


def test_vllms_board_finds_its_metrics_by_model(doubled: Server):
    found = samples(doubled, "vllm:")
    assert set(BOARD.split()) <= found.keys()
    assert all(
        labels["model_name"] == "talker" and labels["engine"] == "0" for each in found.values() for labels, _ in each
    )
    assert found["request_success_total"] == [
        ({"model_name": "talker", "engine": "0", "finished_reason": "length"}, 4.0)
    ]
    assert found["generation_tokens_total"][0][1] == 24.0
    assert found["time_per_output_token_seconds_count"] == found["inter_token_latency_seconds_count"]


def test_vllms_metrics_have_vllms_buckets(doubled: Server):
    """As vLLM 0.26 has them: vllm/v1/metrics/loggers.py; those of 0.33 are the same (buckets.py next to it)."""
    latency = (
        "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf"
    )
    expected = {
        "e2e_request_latency_seconds": latency,
        "request_decode_time_seconds": latency,
        "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 "
        "40.0 80.0 160.0 640.0 2560.0 +Inf",
        "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 "
        "+Inf",
        "request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 +Inf",
        "request_params_n": "1.0 2.0 5.0 10.0 20.0 +Inf",
    }
    found, ours = samples(doubled, "vllm:"), samples(doubled, "atom:")
    for name, bounds in expected.items():
        buckets = {labels["le"]: value for labels, value in found[f"{name}_bucket"]}
        assert list(buckets) == bounds.split()
        finer = {labels["le"]: value for labels, value in ours[f"{name}_bucket"]}
        assert buckets == {bound: finer[bound] for bound in buckets}, "counts are those of our buckets"


def test_what_vllm_has_bears_the_models_name(doubled: Server):
    ours, theirs = samples(doubled, "atom:"), samples(doubled, "vllm:")
    named = {name for name, each in ours.items() if all(labels.get("model_name") == "talker" for labels, _ in each)}
    assert {name for name in named if not name.endswith("_created")} <= theirs.keys()
    assert not {"engine_up", "http_requests_total", "engine_steps_total"} & named


def test_vllms_names_are_left_out_where_nobody_asked(counted: Server):
    assert samples(counted, "vllm:") == {} and samples(counted, "atom:")


@pytest.mark.parametrize(
    ("reason", "name"),
    [("eos", "stop"), ("stop_sequence", "stop"), ("stop_257", "stop"), ("max_tokens", "length"), ("abort", "abort")],
)
def test_a_reason_is_named_as_in_vllm(reason: str, name: str):
    metrics = Metrics(Replicas(load(["serve.http.vllm_metrics=true"])))
    metrics.count_ends(reason)
    assert (
        f'vllm:request_success_total{{engine="0",finished_reason="{name}",model_name="'
        in metrics.render(Tenant()).decode()
    )


def test_every_metric_is_in_the_docs():
    text = Metrics(Replicas(load([]))).render(Tenant()).decode()
    names = set(re.findall(r"^# TYPE (atom:\w+?)(?:_created)? ", text, re.MULTILINE))
    page = (Path(__file__).parents[3] / "docs/serving.md").read_text()
    assert len(names) > 25
    assert {name for name in names if f"`{name}" not in page} == set()


def kinds(file: str) -> dict[str, str]:
    """vLLM's metrics by name, with their kinds."""
    found: dict[str, str] = {}
    for node in (each for each in ast.walk(tree(file)) if isinstance(each, ast.Call)):
        given = {each.arg: each.value for each in node.keywords}
        kind = re.match(r"self\._(gauge|counter|histogram)_cls", ast.unparse(node.func))
        if kind and isinstance(name := given.get("name"), ast.Constant):
            found[str(name.value).removeprefix("vllm:")] = kind[1]
    return found | {"cache_config_info": "gauge"}  # whose name is in a variable


LOGGERS = "v1/metrics/loggers.py"


def test_each_metric_of_vllm_is_there_as_its_kind_or_named_as_missing():
    """Of its loggers, without what only some extensions have."""
    page = (Path(__file__).parents[3] / "docs/from-vllm.md").read_text()
    page = page[page.index("\n## Metrics") :]
    text = Metrics(Replicas(load(["serve.http.vllm_metrics=true", "serve.enable_lora=true"]))).render(Tenant()).decode()
    types = dict(re.findall(r"^# TYPE vllm:(\w+?)(?:_total)? (\w+)$", text, re.MULTILINE))
    types["iteration_tokens_total"] = types.pop("iteration_tokens")
    theirs = kinds(LOGGERS)
    assert len(theirs) > 40 and len(types) > 30
    lacking = {name for name in theirs if name not in types}
    assert {name for name in lacking if f"`vllm:{name}`" not in page and "kv_block_" not in name
            and "mm_cache_" not in name} == set()  # fmt: skip
    assert {name for name in types if f"`vllm:{name}`," in page} & lacking == set(), "what is there is not missing"
    assert all(theirs[name] == kind for name, kind in types.items() if name in theirs)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("iteration_tokens_total", "ITERATION_TOKENS_BUCKETS"),
        ("request_num_preemptions", "REQUEST_NUM_PREEMPTIONS_BUCKETS"),
    ],
)
def test_buckets_of_counts_are_vllms(name: str, bounds: str, doubled: Server):
    (values,) = (
        ast.literal_eval(node.value)
        for node in tree("v1/metrics/buckets.py").body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == bounds and node.value is not None
    )
    found = [labels["le"] for labels, _ in samples(doubled, "vllm:")[f"{name}_bucket"]]
    assert found == [*map(str, map(float, values)), "+Inf"]


def test_the_labels_of_one_metric_are_vllms_too(doubled: Server):
    found = samples(doubled, "vllm:")
    assert {labels["reason"] for labels, _ in found["num_requests_waiting_by_reason"]} == {"capacity", "deferred"}
    assert {labels["reason"] for labels, _ in found["admission_rejections_total"]} == {"max_num_queued_reqs"}
    ((labels, value),) = found["cache_config_info"]
    fields = {
        each.target.id
        for node in tree("config/cache.py").body
        if isinstance(node, ast.ClassDef) and node.name == "CacheConfig"
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert labels.keys() - {"model_name", "engine"} <= fields and value == 1
    assert labels["block_size"] == "16" and int(labels["num_gpu_blocks"]) == 100_000
    config = Replicas(load(["serve.enable_lora=true", "serve.max_loras=3"]))
    config[0].client.stats = EngineStats(running_adapters=["a", "b"], waiting_adapters=["b"])
    text = Metrics(config).render(Tenant()).decode()
    (line,) = re.findall(r"^atom:lora_requests_info\{(.*)\} (.*)$", text, re.MULTILINE)
    given = dict(re.findall(r'(\w+)="([^"]*)"', line[0]))
    words = {each.value for each in ast.walk(tree(LOGGERS)) if isinstance(each, ast.Constant)}
    assert (
        given.keys() == {"model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        and given.keys() <= words
    )
    assert (given["running_lora_adapters"], given["waiting_lora_adapters"], given["max_lora"]) == ("a,b", "b", "3")
    assert float(line[1]) == pytest.approx(time.time(), abs=60)


def test_what_waits_for_something_else_is_no_more_than_what_waits():
    replicas = Replicas(load([]))
    replicas[0].client.stats = EngineStats(num_deferred=3)
    for waiting, expected in ({"a": 5}, (2.0, 3.0)), ({"a": 2}, (0.0, 2.0)):
        replicas[0].client._num_waiting = waiting
        text = Metrics(replicas).render(Tenant()).decode()
        found = re.findall(r"^atom:num_requests_waiting_by_reason\{.*\} (.*)$", text, re.MULTILINE)
        assert tuple(map(float, found)) == expected


def test_labels_do_not_grow_with_what_clients_invent(counted: Server):
    for place in range(50):
        wire.ask(counted.url, "GET", f"/no/{place}")
        wire.ask(counted.url, "POST", "/v1/completions", BODY | {"model": f"m{place}", "user": f"u{place}"})
    text = wire.ask(counted.url, "GET", "/metrics").body.decode()
    assert len(re.findall(r"^atom:http_requests_total", text, re.MULTILINE)) < 12
    assert "/no/" not in text and "u7" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_line_of_json_with_its_id_and_usage(counted: Server, stream: bool):
    name = f"log-{stream}"
    headers = {"x-request-id": name}
    data = wire.request("POST", "/v1/completions", BODY | {"stream": stream, "user": "someone"}, headers)
    assert wire.exchange(counted.url, data).status == 200
    line = serving.wait_for_entry(counted, request_id=name)
    assert (line["message"], line["level"], line["method"]) == ("request", "info", "POST")
    assert (line["path"], line["status"], line["user"]) == ("/v1/completions", 200, "someone")
    assert 0 < line["usage"]["ttft_s"] <= line["usage"]["latency_s"] <= line["seconds"] < wire.SECONDS
    assert line["usage"]["prompt_tokens"] == 4 and line["usage"]["completion_tokens"] == 6
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_a_histograms_buckets_are_cumulative_and_hold_their_bound():
    histogram = Histogram("name", "about", (0.1, 1, 5))
    for value in (0.05, 0.1, 0.5, 1.0, 1.5, 100.0):
        histogram.observe(value)
    (family,) = histogram.collect()
    found = [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples]
    assert found == [
        ("name_bucket", "0.1", 2.0),
        ("name_bucket", "1.0", 4.0),
        ("name_bucket", "5.0", 5.0),
        ("name_bucket", "+Inf", 6.0),
        ("name_count", None, 6.0),
        ("name_sum", None, pytest.approx(103.15)),
    ]


def test_images_that_were_encoded_are_counted():
    replicas = Replicas(load([]))
    replicas[0].client.stats = EngineStats(num_encoded_images=2, num_encoded_patches=48, num_image_hits=5)
    text = Metrics(replicas).render(Tenant()).decode()
    found = re.findall(r"^atom:encoded_(\w+)_total (\S+)$", text, re.MULTILINE)
    assert found == [("images", "2.0"), ("image_patches", "48.0"), ("image_hits", "5.0")]
