"""Divide the model among the ranks of a mesh.

    q = linear(h, W("q", bf16[4096, 4096]))         q = linear(h, share(W("q", …), "tensor", 4))
    a = attention(q, k, v, KV("0", …), …)     ->    a = attention(q, k, v, KV("0", …), …)    # of a quarter of the heads
    o = linear(a, W("o", bf16[4096, 4096]))         o = linear(a, share(W("o", …), "tensor", 4, dim=1))
    x = add(x, o)                                   o = all_reduce(o)
                                                    x = add(x, o)

It comes ahead of all others but split_stages, so that these see the shapes of one rank; the text is the same for all
ranks of a stage. A value is whole on each rank, divided along its last dim or its heads, or partial: the ranks' values
add up to it. A linear of a whole value divides its outputs where attention or an mlp reads them; one of a divided value
is partial, and is summed where something reads it that needs the sum. (Shoeybi et al. 2019; the heads of grouped
queries: a kv head is copied if ranks are more.)

Other ops say themselves what they divide, see `Op.heads`: those of recurrent layers. Columns that a linear computes for
several values are divided value by value:

    m = linear(h, W("m", bf16[96, 64]))             m = linear(h, cat([share(slice(W("m", …), 0, 64), "tensor", 2), …]))
    x, b = split(m, sizes=[64, 32])           ->    x, b = split(m, sizes=[32, 16])

All this is of the ranks along `tensor`. Along `data`, ranks have tokens of their own, which meet in experts only:

    y = experts(h, weights, ids, …)           ->    rows, row_weights, row_ids = gather_tokens(h, weights, ids, …)
                                                    y = experts(rows, row_weights, row_ids, …)    # of its experts
                                                    y = reduce_scatter(y, axis="data", ranks=2)

A program that encodes images is whole on each rank if its heads do not divide.

If context.dispatches, `dispatch` and `collect` take the places of the two collectives. Experts in several calls, each
of which has a norm of its own, keep their width: a rank has some of them, or all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch.fx import Node

from atom.errors import UnsupportedError
from atom.graph import (
    DRAFT_HEAD,
    HEAD,
    Cat,
    Dequantize,
    Graph,
    Mesh,
    Offset,
    Once,
    Program,
    Recipe,
    Regroup,
    Share,
    Stack,
    ops,
    recipes,
)
from atom.graph.formats import block_size, parse_format, with_block
from atom.graph.graph import call_of, rename, results_of
from atom.graph.ops import Op
from atom.graph.parts import aligned, cuts_blocks, is_scaled_as_one
from atom.graph.recipe_contents import slices
from atom.graph.recipe_ranges import cat, narrow
from atom.graph.recipes import leaves
from atom.passes.context import PassContext


@dataclass(frozen=True)
class Divided:
    """A value in equal parts.

    copies: neighbouring ranks that have the same one.
    """

    copies: int = 1


@dataclass(frozen=True)
class Joined:
    """Values side by side, each in equal parts."""

    parts: tuple[tuple[int, Divided], ...]  # of each value, the columns of all ranks

    @property
    def copies(self) -> int:
        return min(state.copies for _, state in self.parts)

    def split(self, sizes: Iterable[int]) -> Iterator[Divided | Joined]:
        """The states of some values side by side, of this many columns each."""
        parts = iter(self.parts)
        for size in sizes:
            own = [next(parts)]
            while sum(columns for columns, _ in own) < size:
                own.append(next(parts))
            yield own[0][1] if len(own) == 1 else Joined(tuple(own))


WHOLE, PARTIAL = "whole", "partial"
State = str | Divided | Joined
Handler = Callable[["_Writer", Node], None]


def shard(graph: Graph, context: PassContext) -> Graph:
    mesh = context.mesh
    if mesh.ranks_per_stage == 1:
        return graph
    tables = {node.args[1] for name in (HEAD, DRAFT_HEAD) for node in _linears_of_logits(graph, name)}
    for name, program in graph.programs.items():
        if any(heads % mesh.tensor for heads in _heads_of_segments(program)):
            continue  # each rank encodes images by itself
        graph.programs[name] = _Writer(program, mesh, tables, context.dispatches).write()
        graph.num_rewrites += 1
    return graph


def _heads_of_segments(program: Program) -> Iterator[int]:
    """The heads of each attention to segments."""
    calls = (node for node in program.nodes if node.target is ops.segment_attention)
    return (int(node.meta["type"].shape[1]) for node in calls)


def _linears_of_logits(graph: Graph, program: str) -> Iterator[Node]:
    """The linears of a program whose outputs are the vocabulary."""
    if program in graph.programs:
        yield from (node for node in graph.programs[program].nodes if node.target is ops.linear and _is_logits(node))


def _is_logits(value: Node) -> bool:
    """Whether a value of the head is what it returns, or chooses by, but for ops on each element."""
    return all(
        user.op == "output"
        or user.target is ops.gumbel_argmax
        or (user.target in (ops.scale, ops.mul, ops.softcap, ops.send) and _is_logits(user))
        for user in value.users
    )


class _Writer:
    """Writes one rank's version of a program."""

    def __init__(self, program: Program, mesh: Mesh, tables: set[Recipe], dispatches: bool) -> None:
        self._program, self._mesh = program, mesh
        self._dispatches = dispatches and mesh.experts > 1  # else each token is for all ranks
        self._made = Program(program.name)
        self._tables = tables  # weights whose rows are the vocabulary and are divided
        self._values: dict[Node, Node] = {}  # by node of the program
        self._states: dict[Node, State] = {}  # by node of the program
        self._unpacked: list[str] = []  # why weights of the next call are plain

    def write(self) -> Program:
        for node in self._program.inputs:
            self._keep(node, self._made.input(node.name, node.meta["type"]), WHOLE)
        handlers = HANDLERS if self._mesh.tensor > 1 else {ops.experts: _Writer.experts}
        for node in self._program.nodes:
            handlers.get(node.target, _Writer.copy if self._mesh.tensor == 1 else _Writer.by_head)(self, node)
        self._made.output(*map(self.whole, self._program.results))
        return rename(self._made, self._names())

    def _names(self) -> dict[Node, str]:
        """A value of all ranks together bears its name in the text of one rank too, and partial sums another."""
        names = {
            made: f"{node.name}_partial" if self._states[node] == PARTIAL else node.name
            for node, made in self._values.items()
        }
        summed = {call.args[0]: call for call in self._made.fx.nodes if call.target is ops.all_reduce}
        names |= {
            made: f"{names[call]}_partial" for made, call in summed.items() if made not in names and call in names
        }
        return names

    def copy(self, node: Node) -> None:
        """The call on each rank, of whole values."""
        self._call(node, node.target, *map(self.whole, node.args), state=WHOLE)

    def follow(self, node: Node) -> None:
        """The call of one value as it is: each rank has the result's part of its own part."""
        self._call(node, node.target, self._value(node.args[0]), *map(self.whole, node.args[1:]),
                   state=self._state(node.args[0]))  # fmt: skip

    def element_by_element(self, node: Node) -> None:
        if self._state(node.args[0]) == PARTIAL:
            return self.copy(node)
        return self.follow(node)

    def embedding(self, node: Node) -> None:
        tokens, table = self.whole(node.args[0]), node.args[1]
        if table not in self._tables and node.args[0].target is not ops.ngrams:  # whose tables are large
            return self.copy(node)
        share = self._share(table)
        offset = Offset("tensor", self._mesh.tensor, int(share.type.shape[0]))
        rows, kept = self._made.call(ops.local_tokens, tokens, offset, size=share.type.shape[0], name=("rows", "kept"))
        x = self._write(ops.embedding, rows, share, name=node.name)
        self._keep(node, self._made.call(ops.mask_rows, x, kept, name=node.name), PARTIAL)
        return None

    def linear(self, node: Node) -> None:
        x, weight, *bias = node.args
        if isinstance(state := self._state(x), Divided):
            if state.copies > 1:
                heads = self._mesh.tensor // state.copies
                raise UnsupportedError(f"{x.name}: {heads} heads cannot be divided among {self._mesh.tensor} ranks")
            own = self._share(weight, dim=1), *(each and Once(each, "tensor") for each in bias)
            return self._call(node, ops.linear, self._value(x), *own, state=PARTIAL)
        if weight in self._tables and _is_logits(node):
            own = self._share(weight), *(each and self._share(each) for each in bias)
            part = self._write(ops.linear, self.whole(x), *own, name=node.name, **node.kwargs)
            size = node.meta["type"].shape[-1]
            logits = self._made.call(ops.all_gather, part, axis="tensor", size=size, name=node.name)
            return self._keep(node, logits, WHOLE)
        parts = _parts(node)
        if parts is None:
            return self.copy(node)
        joined = Joined(tuple((columns, Divided(self._copies(heads, weight))) for columns, heads in parts))
        made = joined.parts[0][1] if len(parts) == 1 else joined
        own = tuple(each and self._share_as(made, each) for each in (weight, *bias))
        return self._call(node, ops.linear, self.whole(x), *own, state=made)

    def norm(self, node: Node) -> None:
        x, weight, *bias = node.args
        state = self._state(x)
        if not isinstance(state, Divided):
            return self.copy(node)
        if len(x.meta["type"].shape) > 2:  # of each head by itself, which may have its own weight
            weights = [each and self._share_of_heads(state, each) for each in (weight, *bias)]
            return self._call(node, node.target, self._value(x), *weights, state=state)
        if node.target is not ops.rms_norm or bias:
            raise UnsupportedError(f"{node.name}: a layer norm over all heads cannot be divided; parallel.tensor=1")
        value, columns = self._value(x), int(x.meta["type"].shape[-1]) * state.copies
        squares = self._made.call(ops.sum_squares, value, name="squares")
        squares = self._made.call(ops.all_reduce, squares, axis="tensor", name="squares")
        own = self._share(weight, copies=state.copies)
        return self._call(node, ops.scale_by_rms, value, squares, own, columns=columns, state=state)

    def group_norm(self, node: Node) -> None:
        """Each rank has whole groups, or a part of one: then ranks add up the squares of each group."""
        (x, weight), ranks, groups = node.args, self._mesh.tensor, int(node.kwargs["groups"])
        state = self._state(x)
        if state != Divided() or groups % ranks == 0:
            return self.by_head(node)
        value, columns = self._value(x), int(x.meta["type"].shape[-1]) // groups
        own = int(value.meta["type"].shape[-1])
        if columns % own:
            raise UnsupportedError(f"{node.name}: {groups} groups cannot be divided among {ranks} ranks")
        first = Offset("tensor", ranks, own)
        squares = self._made.call(ops.sum_squares, value, first, columns=columns, groups=groups, name="squares")
        squares = self._made.call(ops.all_reduce, squares, axis="tensor", name="squares")
        args, eps = (value, squares, self._share(weight), first), node.kwargs["eps"]
        self._keep(node, self._made.call(ops.scale_by_rms, *args, columns=columns, eps=eps, name=node.name), state)
        return None

    def gaussian_topk(self, node: Node) -> None:
        """Ranks add up the moments of a row that they divide."""
        x, state = node.args[0], self._state(node.args[0])
        if not isinstance(state, Divided):
            return self.copy(node)
        value, columns = self._value(x), int(x.meta["type"].shape[-1])
        moments = self._made.call(ops.sum_moments, value, name="moments")
        moments = self._made.call(ops.all_reduce, moments, axis="tensor", name="moments")
        return self._call(node, ops.gaussian_topk, value, moments, columns=columns, state=state)

    def split(self, node: Node) -> None:
        x = node.args[0]
        state = self._state(x)
        if not isinstance(state, Joined):
            return self.element_by_element(node)
        results, states = results_of(node), [*state.split(node.kwargs["sizes"])]
        sizes = [self._size(int(each.meta["type"].shape[1]), own) for each, own in zip(results, states, strict=True)]
        self._call(node, ops.split, self._value(x), sizes=sizes, state=state)
        self._states |= dict(zip(results, states, strict=True))
        return None

    def join(self, node: Node) -> None:
        parts: list[tuple[int, Divided]] = []
        for arg in node.args:
            state = self._state(arg)
            if not isinstance(state, Divided):
                return self.copy(node)
            parts.append((int(arg.meta["type"].shape[-1]), state))
        if len(node.meta["type"].shape) == 3:  # of heads, of which each rank has some
            return self._call(node, ops.join, *map(self._value, node.args), state=parts[0][1])
        return self._call(node, ops.join, *map(self._value, node.args), state=Joined(tuple(parts)))

    def gated(self, node: Node) -> None:
        """Each rank has its parts of gate and of up."""
        state, size = self._state(node.args[0]), int(node.meta["type"].shape[-1])
        if not isinstance(state, Joined):
            return self.copy(node)
        gate, up = state.split([size, size])
        if gate != up:
            raise UnsupportedError(f"{node.name}: gate and up are divided differently among ranks")
        return self._call(node, node.target, self._value(node.args[0]), state=gate)

    def by_head(self, node: Node) -> None:
        """A call of which each rank computes its heads, if the op says where these are."""
        dims, parameters = node.target.heads, node.target.signature.parameters
        named = [(dims.get(name), arg) for name, arg in zip(parameters, node.args, strict=False)]
        states = [self._state(arg) for dim, arg in named if dim is not None and isinstance(arg, Node)]
        divided = [state for state in states if isinstance(state, Divided | Joined)]
        if not divided:
            return self.copy(node)
        if len(divided) < len(states):
            raise UnsupportedError(f"{node.name}: some of what it reads is divided among ranks, and some is not")
        state = min(divided, key=lambda each: each.copies)
        args = [self.whole(arg) if dim is None else self._of_heads(arg, dim, state) for dim, arg in named]
        counts = {name: self._count(node, name, state) for name, dim in dims.items() if dim is None}
        return self._call(node, node.target, *args, state=state, **counts)

    def _of_heads(self, arg: Any, dim: int, state: Divided | Joined) -> Any:
        """A rank's part of an argument whose heads are divided as this state says."""
        if arg is None or isinstance(arg, Node):
            return self._value(arg)
        if not isinstance(arg, recipes.State):
            return self._share_as(state, arg, dim)
        return replace(arg, type=arg.type.with_size(dim, self._size(int(arg.type.shape[dim]), state)))

    def _count(self, node: Node, name: str, state: Divided | Joined) -> int:
        """An attribute that counts heads, on one rank."""
        ranks, whole = self._mesh.tensor, int(node.kwargs[name])
        if whole * state.copies % ranks:
            raise UnsupportedError(f"{node.name}: {whole} {name} cannot be divided among {ranks} ranks")
        return whole * state.copies // ranks

    def linear_by_head(self, node: Node) -> None:
        """Each rank has the heads of its part of the input."""
        x, *recipes = node.args
        state = self._state(x)
        if not isinstance(state, Divided):
            return self.copy(node)
        own, heads = [each and self._share_as(state, each) for each in recipes], self._count(node, "heads", state)
        return self._call(node, ops.linear_by_head, self._value(x), *own, state=state, heads=heads)

    def attention(self, node: Node) -> None:
        q, k, v, cache, *more = node.args
        state = self._state(k)
        if not isinstance(state, Divided):
            return self.copy(node)
        if self._state(q) != Divided():
            heads = q.meta["type"].shape[1]
            raise UnsupportedError(f"{cache.name}: {heads} heads cannot be divided among {self._mesh.tensor} ranks")
        pair, heads, dim = cache.type.shape
        heads = int(heads) * state.copies // self._mesh.tensor
        own = replace(cache, type=replace(cache.type, shape=(pair, heads, dim)))
        for place in (0, 3):  # sinks and slopes, by head
            more[place : place + 1] = [each and self._share(each) for each in more[place : place + 1]]
        more[4:5] = [self.whole(each) for each in more[4:5]]  # ends, by token
        more[5:] = [self._value(each) for each in more[5:]]  # what is selected, by index head, whose heads are here
        return self._call(node, ops.attention, *map(self._value, (q, k, v)), own, *more, state=Divided())

    def mla_attention(self, node: Node) -> None:
        q, q_rope, latent, k_rope, kv_b, cache, *more = node.args
        if not isinstance(self._state(q), Divided):
            return self.copy(node)
        queries, entry = map(self._value, (q, q_rope)), map(self.whole, (latent, k_rope))
        more[2:] = [each and self._share(each) for each in more[2:]]  # sinks, by head
        more[:2] = [each and self.whole(each) for each in more[:2]]
        args = *queries, *entry, self._share(kv_b), cache, *more
        return self._call(node, ops.mla_attention, *args, state=Divided())

    def mul(self, node: Node) -> None:
        a, b = node.args
        states = self._state(a), self._state(b)
        if isinstance(states[0], Divided) and states[0] == states[1]:
            return self._call(node, ops.mul, self._value(a), self._value(b), state=states[0])
        is_vector = not isinstance(b, Node) and b.type.shape == a.meta["type"].shape[-1:]
        if is_vector and isinstance(states[0], Divided | Joined) and len(a.meta["type"].shape) == 2:
            return self._call(node, ops.mul, self._value(a), self._share_as(states[0], b), state=states[0])
        if states == (PARTIAL, WHOLE):
            return self._call(node, ops.mul, self._value(a), self.whole(b), state=PARTIAL)
        return self.copy(node)

    def add(self, node: Node) -> None:
        a, b = node.args
        if self._state(a) == self._state(b) == PARTIAL:
            return self._call(node, ops.add, self._value(a), self._value(b), state=PARTIAL)
        return self.copy(node)

    def experts(self, node: Node) -> None:
        x, weights, ids, gate_up, down, *more = node.args
        gate_up_bias, down_bias, first = (*more, None, None, None)[:3]
        width = int(down.type.shape[2])

        def halves(recipe: Recipe) -> Recipe:  # gate before up, each in parts
            if self._mesh.size("width") == 1:
                return recipe
            if recipe.type.fmt is not None:
                holds = {part.holds for part in parse_format(recipe.type.fmt).parts.values()}
                size = -(-width // self._mesh.size("width"))
                recipe = Dequantize(recipe) if "tensor" in holds else _refined(recipe, 1, size)
            parts = [narrow(recipe, first, first + width, 1) for first in (0, width)]
            return cat(tuple(self._share(part, "width", 1) for part in parts), 1)

        own: list[Any] = [halves(gate_up), self._share(down, "width", 2)]
        if gate_up_bias is not None:
            own += [halves(gate_up_bias), Once(down_bias, "width") if self._mesh.size("width") > 1 else down_bias]
        if (parts := self._mesh.experts) > 1:
            own = [self._share(each, "experts") for each in own]
            first = Offset("experts", parts, int(own[0].type.shape[0]))
        if first is not None:
            own += [*([] if gate_up_bias is not None else [None, None]), first]
        tokens = tuple(map(self.whole, (x, weights, ids)))
        names = ("rows", "row_weights", "row_ids")
        meeting: dict[str, Any] = {"axis": "data", "ranks": self._mesh.data}
        if self._mesh.data == 1:
            y = self._write(ops.experts, *tokens, *own, name=node.name, **node.kwargs)
        elif self._dispatches:
            meeting["experts"] = int(own[0].type.shape[0])
            tokens = self._made.call(ops.dispatch, *tokens, first, **meeting, name=names)
            y = self._write(ops.experts, *tokens, *own, name=node.name, **node.kwargs)
            y = self._made.call(ops.collect, y, tokens[-1], first, **meeting, name=node.name)
        else:
            tokens = self._made.call(ops.gather_tokens, *tokens, **meeting, name=names)
            y = self._write(ops.experts, *tokens, *own, name=node.name, **node.kwargs)
            y = self._made.call(ops.reduce_scatter, y, **meeting, name=node.name)
        self._keep(node, y, PARTIAL if self._mesh.tensor > 1 else WHOLE)

    def group(self, node: Node) -> None:
        """Rows of the experts that are here; those of others come last."""
        x, ids = map(self.whole, node.args)
        own = -(-int(node.kwargs["experts"]) // self._mesh.experts)
        first = [] if self._mesh.experts == 1 else [Offset("experts", self._mesh.experts, own)]
        self._call(node, ops.group, x, ids, *first, state=WHOLE, experts=own)

    def grouped_linear(self, node: Node) -> None:
        x, weight, ends, *biases = node.args
        weight, *biases = (each and self._share(each, "experts") for each in (weight, *biases))
        self._call(node, ops.grouped_linear, self.whole(x), weight, self._value(ends), *biases, state=WHOLE)

    def combine(self, node: Node) -> None:
        state = WHOLE if self._mesh.experts == 1 else PARTIAL
        self._call(node, ops.combine, *map(self.whole, node.args), state=state)

    def whole(self, arg: Any) -> Any:
        """The whole value of an argument, summed or gathered over the ranks if need be."""
        if not isinstance(arg, Node) or self._states[arg] == WHOLE:
            return self._value(arg)
        if self._states[arg] != PARTIAL:
            raise UnsupportedError(f"{arg.name} is divided among ranks, and what reads it needs all of it")
        self._keep(arg, self._made.call(ops.all_reduce, self._values[arg], axis="tensor", name=arg.name), WHOLE)
        return self._values[arg]

    def _value(self, arg: Any) -> Any:
        return self._values[arg] if isinstance(arg, Node) else arg

    def _state(self, arg: Any) -> State:
        return self._states[arg] if isinstance(arg, Node) else WHOLE

    def _keep(self, node: Node, value: Node, state: State) -> None:
        self._values[node], self._states[node] = value, state

    def _call(self, node: Node, op: Op, *args: Any, state: State, **changed: Any) -> None:
        """Write a call in place of a node, whose attributes it has but for those that changed."""
        results = results_of(node)
        made = self._write(op, *args, name=tuple(result.name for result in results), **{**node.kwargs, **changed})
        for result, value in zip(results, made if isinstance(made, tuple) else (made,), strict=True):
            self._keep(result, value, state)

    def _write(self, op: Op, *args: Any, **kwargs: Any) -> Any:
        """Write a call; with it, why weights of it are plain."""
        made = self._made.call(op, *args, **kwargs)
        if self._unpacked:
            call_of(made[0] if isinstance(made, tuple) else made).meta["refused"] = self._unpacked
            self._unpacked = []
        return made

    def _copies(self, heads: int | None, weight: Recipe) -> int:
        """The number of ranks that have the same heads, of this many heads; None: columns of no heads."""
        ranks = self._mesh.tensor
        if heads is None:
            return 1
        if heads % ranks and ranks % heads:
            name = next(leaf.name for leaf in leaves(weight))
            raise UnsupportedError(f"{name}: {heads} heads cannot be divided among {ranks} ranks")
        return max(ranks // heads, 1)

    def _size(self, size: int, state: Divided | Joined) -> int:
        """How much of a dim a rank has."""
        if isinstance(state, Divided):
            return -(-size * state.copies // self._mesh.tensor)
        return sum(self._size(*part) for part in state.parts)

    def _share_as(self, state: Divided | Joined, recipe: Recipe, dim: int = 0) -> Recipe:
        """A rank's part of a dim that is divided as a value's columns are."""
        if isinstance(state, Divided):
            return self._share(recipe, dim=dim, copies=state.copies)
        if recipe.type.fmt is not None:
            step = math.gcd(*(self._size(*part) for part in state.parts))
            own = _refined(recipe, dim, step)
            if own.type.fmt is None:
                self._unpacked.append(f"no parts of {step} in dim {dim} of {recipe.type.fmt}")
            recipe = own
        ends = accumulate(columns for columns, _ in state.parts)
        return cat(tuple(
            self._share(narrow(recipe, end - columns, end, dim), dim=dim, copies=each.copies)
            for end, (columns, each) in zip(ends, state.parts, strict=True)
        ), dim)  # fmt: skip

    def _share_of_heads(self, state: Divided | Joined, weight: Recipe) -> Recipe:
        """A rank's part of a norm's weight [N, D], or of [D], which all heads have."""
        return weight if len(weight.type.shape) == 1 else self._share_as(state, weight)

    def _share(self, recipe: Recipe, axis: str = "tensor", dim: int = 0, copies: int = 1) -> Recipe:
        ranks = self._mesh.size(axis)
        if ranks == 1:
            return recipe
        share = Share(recipe, axis, ranks, dim, copies)
        if recipe.type.fmt is not None:
            is_padded = share.size * ranks > int(recipe.type.shape[dim]) * copies
            made = Dequantize(recipe) if is_padded else _refined(recipe, dim, share.size)
            if made.type.fmt is None:
                self._unpacked.append(f"no parts of {share.size} in dim {dim} of {recipe.type.fmt}")
            recipe = made
        return replace(share, part=recipe)


def _refined(recipe: Recipe, dim: int, size: int) -> Recipe:
    """A packed weight in blocks that divide parts of a size, its scales repeated; plain if it has no such blocks."""
    recipe = aligned(recipe)
    if any(cuts_blocks(each) for each in slices(recipe)):
        return Dequantize(recipe)
    fmt, shape = str(recipe.type.fmt), recipe.type.shape
    block, known = block_size(recipe.type, dim), parse_format(fmt)
    if known.has_order and dim == len(shape) - 1:
        return Dequantize(recipe)
    if is_scaled_as_one(recipe.type, dim) or (block is not None and size % block == 0):
        return recipe
    if block is None or any(part.holds not in ("elements", "blocks") for part in known.parts.values()):
        return Dequantize(recipe)
    sizes = list(known.block)
    sizes[dim - len(shape)] = math.gcd(block, size)
    return _regrouped(recipe, with_block(fmt, *sizes))


def _regrouped(recipe: Recipe, fmt: str) -> Recipe:
    """A packed weight in smaller blocks, each tensor by itself."""
    if isinstance(recipe, Stack):
        return replace(recipe, part=_regrouped(recipe.part, fmt))
    if isinstance(recipe, Cat):
        return replace(recipe, parts=tuple(_regrouped(part, fmt) for part in recipe.parts))
    return Regroup(recipe, fmt)


Part = tuple[int, int | None]  # columns of a value, and the heads in them; None: they divide as they are


def _parts(value: Node, is_wide: bool = False) -> tuple[Part, ...] | None:
    """The parts of a linear's outputs that are divided each by itself: all, unless a `split` follows.

    None if what reads them needs all on each rank.

    is_wide: they went through an activation or a linear.
    """
    found = {_find_parts(user, value, is_wide) for user in value.users}
    return found.pop() if len(found) == 1 else None


def _find_parts(user: Node, value: Node, is_wide: bool) -> tuple[Part, ...] | None:
    shape = value.meta["type"].shape
    if user.target is ops.linear:
        return ((shape[-1], None),) if is_wide else None
    if user.target is ops.mul and not all(map(_is_of_linear, user.all_input_nodes)):
        return None
    if user.target in (ops.activate, ops.gaussian_topk, ops.xielu, ops.mul):
        return _parts(user, True) if user.meta["type"] == value.meta["type"] else None  # a gate of one column
    if user.target in (ops.rms_norm, ops.layer_norm, ops.scale, ops.clamp, ops.clip):
        parts = _parts(user, is_wide)
        needs_all = user.target is ops.layer_norm and all(heads is None for _, heads in parts or ())
        return None if needs_all else parts
    if user.target is ops.join:
        if (joined := _parts(user, is_wide)) is None:
            return None
        ends = list(accumulate(columns for columns, _ in joined))
        start = sum(int(arg.meta["type"].shape[-1]) for arg in user.args[: user.args.index(value)])
        size = int(shape[-1])
        own = tuple(part for end, part in zip(ends, joined, strict=True) if start < end <= start + size)
        return own if sum(columns for columns, _ in own) == size else None  # a head may be of several values
    if user.target is ops.gated_activate:
        return None if (half := _parts(user, True)) is None else half + half
    if user.target is ops.split:
        each = [_parts(result, is_wide) for result in results_of(user)]
        return tuple(part for parts in each for part in parts or ()) if all(each) else None
    if user.target is ops.split_heads:
        return ((shape[-1], user.kwargs["heads"]),) if _is_by_head(user) else None
    if not _divides(user, value):
        return None
    return _parts(user, True) if user.meta["type"].shape == shape else ((shape[-1], shape[1]),)


def _is_of_linear(value: Node) -> bool:
    """Whether each rank can have its part of a value's columns: those of a linear, or of heads, element by element."""
    call = call_of(value)
    if call.target in (ops.add, ops.embedding, ops.rotary) or call.op == "placeholder":
        return False
    if call.target in (
        ops.scale, ops.split, ops.split_heads, ops.merge_heads, ops.activate, ops.clamp, ops.clip,
        ops.gaussian_topk,
    ):  # fmt: skip
        return _is_of_linear(call.all_input_nodes[0])
    return True


def _divides(user: Node, value: Node) -> bool:
    """Whether a call of an op that says where its heads are has some in dim 1 of the value."""
    if user.op == "output":
        return False
    names = (name for name, arg in zip(user.target.signature.parameters, user.args, strict=False) if arg is value)
    return all(user.target.heads.get(name) == 1 for name in names)


BY_HEAD = (
    ops.rms_norm, ops.layer_norm, ops.rope, ops.scale_by_position, ops.split, ops.join, ops.activate, ops.mul,
)  # whose results have the heads of what they read  # fmt: skip


def _is_by_head(value: Node) -> bool:
    """Whether a value [T, N, D] is read head by head."""
    for user in value.users:
        if user.target in BY_HEAD:
            is_so = all(map(_is_by_head, results_of(user)))
        elif user.target is ops.merge_heads:
            is_so = _parts(user, True) is not None
        elif user.target is ops.mla_attention:  # the latent and the key that all heads share are whole
            is_so = value in user.args[:2]
        else:
            is_so = user.target is ops.attention or _divides(user, value)
        if not is_so:
            return False
    return True


HANDLERS: dict[Any, Handler] = {
    ops.embedding: _Writer.embedding,
    ops.linear: _Writer.linear,
    ops.rms_norm: _Writer.norm,
    ops.layer_norm: _Writer.norm,
    ops.group_rms_norm: _Writer.group_norm,
    ops.linear_by_head: _Writer.linear_by_head,
    ops.attention: _Writer.attention,
    ops.mla_attention: _Writer.mla_attention,
    ops.mul: _Writer.mul,
    ops.add: _Writer.add,
    ops.experts: _Writer.experts,
    ops.group: _Writer.group,
    ops.grouped_linear: _Writer.grouped_linear,
    ops.combine: _Writer.combine,
    ops.scale: _Writer.follow,
    ops.clamp: _Writer.element_by_element,
    ops.clip: _Writer.element_by_element,
    ops.gated_activate: _Writer.gated,
    ops.activate: _Writer.element_by_element,
    ops.gaussian_topk: _Writer.gaussian_topk,
    ops.xielu: _Writer.element_by_element,
    ops.split: _Writer.split,
    ops.join: _Writer.join,
    ops.rope: _Writer.element_by_element,
    ops.merge_heads: _Writer.element_by_element,
}
