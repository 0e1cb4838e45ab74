"""Run a model on a device: weights, KV pool, request state.

It launches a step's kernels and does not wait for them.

model = Model(graph, Bindings(weights, code), 16, StepLimits(256, 8192, 4096), device="cuda")
model.bind({"full": 1024})
computed = model.decode(slots)                              # each row computes the newest token of its slot
tokens = model.sample(slots, computed.logits, "greedy")     # which are the newest ones from now on
model.follow(computed, slots)                               # if programs of the text draft
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from atom.config.limits import Drafting
from atom.errors import naming_a_lack_of_memory
from atom.graph import (
    BODY,
    DRAFT,
    DRAFT_HEAD,
    DRAFT_IN,
    HEAD,
    POOL,
    TORCH_DTYPES,
    VISION,
    Batch,
    Graph,
    State,
    Type,
    ops,
)
from atom.graph.batch import SharedPrefixes
from atom.graph.graph import ADAPTERS, STEERING
from atom.graph.shares import active_fractions
from atom.kernels import Communicator, find_step_kernels
from atom.kernels.stable_memory import StableMemory
from atom.kernels.step import BlockCopier, Inputs, StateCopier
from atom.runtime.images.encoder import ImageEncoder, SentImages, encoded_type
from atom.runtime.step.input import NUM_GROUPS, BatchShape, Encode, PackedRows, PrefixRule
from atom.runtime.step.program import Bindings, Executable, Hidden, Kernels, Watched, rows_of, score
from atom.runtime.step.request_state import RequestState, send, zeros
from atom.runtime.types import StepLimits


class Computed(NamedTuple):
    """The result of a step ahead of sampling."""

    inputs: Inputs
    hidden: Hidden  # what its head takes, of each token
    logits: Tensor | None  # [R, V] of rows that sample
    draft_logits: tuple[Tensor, ...] = ()  # [D, V] after the first drafts, the second ones, …, of decodes
    states: Hidden = ()  # what its draft_in takes, of each token
    unscored: Hidden = ()  # what its head takes of rows that sample, if logits are computed later
    taps: Hidden = ()  # of each token, what the layers give that are tapped


class Model:
    def __init__(
        self,
        graph: Graph,
        bindings: Bindings,
        block_size: int,
        limits: StepLimits,
        *,
        device: str,
        backend: str | None = None,
        drafting: Drafting | None = None,
        kinds: Sequence[str] | None = None,
        defers_logits: bool = False,
        kv_memory: StableMemory | None = None,
        prefix_rule: PrefixRule | None = None,
        image_rows: int = 0,
    ) -> None:
        """
        graph: the lowered graph
        bindings: weights and code; `bind` adds the caches before the first step
        block_size: tokens of a KV block
        limits: of steps and sequences
        device: cpu or cuda
        backend: whose kernels prepare and sample a step; None: the device's first one
        drafting: how decodes draft tokens; None: they do not, or the host drafts them
        kinds: the state kinds of all pipeline stages with an entry for each token; None: the graph's
        defers_logits: the head runs later, once another stage has sent the hidden states
        kv_memory: the memory for the caches; None: torch's
        prefix_rule: when steps group decodes with a common prefix; None: never
        image_rows: rows of encoded images to keep, if the graph encodes images
        """
        self.graph, self.block_size, self.limits = graph, block_size, limits
        self.device = torch.device(device)
        self.is_cpu = self.device.type == "cpu"
        self._step = find_step_kernels(self.device.type, backend)
        self._bindings = bindings
        self.executables: dict[str, Executable] = {}
        self._thinned: dict[str, Executable] = {}  # made when they are first needed
        self.defers_logits, self._kv_memory, self.prefix_rule = defers_logits, kv_memory, prefix_rule
        states = graph.states()
        self.kinds = list(kinds or dict.fromkeys(state.kind for state in states if not state.rule.in_slot))
        self.recurrent = tuple(dict.fromkeys(state.kind for state in states if state.rule.in_slot))
        logits = logits_type(graph)
        self.logits_dtype = TORCH_DTYPES[logits.dtype]
        self.drafting, self.num_drafts = drafting, drafting.num_tokens if drafting else 0
        num_slots, width = limits.max_num_seqs, -(-(limits.max_model_len + self.num_drafts) // block_size)
        max_history = limits.max_model_len + self.num_drafts + 2 if drafting else 0
        given = {node.name: node.meta["type"] for node in graph.programs[BODY].inputs}
        self.num_scales = int(given[STEERING].shape[-1]) if STEERING in given else 0
        vocab = int(logits.shape[-1])
        self.state = RequestState(num_slots, vocab, device, self.num_drafts, max_history, self.num_scales)
        starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._starts = [starts * queries for queries in range(1, self.num_drafts + 2)]  # of decodes, by drafts
        self._num_following = torch.arange(self.num_drafts, -1, -1, dtype=torch.int32, device=device)[:, None]
        self.has_experts = any(
            node.target in (ops.experts, ops.grouped_linear) for each in graph.programs.values() for node in each.nodes
        )
        self.has_draft_programs = drafting is not None and drafting.has_programs
        self.carries_hidden = self.has_draft_programs and graph.carries_hidden
        self._state_copiers: dict[str, StateCopier] = {}
        self._image_rows = image_rows if VISION in graph.programs else 0
        self.images: ImageEncoder | None = None  # made by `bind`
        self._drafted = self._zero_drafted() if self.carries_hidden else []
        self._has_adapters = ADAPTERS in given
        num_read = sum(len(graph.programs[name].inputs) for name in (HEAD, *[DRAFT_IN] * self.carries_hidden))
        self.num_taps = max(len(graph.programs[BODY].results) - num_read, 0)
        first = len(graph.programs[HEAD].inputs)
        tapped = enumerate(graph.programs[BODY].results[first : first + self.num_taps])
        self.own_taps = {index for index, node in tapped if node.op != "placeholder"}  # not of another stage
        self._rates = torch.tensor(drafting.rates, device=device) if drafting and drafting.rates else None
        self.tables = torch.zeros(len(self.kinds), num_slots + 1, width, dtype=torch.int32, device=device)

    @property
    def padding(self) -> int:
        """The slot of padding rows."""
        return self.state.num_slots

    @cached_property
    def hidden_size(self) -> int:
        """H of the vectors that are pooled."""
        (vectors,) = self.graph.programs[POOL].results
        return int(vectors.meta["type"].shape[-1])

    @cached_property
    def flops_a_token(self) -> float:
        shares = active_fractions([self.graph.programs[BODY]])
        return 2 * float(sum(recipe.type.num_elements * share for recipe, share in shares.items()))

    @property
    def body(self) -> Executable:
        return self.executables[BODY]

    @property
    def head(self) -> Executable:
        return self.executables[HEAD]

    @property
    def caches(self) -> Mapping[State, Tensor]:
        return self._bindings.caches

    @property
    def slots(self) -> Mapping[State, Tensor]:
        """The recurrent states of all slots [slots + 1, num_states, …], see `ops.run_batch`."""
        return self._bindings.slots

    @property
    def communicator(self) -> Communicator | None:
        return self._bindings.communicator

    @property
    def kernels(self) -> Kernels:
        """The kernels that replace those which the text names."""
        return self._bindings.kernels

    def bind(self, num_blocks: Mapping[str, int]) -> None:
        """Allocate an empty KV pool and slots, once the former ones are freed. num_blocks: by state kind"""
        self.unbind()
        if self._kv_memory is not None:
            self._kv_memory.clear()
        states = self.graph.states()
        caches = {state: self._allocate(state, num_blocks[state.kind]) for state in states}
        num_states = self.limits.num_states
        slots = {
            state: made.view(-1, num_states, *made.shape[1:])
            for state in states
            if state.rule.in_slot
            for made in [self._allocate(state, (self.padding + 1) * num_states)]
        }
        for kind in self.recurrent:
            own = [state for state in slots if state.kind == kind]
            self._state_copiers[kind] = self._step.state_copier(
                [slots[state].flatten(0, 1) for state in own], [caches[state] for state in own]
            )
        if self._image_rows:
            limits = self.limits
            max_tokens = limits.max_num_batched_tokens + limits.max_num_seqs * (1 + self.num_drafts)  # with padding
            encoded = encoded_type(self.graph)
            kept = self._make((self._image_rows, int(encoded.shape[1])), TORCH_DTYPES[encoded.dtype])
            self.images = ImageEncoder(self.graph, kept, max_tokens)
        self._bind(self._bindings._replace(caches=caches, slots=slots))

    def unbind(self) -> None:
        """Drop the KV pool and all references to weights; call `bind` before the next step."""
        self._bindings = self._bindings._replace(caches={}, slots={})
        self._state_copiers, self.images = {}, None
        self.executables, self._thinned = {}, {}

    def use(self, kernels: Kernels) -> None:
        """Run these kernels in place of those that the text names. Captured graphs keep the old ones."""
        self._bind(self._bindings._replace(kernels=kernels))

    @contextmanager
    def thinned(self) -> Iterator[None]:
        """Within this context, equal calls of programs are made once, to find out what steps launch and keep."""
        whole = self.executables
        self._thinned = self._thinned or {
            name: Executable(program, self._bindings, thins=whole[name])
            for name, program in self.graph.programs.items()
        }
        self.executables = self._thinned
        try:
            yield
        finally:
            self.executables = whole

    @contextmanager
    def watched(self, watch: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
        """Within this context, show the values of each program to `watch`; see `Executable.trace`.

        watch: gets the name of the program, then its inputs or the results of a call, by their names
        """
        whole = self.executables
        self.executables = {name: Watched(each, functools.partial(watch, name)) for name, each in whole.items()}
        try:
            yield
        finally:
            self.executables = whole

    def clear_slots(self) -> None:
        """Reset slots and tables."""
        self.state.lengths.fill_(1)
        self.state.tokens.zero_()
        self.tables.zero_()

    def _bind(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self.executables = {name: Executable(program, bindings) for name, program in self.graph.programs.items()}
        self._thinned = {}

    def send(self, array: bytearray | npt.NDArray[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        """Copy an array to the device; the host does not wait."""
        return send(array, dtype, self.device)

    def extend_tables(self, entries: bytearray) -> None:
        """Write block numbers to the tables [C, slots, M].

        entries: i32[2, E], flat indices into the tables, and block numbers
        """
        self._step.extend_tables(self.tables, self.send(entries).view(2, -1))

    def restore_states(self, moves: Mapping[str, bytearray]) -> None:
        """Copy the recurrent states of blocks to slots. moves: as in `StepInput.restores`"""
        for kind, copier in self._state_copiers.items():
            if kind in moves:
                copier.to_slots(*self.send(moves[kind]).view(2, -1))

    def copy_states(self, moves: Mapping[str, bytearray], num_drawn: Tensor | None = None) -> None:
        """Copy the recurrent states of slots to blocks; if tokens are drafted, once a step has sampled.

        moves: as in `StepInput.copies`
        num_drawn: i64[R], the number of tokens that each row has drawn; None: no draft is in doubt
        """
        for kind, copier in self._state_copiers.items():
            if kind in moves:
                copier.to_blocks(*self._accepted(self.send(moves[kind]).view(4, -1), num_drawn))

    def _accepted(self, numbers: Tensor, num_drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states and the blocks of copies, block 0 for those that do not take place. numbers: i32[4, N]"""
        places, blocks, rows, ends = numbers
        if num_drawn is None:
            return places, blocks
        last = self.state.lengths[places // self.limits.num_states] - 1  # the newest token is not computed yet
        is_passed = (ends <= last) & (ends > last - num_drawn[rows.clamp(min=0)])
        return places, torch.where(is_passed | (rows < 0), blocks, 0)

    def block_copier(self, caches: Sequence[Tensor]) -> BlockCopier:
        """The copier of blocks of these caches [num_blocks, width] to rows and back; valid until `bind`."""
        return self._step.block_copier(caches)

    def decode(self, slots: Tensor, prefixes: Tensor | None = None) -> Computed:
        """Compute the newest tokens of slots i32[S]. prefixes: as in `StepInput.prefixes`; None: no groups"""
        return self._compute(self._decode_inputs(slots, prefixes=prefixes))

    def decode_drafts(
        self, slots: Tensor, max_accepted: Tensor, num_drafts: int, prefixes: Tensor | None = None
    ) -> Computed:
        """Draft for slots, and compute their newest tokens and drafts.

        slots: i32[S]
        max_accepted: i32[S], the drafts of each that may be accepted, which have blocks
        num_drafts: of each
        prefixes: as in `decode`
        """
        assert self.drafting is not None
        self._find_ngrams(slots)
        inputs = self._decode_inputs(slots, max_accepted, num_drafts, prefixes)
        self._draft(slots, inputs)
        computed = self._compute(inputs)
        assert computed.logits is not None
        first, *others = computed.logits.view(len(slots), 1 + num_drafts, -1).unbind(1)
        return computed._replace(logits=first, draft_logits=tuple(others))

    def encode(self, encode: Encode) -> None:
        """Encode images, and keep their rows for the steps that follow."""
        assert self.images is not None, "the graph encodes images"
        self.images.run(self.executables[VISION], encode, self.send)

    def mix(
        self, shape: BatchShape, packed: Tensor, prefixes: Tensor | None = None, images: SentImages | None = None
    ) -> Computed:
        """Compute a step with prompts.

        packed: i32, as in `BatchShape.split`
        prefixes: as in `decode`
        images: of the tokens; None: all of them are text
        """
        rows = shape.split(packed)
        num_decodes, num_drafts = shape.num_decodes, shape.num_drafts
        decoding = rows.slots[:num_decodes] if num_drafts else rows.slots[:0]
        self._find_ngrams(decoding)
        inputs = self._inputs(shape.num_tokens, rows.slots, rows.starts, num_decodes, 1 + num_drafts, prefixes)
        self._step.mixed_inputs(rows, self.state, self.tables, self.block_size, inputs)
        inputs = self._extend(inputs, lambda: rows.slots.index_select(0, rows.row_of), images)
        self._draft(decoding, inputs)
        hidden, states, taps = self._run_body(inputs)
        if not shape.num_samples:
            return Computed(inputs, hidden, None, states=states, taps=taps)
        token_index = rows.token_index.long()
        if num_drafts:
            drafted = token_index[:num_decodes] + torch.arange(1, 1 + num_drafts, device=self.device)[:, None]
            token_index = torch.cat([token_index, drafted.clamp(max=shape.num_tokens - 1).view(-1)])
        sampled = rows_of(hidden, token_index)
        if self.defers_logits:
            return Computed(inputs, hidden, None, states=states, unscored=sampled, taps=taps)
        sizes = [shape.num_samples] + [num_decodes] * num_drafts
        first, *others = torch.split(score(self.head, sampled), sizes)
        return Computed(inputs, hidden, first, tuple(others), states, taps=taps)

    def follow(self, computed: Computed, slots: Tensor, rows: PackedRows | None = None) -> None:
        """Run the draft over a step's tokens, which writes its KV, and keep what the next drafts begin with.

        Comes after the step has sampled, since a draft that takes a hidden state reads the token after it.

        computed: the step
        slots: i32[R], that sampled
        rows: of a step with prompts; None: all rows are decodes, with drafts or without
        """
        inputs = computed.inputs
        if not self.carries_hidden:
            self.executables[DRAFT](inputs._asdict())
            return
        tokens, token_index = self._step.draft_inputs(slots, rows, self.state, inputs)
        draft_in = self.executables[DRAFT_IN]
        (hidden,) = draft_in(dict(zip(draft_in.inputs, computed.states, strict=True)))
        drafted = self.executables[DRAFT]({**inputs._asdict(), "tokens": tokens, "hidden": hidden})
        for kept, values in zip(self._drafted, drafted, strict=True):
            self._step.keep_rows(kept, slots, values, token_index)

    def sample(self, slots: Tensor, logits: Tensor, kind: str, penalties: bool = False) -> Tensor:
        """Sample tokens i64[R], which are the newest of their slots from now on, and reported.

        slots: i32[R]
        logits: [R, V]
        kind: one of SAMPLING_KINDS
        penalties: some row has penalties
        """
        out = torch.empty(len(slots), dtype=torch.int64, device=self.device)
        self._step.sample(logits, slots, self.state, kind, out, penalties)
        return out

    def verify(
        self, slots: Tensor, max_accepted: Tensor, logits: Sequence[Tensor], kind: str, penalties: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample after each draft that equals the draw before it; the newest tokens of the slots are the last drawn.

        Returns tokens i64[1 + drafts, S], -1 if none was drawn, and the drafts i64[S, drafts].

        slots, max_accepted: as in `decode_drafts`
        logits: [S, V] after the newest token, then after each draft, of all rows or the first ones
        kind, penalties: as in `sample`
        """
        drawn = torch.empty(len(logits), len(slots), dtype=torch.int64, device=self.device)
        left = slots.repeat(len(logits), 1)  # the slots whose draws go on, else that of padding
        for depth, rows in enumerate(logits):
            if depth:
                self._step.accept(drawn, left, max_accepted, self.state, depth, self._rates)
            num_rows = len(rows)
            self._step.sample(rows, left[depth, :num_rows], self.state, kind, drawn[depth, :num_rows], penalties)
        return drawn, self._step.finish_drafts(drawn, left, slots, self.state, self._rates is not None)

    def score_drawn(
        self, logits: Tensor, rows: Tensor, drawn: Tensor, totals: Tensor, chosen: Tensor, ranks: Tensor
    ) -> None:
        """See `kernels.torch.sampling.score_drawn`."""
        self._step.score_drawn(logits, rows, drawn, totals, chosen, ranks)

    def pool(self, hidden: Hidden, token_index: Tensor, owners: Tensor, sums: Tensor) -> None:
        """Add the vectors of the tokens token_index i64[R] to the sums fp32[P, H] of their owners i64[R]."""
        sums.index_add_(0, owners, score(self.executables[POOL], rows_of(hidden, token_index)).float())

    def _compute(self, inputs: Inputs) -> Computed:
        hidden, states, taps = self._run_body(inputs)
        if self.defers_logits:
            return Computed(inputs, hidden, None, states=states, unscored=hidden, taps=taps)
        return Computed(inputs, hidden, score(self.head, hidden), states=states, taps=taps)

    def _run_body(self, inputs: Inputs) -> tuple[Hidden, Hidden, Hidden]:
        """Run the body; the results that the head takes, those that draft_in takes, and the taps between them."""
        results: Hidden = self.body(inputs._asdict())
        num_taken = len(self.head.inputs)
        num_states = len(self.executables[DRAFT_IN].inputs) if self.carries_hidden else 0
        taps = results[num_taken : num_taken + self.num_taps]
        return results[:num_taken], results[len(results) - num_states :], taps

    def _find_ngrams(self, slots: Tensor) -> None:
        """Draft for slots i32[S] by prompt lookup, if neither a program nor the host drafts."""
        if len(slots) and self.drafting and not self.has_draft_programs and self.drafting.suffix is None:
            self._step.find_ngrams(slots, self.state, self.drafting.min_n, self.drafting.max_n)

    def _draft(self, slots: Tensor, inputs: Inputs) -> None:
        """Draft token by token with the text's programs, if any, and write the drafts to `inputs` and the state.

        A draft uses the noise of the draw that it predicts.

        slots: i32[D], those of the decodes in `inputs`
        """
        if not len(slots) or not self.has_draft_programs:
            return
        assert self.state.drafts is not None
        num_drafts, num_tokens = inputs.batch.query_len - 1, len(slots) * inputs.batch.query_len
        tokens = inputs.tokens[:num_tokens].view(len(slots), -1)
        hidden: Hidden = ()
        lag = int(
            self.carries_hidden
        )  # hidden states of the newest token are known, so DRAFT runs from the next one on
        if self.carries_hidden:
            hidden = tuple(kept.index_select(0, slots) for kept in self._drafted)
        head = self.executables[DRAFT_HEAD]
        keys, *rest = self._step.draw_noise(slots, self.state, num_drafts)
        drafted, parts = list[Tensor](), self._split_by_query(inputs, len(slots)) if num_drafts > lag else []
        for number in range(num_drafts):
            if number >= lag:
                positions, batch = parts[number - lag]
                token = drafted[-1] if drafted else tokens[:, 0].contiguous()
                taken = {"tokens": token, "positions": positions, "batch": batch}
                hidden = self.executables[DRAFT](taken | ({"hidden": hidden[0]} if self.carries_hidden else {}))
            token, *states = head(dict(zip(head.inputs, (*hidden, keys[number], *rest), strict=True)))
            hidden = tuple(states) or hidden
            drafted.append(token)
        tokens[:, 1:] = torch.stack(drafted, 1)
        self.state.drafts[:, :num_drafts].index_copy_(0, slots.long(), tokens[:, 1:])

    def _split_by_query(self, inputs: Inputs, num_rows: int) -> list[tuple[Tensor, Batch]]:
        """The positions i64[S] of each row's first token, second token and so on, each with a batch of these tokens."""
        batch, num_queries = inputs.batch, inputs.batch.query_len
        some = slice(num_rows * num_queries)
        positions = aligned(inputs.positions[some].view(num_rows, num_queries).T)
        mappings = aligned(inputs.slots[:, some].view(-1, num_rows, num_queries).permute(2, 0, 1))
        lengths = aligned(batch.lengths[:num_rows].expand(num_queries, -1)).sub_(self._num_following[-num_queries:])
        tables = {kind: table[:num_rows] for kind, table in batch.tables.items()}
        starts = self._starts[0][: num_rows + 1]
        slots = None if batch.slots is None else batch.slots[:num_rows]
        batches = (
            Batch(
                tables,
                dict(zip(self.kinds, each.unbind(), strict=True)),
                starts,
                length,
                num_rows,
                slots=slots,
                block_size=self.block_size,
            )
            for each, length in zip(mappings, lengths, strict=True)
        )
        return list(zip(positions, batches, strict=True))

    def _decode_inputs(
        self, slots: Tensor, max_accepted: Tensor | None = None, num_drafts: int = 0, prefixes: Tensor | None = None
    ) -> Inputs:
        num_rows, query_len = len(slots), 1 + num_drafts
        starts = self._starts[num_drafts][: num_rows + 1]
        inputs = self._inputs(num_rows * query_len, slots, starts, num_rows, query_len, prefixes)
        self._step.decode_inputs(slots, self.state, self.tables, self.block_size, inputs, max_accepted)
        return self._extend(inputs, lambda: slots if query_len == 1 else slots.repeat_interleave(query_len))

    def _extend(self, inputs: Inputs, find_slots: Callable[[], Tensor], images: SentImages | None = None) -> Inputs:
        """Add what a body takes of a token besides. find_slots: those of the tokens i32[T]"""
        if not (self._has_adapters or self.num_scales or self.images is not None):
            return inputs
        slots, state = find_slots(), self.state
        if self._has_adapters:
            inputs = inputs._replace(adapters=state.adapters.index_select(0, slots))
        if state.steering is not None:
            inputs = inputs._replace(steering=state.steering.index_select(0, slots))
        return inputs if self.images is None else self.images.extend(inputs, slots, state, images)

    def _inputs(
        self,
        num_tokens: int,
        slots: Tensor,
        starts: Tensor,
        num_decodes: int,
        query_len: int,
        prefixes: Tensor | None,
    ) -> Inputs:
        kinds, device, num_rows = len(self.kinds), self.device, len(slots)
        numbers = torch.empty(2 + kinds, num_tokens, dtype=torch.int64, device=device)
        tables = torch.empty(kinds, num_rows, self.tables.shape[2], dtype=torch.int32, device=device)
        batch = Batch(
            tables=dict(zip(self.kinds, tables.unbind(), strict=True)),
            slot_mappings=dict(zip(self.kinds, numbers[2:].unbind(), strict=True)),
            starts=starts,
            lengths=torch.empty(num_rows, dtype=torch.int32, device=device),
            num_decodes=num_decodes,
            query_len=query_len,
            slots=slots if self.recurrent else None,
            prefixes=None if prefixes is None else self._split_prefixes(prefixes, num_decodes),
            block_size=self.block_size,
        )
        return Inputs(numbers[0], numbers[1], batch, numbers[2:], tables)

    def _split_prefixes(self, prefixes: Tensor, num_decodes: int) -> SharedPrefixes:
        assert self.prefix_rule is not None, "only by a rule are decodes grouped"
        parts = torch.split(prefixes, [num_decodes, num_decodes, NUM_GROUPS + 1])
        return SharedPrefixes(self.prefix_rule.kind, *parts)

    def _zero_drafted(self) -> list[Tensor]:
        """Zeros, by slot, for the results of DRAFT from which a slot's first draft is computed."""
        types = [node.meta["type"] for node in self.graph.programs[DRAFT].results]
        shapes = [(self.padding + 1, *map(int, each.shape[1:])) for each in types]
        return [
            torch.zeros(shape, dtype=TORCH_DTYPES[each.dtype], device=self.device)
            for shape, each in zip(shapes, types, strict=True)
        ]

    def _allocate(self, state: State, num_blocks: int) -> Tensor:
        block = state.block(self.block_size)
        shape, dtype = (num_blocks, *map(int, block.shape)), TORCH_DTYPES[block.dtype]
        nbytes = num_blocks * block.num_bytes
        has, knob = ("system", "kv_cache_memory") if self.is_cpu else ("GPU", "gpu_memory_utilization")
        with naming_a_lack_of_memory(
            f"the KV cache of {state.name} takes {nbytes} bytes, more than the {has} has: "
            f"lower serve.{knob}, or serve.num_kvcache_blocks if set"
        ):
            return self._make(shape, dtype)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in the memory of the caches."""
        return zeros(shape, dtype, self.device) if self._kv_memory is None else self._kv_memory.zeros(shape, dtype)


def aligned(x: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes, as kernels require. x: of 4 or 8 bytes a number"""
    size = x.shape[-1]
    return x.new_empty(*x.shape[:-1], -(-size // 4) * 4)[..., :size].copy_(x)


def logits_type(graph: Graph) -> Type:
    """The type of the logits [R, V] that its head gives."""
    (logits,) = graph.programs[HEAD].results
    return logits.meta["type"]  # type: ignore[no-any-return]
