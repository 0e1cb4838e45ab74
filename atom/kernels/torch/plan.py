"""Plan a step's attention once for all layers: slots, masks, workspace.

A plan follows from table, starts and lengths.

    plans = Plans(workspace, budget)    # one for all layers
    plan = plans.find(cache, value_dim, heads, window, table, starts, lengths, num_decodes)
    out = plan.decodes.attend(q, cache, rule)

Each step has new tensors, so a step is known by their identity.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atom.kernels.torch.decode import Decodes
from atom.kernels.torch.prefill import Prefill
from atom.kernels.torch.workspace import Workspace


@dataclass(frozen=True)
class Plan:
    """The plan of one step: its decodes and prefills."""

    inputs: tuple[Tensor, Tensor]  # the table and starts of this plan; held, so that no other tensor gets their ids
    decodes: Decodes
    prefills: list[Prefill]


class Plans:
    """The plans of the current step."""

    def __init__(self, workspace: Workspace, budget: int) -> None:
        """budget in bytes of the fp32 keys and values that decodes read at a time"""
        self._workspace = workspace
        self._budget = budget
        self._lengths: Tensor | None = None  # identifies the current step
        self._plans: dict[object, Plan] = {}  # by the arguments that may differ between layers

    def find(self, cache: Tensor, value_dim: int, heads: int, window: int | None, table: Tensor, starts: Tensor,
             lengths: Tensor, num_decodes: int) -> Plan:  # fmt: skip
        """The step's plan for layers of equal arguments; cache and value_dim as in Reader, the others as in the ops."""
        if lengths is not self._lengths:
            self._plans.clear()
            self._lengths = lengths
        key = (id(table), id(starts), num_decodes, window, heads, value_dim, cache.shape, cache.dtype)
        if key not in self._plans:
            self._plans[key] = self._make(cache, value_dim, heads, window, table, starts, lengths, num_decodes)
        return self._plans[key]

    def _make(self, cache: Tensor, value_dim: int, heads: int, window: int | None, table: Tensor, starts: Tensor,
              lengths: Tensor, num_decodes: int) -> Plan:  # fmt: skip
        decodes = Decodes(self._workspace, self._budget, cache, value_dim, table[:num_decodes], lengths[:num_decodes],
                          heads, window)  # fmt: skip
        bounds, ends = starts.tolist(), lengths.tolist()
        prefills = [
            Prefill(self._workspace, cache, value_dim, table[row], slice(*bounds[row : row + 2]), ends[row], window)
            for row in range(num_decodes, len(ends))
            if bounds[row] < bounds[row + 1]
        ]
        return Plan((table, starts), decodes, prefills)
