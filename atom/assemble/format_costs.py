"""Measure what rounding weights costs: KL divergence from the plain model's outputs.

    groups = find_groups(semantic)                       # weights that must have one format, or kernels are not fused
    meter = KLMeter(graph, prompts, plain)               # runs the plain graph once
    meter.measure(rounded)                               # nats a position, with these weights
    meter.advance(groups[0], rounded)                    # what comes before a group is not run again …
    meter.measure(rounded | changed)                     # … while only its weights change, and those of later ones

A graph is run by the reference bodies, one prompt after the other. Positions count alike, those of prompts too.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from atom.assemble.divergence import kl_divergence
from atom.checkpoint.modules import module_of
from atom.graph import BODY, HEAD, Graph, Quantize, Recipe, ops
from atom.graph.interpret import run_calls
from atom.graph.recipes import leaves

EXPERTS = (ops.experts, ops.plain_experts, ops.grouped_linear)
GATES = (ops.gated_activate, ops.activate, ops.mul)  # between the two linears of a shared expert


class Group(NamedTuple):
    """Packed weights of one format, in the order of the text."""

    weights: tuple[Quantize, ...]

    @property
    def modules(self) -> list[str]:
        """The modules that name them in `quant.formats`."""
        return list(dict.fromkeys(module_of(next(leaves(weight)).name) for weight in self.weights))


def find_groups(graph: Graph) -> list[Group]:
    """The packed weights of a semantic graph, by what must have one format.

    These are the linears of one input (q, k and v; gate and up), which passes fuse; experts with the shared expert next
    to them; the parts of one stored tensor; and the uses of one weight in several layers.
    """
    calls = [node for node in graph.programs[BODY].nodes if _packed_weights(node)]
    with_experts = {_source_of(node) for node in calls if node.target in EXPERTS}
    group_of: dict[Any, dict[Quantize, None]] = {}  # by input and by stored tensor
    for node in calls:
        packed = _packed_weights(node)
        keys = {_source_of(node, with_experts), *(leaf.name for weight in packed for leaf in leaves(weight))}
        joined = {weight: None for key in keys for weight in group_of.get(key, ())} | dict.fromkeys(packed)
        for key in [*group_of]:
            if not joined.keys().isdisjoint(group_of[key]):
                group_of[key] = joined
        group_of |= dict.fromkeys(keys, joined)
    order = {weight: place for place, weight in enumerate(weight for node in calls for weight in _packed_weights(node))}
    groups = {id(each): Group(tuple(sorted(each, key=order.__getitem__))) for each in group_of.values()}
    return sorted(groups.values(), key=lambda group: order[group.weights[0]])


def _packed_weights(node: Node) -> list[Quantize]:
    return [arg for arg in node.args if isinstance(arg, Quantize)]


def _source_of(call: Node, with_experts: Collection[Node] = ()) -> Node:
    """The input of a call; of linears within experts, that of the experts, and so of the last linear of an expert
    next to some."""
    x: Any = call.args[0]
    if call.target is ops.grouped_linear:
        while x.target is not ops.group:
            x = x.args[0]
        return x.args[0]
    inner = x
    while inner.target in GATES:
        inner = inner.args[0]
    return inner.args[0] if inner.target is ops.linear and inner.args[0] in with_experts else x


class KLMeter:
    """Measures how far outputs are from those of plain weights."""

    def __init__(
        self, graph: Graph, prompts: Sequence[Sequence[int]], plain: Mapping[Recipe, Tensor], device: str = "cpu"
    ) -> None:
        """graph: of a body and a head, in fp32, in which packed weights are `Quantize`.

        plain: the tensors of its recipes, which may be in 16 bits.
        """
        self._body, self._head = (list(graph.programs[name].fx.nodes) for name in (BODY, HEAD))
        self._prompts, self._device = prompts, device
        self.rewind()
        self._reference = [logits.log_softmax(-1) for logits in self._run(plain)]

    def rewind(self) -> None:
        """Drop what `advance` has kept, so that all calls are run again."""
        self._place = sum(node.op == "placeholder" for node in self._body)
        self._values = [self._inputs(prompt) for prompt in self._prompts]

    def _inputs(self, prompt: Sequence[int]) -> dict[Node, Any]:
        tokens = torch.tensor(prompt, device=self._device)
        inputs = {"tokens": tokens, "positions": torch.arange(len(prompt), device=self._device)}
        return {node: inputs[node.name] for node in self._body[: self._place]}

    @torch.inference_mode()
    def measure(self, weights: Mapping[Recipe, Tensor]) -> float:
        """The mean KL divergence with these weights, in nats a position."""
        every = zip(self._run(weights), self._reference, strict=True)
        return float(torch.cat([kl_divergence(logits, reference) for logits, reference in every]).double().mean())

    @torch.inference_mode()
    def advance(self, group: Group, weights: Mapping[Recipe, Tensor]) -> None:
        """Compute, and keep, the values of what comes before the first call of a group."""
        first = next(at for at, node in enumerate(self._body) if not {*group.weights}.isdisjoint(_packed_weights(node)))
        self._run_calls(self._body[self._place : first], self._values, weights)
        self._place = max(first, self._place)

    @torch.inference_mode()
    def _run(self, weights: Mapping[Recipe, Tensor]) -> Iterator[Tensor]:
        """The logits [T, V] of each prompt."""
        (hidden,), (logits,) = (results for calls in (self._body, self._head) for results in calls[-1].args)
        values = [dict(kept) for kept in self._values]
        self._run_calls(self._body[self._place : -1], values, weights)
        for each in values:  # one after the other: logits are large
            of_head = {self._head[0]: each.pop(hidden)}
            self._run_calls(self._head[1:-1], [of_head], weights)
            yield of_head[logits]

    def _run_calls(
        self, calls: Sequence[Node], values: Sequence[dict[Node, Any]], weights: Mapping[Recipe, Tensor]
    ) -> None:
        """Run calls in float32, each on all prompts, so that a weight in 16 bits is converted once."""

        @functools.lru_cache(4)
        def in_float32(recipe: Recipe) -> Tensor:
            tensor = weights[recipe]
            return tensor.float() if tensor.is_floating_point() else tensor

        for call in calls:
            for each in values:
                run_calls([call], each, in_float32, self._device)
