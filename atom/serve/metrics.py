"""Prometheus metrics, named as in vLLM, prefixed `atom:`.

    metrics = Metrics(engines)
    metrics.ttft.observe(0.12)                # seconds
    metrics.render()                          # the text of /metrics

Counts of an engine come from its last heartbeat, those of HTTP are counted here. Of several replicas each has a sample
with its number, `engine="0"`. The registry is the app's own, so that a process may have two apps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from atom.serve.engine.client import EngineState
from atom.serve.engine.replicas import Replica, Replicas

LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)  # seconds
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "num_requests_running": ("sequences in the engine's steps", lambda engine: engine.client.stats.num_running),
    "num_requests_waiting": ("sequences that are not admitted", lambda engine: engine.client.num_waiting),
    "kv_cache_usage_perc": ("share of the KV blocks in use, 0 to 1", lambda engine: engine.client.stats.kv_cache_usage),
    "kv_cache_blocks": ("KV blocks in all", lambda engine: engine.client.stats.num_blocks),
    "kv_cache_blocks_used": ("KV blocks in use", lambda engine: engine.client.stats.num_blocks_used),
    "engine_up": ("whether the engine serves, 1 or 0", lambda engine: engine.client.state is EngineState.READY),
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
    "engine_steps": ("steps of the engine", lambda engine: engine.client.stats.scheduler.num_steps),
    "engine_restarts": ("starts after the first", lambda engine: engine.num_restarts),
}


class EngineCollector:
    """Collects the engines' state when the metrics are read."""

    def __init__(self, engines: Replicas) -> None:
        self._engines = engines
        self._label = ["engine"] if len(engines) > 1 else []

    def collect(self) -> Iterable[Metric]:
        for name, (about, value) in GAUGES.items():
            yield self._fill(GaugeMetricFamily(f"atom:{name}", about, labels=self._label), value)
        for name, (about, value) in COUNTERS.items():
            yield self._fill(CounterMetricFamily(f"atom:{name}", about, labels=self._label), value)
        yield self._accepted()

    def _accepted(self) -> Metric:
        name = "atom:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "drafts whose token at a position counts", labels=[*self._label, "position"])
        for engine in self._engines:
            own = [str(engine.number)] if self._label else []
            for position, count in enumerate(engine.client.stats.scheduler.accepted_per_pos):
                family.add_metric([*own, str(position)], count)
        return family

    def _fill(self, family: Family, value: Callable[[Replica], float]) -> Family:
        for engine in self._engines:
            family.add_metric([str(engine.number)] if self._label else [], value(engine))
        return family


class Histogram:
    """A histogram for one thread: it is updated for every token, so it takes no lock and does not walk the buckets."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._about, buckets, self._sum)


class Metrics:
    def __init__(self, engines: Replicas) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engines))
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes, process_open_fds, … of this process

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"atom:{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(f"atom:{name}", about, buckets)
            self.registry.register(found)
            return found

        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.generation_tokens = counter("generation_tokens", "tokens generated")
        self.requests = counter("request_success", "sequences that ended, by reason", "finished_reason")
        self.http = counter("http_requests", "answers over HTTP", "path", "status")
        self.tasks = Gauge("atom:event_loop_tasks", "tasks of the HTTP process", registry=self.registry)
        self.ttft = histogram("time_to_first_token_seconds", "from arrival to the first token", LONG)
        self.itl = histogram("inter_token_latency_seconds", "between two events of a sequence", SHORT)
        self.tpot = histogram("request_time_per_output_token_seconds", "of a sequence, after its first", SHORT)
        self.e2e = histogram("e2e_request_latency_seconds", "from arrival to the last token", LONG)
        self.queue = histogram("request_queue_time_seconds", "from arrival in the engine to admission", LONG)

    def render(self) -> bytes:
        return generate_latest(self.registry)
