"""Find, measure and keep the scales of an fp8 KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from torch import Tensor

from atom.errors import ArtifactError, RequestError
from atom.graph import Mesh, ops
from atom.kernels import Communicator
from atom.process.messages import say
from atom.runtime.kv.scales import PROMPT, KVScales, ScalePlan, ScaleStore
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.step.model import Model


def plan_kv_scales(store: ScaleStore, vocabulary: Vocabulary, *, is_random: bool) -> ScalePlan:
    """Plan the source of fp8 cache scales that the checkpoint lacks.

    is_random: whether weights are random, of which nothing is measured
    """
    if not store.names:
        return ScalePlan()
    if not is_random and (kept := store.read()):
        return ScalePlan(kept)
    try:
        prompt = [] if is_random or vocabulary.tokenizer is None else vocabulary.tokenize(PROMPT)
        why = "weights are random" if is_random else "the checkpoint has none, and no tokenizer to measure them"
    except RequestError as error:
        prompt, why = [], f"the checkpoint has none, and its tokenizer cannot be used to measure them: {error}"
    if not prompt:
        say(f"kv scales: {why}; 1.0 is used")
    return ScalePlan(tokens=prompt)


def set_kv_scales(
    scales: KVScales, plan: ScalePlan, mesh: Mesh, communicator: Communicator | None = None
) -> Callable[[Model], object] | None:
    """Set the scales that are known; if others are to be measured, the function that does so on all ranks together."""
    if plan.values:
        scales.use(plan.values)
    if not plan.tokens:
        return None

    def largest(x: Tensor) -> Tensor:
        for axis in ops.MEETING_AXES:
            if communicator is not None and mesh.size(axis) > 1:
                x = communicator.all_gather(x, axis=axis, size=mesh.size(axis)).max().view(1, 1)
        return x

    return lambda model: scales.measure(model, plan.tokens, largest)


def gather_kv_scales(scales: KVScales, exchange: Callable[[bytes], list[bytes]]) -> dict[str, float]:
    """The scales of all stages, each of which has those of its layers; all ranks call this at the same time."""
    every = exchange(msgspec.msgpack.encode(scales.values()))
    return {name: value for own in every for name, value in msgspec.msgpack.decode(own, type=dict[str, float]).items()}


def keep_kv_scales(store: ScaleStore, values: Mapping[str, float], num_tokens: int) -> None:
    """Keep scales that were measured over this many tokens for the next start."""
    try:
        store.write(values)
    except ArtifactError as error:
        store.cache.warnings.append(f"the next start measures them again: {error}")
    what = f"kv scales: the checkpoint has none, measured over {num_tokens} tokens"
    for line in (*store.cache.warnings, what):
        say(line)
    store.cache.close()
