"""The roofline: the min time of a step, by rates measured here.

What a step has to read and to multiply is divided by these rates.

    costs = read_costs(compile_graph(config))
    limits = measure_limits("cpu", "bf16", acts_of(costs))  # bytes/s read, FLOP/s of matmuls
    work = step_work(costs, step)                           # {"matrix": Work(bytes, flops), "routing": Work(…), …}
    min_seconds(costs, step, limits)                        # no step of these rows takes less

It counts the weights, each read once a step (the head's if a row samples, an expert's with the probability that a
token chose it), the KV that the rows see, recurrent states, which are read and written, and the operations on all of
these; not activations, nor what runs of tokens are pooled of, nor what else is written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from atom.graph import TORCH_DTYPES, Graph, Program, Recipe, State, ops
from atom.graph.graph import call_of, names_of, node_leaves, type_of
from atom.graph.recipe_contents import held_bytes
from atom.graph.shares import active_fraction, group_of, num_parts, num_parts_of_group
from atom.graph.types import Type
from atom.jobs.bench.workload import Step
from atom.state_rules import StateRule

ATTENTION = (ops.paged_attention, ops.norm_rope_attention, ops.paged_mla_attention, ops.paged_mqa_attention)
INDEXERS = (ops.paged_index_topk, ops.paged_index_blocks)
UNPACKED = {ops.stream_logits: 1}  # multiply by a matrix that is never packed: its place
# whose second result is the ids of experts
ROUTERS = (ops.router, ops.add_norm_router, ops.sparse_mixer, ops.token_router)
READ_BYTES = {"cpu": 512 << 20}  # size of the buffer that is read: larger than any cache
OTHER_READ_BYTES = 2 << 30
BATCH_SECONDS = 0.02  # min seconds of a measurement
NUM_BATCHES = 5  # batches, of which the fastest counts
MATMUL_SECONDS = 0.005  # min seconds of a matmul that is large enough
ALL_READ = 0.99  # expected share of experts above which parts do not differ
NUM_DRAWS = 200  # of choices of experts, over which the busiest part is averaged
MATMUL_SIZES = [1 << power for power in range(9, 15)]


class Work(NamedTuple):
    bytes: float = 0.0  # read, and of recurrent states written
    flops: float = 0.0  # on numbers of the run's dtype
    fp8: float = 0.0  # operations on such numbers
    int8: float = 0.0

    def times(self, count: int) -> Work:
        return Work(*(each * count for each in self))


def total(works: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(*works, strict=True))) if (works := list(works)) else Work()


@dataclass(frozen=True)
class Limits:
    bandwidth: float  # bytes/s read
    flops: float  # FLOP/s of matmuls, in the dtype of the run or, on a CPU, in float32 if that is faster
    fp8: float | None = None  # the same of such numbers; None: as those of the run's dtype
    int8: float | None = None

    def of_each(self, ranks: int) -> Limits:
        """The limits of each of several ranks that share the machine."""
        return Limits(**{name: rate / ranks for name, rate in self.measured().items()})

    def seconds(self, work: Work) -> float:
        """The min seconds of some work, with reading and computing overlapped."""
        eight_bits = work.fp8 / (self.fp8 or self.flops) + work.int8 / (self.int8 or self.flops)
        return max(work.bytes / self.bandwidth, work.flops / self.flops + eight_bits)

    def measured(self) -> dict[str, float]:
        """The rates that are known, by name."""
        return {name: rate for name, rate in vars(self).items() if rate is not None}


class Matmul(NamedTuple):
    """A call that multiplies rows with a weight."""

    shape: tuple[int, ...]
    num_bytes: int  # of the weight, and of a bias
    num_elements: int
    share: float = 1.0  # share of the weight that a row is multiplied with: the experts that it chose
    parts: int = 1  # of the experts, of which each rank has one
    groups: int = 1  # whose rows come together
    act: str = "flops"  # the field of Work that its operations count for
    fmt: str | None = None  # of the weight, if it stays packed
    with_next: bool = False  # a kernel that multiplies by this weight does so by the next one

    def work(self, num_rows: int) -> Work:
        """The work of a matmul; of experts, the expected share that some row needs is read."""
        num_rows *= self.groups
        num_bytes = self.num_bytes * share_read(self.share, self.shape[0] * self.parts, self.parts, num_rows)
        return Work(num_bytes, **{self.act: 2.0 * num_rows * self.num_elements * self.share})


@cache
def share_read(share: float, num_experts: int, parts: int, num_rows: int) -> float:
    """The expected share of a weight that some row needs; of experts in parts, of the part of which most is needed.

    Rows choose that share of the experts, all equally likely.
    """
    expected = 1 - (1 - share) ** num_rows
    if parts == 1 or expected > ALL_READ:
        return float(expected)
    random, top_k = np.random.default_rng(0), round(share * num_experts)
    busiest = 0.0
    for _ in range(NUM_DRAWS):
        chosen = random.random((num_rows, num_experts)).argpartition(top_k - 1, axis=1)[:, :top_k]
        is_read = np.bincount(chosen.ravel(), minlength=num_experts) > 0
        busiest += is_read.reshape(parts, -1).mean(1).max()
    return busiest / NUM_DRAWS


class ChosenRule(NamedTuple):
    """Entries of which each query reads those that an indexer chose."""

    rule: StateRule
    most: int  # entries of a query

    def num_read(self, start: int, stop: int) -> int:
        """The max number of entries that queries at positions start to stop read, each once."""
        num_seen = self.rule.num_read(start, stop)
        return min(num_seen, self.most + num_seen - self.rule.num_read(start, start + 1))


class Attention(NamedTuple):
    """One layer's attention to entries of one kind."""

    window: int | None  # max entries that a query sees, its own included
    states: tuple[tuple[StateRule | ChosenRule, int], ...]  # that it reads: the rule, and the bytes of an entry
    decode_flops: int  # of a query and an entry that it sees
    prefill_flops: int  # the same, in a prompt
    weight: Matmul | None = None  # a further weight that it multiplies with
    every: int = 1  # tokens that have an entry together

    def work(self, step: Step) -> Work:
        window = self.window or 1 << 62
        flops = float(sum(min(context // self.every, window) for context in step.decodes) * self.decode_flops)
        flops += sum(visible_pairs(start, num, window, self.every) for start, num in step.chunks) * self.prefill_flops
        work = Work(float(sum(num_read(rule, step) * size for rule, size in self.states)), flops)
        return work if self.weight is None else total([work, self.weight.work(step.num_tokens)])


class Recurrence(NamedTuple):
    """One layer's recurrent op."""

    state: tuple[StateRule, int]  # the rule, and the bytes of an entry
    flops: int  # of a token

    def work(self, step: Step) -> Work:
        rule, num_bytes = self.state
        num_written = len(step.decodes) + step.num_drafts + len(step.chunks)  # of a draft too, which may be accepted
        return Work(float((num_read(rule, step) + num_written) * num_bytes), float(step.num_tokens * self.flops))


def num_read(rule: StateRule | ChosenRule, step: Step) -> int:
    """The number of entries of a state that the step reads."""
    decodes = sum(rule.num_read(context - 1, context) for context in step.decodes)
    return decodes + sum(rule.num_read(start, start + num_tokens) for start, num_tokens in step.chunks)


@dataclass
class Costs:
    """The costs of one run of a program: what it reads and computes."""

    num_bytes: int = 0  # of weights that are in no matmul: norms
    matmuls: list[Matmul] = field(default_factory=list)  # in order, without those of routers
    routing: list[Matmul] = field(default_factory=list)  # in order
    attention: list[Attention] = field(default_factory=list)  # in order
    recurrent: list[Recurrence] = field(default_factory=list)  # in order

    def work(self, num_rows: int) -> Work:
        """The work without attention, recurrent ops and routers; none without rows."""
        return total([Work(self.num_bytes), work_of(self.matmuls, num_rows)]) if num_rows else Work()


def work_of(matmuls: Sequence[Matmul], num_rows: int) -> Work:
    return total(matmul.work(num_rows).times(count) for matmul, count in Counter(matmuls).items())


def read_costs(graph: Graph) -> dict[str, Costs]:
    """Read the costs of each program off the lowered graph."""
    return {name: program_costs(program) for name, program in graph.programs.items()}


def acts_of(costs: Mapping[str, Costs]) -> set[str]:
    """The formats of 8 bits of the activations that matmuls multiply."""
    return {matmul.act for each in costs.values() for matmul in each.matmuls} & MATMULS.keys()


def program_costs(program: Program) -> Costs:
    return costs_of(program.nodes)


def costs_of(nodes: Iterable[Node]) -> Costs:
    """The costs of some calls of a program."""
    costs = Costs()
    for node in nodes:
        assert isinstance(node.target, ops.Op)
        if node.target is ops.embedding:  # a token takes one row of it
            continue
        weights = [
            leaf for leaf in node_leaves(node) if isinstance(leaf, Recipe) and leaf.type.dtype != "i64"
        ]  # a table
        matmuls = find_matmuls(node, weights)
        if node.target in ATTENTION:
            costs.attention += attention_costs(node, matmuls[0] if matmuls else None)
        elif node.target in INDEXERS:
            costs.attention.append(index_costs(node))
        elif node.target.state_flops:
            costs.recurrent += recurrence_costs(node)
        elif node.target in ROUTERS:
            costs.routing += matmuls
        else:
            costs.matmuls += matmuls
        if not matmuls:
            costs.num_bytes += sum(map(held_bytes, weights))
    return costs


def find_matmuls(node: Node, weights: Sequence[Recipe]) -> list[Matmul]:
    """The matmuls of a call whose weights include a matrix or stacks of experts' matrices; none of others."""
    if not node.target.weights and node.target not in UNPACKED:
        return []
    if node.target is ops.experts:
        return [matmul for place in node.target.weights for matmul in expert_matmuls(node, place)]
    place = UNPACKED.get(node.target)
    matrix = type_of(node.args[node.target.weight if place is None else place])
    shape = tuple(int(size) for size in matrix.shape)
    parts = groups = 1
    if node.target is ops.grouped_linear:
        group = group_of(node)
        parts = num_parts_of_group(group)
        groups = _num_groups(group.args[0])
    act = str(node.kwargs.get("act", "flops")).partition("[")[0]
    num_bytes, share = sum(map(held_bytes, weights)), float(active_fraction(node))
    return [Matmul(shape, num_bytes, matrix.num_elements, share, parts, groups, act, matrix.fmt)]


def expert_matmuls(node: Node, place: int) -> list[Matmul]:
    """The matmuls of `experts` with the weight at a place: with those chosen, and with those of all tokens."""
    weight, bias = node.args[place], node.args[place + 2] if len(node.args) > place + 2 else None
    num_bytes = held_bytes(weight) + (0 if bias is None else held_bytes(bias))
    experts, *rest = (int(size) for size in weight.type.shape)
    router, top_k = call_of(node.args[2]), int(node.args[2].meta["type"].shape[1])
    shared = router.kwargs.get("shared", 0)
    parts, act = num_parts(node), str(node.kwargs.get("act", "flops")).partition("[")[0]
    sizes = ((experts - shared, (top_k - shared) / ((experts - shared) * parts), shared > 0), (shared, 1.0, False))
    return [
        Matmul(
            (num, *rest), num_bytes * num // experts, weight.type.num_elements * num // experts, share,
            parts, _num_groups(node.args[0]), act, weight.type.fmt, with_next,
        )
        for num, share, with_next in sizes
        if num
    ]  # fmt: skip


def _num_groups(rows: Node) -> int:
    """The number of groups of ranks that these tokens belong to."""
    return int(rows.meta["type"].bytes_per_token // rows.meta["type"].row.num_bytes)


def find_states(node: Node) -> list[State]:
    """The states that a call reads."""
    return [leaf for leaf in node_leaves(node) if isinstance(leaf, State)]


def num_chosen(node: Node) -> int | None:
    """The max number of entries that a query attends to, of those that an indexer chose; None: of all."""
    names = names_of(node.target, len(node.args), *node.kwargs)
    if "selected" not in names or (selected := node.args[names.index("selected")]) is None:
        return None
    return int(selected.meta["type"].shape[2]) * int(node.kwargs.get("block", 1))


def index_costs(node: Node) -> Attention:
    """Of scores of all keys, by the heads of an indexer."""
    heads, dim = (int(size) for size in node.args[0].meta["type"].shape[1:])
    return _attention(None, find_states(node), 2 * heads * dim)


def attention_costs(node: Node, weight: Matmul | None) -> list[Attention]:
    """Of tokens, and of runs of tokens if the call reads their entries, too; what is chosen are the latter."""
    most, states = num_chosen(node), find_states(node)
    query: Type = node.args[0].meta["type"]  # [T, N, D]
    heads, dim = (int(size) for size in query.shape[1:])
    if weight is None:
        flops, window = 4 * heads * dim, node.kwargs.get("window")
        if runs := [state for state in states if state.rule.entry_tokens > 1]:
            tokens = [state for state in states if state not in runs]
            return [_attention(window, tokens, flops), _attention(None, runs, flops, most)]
        return [_attention(window, states, flops, most)]
    rows, rank = weight.shape  # latent: [N (P + U), L], where a head has P = dim plain dims and U of a value
    entry, value = rank + int(node.args[1].meta["type"].shape[-1]), rows // heads - dim
    absorbed, expanded = 2 * heads * (entry + rank), 2 * heads * (dim + entry - rank + value)
    return [_attention(None, states, absorbed, most)._replace(prefill_flops=expanded, weight=weight)]


def _attention(window: int | None, states: Sequence[State], flops: int, most: int | None = None) -> Attention:
    """The attention to states of one rule. most: entries that an indexer chose; None: it reads all"""
    rules = (state.rule if most is None else ChosenRule(state.rule, most) for state in states)
    sizes = (state.type.num_bytes for state in states)
    every = states[0].rule.entry_tokens
    return Attention(window if most is None else most, tuple(zip(rules, sizes, strict=True)), flops, flops, every=every)


def recurrence_costs(node: Node) -> list[Recurrence]:
    states = [leaf for leaf in node_leaves(node) if isinstance(leaf, State)]
    flops = node.target.state_flops
    return [Recurrence((each.rule, each.type.num_bytes), flops * each.type.num_elements) for each in states]


def step_work(costs: Mapping[str, Costs], step: Step) -> dict[str, Work]:
    """The work of a step by kind: matmuls with weights, routers, attention, and recurrent ops."""
    runs = step.runs(costs)

    def of_layers(kind: Literal["attention", "recurrent"]) -> Work:
        layers = ((run.step, Counter(getattr(costs[run.program], kind))) for run in runs)
        return total(layer.work(seen).times(count) for seen, counts in layers for layer, count in counts.items())

    return {
        "matrix": total(costs[run.program].work(run.num_rows) for run in runs),
        "routing": total(work_of(costs[run.program].routing, run.num_rows) for run in runs),
        "attention": of_layers("attention"),
        "recurrent": of_layers("recurrent"),
    }


def min_seconds(costs: Mapping[str, Costs], step: Step, limits: Limits) -> float:
    """The min seconds of a step, whose data groups compute at the same time."""
    return max(limits.seconds(total(step_work(costs, each).values())) for each in step.groups or (step,))


def visible_pairs(start: int, num_tokens: int, window: int, every: int = 1) -> int:
    """The number of pairs of query and visible entry, for queries at positions start to start + num_tokens.

    window: max entries that a query sees
    every: tokens that have an entry together, which is visible from the last of them on
    """

    def first_pairs(num: int) -> int:
        growing = min(num, window * every - 1)  # queries that see all entries before them
        whole, rest = divmod(growing, every)
        return every * whole * (whole - 1) // 2 + whole * (rest + 1) + (num - growing) * window

    return first_pairs(start + num_tokens) - first_pairs(start)


def measure_limits(device: str, dtype: str, acts: Iterable[str] = ()) -> Limits:
    """Measure this machine's limits, which takes some seconds; all memory is freed afterwards.

    acts: formats of 8 bits whose matmuls are measured too. They take no longer than those of dtype, which such numbers
    can be made into; nor do those of 16 bits on a CPU take longer than those of float32.
    """
    bandwidth = measure_reads(device, TORCH_DTYPES[dtype])
    dtypes = {TORCH_DTYPES[dtype], torch.float32} if device == "cpu" else {TORCH_DTYPES[dtype]}
    flops = max(measure_matmuls(device, each, torch.mm) for each in dtypes)
    rates = {act: max(flops, measure_act(device, act)) for act in acts}
    limits = Limits(bandwidth, flops, **rates)
    if device != "cpu":
        torch.accelerator.empty_cache()
    return limits


def measure_reads(device: str, dtype: torch.dtype) -> float:
    """Measure bytes/s: the best of a sum, a copy (which writes as much), and a matrix-vector product."""
    num_bytes = READ_BYTES.get(device, OTHER_READ_BYTES)
    data = torch.full((num_bytes,), 0x3C, dtype=torch.uint8, device=device)  # unwritten pages would be one page
    wide, (source, target) = data.view(torch.float32), data.chunk(2)
    matrix = data.view(dtype).view(-1, 4096)
    vector = torch.zeros(4096, dtype=dtype, device=device)
    reads: list[Callable[[], object]] = [wide.sum, lambda: target.copy_(source), lambda: matrix @ vector]
    return max(data.nbytes / fastest(read, device) for read in reads)


def measure_matmuls(device: str, dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Measure FLOP/s of matmuls of square matrices, which grow until one takes long enough."""
    best = 0.0
    for size in MATMUL_SIZES:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = fastest(lambda a=a, b=b: multiply(a, b.t()), device)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds > MATMUL_SECONDS:
            break
    return best


def measure_act(device: str, act: str) -> float:
    """Measure FLOP/s of matmuls in a format of 8 bits; 0 if torch has none, as 2.11 for fp8 on a CPU."""
    try:
        return measure_matmuls(device, *MATMULS[act])
    except NotImplementedError:
        return 0.0


def multiply_fp8(a: Tensor, b: Tensor) -> Tensor:
    scale = torch.ones((), device=a.device)
    return F.scaled_mm(
        a, b, scale, F.ScalingType.TensorWise, scale, F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


MATMULS: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = {
    "fp8": (torch.float8_e4m3fn, multiply_fp8),
    "int8": (torch.int8, torch._int_mm),
}


@torch.inference_mode()
def fastest(call: Callable[[], object], device: str) -> float:
    """Seconds per call in the fastest of some batches, each long enough to hide the launch."""

    def batch(num_calls: int) -> float:
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait_for(device)
        return time.perf_counter() - started

    batch(1)
    num_calls = max(1, round(BATCH_SECONDS / batch(1)))
    return min(batch(num_calls) for _ in range(NUM_BATCHES)) / num_calls


def wait_for(device: str) -> None:
    """Wait until a device has finished its work."""
    if device != "cpu":
        torch.accelerator.synchronize()
