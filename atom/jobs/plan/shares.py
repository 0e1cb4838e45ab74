"""Shares of limits that were measured, for shapes like a given one.

    share = measured_share(gpu.shares, Shape(8, mixture=True, recurrent=False, layer_seconds=60e-6), is_least=True)
    share.value, share.rows             # 0.52, of ("next-fp8-1", "glm-air-fp8-1")

What keeps a step from its limit takes about as long in each layer: launches, tails of kernels, waits for memory. So a
share follows from the time that a layer takes at the limit, and from the kernels, which differ by the bits of a weight,
between dense models and mixtures, and if layers are recurrent: the limit counts little of what their prompts take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from atom.config import GPUConfig
from atom.config.load import DEFAULT_GPU, load_gpu

Rows = Mapping[str, Mapping[str, float]]  # as of GPUConfig.shares


class Shape(NamedTuple):
    bits: int  # of most weights: 4, 8 or 16
    mixture: bool
    recurrent: bool  # whether some layers have recurrent state
    layer_seconds: float  # at the limit


class Share(NamedTuple):
    value: float
    rows: tuple[str, ...]  # of docs/results/gpu


class Shares(NamedTuple):
    """The rows that a GPU's estimates follow from."""

    runs: Rows
    prompts: Rows
    measured_on: str  # in words


def find_shares(name: str, gpu: GPUConfig) -> Shares:
    """A GPU's own rows, and those of DEFAULT_GPU for the others."""
    default = load_gpu(DEFAULT_GPU)
    runs, prompts = {**default.shares, **gpu.shares}, {**default.prompt_shares, **gpu.prompt_shares}
    where = [name] if gpu.shares else []
    where += [DEFAULT_GPU] if not {*default.shares, *default.prompt_shares} <= {*gpu.shares, *gpu.prompt_shares} else []
    return Shares(runs, prompts, " and ".join(where))


def measured_share(rows: Rows, shape: Shape, *, is_least: bool) -> Share:
    """The share of the limit of rows with as many bits; if there are some, as recurrent, and of these as dense.

    Between two rows it is interpolated over the logarithm of a layer's time, beyond the longest it is that row's.

    rows: at least one
    is_least: a layer needs no less time than that of the shortest row did; else the share is that row's
    """
    near = min({row["bits"] for row in rows.values()}, key=lambda bits: abs(math.log(bits / shape.bits)))
    known = {name: row for name, row in rows.items() if row["bits"] == near}
    for kind in ("recurrent", "mixture"):
        known = {name: row for name, row in known.items() if row[kind] == getattr(shape, kind)} or known
    ordered = sorted(known, key=lambda name: known[name]["layer_seconds"])
    after = next((at for at, name in enumerate(ordered) if known[name]["layer_seconds"] >= shape.layer_seconds), None)
    if after is None:
        return Share(known[ordered[-1]]["share"], (ordered[-1],))
    high = known[ordered[after]]
    if after == 0:
        part = shape.layer_seconds / high["layer_seconds"] if is_least else 1.0
        return Share(high["share"] * part, (ordered[0],))
    low = known[ordered[after - 1]]
    part = math.log(shape.layer_seconds / low["layer_seconds"]) / math.log(high["layer_seconds"] / low["layer_seconds"])
    return Share(low["share"] + part * (high["share"] - low["share"]), (ordered[after - 1], ordered[after]))
