"""A model on a device: its weights, KV pool and slots, and what a step starts there. Nothing here waits for the device.

model = DeviceModel(graph, weights, {"full": 1024}, 16, device="cuda", max_num_seqs=256, max_model_len=4096)
logits = model.decode(rows)                     # each row computes the newest token of its slot
tokens = model.sample(rows, logits, "greedy")   # which are the newest ones from now on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atom.errors import naming_a_lack_of_memory
from atom.graph import KV, TORCH_DTYPES, Graph, Recipe
from atom.graph.ops import Op
from atom.graph.shares import token_shares
from atom.pieces import PieceCode
from atom.runtime.batch_shape import Layout
from atom.runtime.program import Executable, Hidden, rows_of, score
from atom.runtime.request_state import Slots

Kernels = Mapping[tuple[Op, str], Callable[..., Any]]  # by op and backend
KINDS = ("greedy", "random", "cut")  # of sampling: each takes the rows of those before it too


class DeviceModel:
    def __init__(
        self,
        graph: Graph,
        weights: Mapping[Recipe, Any],
        num_blocks: Mapping[str, int],
        block_size: int,
        code: Mapping[str, PieceCode],
        *,
        device: str,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """num_blocks by cache kind; code by the text of a piece"""
        from atom.kernels.triton import prepare_inputs, sampling

        self._prepare_inputs, self._sampling = prepare_inputs, sampling
        self._graph, self._weights, self._code = graph, weights, code
        self._kernels: Kernels = {}
        self.device, self.block_size = torch.device(device), block_size
        self.kinds = list(dict.fromkeys(cache.kind for cache in graph.caches()))
        (logits,) = graph.programs["head"].results
        self.logits_dtype = TORCH_DTYPES[logits.meta["type"].dtype]
        self.slots = Slots(max_num_seqs, logits.meta["type"].shape[-1], device)
        shares = token_shares([graph.programs["body"]])
        self.flops_a_token = 2 * float(sum(recipe.type.num_elements * share for recipe, share in shares.items()))
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)  # of decodes
        width = -(-max_model_len // block_size)
        self.tables = torch.zeros(len(self.kinds), max_num_seqs + 1, width, dtype=torch.int32, device=device)
        self.bind(num_blocks)

    @property
    def padding(self) -> int:
        """The slot of rows that only fill a batch up."""
        return self.slots.num_slots

    def bind(self, num_blocks: Mapping[str, int]) -> None:
        """Take another KV pool, empty."""
        self.caches: dict[KV, Tensor] = {}
        self.caches = {cache: self._allocate(cache, num_blocks[cache.kind]) for cache in self._graph.caches()}
        self.use(self._kernels)

    def use(self, kernels: Kernels) -> None:
        """Run these in place of the kernels that the text names; what was captured keeps to those of before."""
        self._kernels = kernels
        body, head = self._graph.programs["body"], self._graph.programs["head"]
        self._body = Executable(body, self._weights, self.caches, self._code, kernels)
        self.head = Executable(head, self._weights, self.caches, self._code, kernels)

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy on the device, which the host does not wait for."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def extend_tables(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Write block numbers to the tables [C, slots, M], at places counted through all of them."""
        self._prepare_inputs.extend_tables(self.tables, self.send(np.array([places, blocks], np.int32)))

    def decode(self, rows: Tensor) -> Tensor:
        """rows: i32[S] of slots, each of which computes its newest token -> logits [S, V]"""
        size = len(rows)
        inputs = self._inputs(size, size)
        self._prepare_inputs.feed_decodes(rows, self.slots, self.tables, self.block_size, inputs)
        return score(self.head, self._body(self._named(inputs, self._starts[: size + 1], size)))

    def mix(self, layout: Layout, packed: Tensor) -> tuple[Hidden, Tensor | None]:
        """A step that a layout describes -> what its head takes, of each token; logits [R, V] where rows sample"""
        inputs = self._inputs(layout.num_tokens, layout.num_rows)
        rows, starts, ends, given, row_of = layout.rows(packed)
        self._prepare_inputs.feed_rows(
            rows, given, row_of, starts, ends, self.slots, self.tables, self.block_size, inputs
        )
        hidden = self._body(self._named(inputs, starts, layout.num_decodes))
        if not layout.num_samples:
            return hidden, None
        _, places = layout.samples(packed)
        return hidden, score(self.head, rows_of(hidden, places.long()))

    def sample(self, rows: Tensor, logits: Tensor, kind: str, penalties: bool = False) -> Tensor:
        """rows: i32[R] of slots, logits [R, V] -> tokens i64[R], the newest of their slots from now on, and reported"""
        out = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        self._sampling.sample(logits, rows, self.slots, kind, out, penalties)
        return out

    def top_logprobs(self, logits: Tensor, rows: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """logits [R, V], rows i64[A] of them -> see `kernels.triton.sampling.top_logprobs`"""
        return self._sampling.top_logprobs(logits, rows, num_top)

    def score_drawn(
        self, logits: Tensor, rows: Tensor, drawn: Tensor, totals: Tensor, chosen: Tensor, ranks: Tensor
    ) -> None:
        """drawn i64[R] -> see `kernels.triton.sampling.score_drawn`"""
        self._sampling.score_drawn(logits, rows, drawn, totals, chosen, ranks)

    def _inputs(self, num_tokens: int, num_rows: int) -> Any:
        kinds, device = len(self.kinds), self.device
        numbers = torch.empty(2 + kinds, num_tokens, dtype=torch.int64, device=device)
        return self._prepare_inputs.Inputs(
            tokens=numbers[0],
            positions=numbers[1],
            lengths=torch.empty(num_rows, dtype=torch.int32, device=device),
            slots=numbers[2:],
            tables=torch.empty(kinds, num_rows, self.tables.shape[2], dtype=torch.int32, device=device),
        )

    def _named(self, inputs: Any, starts: Tensor, num_decodes: int) -> dict[str, Any]:
        """The inputs under the names that a lowered body has for them."""
        named = {
            "tokens": inputs.tokens,
            "positions": inputs.positions,
            "lengths": inputs.lengths,
            "starts": starts,
            "num_decodes": num_decodes,
        }
        for kind, name in enumerate(self.kinds):
            named[f"slots_{name}"], named[f"table_{name}"] = inputs.slots[kind], inputs.tables[kind]
        return named

    def _allocate(self, cache: KV, num_blocks: int) -> Tensor:
        shape = (num_blocks, self.block_size, *(int(dim) for dim in cache.type.shape))
        nbytes = num_blocks * self.block_size * cache.type.num_bytes
        with naming_a_lack_of_memory(
            f"the KV cache of {cache.name} takes {nbytes} bytes, more than the GPU has: "
            "lower serve.gpu_memory_utilization, or serve.num_kvcache_blocks where it is set"
        ):
            return torch.zeros(shape, dtype=TORCH_DTYPES[cache.type.dtype], device=self.device)
