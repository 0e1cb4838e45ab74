from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_client.py"


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="client and server have a core each")


def measure_client(*flags: str) -> dict[str, float]:
    ended = subprocess.run([sys.executable, SCRIPT, *flags, "--json"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, float] = json.loads(ended.stdout)
    return result


@pytest.mark.slow
@needs_two_cores
def test_the_script_that_measures_the_client_reads_every_token_on_schedule():
    result = measure_client("--streams", "8", "--rate", "400", "--seconds", "0.4")
    assert (result["asked_tokens_per_s"], result["asked_itl_ms"]) == (400, 20)
    assert 0 < result["client_cpu_share"] < 1
    assert 10 < result["mean_itl_ms"] < 40


@pytest.mark.slow
@needs_two_cores
def test_the_client_keeps_up_with_256_streams_of_20000_tokens_a_second():
    result = measure_client("--streams", "256", "--rate", "20000", "--seconds", "5")
    assert result["asked_itl_ms"] == 12.8  # 256 / 20000
    assert result["tokens_per_s"] > 19_000  # its start and end are in the time
    assert abs(result["mean_itl_ms"] - 12.8) < 0.3
    assert result["client_cpu_share"] < 0.95
