"""Paged attention on a CPU, in float32 on batched matrix products.

It is as fast as torch's flash attention, and rounds once.

attend = PagedAttention()    # one object for all layers: it owns the workspace and the plan of the step
for layer in layers:
    out = attend(q, cache, table, starts, lengths, num_decodes, scale=0.125)
"""

from __future__ import annotations

from torch import Tensor

from atom.kernels.torch.plan import Plans
from atom.kernels.torch.softmax import Rule
from atom.kernels.torch.workspace import Workspace


class PagedAttention:
    """The op `paged_attention`."""

    def __init__(self, workspace_bytes: int = 6 << 20) -> None:
        """workspace_bytes: of the fp32 keys and values that decodes read at a time"""
        self._plans = Plans(Workspace(), workspace_bytes)

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
                 sinks: Tensor | None = None, *, scale: float, window: int | None = None,
                 softcap: float | None = None) -> Tensor:  # fmt: skip
        """Shapes as in the op. A token of no sequence and a sequence of no positions give zeros."""
        rule = Rule(scale, softcap, sinks)
        plan = self._plans.find(cache, q.shape[2], q.shape[1], window, table, starts, lengths, num_decodes)
        if num_decodes == len(q):
            return plan.decodes.attend(q, cache, rule).to(q.dtype, copy=True)
        out = q.new_zeros(q.shape)
        out[:num_decodes] = plan.decodes.attend(q[:num_decodes], cache, rule)
        for prefill in plan.prefills:
            prefill.reader.read(cache)
            keys, values = prefill.reader.keys, prefill.reader.values
            prefill.attend(q[prefill.tokens], keys, values, rule, out[prefill.tokens])
        return out
