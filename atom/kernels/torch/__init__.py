"""The backend `torch`: CPU kernels in eager torch.

They are faster than the ops' reference bodies, and need no compiler.

    for kernel in BACKEND.kernels:
        reason = kernel.accepts(Target("cpu"))     # None: yes
        run = kernel.load(LoadContext())           # a callable with the op's signature

Activations, embeddings, routers and the grouping of experts are a few calls of torch in the reference, which cannot be
beaten here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atom.graph import ops
from atom.graph.ops import Op
from atom.kernels.backend import Accepts, Backend, Kernel, accepts_all, on_device
from atom.kernels.step import StepKernels
from atom.kernels.torch.attention import PagedAttention
from atom.kernels.torch.block_sparse import paged_index_blocks
from atom.kernels.torch.latent import PagedLatentAttention
from atom.kernels.torch.linear import accepts, find_features, pack, packed_linear, trace_packed_linear
from atom.kernels.torch.moe import combine, packed_grouped_linear
from atom.kernels.torch.norm import add_rms_norm, rms_norm
from atom.kernels.torch.rope import norm_rope_write, norm_rope_write_latent
from atom.kernels.torch.segments import segment_attention
from atom.kernels.torch.sparse import paged_index_topk
from atom.kernels.torch.step import blocks, prepare_inputs, sampling, speculation


def _kernel(op: Op, run: Callable[..., Any], accepts: Accepts = accepts_all, **options: Any) -> Kernel:
    """The kernel of a function, or of a class, of which each program has one object."""
    load = (lambda context: context.share(run)) if isinstance(run, type) else lambda _: run
    return Kernel(op, "torch", on_device("cpu", accepts), load, **options)


KERNELS: tuple[Kernel, ...] = (
    _kernel(ops.linear, packed_linear, accepts, layout="onednn", trace=trace_packed_linear),
    _kernel(ops.rms_norm, rms_norm),
    _kernel(ops.add_rms_norm, add_rms_norm),
    _kernel(ops.grouped_linear, packed_grouped_linear, accepts, layout="onednn"),
    _kernel(ops.combine, combine),
    _kernel(ops.gumbel_argmax, speculation.gumbel_argmax),
    _kernel(ops.norm_rope_write, norm_rope_write),
    _kernel(ops.norm_rope_write_latent, norm_rope_write_latent),
    _kernel(ops.paged_attention, PagedAttention),
    _kernel(ops.paged_mla_attention, PagedLatentAttention),
    _kernel(ops.paged_index_blocks, paged_index_blocks),
    _kernel(ops.paged_index_topk, paged_index_topk),
    _kernel(ops.segment_attention, segment_attention),
)

BACKEND = Backend(
    "torch",
    KERNELS,
    layouts={"onednn": pack},
    find_features=find_features,
    find_versions=lambda: {"torch": torch.__version__},
    step_kernels=lambda: StepKernels.of(prepare_inputs, sampling, speculation, blocks),
)
