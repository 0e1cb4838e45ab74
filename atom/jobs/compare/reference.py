"""Run a checkpoint in transformers, and name its values as atom's text does.

A module with a weight of its own, as `model.layers.0.mlp.down_proj`, takes and gives what the call with that weight
does. So values have names wherever the checkpoint's tensors bear those of the modules.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from atom.checkpoint import Checkpoint
from atom.config import Config
from atom.errors import ConfigError, one_line
from atom.graph import BODY, Graph, Recipe, Slice, W, ops
from atom.graph.graph import results_of
from atom.graph.recipes import leaves
from atom.jobs.compare.lines import LAYER
from atom.jobs.compare.trace import Trace, Value, is_choice

SUFFIX = ".weight"
EXPERTS = ".experts"  # of the path of a module with all experts of a layer
NORMS = (ops.rms_norm, ops.layer_norm)
ROUTERS = (ops.router, ops.sparse_mixer, ops.token_router)


class Place(NamedTuple):
    """Where a value is found: in what a module takes, or gives."""

    module: str
    part: str  # input, output, or of a router's output weights or ids
    columns: tuple[int, int] | None = None  # None: all
    call: int = 0  # of the module in a step, which may call it several times


Calls = collections.Counter[Place]  # in a step so far; in the text, of places without `call`


def places_of(graph: Graph) -> dict[str, Place]:
    """The places of a body's values, by name; those that come first in the text win."""
    found: dict[str, Place] = {}
    num_calls = Calls()
    for node in graph.programs[BODY].nodes:
        for name, place in places_by(node):
            found.setdefault(name, place._replace(call=num_calls[place]))
            num_calls[place] += 1
    return found


def places_by(call: Node) -> Iterator[tuple[str, Place]]:
    """The places of the values that a call reads and computes. An embedding's module may scale what it gives."""
    weight = next((arg for arg in call.args if isinstance(arg, Recipe)), None)
    stored = next(leaves(weight), None) if weight is not None else None
    if stored is None:
        return
    if call.target is ops.experts and EXPERTS in stored.name:
        yield call.name, Place(stored.name.partition(EXPERTS)[0] + EXPERTS, "output")
    if not stored.name.endswith(SUFFIX):
        return
    module = stored.name.removesuffix(SUFFIX)
    if call.target in (*NORMS, ops.linear, *ROUTERS) and isinstance(call.args[0], Node):
        yield call.args[0].name, Place(module, "input")
    if call.target in ROUTERS:
        yield from zip(
            (node.name for node in results_of(call)), (Place(module, "weights"), Place(module, "ids")), strict=True
        )
    elif call.target is ops.linear and not all(is_of(arg, module) for arg in call.args[1:]):
        return  # what the module gives lacks a bias that is not stored, or stored elsewhere
    elif call.target in NORMS or (call.target is ops.linear and isinstance(weight, W)):  # a norm's may be shifted
        yield call.name, Place(module, "output")
    elif call.target is ops.linear and isinstance(weight, Slice) and (weight.dim, weight.step) == (0, 1):
        yield call.name, Place(module, "output", (weight.start, weight.stop))


def is_of(recipe: Recipe | None, module: str) -> bool:
    """Whether a recipe, if there is one, is of stored tensors, all of them a module's."""
    return recipe is None or {leaf.name.rpartition(".")[0] for leaf in leaves(recipe)} == {module}


def run_reference(
    config: Config, checkpoint: Checkpoint, graph: Graph, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Trace:
    """The values, logits and greedy answers that transformers computes in float32. ConfigError if it cannot.

    graph: the text before all passes
    num_tokens: of each answer
    """
    model, trace, found = open_model(config, checkpoint), Trace(), dict[str, Any]()
    num_calls = Calls()
    with ExitStack() as hooks, torch.inference_mode():
        for place, names in group(places_of(graph)).items():
            hook(model, place, hooks, functools.partial(keep, found, names, place, num_calls))
        for number, prompt in enumerate(prompts):
            run = functools.partial(model, **open_cache(model), use_cache=True)
            tokens, answer = list(prompt), list[int]()
            for step in range(num_tokens):
                found.clear()
                num_calls.clear()
                logits = run(torch.tensor([tokens], device=model.device)).logits[0].float().cpu()
                shaped = ((name, rows_of(value, len(tokens))) for name, value in found.items())
                trace.values[number, step] = {(BODY, name): rows for name, rows in shaped if rows is not None}
                trace.logits[number, step] = logits
                tokens = [int(logits[-1].argmax())]
                answer += tokens
            trace.answers.append(answer)
    drop_unscaled(graph, trace)
    keep_common(trace)
    return trace


def open_model(config: Config, checkpoint: Checkpoint, key: str = "job.b") -> Any:
    """The checkpoint as a model of transformers, in float32. ConfigError if that fails.

    key: the field that asks for it
    """
    asked = f"{key}=transformers"
    if config.load_dummy:
        raise ConfigError(f"{asked} compares a checkpoint's weights: leave out load_dummy=true")
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(f"{asked} needs transformers: {error}") from None
    disable_progress_bar()
    first, cannot = Path(min(map(str, checkpoint.files()))), f"{asked}: no prompt can be compared"
    options: dict[str, Any] = {"gguf_file": first.name} if first.suffix == ".gguf" else {}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            first.parent,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        reason = one_line(str(error) or type(error).__name__)
        raise ConfigError(f"{cannot}: {first.parent}: {reason}") from None
    if missing := sorted(map(str, {*loading["missing_keys"], *loading["mismatched_keys"]})):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(f"{cannot}: {first.parent} has not all weights that it needs: {missing[0]}{more}")
    return model.eval().to("cuda" if config.device == "cuda" else "cpu")


def open_cache(model: Any) -> dict[str, Any]:
    """The argument that holds the KV of one sequence; newer versions of transformers call it otherwise."""
    from transformers import DynamicCache

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def group(places: Mapping[str, Place]) -> dict[Place, list[str]]:
    """The names of each place."""
    grouped: dict[Place, list[str]] = {}
    for name, place in places.items():
        grouped.setdefault(place, []).append(name)
    return grouped


def keep(found: dict[str, Any], names: Sequence[str], place: Place, num_calls: Calls, value: Any) -> None:
    """Add the value of a place's call by its names; a copy, as the model may go on to write to it."""
    num_calls[place] += 1
    if num_calls[place] != place.call + 1:
        return
    found.update(dict.fromkeys(names, value.clone() if torch.is_tensor(value) else None))


def hook(model: nn.Module, place: Place, hooks: ExitStack, see: Callable[[Any], Any]) -> None:
    """Show what a module takes or gives, if the model has it."""
    module = find_module(model, place.module)
    if module is None:
        return
    if place.part == "input":
        handle = module.register_forward_pre_hook(lambda _, args: see(args[0] if args else None))
    else:
        handle = module.register_forward_hook(lambda _, args, result: see(part_of(result, place)))
    hooks.callback(handle.remove)


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """The module of a stored name: of this path, or else the only one in its layer with the last part of the name."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name in modules:
        return modules[name]
    if (layer := LAYER.search(name)) is None:
        return None
    last = name.rpartition(".")[2]
    alike = [module for path, module in modules.items() if f".{layer[0]}." in path and path.endswith(f".{last}")]
    return alike[0] if len(alike) == 1 else None


def part_of(result: Any, place: Place) -> Any:
    """A place's part of what a module gives. A router gives logits, weights and ids."""
    if place.part in ("weights", "ids"):
        tensors = [each for each in result if torch.is_tensor(each)] if isinstance(result, tuple) else []
        ids = next(filter(is_choice, tensors), None)
        if place.part == "ids" or ids is None:
            return ids
        return next((each for each in tensors if each is not ids and each.shape == ids.shape), None)
    return result[..., slice(*place.columns)] if place.columns and torch.is_tensor(result) else result


def rows_of(value: Any, num_tokens: int) -> Tensor | None:
    """A value [1, T, …] or [T, …] as [T, …] on the host; None if it has no row for each token."""
    if not torch.is_tensor(value):
        return None
    if value.dim() > 2 and value.shape[:2] == (1, num_tokens):
        value = value[0]
    rows: Tensor = value.cpu()
    if rows.dim() < 2 or len(rows) != num_tokens:
        return None
    return rows.float() if rows.is_floating_point() else rows


def drop_unscaled(graph: Graph, trace: Trace) -> None:
    """Drop a router's weights, and what experts give by them, if the reference scales only the sum of the experts."""
    for router in graph.find(ops.router):
        weights, _ = results_of(router)
        scale = router.kwargs.get("scale", 1.0)
        if scale == 1.0 or not router.kwargs.get("renormalize"):
            continue
        readers = [user.name for user in weights.users if user.target is ops.experts]
        for values in trace.values.values():
            found = values.get((BODY, weights.name))
            if found is not None and torch.allclose(found.sum(-1), torch.ones(len(found)), atol=1e-3):
                for name in (weights.name, *readers):
                    values.pop((BODY, name), None)


def keep_common(trace: Trace) -> None:
    """Drop the values that some steps lack: their rows are heads, as many as the tokens of other steps."""
    common = set[Value].intersection(*map(set, trace.values.values()))
    for at, values in trace.values.items():
        trace.values[at] = {value: rows for value, rows in values.items() if value in common}
