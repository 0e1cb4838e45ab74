"""Run a checkpoint in transformers, and name its values as atom's text does.

A module with a weight of its own, as `model.layers.0.mlp.down_proj`, takes and gives what the call with that weight
does. So values have names wherever the checkpoint's tensors bear those of the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from atom.checkpoint import Checkpoint
from atom.config import Config
from atom.errors import ConfigError, one_line
from atom.graph import BODY, Graph, W, ops
from atom.jobs.compare.trace import Trace

SUFFIX = ".weight"
NAMED = (ops.linear, ops.rms_norm, ops.layer_norm)  # an embedding's module may scale what it gives


class Place(NamedTuple):
    """Where a value is found: what a module takes, or gives."""

    module: str
    is_input: bool


def places_of(graph: Graph) -> dict[str, Place]:
    """The places of a body's values, by name; those that come first in the text win."""
    found: dict[str, Place] = {}
    for node in graph.programs[BODY].nodes:
        if node.target not in NAMED:
            continue
        weight = next((arg for arg in node.args if isinstance(arg, W)), None)
        if weight is None or not weight.name.endswith(SUFFIX):
            continue
        module = weight.name.removesuffix(SUFFIX)
        if isinstance(node.args[0], Node):
            found.setdefault(node.args[0].name, Place(module, is_input=True))
        if node.target is not ops.linear or not any(isinstance(arg, Node) for arg in node.args[1:]):
            found.setdefault(node.name, Place(module, is_input=False))
    return found


def run_reference(
    config: Config, checkpoint: Checkpoint, graph: Graph, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Trace:
    """The values, logits and greedy answers that transformers computes in float32. ConfigError if it cannot.

    graph: the text before all passes
    num_tokens: of each answer
    """
    model, places, trace = open_model(config, checkpoint), group(places_of(graph)), Trace()
    for number, prompt in enumerate(prompts):
        with torch.inference_mode():
            answer = generate(model, prompt, num_tokens)
            values, logits = run(model, [*prompt, *answer[:-1]], places)
        trace.answers.append(answer)
        for step, rows in enumerate(steps_of(len(prompt), len(answer))):
            trace.values[number, step] = {(BODY, name): value[rows] for name, value in values.items()}
            trace.logits[number, step] = logits[rows]
    return trace


def run(model: Any, tokens: Sequence[int], places: Mapping[Place, Sequence[str]]) -> tuple[dict[str, Tensor], Tensor]:
    """The values at places, by name, and the logits fp32[T, V]."""
    found: dict[Place, Tensor] = {}
    with ExitStack() as hooks:
        for place in places:
            hook(model, place, len(tokens), hooks, functools.partial(found.__setitem__, place))
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float().cpu()
    return {name: value for place, value in found.items() for name in places[place]}, logits


def open_model(config: Config, checkpoint: Checkpoint) -> Any:
    """The checkpoint as a model of transformers, in float32. ConfigError if that fails."""
    if config.load_dummy:
        raise ConfigError("job.b=transformers compares a checkpoint's weights: leave out load_dummy=true")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"job.b=transformers needs transformers: {error}") from None
    first = Path(min(map(str, checkpoint.files())))
    options: dict[str, Any] = {"gguf_file": first.name} if first.suffix == ".gguf" else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            first.parent,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            **options,
        )
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"job.b=transformers: it cannot load {first.parent}: {one_line(str(error))}") from None
    return model.eval().to("cuda" if config.device == "cuda" else "cpu")


def generate(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer, on after an end."""
    tokens, answer, cache = list(prompt), list[int](), None
    for _ in range(num_tokens):
        step = model(torch.tensor([tokens], device=model.device), past_key_values=cache, use_cache=True)
        cache, tokens = step.past_key_values, [int(step.logits[0, -1].argmax())]
        answer += tokens
    return answer


def steps_of(num_prompt: int, num_answer: int) -> list[slice]:
    """The tokens of each step: the prompt, then each token of the answer but the last."""
    return [slice(0, num_prompt), *(slice(at, at + 1) for at in range(num_prompt, num_prompt + num_answer - 1))]


def group(places: Mapping[str, Place]) -> dict[Place, list[str]]:
    """The names of each place."""
    grouped: dict[Place, list[str]] = {}
    for name, place in places.items():
        grouped.setdefault(place, []).append(name)
    return grouped


def hook(model: nn.Module, place: Place, num_tokens: int, hooks: ExitStack, keep: Callable[[Tensor], Any]) -> None:
    """Keep what a module takes or gives, [T, …] on the host, if the model has it and it is one row for each token."""
    try:
        module = model.get_submodule(place.module)
    except AttributeError:
        return

    def see(value: Any) -> None:
        if torch.is_tensor(value) and value.dim() >= 3 and value.shape[:2] == (1, num_tokens):
            keep(value[0].float().cpu())

    if place.is_input:
        handle = module.register_forward_pre_hook(lambda _, args: see(args[0] if args else None))
    else:
        handle = module.register_forward_hook(lambda _, args, result: see(result))
    hooks.callback(handle.remove)
