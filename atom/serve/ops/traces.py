"""Send a span of each request to an OpenTelemetry collector, named as in vLLM.

    traces = open_traces("http://localhost:4318/v1/traces")       # None for None
    traces.record(scope["state"], headers, seconds=0.25)
    traces.close()
    while traces.is_sending: ...

A span has the counts and times that the log line and the metrics of its request have, and none of its words. The SDK
collects spans and sends them from a thread of its own; it drops what a collector does not take. The environment's
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, … count as the SDK reads them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from atom.errors import ConfigError

if TYPE_CHECKING:
    from atom.serve.http.response import ActiveResponse

EXTRA = "traces need two packages; pip install 'atom-run[otel]'"
TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
SPAN = "llm_request"
PARENT_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


class Traces:
    def __init__(self, endpoint: str) -> None:
        """endpoint: serve.http.otlp_traces_endpoint. ConfigError if it is not a URL, or traces cannot be sent."""
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(f"serve.http.otlp_traces_endpoint={endpoint}: {EXTRA}") from None
        resource = Resource.create({SERVICE_NAME: "atom", **OTELResourceDetector().detect().attributes})
        # shutdown_on_exit: it would keep the process for as long as a collector does not answer
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        try:
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        except ValueError as error:  # of a variable of the environment
            raise ConfigError(f"traces cannot be sent: {error}; see the environment's OTEL_…") from None
        self._tracer = self._provider.get_tracer("atom")
        self._propagator = TraceContextTextMapPropagator()
        # a daemon thread: a collector that does not answer must not keep the process
        self._closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)

    def record(self, state: Mapping[str, Any], headers: Mapping[bytes, bytes], seconds: float) -> None:
        """Record the span of a request that ends now. seconds: since it arrived

        state: of its scope; no span if no engine has got the request
        """
        active: ActiveResponse | None = state.get("active")
        if active is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        found = {name: headers.get(name.encode(), b"").decode("latin-1") for name in PARENT_HEADERS}
        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN,
            self._propagator.extract({name: value for name, value in found.items() if value}),
            SpanKind.SERVER,
            {
                "gen_ai.response.model": state["log"]["model"],
                "gen_ai.request.id": state["log"]["id"],
                **params_of(active),
                **usage_of(active),
            },
            start_time=end - round(seconds * 1e9),
        )
        if fault := fault_of(state["log"], active):
            span.set_status(Status(StatusCode.ERROR, fault))
        span.end(end)

    def close(self) -> None:
        """Send the spans that are left; `is_sending` meanwhile."""
        self._closing.start()

    @property
    def is_sending(self) -> bool:
        return self._closing.is_alive()


def open_traces(endpoint: str | None) -> Traces | None:
    return None if endpoint is None else Traces(endpoint)


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to. ConfigError if it is not one of HTTP."""
    try:
        url = urlsplit(endpoint)
        is_http = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of its port, or of an IPv6 address
        is_http = False
    if not is_http:
        fix = f"traces go over HTTP; write http://HOST:4318{TRACES_PATH}"
        raise ConfigError(f"serve.http.otlp_traces_endpoint={endpoint}: {fix}")
    return url._replace(path=TRACES_PATH if url.path in ("", "/") else url.path).geturl()


def params_of(active: ActiveResponse) -> dict[str, float]:
    """The sampling parameters of a request; none of an embedding, whose parameters are not its own."""
    request = active.request
    if request.options.pooling is not None:
        return {}
    params = request.params[0]
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": request.num_kept,
    }


def usage_of(active: ActiveResponse) -> dict[str, float]:
    """Tokens, and seconds as far as they are known; of several sequences each time is the longest."""
    usage: dict[str, float] = {
        "gen_ai.usage.prompt_tokens": active.num_prompt,
        "gen_ai.usage.completion_tokens": sum(choice.num_tokens for choice in active.choices),
    }
    if active.ttft is not None:
        usage["gen_ai.latency.time_to_first_token"] = active.ttft
    if ended := [(choice.seconds, choice.finish) for choice in active.choices if choice.finish is not None]:
        finishes = [finish for _, finish in ended]
        usage |= {
            "gen_ai.latency.time_in_queue": max(each.queue for each in finishes),
            "gen_ai.latency.time_in_model_prefill": max(each.prefill for each in finishes),
            "gen_ai.latency.time_in_model_decode": max(each.decode for each in finishes),
            "gen_ai.latency.time_in_model_inference": max(each.prefill + each.decode for each in finishes),
            "gen_ai.latency.e2e": max(seconds for seconds, _ in ended),
        }
    return usage


def fault_of(log_fields: Mapping[str, Any], active: ActiveResponse) -> str | None:
    """Whether a request has failed or was aborted. The message of an error may repeat the client's words."""
    if "error" in log_fields:
        return "failed"
    reasons = ["abort" if choice.finish is None else choice.finish.reason for choice in active.choices]
    return "aborted" if "abort" in reasons else None
