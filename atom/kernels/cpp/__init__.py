"""The backend `cpp`: CPU kernels in C++, for packed weights, attention and recurrences.

Packed weights are unpacked in registers, so few rows take only the time to read the weight; plain weights are in the
layout of oneDNN, which multiplies many rows. If a source cannot be compiled, packed weights are unpacked while they
load, plain ones stay as stored, torch runs attention, and a line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atom.graph import ops
from atom.graph.gguf_blocks import TYPES
from atom.graph.ops import Op
from atom.kernels.backend import Accepts, Backend, Kernel, accepts_all, kinds_in, on_device
from atom.kernels.cpp.attention import load_attention, load_write
from atom.kernels.cpp.blocks import find_features, pack_blocks
from atom.kernels.cpp.build import ATTENTION, RECURRENT, build_library, keep_libraries
from atom.kernels.cpp.linear import accepts, accepts_embedding, build_for, embedding, grouped_linear, linear
from atom.kernels.cpp.panels import kept_type, pack_panels, packed_type
from atom.kernels.cpp.recurrent import (
    accepts_conv,
    causal_conv,
    gated_delta,
    lightning,
    loader,
    selective_scan,
    ssd,
)

KINDS = ("scaled", "int4", "int8", "mxfp4", "nvfp4", *TYPES)


def _kernel(op: Op, run: Callable[..., Any], accepts: Accepts, **options: Any) -> Kernel:
    here = on_device("cpu", accepts, packed=KINDS)
    options |= {"layout": "blocks", "packed_layout": kinds_in("panels"), "packed_type": packed_type, "build": build_for}
    return Kernel(op, "cpp", here, lambda _: run, **options)


def _recurrent(run: Callable[..., Any], accepts: Accepts = accepts_all) -> Kernel:
    op = ops.OPS[f"batched_{run.__name__}"]
    return Kernel(op, "cpp", on_device("cpu", accepts), loader(op, run), build=build_recurrent)


build_recurrent = partial(build_library, RECURRENT)
build_attention = partial(build_library, ATTENTION)
KERNELS: tuple[Kernel, ...] = (
    _kernel(ops.linear, linear, accepts, trace=linear),
    _kernel(ops.grouped_linear, grouped_linear, accepts),
    _kernel(ops.embedding, embedding, accepts_embedding, trace=embedding),
    Kernel(ops.norm_rope_write, "cpp", on_device("cpu"), load_write, build=build_attention),
    Kernel(ops.paged_attention, "cpp", on_device("cpu"), load_attention, build=build_attention),
    _recurrent(causal_conv, accepts_conv),
    _recurrent(gated_delta),
    _recurrent(lightning),
    _recurrent(ssd),
    _recurrent(selective_scan),
)

BACKEND = Backend(
    "cpp",
    KERNELS,
    layouts={"blocks": pack_blocks, "panels": pack_panels},
    map_layouts={"panels": kept_type},
    find_features=find_features,
    keep_binaries=keep_libraries,
)
