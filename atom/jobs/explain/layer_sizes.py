"""Divide weights, states and the work of a step among layers and their modules.

    entries = divide_sizes(graph)
    for kind in group_layers(graph, entries): …     # layers that are alike, with their entries

Modules are what the names of stored tensors say: of `model.layers.3.mlp.experts.7.up_proj.weight` the stack is
`model.layers`, the layer 3, the part `mlp` and the row `experts`. What a call reads and computes belongs to its
weights, in proportion to their bytes, and to the states of its layer.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.fx import Node

from atom.graph import BODY, DRAFT, DRAFT_HEAD, HEAD, Graph, Program, State, ops
from atom.graph.graph import DRAFT_IN, VISION, call_of, node_leaves, type_of
from atom.graph.recipe_contents import held_bytes
from atom.graph.recipes import TEXT_NAMES, Cat, Recipe, W, once, operands
from atom.graph.shares import ENDS, group_of, num_parts, num_parts_of_group
from atom.jobs.bench.roofline import costs_of, step_work, total
from atom.jobs.bench.workload import Step
from atom.jobs.explain.layouts import CONTEXT, PROMPT

NUMBERED = re.compile(r"(.+?)\.(\d+)\.(.+)")  # the name of a layer's tensor: stack, layer, and the rest
TENSORS = ("weight", "bias")  # last names, which say nothing of a module
SECTIONS = {VISION: "images", DRAFT_IN: "drafts", DRAFT: "drafts", DRAFT_HEAD: "drafts"}  # of programs; others: a step
NAMES = {kind: name for name, kind in TEXT_NAMES.items()}
KV, STATE = "KV", "recurrent state"  # rows of what a layer keeps of a sequence
DECODE = Step(0.0, array("q", [CONTEXT]), [], 1)
PREFILL = Step(0.0, array("q"), [(0, PROMPT)], 0)


class Place(NamedTuple):
    """Where a tensor or a state is."""

    section: str  # "" of a step, "images", "drafts"
    stack: str  # of layers; empty: in none
    layer: int
    part: str
    row: str


class Entry(NamedTuple):
    """What a call has at a place."""

    place: Place
    call: str  # "linear by triton"
    num_bytes: float = 0.0  # of weights in memory, each once
    decode_bytes: float = 0.0  # moved by a decode of one sequence of CONTEXT tokens
    prompt_flops: float = 0.0  # of a prompt of PROMPT tokens
    fmt: str = ""  # of a matrix in memory: its dtype, or how it is packed; empty: there is none


class LayerKind(NamedTuple):
    """Layers whose tensors have the same names and shapes, and whose states the same rules."""

    section: str
    stack: str
    layers: list[int]
    entries: list[Entry]  # of all these layers
    states: list[State]  # of one layer, its own
    experts: tuple[int, int] | None  # that a token chooses, and all


class Visit(NamedTuple):
    """A call, and where its weights and states are."""

    program: Program
    node: Node
    places: Mapping[str, Place]  # of all tensors up to it
    own: list[State]  # states that no earlier call has
    at: Place | None  # of the states that it reads


def divide_sizes(graph: Graph) -> list[Entry]:
    """The entries of all calls, in order. The sum of their bytes is that of the graph's weights."""
    entries, counted = list[Entry](), set[Recipe]()
    for program, node, places, _, at in walk(graph):
        held = {recipe: held_by_tensor(recipe) for recipe in node_leaves(node) if isinstance(recipe, Recipe)}
        new = sum((Counter(sizes) for recipe, sizes in held.items() if recipe not in counted), Counter[str]())
        counted |= held.keys()
        call = f"{node.target.name} by {node.meta.get('kernel', 'reference')}"
        formats = {
            name: recipe.type.fmt or recipe.type.dtype for recipe in held if is_matrix(recipe) for name in held[recipe]
        }
        work, of_states = divide_work(program, node)
        for name, share in work_shares(node, held.values()).items():
            decode_bytes, prompt_flops = (each * share for each in work)
            entries.append(Entry(places[name], call, new[name], decode_bytes, prompt_flops, formats.get(name, "")))
        if at is not None:
            entries.append(Entry(at, call, 0.0, *of_states))
    return entries


def is_matrix(recipe: Recipe) -> bool:
    return recipe.type.dtype != "i64" and len(recipe.type.shape) > 1


def walk(graph: Graph) -> Iterator[Visit]:
    """Visit all calls, those of a step's programs first. A state is in the layer of the last weights before it."""
    places, owners, stacks = dict[str, Place](), dict[State, Place](), find_stacks(graph)
    for program in in_order(graph):
        section = SECTIONS.get(program.name, "")
        latest = Place(section, "", 0, "", "")
        for node in program.nodes:
            for name in tensor_names(node):
                place = places.setdefault(name, place_of(name, section, stacks))
                latest = place if place.stack else latest
            states = [leaf for leaf in node_leaves(node) if isinstance(leaf, State)]
            own = [state for state in states if state not in owners]
            owners |= dict.fromkeys(own, latest)
            at = None
            if states:
                row = STATE if states[0].rule.in_slot else KV
                is_own = any(owners[state][:3] == latest[:3] for state in states)
                at = latest._replace(row=row if is_own else f"{row} of an earlier layer")
            yield Visit(program, node, places, own, at)


def in_order(graph: Graph) -> list[Program]:
    """The programs of a step before the others."""
    return sorted(graph.programs.values(), key=lambda program: program.name not in (BODY, HEAD))


def find_stacks(graph: Graph) -> set[tuple[str, str]]:
    """The sections and names of stacks of layers: names that numbers without a gap follow, and modules these."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    with_modules = set[tuple[str, str]]()  # without them it is a list of tensors
    for program in in_order(graph):
        for match in (NUMBERED.fullmatch(name) for node in program.nodes for name in tensor_names(node)):
            if match is not None:
                stack = SECTIONS.get(program.name, ""), match[1]
                numbers[stack].add(int(match[2]))
                with_modules |= {stack} if "." in match[3] else set()
    return {stack for stack, each in numbers.items() if len(each) == max(each) - min(each) + 1} & with_modules


def place_of(name: str, section: str, stacks: set[tuple[str, str]]) -> Place:
    """The place of a tensor."""
    match = NUMBERED.fullmatch(name)
    if match is not None and (section, match[1]) in stacks:
        stack, number, size, rest = match[1], int(match[2]), 1, match[3]
    else:
        stack, number, size, rest = "", 0, 2, name
    if name in NAMES.values():
        return Place(section, "", 0, "constants", name)
    path = rest.split(".")
    path = path[:-1] if path[-1] in TENSORS and len(path) > 1 else path
    return Place(section, stack, number, ".".join(path[:size]), ".".join(path[size : size + 1]))


def tensor_names(node: Node) -> Iterator[str]:
    """The names of the tensors that a call reads."""
    return (name for leaf in node_leaves(node) if isinstance(leaf, Recipe) for name in held_by_tensor(leaf))


@once
def held_by_tensor(recipe: Recipe) -> Mapping[str, float]:
    """The bytes of `held_bytes` by stored tensor; experts count as one, what is computed by its name in the text."""
    parts = operands(recipe)
    if not parts:
        name = recipe.name if isinstance(recipe, W) else getattr(recipe, "name", NAMES[type(recipe)])
        return {name: float(held_bytes(recipe))}
    sizes = sum((Counter(held_by_tensor(part)) for part in parts), Counter[str]())
    whole = sizes.total()
    return {name: size * held_bytes(recipe) / whole for name, size in sizes.items()} if whole else dict(sizes)


def divide_work(program: Program, node: Node) -> tuple[tuple[float, float], tuple[float, float]]:
    """The bytes of DECODE and the operations of PREFILL, of a call's weights and of its states."""
    costs, own, of_states = costs_of([node]), [0.0, 0.0], [0.0, 0.0]
    for at, step in enumerate((DECODE, PREFILL)):
        if not step.runs({program.name}):
            continue
        work = step_work({program.name: costs}, step)
        latent = total(each.weight.work(step.num_tokens) for each in costs.attention if each.weight is not None)
        states = total((work["attention"], work["recurrent"], latent.times(-1)))
        weights = total((work["matrix"], work["routing"], latent))
        own[at], of_states[at] = (each.bytes if step is DECODE else sum(each[1:]) for each in (weights, states))
    return (own[0], own[1]), (of_states[0], of_states[1])


def work_shares(node: Node, held: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The share that each tensor has of the work of a call's weights: by bytes, of experts those that a token reads."""
    sizes = sum(map(Counter, held), Counter[str]())
    if (chosen := experts_of(node)) is not None and node.target is ops.experts:
        always = {name for place in node.target.weights for name in shared_tensors(node, node.args[place])}
        active = chosen[0] / chosen[1]
        sizes = Counter({name: size * (1.0 if name in always else active) for name, size in sizes.items()})
    return {name: size / sizes.total() for name, size in sizes.items()} if sizes.total() else {}


def shared_tensors(experts: Node, recipe: Recipe) -> Iterable[str]:
    """The tensors of the experts of all tokens, which come last."""
    if not call_of(experts.args[2]).kwargs.get("shared"):
        return ()
    while not isinstance(recipe, Cat):
        (recipe,) = operands(recipe)
    return held_by_tensor(recipe.parts[-1])


def experts_of(node: Node) -> tuple[int, int] | None:
    """How many experts a token chooses, and of how many, without those of all tokens; None of other calls."""
    if node.target is ops.experts:
        shared = call_of(node.args[2]).kwargs.get("shared", 0)
        top_k, num = node.args[2].meta["type"].shape[1], type_of(node.args[3]).shape[0]
        return int(top_k) - shared, (int(num) - shared) * num_parts(node)
    if node.target is ops.grouped_linear:
        group = group_of(node)
        num = int(type_of(node.args[ENDS[node.target]]).shape[0])
        return int(group.args[1].meta["type"].shape[1]), num * num_parts_of_group(group)
    return None


def group_layers(graph: Graph, entries: Sequence[Entry]) -> list[LayerKind]:
    """The kinds of layers, in order."""
    marks: dict[tuple[str, str, int], set[object]] = defaultdict(set)  # what the kind of a layer follows from
    states: dict[tuple[str, str, int], list[State]] = defaultdict(list)
    experts: dict[tuple[str, str, int], tuple[int, int]] = {}
    for _, node, places, own, at in walk(graph):
        if at is not None:
            states[at[:3]] += own
            marks[at[:3]] |= {at.row, *((state.rule, state.type, state.part) for state in own)}
        for recipe in node_leaves(node):
            for tensor in tensors(recipe) if isinstance(recipe, Recipe) else ():
                place = places[tensor.name]
                marks[place[:3]].add((place.part, place.row, tensor.type.shape))
                if (chosen := experts_of(node)) is not None:
                    experts[place[:3]] = chosen
    of_layer: dict[tuple[str, str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.place.stack:
            of_layer[entry.place[:3]].append(entry)
    found: dict[tuple[str, str, frozenset[object]], LayerKind] = {}
    for layer, its_entries in of_layer.items():
        section, stack, number = layer
        new = LayerKind(section, stack, [], [], states[layer], experts.get(layer))
        kind = found.setdefault((section, stack, frozenset(marks[layer])), new)
        kind.layers.append(number)
        kind.entries.extend(its_entries)
    return list(found.values())


def tensors(recipe: Recipe) -> Iterator[W]:
    """The stored tensors of a recipe; of experts, one stands for all."""
    if isinstance(recipe, W):
        yield recipe
    for part in operands(recipe):
        yield from tensors(part)
