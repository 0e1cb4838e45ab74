"""Paged attention in float32 on batched matrix products: as fast as torch's flash attention, rounded once.

    attend = PagedAttention()                # one object for all layers: it owns the workspace and the plan of the step
    for layer in layers:
        out = attend(q, cache, table, starts, lengths, num_decodes, scale=0.125)

The plan holds what depends on table, starts and lengths alone: slots that are read, masks, places in the workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atom.kernels.torch.decode import Decodes
from atom.kernels.torch.prefill import Prefill
from atom.kernels.torch.workspace import Workspace


@dataclass(frozen=True)
class _Plan:
    """What the layers of a step share."""

    inputs: tuple[Tensor, Tensor]  # table and starts that it was made of; held, so that no other tensor gets their ids
    decodes: Decodes
    prefills: list[Prefill]


class PagedAttention:
    """The op `paged_attention`. Each step brings new tables, starts and lengths: it is known by their identity."""

    def __init__(self, workspace_bytes: int = 6 << 20) -> None:
        """workspace_bytes: of the fp32 keys and values that decodes read at a time"""
        self._workspace_bytes = workspace_bytes
        self._workspace = Workspace()
        self._lengths: Tensor | None = None  # of the step that the plans are of
        self._plans: dict[object, _Plan] = {}  # by what may differ between layers

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int, *,
                 scale: float, window: int | None = None) -> Tensor:  # fmt: skip
        """Shapes as in the op. A token of no sequence and a sequence of no positions give zeros."""
        if lengths is not self._lengths:
            self._plans.clear()
            self._lengths = lengths
        key = (id(table), id(starts), num_decodes, window, q.shape, cache.shape, cache.dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(q, cache, table, starts, lengths, num_decodes, window)
        if num_decodes == len(q):
            return plan.decodes.attend(q, cache, scale).to(q.dtype, copy=True)
        out = q.new_zeros(q.shape)
        out[:num_decodes] = plan.decodes.attend(q[:num_decodes], cache, scale)
        for prefill in plan.prefills:
            prefill.attend(q, cache, scale, out)
        return out

    def _plan(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
              window: int | None) -> _Plan:  # fmt: skip
        decodes = Decodes(self._workspace, self._workspace_bytes, cache, table[:num_decodes], lengths[:num_decodes],
                          q.shape[1], window)  # fmt: skip
        bounds, ends = starts.tolist(), lengths.tolist()
        prefills = [
            Prefill(self._workspace, cache, table[row], slice(bounds[row], bounds[row + 1]), ends[row], window)
            for row in range(num_decodes, len(ends))
            if bounds[row] < bounds[row + 1]
        ]
        return _Plan((table, starts), decodes, prefills)
