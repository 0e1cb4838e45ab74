"""Run a model on a device: weights, KV pool, request state.

It starts what a step needs there, and waits for nothing.

model = Model(graph, weights, {"full": 1024}, 16, device="cuda", max_num_seqs=256, max_model_len=4096)
logits = model.decode(slots)                        # each row computes the newest token of its slot
tokens = model.sample(slots, logits, "greedy")      # which are the newest ones from now on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from atom.errors import naming_a_lack_of_memory
from atom.graph import BODY, HEAD, KV, TORCH_DTYPES, Batch, Graph, Recipe, Type
from atom.graph.ops import Op
from atom.graph.shares import token_shares
from atom.kernels import find_step_kernels
from atom.kernels.step import Inputs
from atom.pieces import PieceCode
from atom.runtime.program import Executable, Hidden, rows_of, score
from atom.runtime.request_state import RequestState, send, zeros
from atom.runtime.step_input import BatchShape

Kernels = Mapping[tuple[Op, str], Callable[..., Any]]  # by op and backend


class Model:
    def __init__(
        self,
        graph: Graph,
        weights: Mapping[Recipe, Any],
        num_blocks: Mapping[str, int],
        block_size: int,
        code: Mapping[str, PieceCode] = MappingProxyType({}),
        *,
        device: str,
        max_num_seqs: int,
        max_model_len: int,
        backend: str | None = None,
    ) -> None:
        """num_blocks by cache kind; code by the text of a piece; backend: that prepares and samples a step"""
        self.device, self.block_size = torch.device(device), block_size
        self.is_cpu = self.device.type == "cpu"
        self._step = find_step_kernels(self.device.type, backend)
        self._graph, self._weights, self._code = graph, weights, code
        self._kernels: Kernels = {}
        self.kinds = list(dict.fromkeys(cache.kind for cache in graph.caches()))
        logits = logits_type(graph)
        self.logits_dtype = TORCH_DTYPES[logits.dtype]
        self.state = RequestState(max_num_seqs, int(logits.shape[-1]), device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)  # of decodes
        width = -(-max_model_len // block_size)
        self.tables = torch.zeros(len(self.kinds), max_num_seqs + 1, width, dtype=torch.int32, device=device)
        self.bind(num_blocks)

    @property
    def padding(self) -> int:
        """The slot of padding rows."""
        return self.state.num_slots

    @cached_property
    def flops_a_token(self) -> float:
        shares = token_shares([self._graph.programs[BODY]])
        return 2 * float(sum(recipe.type.num_elements * share for recipe, share in shares.items()))

    def bind(self, num_blocks: Mapping[str, int]) -> None:
        """Allocate another KV pool, empty."""
        self.caches: dict[KV, Tensor] = {}
        self.caches = {cache: self._allocate(cache, num_blocks[cache.kind]) for cache in self._graph.caches()}
        self.use(self._kernels)

    def use(self, kernels: Kernels) -> None:
        """Run these in place of the kernels that the text names; captured graphs keep the old ones."""
        self._kernels = kernels
        self.executables = {
            name: Executable(program, self._weights, self.caches, self._code, kernels)
            for name, program in self._graph.programs.items()
        }
        self.body, self.head = self.executables[BODY], self.executables[HEAD]

    def send(self, array: bytearray | npt.NDArray[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        """A copy on the device, which the host does not wait for."""
        return send(array, dtype, self.device)

    def extend_tables(self, entries: bytearray) -> None:
        """Write block numbers to the tables [C, slots, M]. entries: i32[2, E], places counted through them, numbers"""
        self._step.extend_tables(self.tables, self.send(entries).view(2, -1))

    def decode(self, slots: Tensor) -> Tensor:
        """slots: i32[S], each of which computes its newest token -> logits [S, V]"""
        size = len(slots)
        inputs = self._inputs(size, size, self._starts[: size + 1], size)
        self._step.decode_inputs(slots, self.state, self.tables, self.block_size, inputs)
        return score(self.head, self.body(inputs._asdict()))

    def mix(self, shape: BatchShape, packed: Tensor) -> tuple[Hidden, Tensor | None]:
        """A step of this shape -> what its head takes, of each token; logits [R, V] where rows sample"""
        slots, starts, ends, _, places, given, row_of = shape.split(packed)
        inputs = self._inputs(shape.num_tokens, shape.num_rows, starts, shape.num_decodes)
        self._step.mixed_inputs(slots, given, row_of, ends, self.state, self.tables, self.block_size, inputs)
        hidden = self.body(inputs._asdict())
        if not shape.num_samples:
            return hidden, None
        return hidden, score(self.head, rows_of(hidden, places.long()))

    def sample(self, slots: Tensor, logits: Tensor, kind: str, penalties: bool = False) -> Tensor:
        """slots: i32[R], logits [R, V] -> tokens i64[R], the newest of their slots from now on, and reported"""
        out = torch.empty(len(slots), dtype=torch.int64, device=self.device)
        self._step.sample(logits, slots, self.state, kind, out, penalties)
        return out

    def score_drawn(
        self, logits: Tensor, rows: Tensor, drawn: Tensor, totals: Tensor, chosen: Tensor, ranks: Tensor
    ) -> None:
        """See `kernels.torch.sampling.score_drawn`."""
        self._step.score_drawn(logits, rows, drawn, totals, chosen, ranks)

    def _inputs(self, num_tokens: int, num_rows: int, starts: Tensor, num_decodes: int) -> Inputs:
        kinds, device = len(self.kinds), self.device
        numbers = torch.empty(2 + kinds, num_tokens, dtype=torch.int64, device=device)
        tables = torch.empty(kinds, num_rows, self.tables.shape[2], dtype=torch.int32, device=device)
        batch = Batch(
            tables=dict(zip(self.kinds, tables.unbind(), strict=True)),
            slot_mappings=dict(zip(self.kinds, numbers[2:].unbind(), strict=True)),
            starts=starts,
            lengths=torch.empty(num_rows, dtype=torch.int32, device=device),
            num_decodes=num_decodes,
        )
        return Inputs(numbers[0], numbers[1], batch, numbers[2:], tables)

    def _allocate(self, cache: KV, num_blocks: int) -> Tensor:
        shape = (num_blocks, self.block_size, *(int(dim) for dim in cache.type.shape))
        nbytes = num_blocks * self.block_size * cache.type.num_bytes
        has, knob = ("system", "kv_cache_memory") if self.is_cpu else ("GPU", "gpu_memory_utilization")
        with naming_a_lack_of_memory(
            f"the KV cache of {cache.name} takes {nbytes} bytes, more than the {has} has: "
            f"lower serve.{knob}, or serve.num_kvcache_blocks where it is set"
        ):
            return zeros(shape, TORCH_DTYPES[cache.type.dtype], self.device)


def logits_type(graph: Graph) -> Type:
    """What its head gives of each row, [R, V]."""
    (logits,) = graph.programs[HEAD].results
    return logits.meta["type"]  # type: ignore[no-any-return]
