"""The metrics of a server: of HTTP, keys, this process, and its models.

    server = ServerMetrics()
    Metrics(engines, server)                  # of a model; see `atom.serve.ops.metrics`
    server.render(tenant)                     # the text of /metrics for this tenant

The registry is the server's own, so that a process may have two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from atom.serve.auth.tenants import Tenant
from atom.serve.ops import log

TENANT_COUNTERS: dict[str, tuple[str, Callable[[Tenant], float]]] = {
    "key_requests": ("requests that an engine took", lambda tenant: tenant.num_requests),
    "key_prompt_tokens": ("tokens of prompts", lambda tenant: tenant.num_prompt_tokens),
    "key_generation_tokens": ("tokens generated", lambda tenant: tenant.num_output_tokens),
}


class Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class TenantCollector:
    """Collects the counts of tenants by their names."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = tenants

    def collect(self) -> Iterable[Metric]:
        for name, (about, value) in TENANT_COUNTERS.items():
            counter = CounterMetricFamily(f"atom:{name}", about, labels=["key"])
            for tenant in self._tenants:
                counter.add_metric([tenant.name], value(tenant))
            yield counter
        about = "requests beyond a limit, or that found the queue full"
        refused = CounterMetricFamily("atom:key_refused", about, labels=["key", "limit"])
        running = GaugeMetricFamily("atom:key_requests_open", "requests that are being answered", labels=["key"])
        for tenant in self._tenants:
            running.add_metric([tenant.name], tenant.num_open)
            for limit, count in tenant.num_refused.items():
                refused.add_metric([tenant.name, limit], count)
        yield refused
        yield running


class LogCollector:
    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily("atom:log_lines_dropped", "lines that stderr did not take", labels=[])
        counter.add_metric([], log.num_dropped())
        yield counter


class Merged:
    """Collects what the collectors of several models do: of each metric the samples of all, together."""

    def __init__(self) -> None:
        self.collectors: list[Collector] = []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for each in self.collectors:
            for family in each.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values()


class ServerMetrics:
    """The metrics of a server: those of HTTP and of this process, and those of its models."""

    def __init__(self, *, has_several: bool = False) -> None:
        """has_several: several models"""
        self.has_several = has_several
        self.num_open = 0  # requests that are being answered, without those of probes and scrapes
        self.ended_at = 0.0  # time.perf_counter() when the last of them ended
        self.models = Merged()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self.models)
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes, process_open_fds, … of this process
        self.http = Counter("atom:http_requests", "answers over HTTP", ("path", "status"), registry=self.registry)
        self.registry.register(LogCollector())
        self.tasks = Gauge("atom:event_loop_tasks", "tasks of the HTTP process", registry=self.registry)
        self._tenants: list[Tenant] = []

    def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Have the counts of these tenants rendered too, and of no others."""
        self._tenants = list(tenants)

    def render(self, tenant: Tenant) -> bytes:
        """The metrics for a tenant: of the counts of keys an administrator gets all, others their own."""
        shown = [each for each in self._tenants if tenant.is_admin or each is tenant]
        counts = CollectorRegistry(auto_describe=False)
        if shown:
            counts.register(TenantCollector(shown))
        return generate_latest(self.registry) + generate_latest(counts)
