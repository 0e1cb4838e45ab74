"""A step's numbers for the device, in one array, so that one copy brings them there.

layout = Layout(num_tokens=300, num_rows=12, num_samples=12, num_decodes=8)
packed = layout.pack(plan)                          # i32 on the host; padded where the plan has less
slots, starts, ends, given, row_of = layout.rows(torch.from_numpy(packed))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atom.runtime.types import Plan


@dataclass(frozen=True)
class Layout:
    """T tokens of S rows, R of which sample. The first D rows have a token each, the others have what lies behind."""

    num_tokens: int
    num_rows: int
    num_samples: int
    num_decodes: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        return cls(plan.num_tokens, len(plan.rows), sum(row.samples for row in plan.rows), plan.num_decodes)

    def holds(self, other: Layout) -> bool:
        """Whether the other fits, with a row of padding behind its rows where there are tokens of padding."""
        num_tokens, num_more = (each.num_tokens - each.num_decodes for each in (other, self))
        num_rows = other.num_rows - other.num_decodes + (num_tokens < num_more)
        return (
            other.num_decodes <= self.num_decodes
            and num_tokens <= num_more
            and num_rows <= self.num_rows - self.num_decodes
            and other.num_samples <= self.num_samples
        )

    def pack(self, plan: Plan, padding: int) -> npt.NDArray[np.int32]:
        """The plan's rows and tokens. What is left behind its decodes, and behind all, is padding: nobody's slot."""
        packed = self.padding(padding)
        slots, starts, ends, sampled, places, given, row_of = np.split(packed, np.cumsum(self._sizes()[:-1]))
        num_left = self.num_decodes - plan.num_decodes
        is_known = [row.start < row.sequence.num_given for row in plan.rows]
        num_rows, num_tokens = len(plan.rows) + num_left, plan.num_tokens + num_left
        counts, samples = np.array([(row.num_tokens, row.samples) for row in plan.rows]).T
        rows, stops = np.arange(len(plan.rows)), np.cumsum(counts)
        rows[plan.num_decodes :] += num_left
        stops[plan.num_decodes :] += num_left
        slots[rows] = [row.sequence.slot for row in plan.rows]
        starts[rows], starts[num_rows:] = stops - counts, num_tokens
        ends[rows] = [row.start + row.num_tokens if is_known[at] else 0 for at, row in enumerate(plan.rows)]
        (chosen,) = samples.nonzero()
        sampled[: len(chosen)], places[: len(chosen)] = slots[rows[chosen]], stops[chosen] - 1
        tokens: list[int] = []
        for row, known in zip(plan.rows, is_known, strict=True):
            tokens += row.sequence.tokens(row.start, row.start + row.num_tokens) if known else [-1]
        given[: plan.num_decodes] = tokens[: plan.num_decodes]
        given[self.num_decodes : num_tokens] = tokens[plan.num_decodes :]
        row_of[self.num_decodes : num_tokens] = np.repeat(rows, counts)[plan.num_decodes :]
        row_of[num_tokens:] = num_rows
        return packed

    def padding(self, slot: int) -> npt.NDArray[np.int32]:
        """All rows and tokens are padding."""
        packed = np.zeros(sum(self._sizes()), np.int32)
        slots, starts, _, sampled, _, _, row_of = np.split(packed, np.cumsum(self._sizes()[:-1]))
        slots[:] = sampled[:] = slot
        for each in (starts, row_of):
            each[:] = np.minimum(np.arange(len(each)), self.num_decodes)
        return packed

    def rows(self, packed: Tensor) -> tuple[Tensor, ...]:
        """-> slots [S], starts [S + 1], ends [S] (0 where the device knows it), given [T] (-1 likewise), row_of [T]"""
        slots, starts, ends, _, _, given, row_of = torch.split(packed, self._sizes())
        return slots, starts, ends, given, row_of

    def samples(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """-> slots [R], places [R] among the tokens"""
        parts = torch.split(packed, self._sizes())
        return parts[3], parts[4]

    def _sizes(self) -> list[int]:
        rows, samples, tokens = self.num_rows, self.num_samples, self.num_tokens
        return [rows, rows + 1, rows, samples, samples, tokens, tokens]
