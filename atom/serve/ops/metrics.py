"""Prometheus metrics, named as in vLLM, prefixed `atom:`.

    metrics = Metrics(engines)
    metrics.ttft.observe(0.12)                # seconds
    metrics.render(tenant)                    # the text of /metrics for this tenant

Counts of an engine come from its last heartbeat, those of HTTP are counted here. Of several replicas each has a sample
with its number, `engine="0"`. What vLLM has too bears its label `model_name`, and so does all of several models;
with serve.http.vllm_metrics=true it is there a second time as in vLLM: prefixed `vllm:`, with its buckets.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile
from math import inf
from typing import TypeVar

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from atom.runtime.metrics import STEP_TOKENS
from atom.runtime.types import openai_reason
from atom.sampling_params import SamplingParams
from atom.serve.auth.tenants import Tenant
from atom.serve.engine.client import EngineState
from atom.serve.engine.protocol import Finish
from atom.serve.engine.replica import Replica
from atom.serve.engine.replicas import Replicas
from atom.serve.engine.served_model import ServedModel
from atom.serve.ops.server_metrics import Collector, ServerMetrics

# vLLM's buckets (vllm/v1/metrics/loggers.py), seconds
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
           1920.0, 7680.0)  # fmt: skip
ANSWERS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
QUEUE_FULL = "max_num_queued_reqs"  # vLLM's reason
# ours next to them, for small models and fast GPUs
FINE_TOKEN = (0.001, 0.0025, 0.005, 0.02, 0.03)
FINE_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.2)

# of the metrics of engines, those that vLLM has
VLLM_ENGINE = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prefix_cache_queries",
    "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "external_prefix_cache_queries", "external_prefix_cache_hits",
    "cpu_cache_usage_perc", "prompt_tokens_cached", "num_requests_waiting_by_reason", "iteration_tokens_total",
    "cache_config_info", "lora_requests_info",
}  # fmt: skip
OLD_NAMES = {  # which older boards of vLLM ask for
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def is_up(engine: Replica) -> bool:
    return engine.client.state is EngineState.READY and not engine.client.stopped


GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "num_requests_running": ("sequences in the engine's steps", lambda engine: engine.client.stats.num_running),
    "num_requests_waiting": ("sequences that are not admitted", lambda engine: engine.client.num_waiting),
    "kv_cache_usage_perc": ("share of the KV blocks in use, 0 to 1", lambda engine: engine.client.stats.kv_cache_usage),
    "kv_cache_blocks": ("KV blocks in all", lambda engine: engine.client.stats.num_blocks),
    "kv_cache_blocks_used": ("KV blocks in use", lambda engine: engine.client.stats.num_blocks_used),
    "kv_blocks_retained": (
        "KV blocks of all kinds that requests want to be kept from eviction",
        lambda engine: engine.client.stats.num_retained_blocks,
    ),
    "cpu_cache_usage_perc": (
        "share of the KV blocks in host memory that have content, 0 to 1",
        lambda engine: engine.client.stats.host_cache_usage,
    ),
    "prefill_budget_tokens": (
        "tokens of prompts that a step may have next to decodes, by serve.max_itl_ms; 0: no limit",
        lambda engine: engine.client.stats.scheduler.max_prompt_tokens,
    ),
    "engine_up": ("whether the engine serves, 1 or 0", is_up),
    "engine_paused": ("whether it starts no step until /resume, 1 or 0", lambda engine: engine.client.is_paused),
}
COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "num_preemptions": (
        "sequences that gave way to others",
        lambda engine: engine.client.stats.scheduler.num_preemptions,
    ),
    "prefix_cache_queries": (
        "prompt tokens looked up in the prefix cache",
        lambda engine: engine.client.stats.scheduler.num_prefix_queries,
    ),
    "prefix_cache_hits": (
        "prompt tokens that it had",
        lambda engine: engine.client.stats.scheduler.num_prefix_hit_tokens,
    ),
    "prompt_tokens_cached": (
        "tokens of prompts that the prefix cache had when they were admitted",
        lambda engine: engine.client.stats.scheduler.num_cached_tokens,
    ),
    "external_prefix_cache_queries": (
        "of the prompt tokens looked up, those looked up in host memory",
        lambda engine: engine.client.stats.scheduler.num_host_queries,
    ),
    "external_prefix_cache_hits": (
        "of the prompt tokens that the prefix cache had, those loaded from host memory",
        lambda engine: engine.client.stats.scheduler.num_host_hit_tokens,
    ),
    "kv_blocks_retained_found": (
        "retained KV blocks that requests found and that would have been evicted",
        lambda engine: engine.client.stats.num_retained_found,
    ),
    "kv_blocks_retained_overridden": (
        "retained KV blocks that were taken for running sequences",
        lambda engine: engine.client.stats.num_retained_overridden,
    ),
    "spec_decode_num_drafts": (
        "steps of a sequence that verified drafted tokens",
        lambda engine: engine.client.stats.scheduler.num_drafts,
    ),
    "spec_decode_num_draft_tokens": (
        "drafted tokens that were verified",
        lambda engine: engine.client.stats.scheduler.num_draft_tokens,
    ),
    "spec_decode_num_accepted_tokens": (
        "drafted tokens that count",
        lambda engine: engine.client.stats.scheduler.num_accepted_tokens,
    ),
    "encoded_images": (
        "images that were encoded, each time",
        lambda engine: engine.client.stats.num_encoded_images,
    ),
    "encoded_image_patches": (
        "patches of the images that were encoded",
        lambda engine: engine.client.stats.num_encoded_patches,
    ),
    "encoded_image_hits": (
        "images that prompts reached and that were encoded already",
        lambda engine: engine.client.stats.num_image_hits,
    ),
    "engine_steps": ("steps of the engine", lambda engine: engine.client.stats.scheduler.num_steps),
    "engine_restarts": ("starts after the first", lambda engine: engine.num_restarts),
}

OURS = {*GAUGES, *COUNTERS, "weight_version_info"} - VLLM_ENGINE  # those of engines that vLLM has not


class EngineCollector:
    """Collects the engines' state when the metrics are read."""

    def __init__(self, engines: Replicas, served: ServedModel | None = None, *, names_all: bool = False) -> None:
        """
        served: the model, if it may sleep
        names_all: each metric has the model's name, and not only those that vLLM has
        """
        self._engines, self._config, self._model = engines, engines.config, engines.config.served_names[0]
        self._served, self._names_all = served, names_all

    def collect(self) -> Iterable[Metric]:
        is_asleep = self._served is not None and self._served.is_asleep
        for name, (about, value) in GAUGES.items():
            if name == "engine_up" and is_asleep:  # for alerts: it is meant to be down
                continue
            yield self._fill(GaugeMetricFamily(f"atom:{name}", about, labels=self._labels(name)), value)
        for name, (about, value) in COUNTERS.items():
            yield self._fill(CounterMetricFamily(f"atom:{name}", about, labels=self._labels(name)), value)
        yield self._accepted()
        yield self._waiting()
        yield self._step_tokens()
        yield self._cache_config()
        yield self._weights()
        if self._config.serve.enable_lora:
            yield self._adapters()

    def _labels(self, name: str) -> list[str]:
        has_name = self._names_all or name in VLLM_ENGINE
        return [*(["model_name"] if has_name else []), *(["engine"] if len(self._engines) > 1 else [])]

    def _values(self, labels: Sequence[str], engine: Replica) -> list[str]:
        return [{"model_name": self._model, "engine": str(engine.number)}[label] for label in labels]

    def _accepted(self) -> Metric:
        name = "spec_decode_num_accepted_tokens_per_pos"
        labels = self._labels(name)
        about = "drafts whose token at a position counts"
        family = CounterMetricFamily(f"atom:{name}", about, labels=[*labels, "position"])
        for engine in self._engines:
            for position, count in enumerate(engine.client.stats.scheduler.accepted_per_pos):
                family.add_metric([*self._values(labels, engine), str(position)], count)
        return family

    def _waiting(self) -> Metric:
        labels = self._labels("num_requests_waiting_by_reason")
        about = "sequences that are not admitted: for lack of capacity, or deferred until something else is there"
        family = GaugeMetricFamily("atom:num_requests_waiting_by_reason", about, labels=[*labels, "reason"])
        for engine in self._engines:
            num_waiting = engine.client.num_waiting
            num_deferred = min(engine.client.stats.num_deferred, num_waiting)
            for reason, count in (("capacity", num_waiting - num_deferred), ("deferred", num_deferred)):
                family.add_metric([*self._values(labels, engine), reason], count)
        return family

    def _step_tokens(self) -> Metric:
        labels = self._labels("iteration_tokens_total")
        about = "tokens of a step: of prompts that it computed, and generated"
        family = HistogramMetricFamily("atom:iteration_tokens_total", about, labels=labels)
        for engine in self._engines:
            stats = engine.client.stats
            names = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
            buckets = list(zip(names, map(float, accumulate(stats.step_sizes)), strict=True))
            family.add_metric(self._values(labels, engine), buckets, stats.num_step_tokens)
        return family

    def _cache_config(self) -> Metric:
        """The labels of vLLM's CacheConfig that say something here, as Python writes their values."""
        serve, labels = self._config.serve, self._labels("cache_config_info")
        of_all = {
            "block_size": serve.block_size,
            "cache_dtype": serve.kv_cache_dtype,
            "enable_prefix_caching": serve.enable_prefix_caching,
            "gpu_memory_utilization": serve.gpu_memory_utilization,
            "kv_cache_memory_bytes": serve.kv_cache_memory,
            "num_gpu_blocks_override": serve.num_kvcache_blocks,
        }
        names = [*of_all, "num_gpu_blocks", "num_cpu_blocks"]
        family = GaugeMetricFamily("atom:cache_config_info", "how the KV cache is set; 1", labels=[*labels, *names])
        for engine in self._engines:
            values = [*of_all.values(), engine.client.num_blocks, engine.client.stats.num_host_blocks]
            family.add_metric([*self._values(labels, engine), *map(str, values)], 1)
        return family

    def _weights(self) -> Metric:
        labels = self._labels("weight_version_info")
        family = GaugeMetricFamily(
            "atom:weight_version_info", "the name of the weights; 1", labels=[*labels, "version"]
        )
        for engine in self._engines:
            family.add_metric([*self._values(labels, engine), engine.client.weight_version], 1)
        return family

    def _adapters(self) -> Metric:
        labels = self._labels("lora_requests_info")
        names = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        about = "adapters of requests that wait and that run; the time in seconds"
        family = GaugeMetricFamily("atom:lora_requests_info", about, labels=[*labels, *names])
        for engine in self._engines:
            stats = engine.client.stats
            adapters = map(",".join, (stats.waiting_adapters, stats.running_adapters))
            values = [*self._values(labels, engine), str(self._config.serve.max_loras), *adapters]
            family.add_metric(values, time.time())
        return family

    def _fill(self, family: Family, value: Callable[[Replica], float]) -> Family:
        labels = self._labels(family.name.removeprefix("atom:"))
        for engine in self._engines:
            family.add_metric(self._values(labels, engine), value(engine))
        return family


class Histogram:
    """A histogram for one thread: it is updated for every token, so it takes no lock and does not walk the buckets."""

    def __init__(
        self, name: str, about: str, bounds: Sequence[float], more: Sequence[float] = (), model: str | None = None
    ) -> None:
        """
        bounds: vLLM's buckets
        more: those that only we have
        model: the label model_name; None: no label
        """
        self._name, self._about, self._model = name, about, model
        self._vllm_bounds, self._bounds = bounds, sorted({*bounds, *more})
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        yield self._family(self._bounds)

    def collect_vllm(self) -> Iterable[Metric]:
        """The same with only vLLM's buckets."""
        yield self._family(self._vllm_bounds)

    def _family(self, bounds: Sequence[float]) -> Metric:
        totals = dict(zip([*self._bounds, inf], accumulate(self._counts), strict=True))
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = [(name, float(totals[bound])) for name, bound in zip(names, [*bounds, inf], strict=True)]
        labels = [] if self._model is None else ["model_name"]
        family = HistogramMetricFamily(self._name, self._about, labels=labels)
        family.add_metric([] if self._model is None else [self._model], buckets, self._sum)
        return family


class VLLMCollector:
    """The metrics that vLLM has too: under its names, with its label `engine` and its words for reasons."""

    def __init__(self, collectors: Sequence[Collector], *, has_one_engine: bool) -> None:
        self._collectors, self._engine = collectors, {"engine": "0"} if has_one_engine else {}

    def collect(self) -> Iterable[Metric]:
        for collector in self._collectors:
            families = collector.collect_vllm() if isinstance(collector, Histogram) else collector.collect()
            for family in families:
                name = family.name.removeprefix("atom:")
                if name not in OURS and all("model_name" in sample.labels for sample in family.samples):
                    yield self._rename(family, name, name)
                    if name in OLD_NAMES:
                        yield self._rename(family, name, OLD_NAMES[name])

    def _rename(self, family: Metric, name: str, alias: str) -> Metric:
        totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            labels = self._engine | sample.labels
            if reason := labels.get("finished_reason"):
                labels["finished_reason"] = openai_reason(reason)
            if not sample.name.endswith("_created"):
                totals[sample.name.replace(f"atom:{name}", f"vllm:{alias}", 1), tuple(labels.items())] += sample.value
        renamed = Metric(f"vllm:{alias}", family.documentation, family.type)
        for (sample_name, pairs), value in totals.items():
            renamed.add_sample(sample_name, dict(pairs), value)
        return renamed


class Metrics:
    """The metrics of a model."""

    def __init__(
        self, engines: Replicas, server: ServerMetrics | None = None, served: ServedModel | None = None
    ) -> None:
        """
        server: None: it has no other model
        served: the model, if it may sleep
        """
        config = engines.config
        self.server = server = ServerMetrics() if server is None else server
        self._model = model = config.served_names[0]
        collectors: list[Collector] = [EngineCollector(engines, served, names_all=server.has_several)]

        def counter(name: str, about: str, *labels: str) -> Counter:
            found = Counter(f"atom:{name}", about, ("model_name", *labels), registry=None)
            collectors.append(found)
            return found

        def histogram(name: str, about: str, bounds: Sequence[float], more: Sequence[float] = ()) -> Histogram:
            found = Histogram(f"atom:{name}", about, bounds, more, model)
            collectors.append(found)
            return found

        sizes = powers_1_2_5(config.serve.max_model_len or config.model.max_position)
        times = REQUEST, FINE_REQUEST
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts").labels(model)
        self.generation_tokens = counter("generation_tokens", "tokens generated").labels(model)
        self._requests = counter("request_success", "sequences that ended, by reason", "finished_reason")
        self.ttft = histogram("time_to_first_token_seconds", "from arrival to the first token", FIRST_TOKEN)
        self.itl = histogram("inter_token_latency_seconds", "between two events of a sequence", TOKEN, FINE_TOKEN)
        about = "of a sequence, after its first"
        self.tpot = histogram("request_time_per_output_token_seconds", about, TOKEN, FINE_TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "from arrival to the last token", *times)
        about = "from arrival in the engine to admission"
        self._queue = histogram("request_queue_time_seconds", about, *times)
        self._prefill = histogram("request_prefill_time_seconds", "from admission to the first token", *times)
        self._decode = histogram("request_decode_time_seconds", "from the first token to the last", *times)
        self._inference = histogram("request_inference_time_seconds", "from admission to the last token", *times)
        self._prompt_size = histogram("request_prompt_tokens", "tokens of a sequence's prompt", sizes)
        self._output_size = histogram("request_generation_tokens", "tokens of a sequence's answer", sizes)
        about = "tokens of the longest answer to a prompt"
        self.longest = histogram("request_max_num_generation_tokens", about, sizes)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of a prompt's answers", sizes)
        self._num_answers = histogram("request_params_n", "answers asked for to a prompt", ANSWERS)
        self._preemptions = histogram("request_num_preemptions", "times a sequence gave way to others", PREEMPTIONS)
        about = "tokens of a sequence's prompt that were computed, not cached"
        self._computed = histogram("request_prefill_kv_computed_tokens", about, sizes)
        rejections = counter("admission_rejections", "requests that found the queue full", "reason")
        self._rejections = rejections.labels(model, QUEUE_FULL)
        server.models.collectors += collectors
        if config.serve.http.vllm_metrics:
            server.models.collectors.append(VLLMCollector(collectors, has_one_engine=len(engines) == 1))

    def record_request(self, num_prompt: int, params: Sequence[SamplingParams]) -> None:
        """Record a request.

        num_prompt: tokens of all its prompts
        params: of each prompt
        """
        self.prompt_tokens.inc(num_prompt)
        for each in params:
            self._max_tokens.observe(each.max_tokens)
            self._num_answers.observe(each.n)

    def record_end(self, finish: Finish, num_prompt: int, seconds: float) -> None:
        """Record the end of a sequence.

        num_prompt: tokens of its prompt
        seconds: since its request arrived
        """
        self.count_ends(finish.reason)
        self._e2e.observe(seconds)
        self._queue.observe(finish.queue)
        self._prefill.observe(finish.prefill)
        self._decode.observe(finish.decode)
        self._inference.observe(finish.prefill + finish.decode)
        self._prompt_size.observe(num_prompt)
        self._output_size.observe(finish.num_output)
        self._preemptions.observe(finish.num_preemptions)
        self._computed.observe(num_prompt - finish.num_cached)

    def count_rejection(self) -> None:
        """Count a request that found the queue full."""
        self._rejections.inc()

    def count_ends(self, reason: str, num_sequences: int = 1) -> None:
        self._requests.labels(self._model, reason).inc(num_sequences)

    def render(self, tenant: Tenant) -> bytes:
        """Those of the server, for a tenant."""
        return self.server.render(tenant)


def powers_1_2_5(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `limit`, as vLLM counts tokens."""
    return list(
        takewhile(lambda bound: bound <= limit, (step * 10**power for power in range(12) for step in (1, 2, 5)))
    )
