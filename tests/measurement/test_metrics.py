from __future__ import annotations

import pytest

from atom.measurement.metrics import (
    RequestFuncOutput,
    calculate_metrics,
    finish_outputs,
    flatten_metrics,
    format_table,
)


def answered(ttft: float | None, *itl: float, latency: float, tokens: int | None = None) -> RequestFuncOutput:
    """An answer of 10 prompt tokens; seconds."""
    return RequestFuncOutput("a b c", True, 0.0, latency, ttft, list(itl), None, 10, tokens)


def outputs() -> list[RequestFuncOutput]:
    return [
        answered(0.1, 0.02, 0.04, latency=0.17, tokens=3),  # TPOT 35 ms
        answered(0.3, 0.01, latency=0.31, tokens=3),  # two tokens in one event: TPOT 5 ms
        answered(0.2, latency=0.2, tokens=1),  # no TPOT
        RequestFuncOutput(error="HTTP 500", prompt_len=10),
    ]


@pytest.fixture
def metrics():
    made = outputs()
    finish_outputs(made, None)
    return calculate_metrics(made, 2.0, [50, 99, 100], {"ttft": 250.0, "tpot": 20.0})


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it():
    made = outputs()
    finish_outputs(made, None)
    assert [each.tpot for each in made] == [pytest.approx(0.035), pytest.approx(0.005), None, None]


def test_a_last_token_without_text_has_its_time_in_tpot():
    made = [answered(0.1, latency=0.16, tokens=2), answered(0.1, 0.02, latency=0.18, tokens=3)]
    finish_outputs(made, None)
    assert [each.tpot for each in made] == [pytest.approx(0.06), pytest.approx(0.04)]


def test_tokens_are_counted_by_the_server_else_by_the_tokenizer_else_by_events():
    reported, counted, bare = (answered(0.1, 0.02, latency=0.12, tokens=n) for n in (7, None, None))
    finish_outputs([reported, counted], lambda text: len(text.split()))
    finish_outputs([bare], None)
    assert [reported.output_tokens, counted.output_tokens, bare.output_tokens] == [7, 3, 2]
    assert counted.tpot == pytest.approx(0.02 / 2)


def test_throughputs_count_answered_requests_only(metrics):
    assert (metrics.completed, metrics.failed, metrics.total_input, metrics.total_output) == (3, 1, 30, 7)
    assert (metrics.request_throughput, metrics.output_throughput, metrics.total_token_throughput) == (1.5, 3.5, 18.5)


def test_latencies_are_milliseconds(metrics):
    ttft = metrics.latencies["ttft"]
    assert (ttft.mean, ttft.median) == (pytest.approx(200), pytest.approx(200))
    assert ttft.std == pytest.approx(81.6496580927726)  # of 100, 200, 300 as a population
    assert ttft.percentiles == {50: pytest.approx(200), 99: pytest.approx(298), 100: pytest.approx(300)}
    assert metrics.latencies["tpot"].mean == pytest.approx(20)
    assert metrics.latencies["itl"].median == pytest.approx(20)
    assert metrics.latencies["e2el"].percentiles[100] == pytest.approx(310)


def test_goodput_counts_the_requests_that_meet_every_objective(metrics):
    assert metrics.request_goodput == 0.5  # only the third, which has no TPOT to miss, in 2 s
    for goal, met in [({"ttft": 100.0}, 1), ({"tpot": 6.0}, 2), ({"e2el": 200.0}, 2), ({"e2el": 0.0}, 0)]:
        made = outputs()
        finish_outputs(made, None)
        assert calculate_metrics(made, 1.0, [99], goal).request_goodput == met, goal
    assert calculate_metrics(outputs(), 1.0, [99], {}).request_goodput is None


def test_first_turns_of_conversations_have_numbers_of_their_own():
    made = [answered(ttft, latency=latency, tokens=tokens) for ttft, latency, tokens in
            ((0.8, 1.0, 5), (0.4, 0.8, 5), (0.1, 0.3, 3), (0.2, 0.2, 1), (0.3, 0.7, 5))]  # fmt: skip
    for output, turn, cached in zip(made, (0, 0, 1, 1, 2), (0, 5, 8, 9, 7), strict=True):
        output.turn, output.cached_tokens = turn, cached  # of 10
    finish_outputs(made, None)
    metrics = calculate_metrics(made, 2.0, [99], {})
    result = flatten_metrics(metrics)
    assert (result["mean_first_turn_ttft_ms"], result["median_later_turns_ttft_ms"]) == pytest.approx((600, 200))
    assert (result["first_turn_cached_share"], result["later_turns_cached_share"]) == pytest.approx((5 / 20, 24 / 30))
    # TPOT 50 and 100 ms, the median 75; 100 and 100
    assert (result["first_turn_interactivity"], result["later_turns_interactivity"]) == pytest.approx((1 / 0.075, 10))
    table = format_table(metrics, [], [99]).splitlines()
    first, later = (
        next(at for at, line in enumerate(table) if name in line) for name in ("First Turns", "Later Turns")
    )
    assert table[first + 1] == "Mean TTFT (ms):                          600.00"
    assert table[later + 5] == "Cached prompt tokens (%):                80.00"
    single = calculate_metrics(made[:2], 2.0, [99], {})
    assert not single.turns and "first_turn_cached_share" not in flatten_metrics(single)


def test_what_was_not_measured_has_no_number():
    made = [answered(None, latency=0.5, tokens=20)]
    finish_outputs(made, None)
    metrics = calculate_metrics(made, 1.0, [99], {})
    assert metrics.latencies["ttft"].percentiles == {99: None}
    flat = flatten_metrics(metrics)
    assert (flat["mean_ttft_ms"], flat["p99_tpot_ms"], flat["mean_e2el_ms"]) == (None, None, 500.0)
    assert "Mean TTFT (ms):                          -" in format_table(metrics, ["ttft"], [99])


def test_peaks_are_those_of_a_second_after_the_first_start():
    """A request counts in each second that it touches (vllm/benchmarks/serve.py: calculate_metrics)."""
    two_seconds = RequestFuncOutput("a b c", True, 10.0, latency=1.2, ttft=0.5, itl=[0.6, 0.1])  # at 0.5, 1.1, 1.2 s
    second = RequestFuncOutput("d", True, 11.0, latency=0.3, ttft=0.3)  # at 1.3 s
    unstreamed = RequestFuncOutput("e", True, 12.5, latency=0.1)
    failed = RequestFuncOutput(started=11.0)
    metrics = calculate_metrics([two_seconds, second, unstreamed, failed], 3.0, [99], {})
    assert (metrics.max_output_tokens_per_s, metrics.max_concurrent_requests) == (3.0, 2)


def test_the_names_of_a_result_file(metrics):
    flat = flatten_metrics(metrics)
    latencies = {
        f"{kind}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for kind in ("mean", "median", "std", "p50", "p99", "p100")
    }
    assert set(flat) - latencies == {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests",
    }  # fmt: skip
    assert latencies <= set(flat)
    assert "p99.9_itl_ms" in flatten_metrics(calculate_metrics(outputs(), 1.0, [99.9], {}))


def test_the_table(metrics):
    assert format_table(metrics, ["ttft", "itl"], [50, 99]).splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      30",
        "Total generated tokens:                  7",
        "Request throughput (req/s):              1.50",
        "Request goodput (req/s):                 0.50",
        "Output token throughput (tok/s):         3.50",
        "Peak output token throughput (tok/s):    6.00",
        "Peak concurrent requests:                3",
        "Total Token throughput (tok/s):          18.50",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00",
        "Median TTFT (ms):                        200.00",
        "Std TTFT (ms):                           81.65",
        "P50 TTFT (ms):                           200.00",
        "P99 TTFT (ms):                           298.00",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           23.33",
        "Median ITL (ms):                         20.00",
        "Std ITL (ms):                            12.47",
        "P50 ITL (ms):                            20.00",
        "P99 ITL (ms):                            39.60",
        "==================================================",
    ]
