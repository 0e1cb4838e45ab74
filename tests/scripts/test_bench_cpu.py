"""What scripts/bench-cpu compares with llama.cpp, on programs whose times are known, and the rows it keeps."""

from __future__ import annotations

import pytest
import torch

from scripts import bench_cpu

PROGRAM = """
import json, sys

assert sys.argv[1:] == ["model.gguf", "2"]
memory = bytearray({num_bytes})
for line in sys.stdin:
    prompt, num_out = json.loads(line)
    assert (len(prompt), num_out) in ((64, 128), (512, 1), (2048, 1)) and len(set(prompt)) > 1
    print(json.dumps([{prefill}, {decodes}]), flush=True)
"""


@pytest.mark.slow
def test_rates_are_tokens_over_the_seconds_that_each_process_reports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_cpu, "ATOM", PROGRAM.format(num_bytes="b'x' * 200_000_000", prefill=2, decodes=0.5))
    monkeypatch.setattr(bench_cpu, "LLAMA_CPP", PROGRAM.format(num_bytes=0, prefill=4, decodes=0.25))
    result = bench_cpu.compare("model.gguf", 1, 2, torch.Generator().manual_seed(0))
    sizes = result.pop("llama_cpp_resident_MB")
    assert result == {
        "llama_cpp_decode": {"atom": 254, "llama_cpp": 508, "ratio": 0.5},  # 127 tokens after the first
        "llama_cpp_prefill": {"atom": 256, "llama_cpp": 128, "ratio": 2},
    }
    assert sizes["atom"] - sizes["llama_cpp"] == pytest.approx(200, abs=5)
    assert sizes["ratio"] == sizes["atom"] / sizes["llama_cpp"]


def test_a_hybrid_is_timed_on_a_longer_prompt_too(monkeypatch: pytest.MonkeyPatch):
    for name in ("ATOM", "LLAMA_CPP"):
        monkeypatch.setattr(bench_cpu, name, PROGRAM.format(num_bytes=0, prefill=4, decodes=1))
    result = bench_cpu.compare("model.gguf", 1, 2, torch.Generator(), "llama_cpp_hybrid", bench_cpu.HYBRID_PREFILLS)
    assert result.keys() == bench_cpu.HYBRID_ROWS.keys()
    assert result["llama_cpp_hybrid_prefill_2048"] == {"atom": 512, "llama_cpp": 512, "ratio": 1}


def test_a_run_gives_a_row_for_each_figure():
    decode = {"atom": 113.6, "level_1": 97.2, "transformers": 46.61, "share_of_read_limit": 0.63987}
    result = {
        "decode_1": decode,
        "decode_16": decode | {"atom": 839.4},
        "start_to_first_token_s": {"level_1": 1.701, "level_2": 1.712},
        "cold_compile_s": 33.3,
        "peak_memory_MB": {"resident": 548.2, "weights_and_pool": 1343.1},
        "llama_cpp_decode": {"atom": 214.2, "llama_cpp": 150.1, "ratio": 1.43},
        "llama_cpp_hybrid_prefill_2048": {"atom": 300, "llama_cpp": 200, "ratio": 1.5},
    }
    rows = bench_cpu.rows_of(result, {"date": "2026-11-23", "commit": "abc", "versions": {"torch": "2.13.0"}})
    assert [*rows] == [
        "decode_1",
        "decode_16",
        "start",
        "compile",
        "memory",
        "llama_cpp_decode",
        "llama_cpp_hybrid_prefill_2048",
    ]
    assert rows["decode_1"] == {
        "model": "SmolLM2-135M bf16", "load": "decode, 1 request", "value": 114, "unit": "tok/s",
        "date": "2026-11-23", "commit": "abc", "versions": {"torch": "2.13.0"},
        "share_of_limit": 0.6399, "compared": {"transformers": 46.61, "level 1": 97.2},
    }  # fmt: skip
    assert (rows["start"]["value"], rows["start"]["unit"], rows["start"]["compared"]) == (1.71, "s", {"level 1": 1.7})
    assert rows["llama_cpp_decode"]["model"] == "SmolLM2-135M Q4_1"
    assert rows["llama_cpp_decode"]["compared"] == {"llama.cpp": 150}
    assert rows["llama_cpp_hybrid_prefill_2048"]["model"] == "LFM2-350M Q8_0"
