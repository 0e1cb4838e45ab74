"""The verb `execute`: one rank's weights, caches and programs, and what a plan makes of them.

runner = Runner(graph, weights, num_blocks={"full": 1024}, block_size=16)
sampled = runner.execute(plan)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom.errors import CapacityError, is_out_of_memory
from atom.graph import KV, TORCH_DTYPES, Graph, Recipe
from atom.pieces import PieceCode
from atom.runtime.batch import build_inputs
from atom.runtime.program import Executable, Hidden, rows_of, score
from atom.runtime.sampling import prompt_logprobs, sample
from atom.runtime.types import Logprobs, Plan, Row, Sampled

HEAD_ROWS = 256  # logits that prompt_logprobs makes at a time


class Runner:
    run_ahead = 0

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[Recipe, Any],
        num_blocks: Mapping[str, int],
        block_size: int,
        code: Mapping[str, PieceCode] = MappingProxyType({}),
    ) -> None:
        """num_blocks by cache kind; code by the text of a piece"""
        self.block_size = block_size
        self.caches = {cache: _allocate(cache, num_blocks[cache.kind], block_size) for cache in graph.caches()}
        self.body = Executable(graph.programs["body"], weights, self.caches, code)
        self.head = Executable(graph.programs["head"], weights, self.caches, code)

    def execute(self, plan: Plan) -> Sampled:
        """Run the plan's tokens through the model and sample a token for each row that is to have one.

        Nothing but KV of the plan's own tokens is written, so that a plan that raised can be executed again, or in
        parts. CapacityError where memory does not suffice.
        """
        try:
            return self._execute(plan)
        except (MemoryError, RuntimeError) as error:
            if is_raised_by(error, "KeyboardInterrupt"):
                raise KeyboardInterrupt from None
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(plan, "serve.kv_cache_memory") from error

    @torch.inference_mode()
    def _execute(self, plan: Plan) -> Sampled:
        hidden = self.body(build_inputs(plan, self.body.inputs, self.block_size))
        ends = np.cumsum([row.num_tokens for row in plan.rows])
        sampling = [(row.sequence, end - 1) for row, end in zip(plan.rows, ends.tolist(), strict=True) if row.samples]
        scored = {
            row.sequence.id: score_prompt(self.head, row, rows_of(hidden, slice(end - row.num_tokens, end)))
            for row, end in zip(plan.rows, ends.tolist(), strict=True)
            if row.sequence.params.prompt_logprobs is not None and row.start < len(row.sequence.prompt)
        }
        if not sampling:
            return Sampled([], [], scored)
        rows = torch.tensor([last for _, last in sampling])
        logits = score(self.head, rows_of(hidden, rows))
        return Sampled(*sample(logits, [sequence for sequence, _ in sampling]), scored)


def score_prompt(head: Executable, row: Row, hidden: Hidden) -> list[Logprobs]:
    """Log probabilities of the prompt's tokens that follow this row's positions; hidden: of these."""
    sequence = row.sequence
    targets = sequence.prompt[row.start + 1 : row.start + 1 + row.num_tokens]
    scored: list[Logprobs] = []
    for start in range(0, len(targets), HEAD_ROWS):
        part = targets[start : start + HEAD_ROWS]
        logits = score(head, rows_of(hidden, slice(start, start + len(part))))
        scored += prompt_logprobs(logits, part, sequence.params.prompt_logprobs or 0)
    return scored


def out_of_memory(plan: Plan, knob: str) -> CapacityError:
    """What to say of a step that ran out of memory; knob: of the memory that the KV cache has taken."""
    return CapacityError(
        f"a step of {plan.num_tokens} tokens of {len(plan.rows)} sequences ran out of memory: "
        f"lower serve.max_num_batched_tokens (to {max(plan.num_tokens // 2, 1)}), serve.max_num_seqs or {knob}"
    )


def is_raised_by(error: Exception, name: str) -> bool:
    """Whether a kernel in Python raised that: a compiled piece makes a RuntimeError of it that begins with its name."""
    return str(error).startswith(f"{name}: ")


def _allocate(cache: KV, num_blocks: int, block_size: int) -> Tensor:
    """Zeros [num_blocks, block_size, *entry], whose pages the system gives when they are first written."""
    nbytes = num_blocks * block_size * cache.type.num_bytes
    shape = (num_blocks, block_size, *(int(dim) for dim in cache.type.shape))
    try:
        zeros = np.zeros(nbytes, np.uint8)
    except (MemoryError, ValueError):
        raise CapacityError(
            f"the KV cache of {cache.name} takes {nbytes} bytes, more than the system has: "
            "lower serve.kv_cache_memory, or serve.num_kvcache_blocks where it is set"
        ) from None
    return torch.from_numpy(zeros).view(TORCH_DTYPES[cache.type.dtype]).view(shape)
