"""The backend `cpp`: CPU kernels in C++, for packed weights and decodes.

Packed numbers are unpacked in registers, so that few rows take as long as it takes to read the packed weight. Plain
weights are left to torch, and so are prompts. Where a source cannot be compiled, packed weights are unpacked while they
load, decodes are torch's, and a line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atom.graph import ops
from atom.graph.ops import Op
from atom.kernels.backend import Accepts, Backend, Kernel, on_device
from atom.kernels.cpp.attention import load_attention, load_write
from atom.kernels.cpp.build import ATTENTION, PACKED, build_library, keep_libraries
from atom.kernels.cpp.panels import (
    accepts,
    accepts_embedding,
    pack_panels,
    packed_type,
    panel_embedding,
    panel_grouped_linear,
    panel_linear,
)

KINDS = ("scaled", "int4", "int8", "mxfp4", "nvfp4")


def _kernel(op: Op, run: Callable[..., Any], accepts: Accepts, **options: Any) -> Kernel:
    here = on_device("cpu", accepts, packed=KINDS)
    options |= {"packed_layout": "panels", "packed_type": packed_type, "build": partial(build_library, PACKED)}
    return Kernel(op, "cpp", here, lambda _: run, **options)


KERNELS: tuple[Kernel, ...] = (
    _kernel(ops.linear, panel_linear, accepts, trace=panel_linear),
    _kernel(ops.grouped_linear, panel_grouped_linear, accepts),
    _kernel(ops.embedding, panel_embedding, accepts_embedding, trace=panel_embedding),
    Kernel(ops.norm_rope_write, "cpp", on_device("cpu"), load_write, build=partial(build_library, ATTENTION)),
    Kernel(ops.paged_attention, "cpp", on_device("cpu"), load_attention, build=partial(build_library, ATTENTION)),
)

BACKEND = Backend("cpp", KERNELS, layouts={"panels": pack_panels}, keep_binaries=keep_libraries)
