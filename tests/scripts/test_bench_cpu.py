"""What scripts/bench-cpu compares with llama.cpp, on programs whose times are known."""

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
    assert (len(prompt), num_out) in ((64, 128), (512, 1)) and len(set(prompt)) > 1
    print(json.dumps([{prefill}, {decodes}]), flush=True)
"""


def test_rates_are_tokens_over_the_seconds_that_each_process_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_cpu, "ATOM", PROGRAM.format(num_bytes="b'x' * 200_000_000", prefill=2, decodes=0.5))
    monkeypatch.setattr(bench_cpu, "LLAMA_CPP", PROGRAM.format(num_bytes=0, prefill=4, decodes=0.25))
    result = bench_cpu.compare("model.gguf", 1, 2, torch.Generator().manual_seed(0))
    sizes = result.pop("beside_llama_cpp_resident_MB")
    assert result == {
        "beside_llama_cpp_decode": {"atom": 254, "llama_cpp": 508, "ratio": 0.5},  # 127 tokens behind the first
        "beside_llama_cpp_prefill": {"atom": 256, "llama_cpp": 128, "ratio": 2},
    }
    assert sizes["atom"] - sizes["llama_cpp"] == pytest.approx(200, abs=5)
    assert sizes["ratio"] == sizes["atom"] / sizes["llama_cpp"]
