"""A plan as tensors: the inputs that a lowered program asks for by name.

inputs = build_inputs(plan, body.inputs, block_size=16)
inputs["tokens"], inputs["slots_full"], inputs["num_decodes"]
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from atom.runtime.types import INPUTS_BY_KIND, Plan


def build_inputs(plan: Plan, names: Collection[str], block_size: int) -> dict[str, Any]:
    """T tokens of S rows: tokens and positions i64[T], starts i32[S + 1], lengths i32[S] (positions known after this
    step), and by cache kind slots i64[T] and table i32[S, M]."""
    rows = plan.rows
    counts = np.array([row.num_tokens for row in rows])
    first_positions = np.array([row.start for row in rows])
    starts = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(starts[-1]) + np.repeat(first_positions - starts[:-1], counts)
    tokens = [token for row in rows for token in row.sequence.tokens(row.start, row.start + row.num_tokens)]
    inputs: dict[str, Any] = {
        "tokens": torch.tensor(tokens),
        "positions": torch.from_numpy(positions),
        "starts": torch.from_numpy(starts.astype(np.int32)),
        "lengths": torch.from_numpy((first_positions + counts).astype(np.int32)),
        "num_decodes": plan.num_decodes,
    }
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    for kind in {name.partition("_")[2] for name in names if name.startswith(INPUTS_BY_KIND)}:
        table = _table(plan, kind, block_size)
        slots = table[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
        inputs[f"table_{kind}"], inputs[f"slots_{kind}"] = torch.from_numpy(table), torch.from_numpy(slots)
    return inputs


def _table(plan: Plan, kind: str, block_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """i32[S, M]: each row's blocks of this kind up to its last position; 0, no block, behind them."""
    widths = [-(-(row.start + row.num_tokens) // block_size) for row in plan.rows]
    table = np.zeros((len(plan.rows), max(widths)), np.int32)
    for index, (row, width) in enumerate(zip(plan.rows, widths, strict=True)):
        table[index, :width] = row.sequence.blocks[kind][:width]
    return table
