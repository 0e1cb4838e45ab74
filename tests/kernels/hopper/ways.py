"""Watch by which kernels experts are multiplied on Hopper.

taken = watch_ways(monkeypatch)
experts.experts(x, weights, ids, gate_up, down, kind="silu")
assert taken == ["few", "few"]          # gate/up and down projections
"""

from __future__ import annotations

from typing import Any

import pytest

from atom.kernels.hopper import few_experts as few_hopper
from atom.kernels.hopper import grouped_linear as grouped_hopper
from atom.kernels.hopper import grouped_packed_linear as grouped_packed_hopper
from atom.kernels.hopper import packed_linear as packed_hopper
from atom.kernels.triton.experts import moe

WAYS: tuple[tuple[str, Any, str], ...] = (
    ("few", few_hopper, "multiply_gate_up"),
    ("few", few_hopper, "multiply_down"),
    ("groups", packed_hopper, "multiply_grouped"),
    ("many", grouped_packed_hopper, "multiply"),
    ("fp8", grouped_hopper, "multiply_fp8"),
    ("fp8", grouped_hopper, "multiply_and_quantize"),
    ("plain groups", moe, "multiply_plain"),
    ("many plain", grouped_hopper, "multiply"),
)


def watch_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways of all GEMMs of experts from here on, in order."""
    taken: list[str] = []

    def watch(way: str, module: Any, name: str) -> None:
        run = getattr(module, name)

        def multiply(*args: Any, **options: Any) -> Any:
            taken.append(way)
            return run(*args, **options)

        monkeypatch.setattr(module, name, multiply)

    for each in WAYS:
        watch(*each)
    return taken
