"""Plan a step's attention once for all layers: slots, masks, workspace.

    plans = Plans(workspace, budget)    # one for all layers
    plan = plans.find(cache, value_dim, heads, window, batch)
    out = plan.decodes.attend(q, cache.blocks, rule)

Each step has a new `Batch` object, whose identity identifies the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.graph import Batch, PagedCache
from atom.kernels.torch.decode import Decodes
from atom.kernels.torch.prefill import Prefill
from atom.kernels.torch.workspace import Workspace


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of one step: its decodes and prefills."""

    num_decodes: int
    decodes: Decodes
    prefills: list[Prefill]


class Plans:
    """The plans of the current step."""

    def __init__(self, workspace: Workspace, budget: int) -> None:
        """budget: bytes of fp32 keys and values that decodes read at once"""
        self._workspace = workspace
        self._budget = budget
        self._batch: Batch | None = None  # of the step that is planned
        self._plans: dict[object, AttentionPlan] = {}  # by what may differ between layers

    def find(self, cache: PagedCache, value_dim: int, heads: int, window: int | None, batch: Batch,
             tail: torch.dtype | None = None, chunked: bool = False) -> AttentionPlan:  # fmt: skip
        """The plan for layers with these arguments; cache.blocks, value_dim, tail as in Reader, others as in ops."""
        if batch is not self._batch:
            self._plans.clear()
            self._batch = batch
        key = (cache.kind, window, chunked, heads, value_dim, cache.blocks.shape, cache.blocks.dtype, tail)
        if key not in self._plans:
            self._plans[key] = self._make(cache, value_dim, heads, window, batch, tail, chunked)
        return self._plans[key]

    def _make(self, cache: PagedCache, value_dim: int, heads: int, window: int | None, batch: Batch,
              tail: torch.dtype | None, chunked: bool) -> AttentionPlan:  # fmt: skip
        table, blocks, num_decodes = batch.tables[cache.kind], cache.blocks, batch.num_single_query
        decodes = Decodes(self._workspace, self._budget, blocks, value_dim, table[:num_decodes],
                          batch.lengths[:num_decodes], heads, window, tail, chunked)  # fmt: skip
        bounds, ends = batch.starts.tolist(), batch.lengths.tolist()
        arguments = self._workspace, blocks, value_dim
        prefills = [
            Prefill(*arguments, table[row], slice(*bounds[row : row + 2]), ends[row], window, tail, chunked)
            for row in range(num_decodes, len(ends))
            if bounds[row] < bounds[row + 1]
        ]
        return AttentionPlan(num_decodes, decodes, prefills)
