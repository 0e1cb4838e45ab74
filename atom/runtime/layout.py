"""A step's numbers for the device, in one array, so that one copy brings them there.

layout = Layout(num_tokens=300, num_rows=12, num_samples=12)
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
    """T tokens of S rows, R of which sample."""

    num_tokens: int
    num_rows: int
    num_samples: int

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        return cls(plan.num_tokens, len(plan.rows), sum(row.samples for row in plan.rows))

    def holds(self, other: Layout) -> bool:
        """Whether the other fits, with a row of padding behind its rows where there are tokens of padding."""
        num_rows = other.num_rows + (other.num_tokens < self.num_tokens)
        return (
            other.num_tokens <= self.num_tokens and num_rows <= self.num_rows and other.num_samples <= self.num_samples
        )

    def pack(self, plan: Plan, padding: int) -> npt.NDArray[np.int32]:
        """The plan's rows and tokens; those behind them are padding, of a slot that is nobody's."""
        packed = self.padding(padding)
        slots, starts, ends, sampled, places, given, row_of = np.split(packed, np.cumsum(self._sizes()[:-1]))
        counts = np.array([row.num_tokens for row in plan.rows])
        stops, samples = np.cumsum(counts), np.array([row.samples for row in plan.rows])
        num_rows, num_tokens, num_samples = len(plan.rows), int(stops[-1]), int(samples.sum())
        slots[:num_rows] = [row.sequence.slot for row in plan.rows]
        starts[0], starts[1 : num_rows + 1], starts[num_rows + 1 :] = 0, stops, num_tokens
        is_given = [row.start < row.sequence.num_given for row in plan.rows]
        ends[:num_rows] = [row.start + row.num_tokens if is_given[at] else 0 for at, row in enumerate(plan.rows)]
        sampled[:num_samples], places[:num_samples] = slots[:num_rows][samples], (stops - 1)[samples]
        tokens: list[int] = []
        for row, known in zip(plan.rows, is_given, strict=True):
            tokens += row.sequence.tokens(row.start, row.start + row.num_tokens) if known else [-1]
        given[:num_tokens] = tokens
        row_of[:num_tokens], row_of[num_tokens:] = np.repeat(np.arange(num_rows), counts), num_rows
        return packed

    def padding(self, slot: int) -> npt.NDArray[np.int32]:
        """All rows and tokens are padding."""
        rows, samples, tokens = self.num_rows, self.num_samples, self.num_tokens
        parts = ([slot] * rows, [tokens] * (rows + 1), [0] * rows, [slot] * samples, [0] * (samples + 2 * tokens))
        return np.concatenate([np.array(part, np.int32) for part in parts])

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
