"""Paged attention on a CPU, by batched float32 matmuls.

It is as fast as torch's flash attention, and rounds once.

attend = PagedAttention()    # one object for all layers: it owns the workspace and the plan of the step
for layer in layers:
    out = attend(q, cache, batch, scale=0.125)
"""

from __future__ import annotations

from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.block_sparse import chooses_all
from atom.kernels.torch.block_sparse import attend_blocks
from atom.kernels.torch.plan import Plans
from atom.kernels.torch.softmax import Rule
from atom.kernels.torch.workspace import Workspace


class PagedAttention:
    """The op `paged_attention`."""

    def __init__(self, workspace_bytes: int = 6 << 20) -> None:
        """workspace_bytes: of fp32 keys and values that decodes read at once"""
        self._plans = Plans(Workspace(), workspace_bytes)

    def __call__(self, q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                 k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                 ends: Tensor | None = None, selected: Tensor | None = None, *, scale: float,
                 window: int | None = None, softcap: float | None = None, chunked: bool = False,
                 block: int = 1) -> Tensor:  # fmt: skip
        """Shapes as in the op. Tokens of no sequence, and sequences without positions, get zeros."""
        of_keys, of_values = (1.0 if each is None else float(each) for each in (k_scale, v_scale))
        rule, blocks = Rule(scale * of_keys, softcap, sinks, of_values, slopes), cache.blocks
        if selected is not None and not chooses_all(selected, cache, batch, block):
            out = q.new_zeros(q.shape)
            attend_blocks(q, cache, batch, selected, rule, block, out)
            return out
        plan = self._plans.find(cache, q.shape[2], q.shape[1], window, batch, chunked=chunked)
        if plan.num_decodes == len(q):
            return plan.decodes.attend(q, blocks, rule).to(q.dtype, copy=True)
        out = q.new_zeros(q.shape)
        out[: plan.num_decodes] = plan.decodes.attend(q[: plan.num_decodes], blocks, rule)
        for prefill in plan.prefills:
            prefill.reader.read(blocks)
            keys, values = prefill.reader.keys, prefill.reader.values
            own_ends = None if ends is None else ends[prefill.tokens]
            prefill.attend(q[prefill.tokens], keys, values, rule, out[prefill.tokens], own_ends)
        return out
