"""Which instructions our own code may use on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atom.kernels import cpu

FLAGS = [
    "fpu",
    "sse2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
]


@pytest.fixture(autouse=True)
def _sapphire_rapids(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "_flags", lambda: FLAGS)
    for each in (cpu.instruction_set, cpu.left_out):
        each.cache_clear()
    yield
    for each in (cpu.instruction_set, cpu.left_out):
        each.cache_clear()


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("", FLAGS[1:]),
        ("DEFAULT", FLAGS[1:]),
        ("AVX512_CORE_AMX", FLAGS[1:]),
        ("avx512_core_vnni", ["sse2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni"]),
        ("AVX512_CORE", ["sse2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw"]),
        ("AVX2", ["sse2", "avx", "avx2", "fma", "f16c"]),
    ],
)
def test_what_limits_onednn_limits_our_code(limit: str, used: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert set(cpu.instruction_set().split()[1:]) == set(used)
