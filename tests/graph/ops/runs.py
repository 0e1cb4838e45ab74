"""Steps of sequences whose runs of tokens have entries, in scattered blocks.

runs, entries = leaves(16, 4, overlaps=True)
pools = Pools((runs, entries), block_size=16, num_sequences=3)
for chunks in in_steps((37, 5, 50), 7):
    ops.paged_compress(kv, gate, bias, pools.caches[runs], pools.batch(chunks), overlaps=True)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from graph.ops.checked import Cache

from atom.graph import KV, Batch, Type


def leaves(dim: int, every: int, overlaps: bool) -> tuple[KV, KV]:
    """The states of a compressor: inputs of its last runs, and entries."""
    width = 2 * dim if overlaps else dim
    runs = KV("0", Type("fp32", (2, width)), window=2 * every if overlaps else every, part="runs")
    return runs, KV("0", Type("fp32", (dim,)), every=every, part="index")


class Pools:
    """Caches of some states for sequences of up to 64 tokens, whose blocks are scattered."""

    def __init__(self, states: Sequence[KV], block_size: int, num_sequences: int) -> None:
        self.size, width = block_size, -(-64 // block_size)
        self.caches, self.tables = {}, {}
        for state in states:
            stride = state.stride(block_size)
            blocks = 1 + torch.randperm(num_sequences * (width // stride)).view(num_sequences, -1)
            table = torch.zeros(num_sequences, width, dtype=torch.int32)
            table[:, stride - 1 :: stride] = blocks.int()
            self.tables[state.kind] = table
            shape = state.block(block_size).shape
            self.caches[state] = Cache(state, torch.full((1 + blocks.numel(), *map(int, shape)), float("nan")))

    def batch(self, chunks: Sequence[tuple[int, int]]) -> Batch:
        """A step that computes positions start to stop of each sequence."""
        slots = {}
        for kind, table in self.tables.items():
            own = [table[row, at // self.size] * self.size + at % self.size for row, span in enumerate(chunks)
                   for at in range(*span)]  # fmt: skip
            slots[kind] = torch.tensor(own, dtype=torch.int64)
        starts = torch.tensor([0, *itertools.accumulate(stop - start for start, stop in chunks)]).int()
        lengths = torch.tensor([stop for _, stop in chunks]).int()
        return Batch(self.tables, slots, starts, lengths, 0, block_size=self.size)


def led_by_padding(batch: Batch) -> Batch:
    """The step with a first row of one token and no length, as a group of ranks has that others exceed."""
    tables = {kind: torch.cat((torch.zeros_like(table[:1]), table)) for kind, table in batch.tables.items()}
    slots = {kind: torch.cat((torch.zeros_like(each[:1]), each)) for kind, each in batch.slot_mappings.items()}
    starts = torch.cat((batch.starts[:1], batch.starts + 1))
    lengths = torch.cat((torch.zeros_like(batch.lengths[:1]), batch.lengths))
    return batch._replace(tables=tables, slot_mappings=slots, starts=starts, lengths=lengths)


def in_steps(lengths: Sequence[int], max_tokens: int, seed: int = 0) -> list[list[tuple[int, int]]]:
    """Chunks of sequences, step by step, until all are as long as that; some steps have none of a sequence."""
    chance, ends, steps = random.Random(seed), [0] * len(lengths), []
    while ends != [*lengths]:
        before = list(ends)
        ends = [min(end + chance.randint(0, max_tokens), length) for end, length in zip(ends, lengths, strict=True)]
        if ends != before:
            steps.append([*zip(before, ends, strict=True)])
    return steps
