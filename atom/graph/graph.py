"""The graph: programs of `torch.fx` nodes.

Their targets are ops, and their weights are recipes.

    graph = Graph()
    body = graph.program("body")
    tokens = body.input("tokens", Type("i64", ("T",)))
    x = body.call(ops.embedding, tokens, W("embed.weight", Type("bf16", (100, 64))), name="x")
    body.output(x)

    for norm in graph.find(ops.rms_norm):                 # what passes do: find, insert, replace
        graph.replace({norm: graph.insert(norm, ops.layer_norm, *norm.args, eps=1e-6)})

A node's type is `node.meta["type"]`, inferred when it is made. A node of several results has a getitem
node after it for each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, count
from typing import Any

import torch.fx
from torch.fx import Node
from torch.fx.node import map_arg

from atom.errors import PassError
from atom.graph.ops import Op
from atom.graph.recipes import Recipe, State, W, leaves
from atom.graph.types import BatchType, Type

BODY, HEAD = "body", "head"  # the programs of a step: of each token, and of the rows that sample
POOL = "pool"  # of rows that are pooled, if a text makes embeddings
VISION = "vision"  # of the patches of images, whose rows the body takes
# of a text that drafts tokens: what a draft takes of the body's last results; its hidden states; tokens of these
DRAFT_IN, DRAFT, DRAFT_HEAD = "draft_in", "draft", "draft_head"
NOISE = ("keys", "temperatures", "depths")  # what DRAFT_HEAD takes besides rows of hidden states, of each
ADAPTERS = "adapters"  # the input of a body that has the number of each token's adapter
STEERING = "steering"  # the input of a body that has each token's scale of each steering vector
# further inputs of a body that reads images: of each token its row of ENCODED, or -1; those rows; its position in time,
# row and column, if its rope has sections; and, if tokens of an image see each other, up to where it sees
ROWS, ENCODED, ROPE_POSITIONS, ENDS = "rows", "encoded", "rope_positions", "ends"


class Program:
    """One function of the text."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fx = torch.fx.Graph()

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.fx.nodes if node.op == "placeholder"]

    @property
    def nodes(self) -> list[Node]:
        """The calls of ops, in order."""
        return [node for node in self.fx.nodes if isinstance(node.target, Op)]

    @property
    def results(self) -> tuple[Node, ...]:
        return tuple(self.fx.output_node().args[0])

    def input(self, name: str, type: Type | BatchType) -> Node:
        """The input of this name, added after the others if it is missing."""
        for node in self.inputs:
            if node.name == name:
                return node
        last = self.inputs[-1:] or [self.fx._root]
        with self.fx.inserting_after(last[0]):
            node = self.fx.create_node("placeholder", name, name=name)
        node.meta["type"] = type
        return node

    def call(self, op: Op, *args: Any, name: str | tuple[str, ...] = "", **kwargs: Any) -> Any:
        """Add a call; its node, or a tuple of nodes for an op of several results. PassError if types do not fit."""
        defaults = op.signature.parameters
        kwargs = {key: value for key, value in kwargs.items() if key not in defaults or value != defaults[key].default}
        result = infer_call(op, args, kwargs)
        names = (name,) if isinstance(name, str) else name
        if isinstance(result, Type):
            return self._node(op, args, kwargs, names[0] or op.name, result)
        node = self._node(op, args, kwargs, f"{op.name}_results", result)
        names = names if len(names) == len(result) else (names[0] or op.name,) * len(result)
        return tuple(self._item(node, index, name) for index, name in enumerate(names))

    def output(self, *nodes: Node) -> None:
        self.fx.output(nodes)

    def _item(self, node: Node, index: int, name: str) -> Node:
        return self._node(operator.getitem, (node, index), {}, name, node.meta["type"][index])

    def _node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, type: Any) -> Node:
        node = self.fx.create_node("call_function", target, name=name)
        set_arguments(node, args, kwargs)
        node.meta["type"] = type
        return node


class Graph:
    """A model: programs by name. `num_rewrites` counts the replacements that passes made."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self.num_rewrites = 0

    def program(self, name: str) -> Program:
        """The program of this name, added empty if it is missing."""
        return self.programs.setdefault(name, Program(name))

    def program_of(self, node: Node) -> Program:
        return next(program for program in self.programs.values() if program.fx is node.graph)

    def find(self, op: Op) -> list[Node]:
        """The calls of an op in all programs, in order."""
        return [node for program in self.programs.values() for node in program.nodes if node.target is op]

    def insert(self, before: Node, op: Op, *args: Any, name: str | tuple[str, ...] = "", **kwargs: Any) -> Any:
        """Add a call before a node; otherwise as `Program.call`."""
        with before.graph.inserting_before(before):
            return self.program_of(before).call(op, *args, name=name, **kwargs)

    def replace(self, mapping: Mapping[Node, Node], written: Collection[Node] = ()) -> None:
        """Replace every use of a key by its value, then erase nodes without users.

        written: calls whose states the new ones write; others that write a state are never dead
        """
        for old, new in mapping.items():
            old.replace_all_uses_with(new)
            new.name, old.name = old.name, new.name
        _erase_unused(mapping, written)
        self.num_rewrites += 1

    def recipes(self) -> list[Recipe]:
        """The recipes of all programs, each once, in order."""
        return [leaf for leaf in self._leaves() if not isinstance(leaf, State)]

    def states(self) -> list[State]:
        """The states of all programs, each once, in order."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, State)]

    def layers(self) -> list[str]:
        """The names of the layers that have states, each once, in order."""
        return list(dict.fromkeys(state.name for state in self.states()))

    def _leaves(self) -> Iterable[Recipe | State]:
        every = (leaf for program in self.programs.values() for node in program.nodes for leaf in node_leaves(node))
        return dict.fromkeys(every)

    @property
    def carries_hidden(self) -> bool:
        """Whether a draft takes a hidden state, in place of which a further draft takes what it gives."""
        return DRAFT in self.programs and any(node.name == "hidden" for node in self.programs[DRAFT].inputs)

    def stored(self) -> dict[str, W]:
        """The checkpoint's tensors that the recipes read, by name."""
        return {leaf.name: leaf for recipe in self.recipes() for leaf in leaves(recipe)}


def node_leaves(node: Node) -> Iterator[Recipe | State]:
    """The recipes and states among a call's arguments."""
    return (arg for arg in node.args if isinstance(arg, Recipe | State))


def infer_call(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Type | tuple[Type, ...]:
    """The type of a call; PassError if the arguments do not fit the op."""
    types = [type_of(arg) for arg in args]
    try:
        return _infer(op, *types, **kwargs)
    except TypeError:  # an argument without a hash
        return _infer.__wrapped__(op, *types, **kwargs)


@functools.lru_cache(1 << 14, typed=True)  # layers are alike, and every pass is verified
def _infer(op: Op, /, *types: Any, **kwargs: Any) -> Type | tuple[Type, ...]:
    try:
        named = names_of(op, len(types), *kwargs)
        for place, (name, type) in enumerate(zip(named, types, strict=False)):
            if isinstance(type, Type) and type.fmt is not None and place not in op.weights:
                raise ValueError(f"{name} cannot be stored as {type.fmt}: only a matrix of weights can")
        result = op.infer(*types, **kwargs)
        if isinstance(result, BatchType):
            raise TypeError("no op makes a Batch")
        return result
    except (TypeError, ValueError, AttributeError) as error:
        shown = ", ".join([*map(str, types), *(f"{key}={value}" for key, value in kwargs.items())])
        raise PassError(f"{op.name}({shown}): {error}") from None


@functools.cache
def names_of(op: Op, num_args: int, *keywords: str) -> tuple[str, ...]:
    """The names of a call's arguments; TypeError if the op takes no such call."""
    return tuple(op.signature.bind(*[None] * num_args, **dict.fromkeys(keywords)).arguments)


def type_of(arg: Any) -> Any:
    """The type of an argument of a call, for shape rules and `accepts`: a tensor's type, or the value itself."""
    if isinstance(arg, Node):
        return arg.meta["type"]
    return arg.type if isinstance(arg, Recipe) else arg


def results_of(call: Node) -> tuple[Node, ...]:
    """The nodes of a call's results: itself, or its getitem nodes."""
    is_many = isinstance(call.meta["type"], tuple)
    return tuple(sorted(call.users, key=lambda item: item.args[1])) if is_many else (call,)


def call_of(node: Node) -> Node:
    """The call that a node is a result of."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def copy_calls(calls: Iterable[Node], program: Program, copies: dict[Node, Node]) -> None:
    """Copy calls into a program. `copies` maps old nodes to new ones; the new results are added to it."""
    for call in calls:
        names = tuple(result.name for result in results_of(call))
        args = [copies[arg] if isinstance(arg, Node) else arg for arg in call.args]
        results = program.call(call.target, *args, name=names, **call.kwargs)
        copies |= zip(results_of(call), results if isinstance(results, tuple) else (results,), strict=True)


def rename(program: Program, names: Mapping[Node, str]) -> Program:
    """A copy of a program in which these nodes have these names, each a name of its own, and others give way."""
    made, copies, taken = Program(program.name), dict[Node, Node](), set(names.values())
    for node in program.fx.nodes:
        if node.op == "output":
            made.output(*(copies[result] for result in program.results))
            continue
        name = names.get(node) or next(name for name in _numbered(node.name) if name not in taken)
        taken.add(name)
        copies[node] = copy = made.fx.create_node(node.op, node.target, name=name)
        set_arguments(copy, *map_arg((node.args, node.kwargs), copies.__getitem__))
        object.__setattr__(copy, "meta", dict(node.meta))
    return made


def set_arguments(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set the arguments of a node just made.

    create_node would search them for symbolic numbers, and a plain assignment takes the node out of its graph's table
    of targets and back.
    """
    object.__setattr__(node, "args", args)
    object.__setattr__(node, "kwargs", kwargs)


def copy_graph(graph: Graph, shared: Collection[str] = ()) -> Graph:
    """A copy whose rewrites leave the graph as it is.

    shared: names of programs that nothing rewrites, which are not copied
    """
    made = Graph()
    made.programs = {
        name: program if name in shared else rename(program, {}) for name, program in graph.programs.items()
    }
    made.num_rewrites = graph.num_rewrites
    return made


def _numbered(name: str) -> Iterator[str]:
    return chain([name], (f"{name}_{number}" for number in count(1)))


def _erase_unused(nodes: Iterable[Node], written: Collection[Node]) -> None:
    waiting = list(nodes)[::-1]
    erased: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in erased or not isinstance(call_of(node).target, Op):
            continue
        call = call_of(node)
        results = results_of(call)
        if (call.target.is_state and call not in written) or any(result.users for result in results):
            continue
        waiting += call.all_input_nodes
        for dead in dict.fromkeys((*results, call)):
            dead.graph.erase_node(dead)
            erased.add(dead)
