"""Summarize a profiler trace: time by kernel or call, and the gaps.

summary = summarize(json.load(gzip.open("atom.1716899120527.pt.trace.json.gz")))
summary.timeline, summary.seconds, summary.gap_seconds
for row in summary.rows:                        # longest first
    print(row.name, row.kind, row.calls, row.seconds)
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from atom.errors import ConfigError

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # the profiler's categories of GPU activities
ON_HOST = ("cpu_op", "user_annotation")
# the kind of a kernel or operator by its name; the first match counts
KINDS = {
    kind: re.compile("|".join(patterns), re.IGNORECASE)
    for kind, patterns in {
        "attention": (
            "attention|attn|attend|flash|fmha|norm_rope",
            "^_(decode|prefill|expand|unpack)$|(decode|prefill)_kernel",
            "^_(absorb|merge|merge_values|multiply_rest|write)_kernel$",  # of latents
            "^_(score|select|stream|slots|chosen)_kernel$|^_(score|pick|unite)_blocks$|^_merge_parts$",  # of indexers
            r"^_(pool|score)_runs$|^_run_tokens_|\.(paged_compress|paged_index_\w+|run_tokens|write_index|write_mqa)$",
        ),
        "matrix": (
            r"linear|(?<!of_)experts|lora|gemm|gemv|matmul|nvjet|cijk|cutlass|(matrix|vector)_kernel|(?<![a-z])(add)?mm(?![a-z])",
            "^_multiply(_row)?$|^_(gate_up|down|expand)_kernel$",
        ),
        "recurrent": (
            "causal_conv|gated_delta|_chunks|pass_state|(?<![a-z])ssd(?![a-z])|selective_scan|lightning",
            r"^_ngrams$|\.(ssm_decay|time_step)$",
        ),
        "routing": (
            "router|sparse_mixer|ends_of_experts",
            r"\.(group|combine)$",
            "^_(logits|choose|route_few|count|group|place|plan|number|combine|sum_rows)_kernel$",
        ),
        "elementwise": (
            "norm|quantize|elementwise|triton_(poi|red|per)_fused|^_(gate|scale)_kernel$|^_(unpack|round_shuffled)_",
            r"\.(embedding|add|mul|affine|steer|scale|softcap|clamp|activate|gated_activate|xielu|rotary|rope)$",
            r"^_(sum_parts|finish_logits|sinkhorn)_kernel$|\.(stream_logits|stream_gate|sinkhorn|mix_streams)$",
        ),
        "step": (  # inputs, sampling and drafts
            "^_(prepare|prepare_draft|extend|draw|gather|limit|score|summarize|sum_exponentials)$",
            "^_(find|draw_noise|accept|keep|repeat|finish|best_of_part|best_of_row|largest_of_part)$|gumbel_argmax",
        ),
        "collective": (
            "nccl|all_reduce|reduce_scatter|all_gather|gather_tokens|^_gather_kernel$",
            r"\.(dispatch|collect|send|receive)$",
        ),
        "copy": ("^_copy_|^mem(cpy|set)",),
    }.items()
}


LOGITS, CHOOSES = "logits of a router", "_choose_kernel"
WITH_LIMITS = ("attention", "matrix", "recurrent", "routing")  # kinds of `bench.roofline.step_work`


class Row(NamedTuple):
    """All calls with one name."""

    name: str
    kind: str | None  # of KINDS
    calls: int
    seconds: float


class Summary(NamedTuple):
    """The time of a timeline, from its first event to its last, by row."""

    timeline: str  # device | host
    seconds: float
    rows: list[Row]  # longest first
    num_gaps: int
    gap_seconds: float  # when no event ran
    matmuls: list[float]  # seconds of each matmul, in order


class Event(NamedTuple):
    name: str
    is_label: bool
    start: float  # µs
    stop: float


def summarize(trace: Mapping[str, Any]) -> Summary:
    """Summarize a Chrome trace: the device's timeline if there is one, else that of the busiest thread. ConfigError."""
    timeline, events = read_timeline(trace)
    return summarize_device(events) if timeline == "device" else summarize_host(events)


def middle_step(trace: Mapping[str, Any], num_steps: int) -> list[Event]:
    """The events of the step in the middle of a trace: each step has as many. Times count from its first."""
    _, events = read_timeline(trace)
    events = sorted(events, key=nested)
    first, last = (len(events) * step // num_steps for step in (num_steps // 2, num_steps // 2 + 1))
    start = events[first].start
    return [event._replace(start=event.start - start, stop=event.stop - start) for event in events[first:last]]


def nested(event: Event) -> tuple[float, float]:
    """A sort key by which events follow those that contain them."""
    return event.start, -event.stop


def has_events(trace: Mapping[str, Any]) -> bool:
    """Whether a trace has anything that `summarize` counts."""
    return any(event.get("ph") == "X" and event.get("cat") in (*ON_DEVICE, *ON_HOST) for event in trace["traceEvents"])


def read_timeline(trace: Mapping[str, Any]) -> tuple[str, list[Event]]:
    """The device's timeline if there is one, else that of the busiest thread; which, and its events. ConfigError."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    if on_device:
        return "device", [read_event(event) for event in on_device]
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_HOST:
            threads[event["tid"]].append(read_event(event))
    if not threads:
        raise ConfigError("the trace has no events: the profiler of this torch sees neither operators nor kernels")
    return "host", max(threads.values(), key=len)


def read_event(event: Mapping[str, Any]) -> Event:
    start = float(event["ts"])
    return Event(event["name"], event["cat"] == "user_annotation", start, start + float(event["dur"]))


def summarize_device(events: list[Event]) -> Summary:
    """Summarize a device's timeline: overlapping kernels each count in full, gaps are where none ran."""
    calls, micros = Counter[str](), defaultdict[str, float](float)
    events = name_logits(events)
    for event in events:
        calls[event.name] += 1
        micros[event.name] += event.stop - event.start
    return make_summary("device", events, events, calls, micros)


def name_logits(events: list[Event]) -> list[Event]:
    """Name the library's GEMMs that give a router's logits, which it chooses by next."""
    events = sorted(events, key=nested)
    for number, (event, after) in enumerate(itertools.pairwise(events)):
        if after.name == CHOOSES and kind_of(event.name) == "matrix":
            events[number] = event._replace(name=LOGITS)
    return events


def summarize_host(events: list[Event]) -> Summary:
    """Summarize a thread: an event's own time, without that of nested events, counts for the nearest event with a row.

    Events with a row: top-level ones, labels, and events of a kind with a limit inside events of none.
    """
    calls, micros = Counter[str](), defaultdict[str, float](float)
    open_events: list[tuple[float, str]] = []  # when each ends, and its row
    with_rows: list[Event] = []
    for event in sorted(events, key=nested):
        while open_events and open_events[-1][0] <= event.start:
            open_events.pop()
        outer = open_events[-1][1] if open_events else None
        has_row = outer is None or event.is_label or (not has_limit(outer) and has_limit(event.name))
        row = event.name if has_row or outer is None else outer
        if has_row:
            calls[row] += 1
            with_rows.append(event)
        micros[row] += event.stop - event.start
        if outer is not None:
            micros[outer] -= event.stop - event.start
        open_events.append((event.stop, row))
    return make_summary("host", events, with_rows, calls, micros)


def make_summary(
    timeline: str,
    events: list[Event],
    with_rows: list[Event],
    calls: Mapping[str, int],
    micros: Mapping[str, float],
) -> Summary:
    num_gaps, gap = 0, 0.0
    events = sorted(events, key=lambda event: event.start)
    end = events[0].start
    for event in events:
        if event.start > end:
            num_gaps, gap = num_gaps + 1, gap + event.start - end
        end = max(end, event.stop)
    rows = [Row(name, kind_of(name), calls[name], micros[name] / 1e6) for name in calls]
    rows.sort(key=lambda row: -row.seconds)
    of_matmuls = sorted(event[2:] for event in with_rows if kind_of(event.name) == "matrix")
    matmuls = [(stop - start) / 1e6 for start, stop in of_matmuls]
    return Summary(timeline, (end - events[0].start) / 1e6, rows, num_gaps, gap / 1e6, matmuls)


def kind_of(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)


def has_limit(name: str) -> bool:
    return kind_of(name) in WITH_LIMITS
