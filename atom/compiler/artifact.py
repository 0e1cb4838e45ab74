"""Publish and read artifacts: lowered graphs, by a key of all their ingredients.

A miss is explained.

ingredients = launch_ingredients(config, find_target(config.device))    # in words
key = key_of(ingredients)
graph = read_artifact(cache, key)                                       # None, or with its pieces marked
explain_miss(config, ingredients, cache)      # "dtype differs from the nearest artifact, 3f2a91c07d11 (qwen3)"
publish_artifact(cache, config, ingredients, graph, piece_keys)
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from atom.cache import Cache, Entry, digest, key_of
from atom.cache.files import BINARIES
from atom.config import Config, QuantConfig
from atom.config.resolve_quant import BUDGET
from atom.config.spelling import override
from atom.config.taps import layer_taps
from atom.errors import ConfigError
from atom.frontend import build
from atom.graph import Graph, Mesh, parse, show
from atom.graph.types import BITS
from atom.kernels import Target, find_target, find_versions, highest_level
from atom.pieces import find_pieces, identity, sources_of
from atom.plugins import PASSES, digest_of, module_of, naming

# the overrides that a graph depends on, besides the final values below
IN_RECIPE = re.compile(r"[+~]*(checkpoint|revision|(model|quant|passes)([.@].*)?)(=|$)")


def level_of(config: Config) -> int:
    """The level of a configuration, by default the highest of its device."""
    if config.level is not None:
        return config.level
    return 2 if config.serve.enforce_eager else highest_level(config.device)


def has_pieces(config: Config) -> bool:
    """Whether parts of a configuration's graph are compiled: from level 2 on, on a GPU in any batch-invariant one."""
    return level_of(config) >= 2 or (config.batch_invariant and config.device == "cuda")


def semantic_graph(config: Config) -> Graph:
    """The semantic graph of a configuration's model. ConfigError if its formats are to be measured first."""
    if config.quant.fmt == BUDGET:
        raise ConfigError("quant=budget is measured when an engine starts; here, load a file that such a start wrote")
    method, cache_dtype = config.serve.method, config.serve.kv_cache_dtype
    return build(
        config.model,
        config.dtype,
        cache_dtype,
        config.quant,
        method=method,
        draft=config.draft,
        pools=pools(config),
        images=config.reads_images,
        taps=layer_taps(config),
    )


def has_draft(config: Config) -> bool:
    """Whether programs of the text draft tokens."""
    method = config.serve.draft_method
    return method is not None and method.has_programs


def pools(config: Config) -> bool:
    """Whether the text has a program for embeddings."""
    return config.serve.pooler_config.pooling_type is not None


def max_loras_of(config: Config) -> int:
    """The adapters that the text has room for; 0: it has none."""
    serve = config.serve
    return serve.max_loras if serve.enable_lora else 0


def mesh_of(config: Config) -> Mesh:
    """The ranks of an engine."""
    parallel = config.parallel
    return Mesh(parallel.tensor, parallel.experts, parallel.data, parallel.pipeline)


def dispatches(config: Config) -> bool:
    """Whether data groups send tokens only to the ranks of their experts."""
    return config.parallel.dispatch == "dispatch"


def launch_ingredients(config: Config, target: Target, stage: int = 0) -> dict[str, str]:
    """All ingredients of a lowered graph and its code, in words; equal ones are one artifact.

    stage: of the pipeline.
    """
    return {
        "model": digest(show(semantic_graph(config))),
        "dtype": config.dtype,
        "kv_cache_dtype": config.serve.kv_cache_dtype,
        "quant": json.dumps(asdict(config.quant)),
        "passes": json.dumps(asdict(config.passes)),
        "sources of plug-ins": plugin_sources(config),
        "draft": str(config.serve.method) if has_draft(config) else "none",
        "pools": str(pools(config)).lower(),
        **({"images": "encoded"} if config.reads_images else {}),
        **({"batch_invariant": "true"} if config.batch_invariant else {}),
        **loras(config),
        **({"in host memory": " ".join(names)} if (names := config.serve.cpu_offload_params) else {}),
        "parallel": json.dumps(asdict(mesh_of(config))),
        **({"tokens": "sent to the ranks of their experts"} if dispatches(config) else {}),
        "stage": str(stage),
        "level": str(min(level_of(config), 2)),  # 3 runs the text of 2
        **machine_ingredients(target),
    }


def loras(config: Config) -> dict[str, str]:
    """The ingredient of adapters, if there is room for any."""
    num_loras = max_loras_of(config)
    where = ", of experts too" if config.serve.lora_experts else ""
    return {"adapters": f"{num_loras} of rank {config.serve.max_lora_rank}{where}"} if num_loras else {}


def plugin_sources(config: Config) -> str:
    """A digest of the users' modules whose passes rewrite the graph."""
    digests: dict[str, str] = {}
    for extra in config.passes.extra:
        module = module_of(extra.partition("@")[0], PASSES)
        with naming(f"passes.extra: {extra}"):
            digests[module] = digest_of(module)
    return digest("".join(digests[module] for module in sorted(digests))) if digests else "none"


def machine_ingredients(target: Target) -> dict[str, str]:
    """The ingredients that no configuration chooses."""
    return {
        "device": target.device,
        "features": " ".join(sorted(target.features)),
        **find_versions(target.device),
        "sources of the graph": sources_of("dtypes.py", "graph"),
        "sources of the passes": sources_of("passes"),
        "sources of the kernels": sources_of("kernels"),
        "sources of the pieces": sources_of("pieces"),
        "sources of the compiler": sources_of("compiler"),
    }


def read_artifact(cache: Cache, key: str) -> Graph | None:
    """Read the graph of a published artifact, its pieces marked; None if there is none to be trusted."""
    folder, entry = cache.find("artifacts", key), cache.describe("artifacts", key)
    if folder is None or entry is None:
        return None
    graph = parse((folder / "graph.py").read_text(), f"artifact {key[:12]}")
    number = 0
    for name, program in graph.programs.items():
        nodes = program.nodes
        for run in entry.about["marks"][name].split():
            first, last = map(int, run.split("-"))
            for node in nodes[first : last + 1]:
                node.meta["piece"] = number
            number += 1
    return graph


def publish_artifact(
    cache: Cache, config: Config, ingredients: dict[str, str], graph: Graph, pieces: Sequence[str]
) -> None:
    """Store the graph with its recipe file.

    pieces: their keys.
    """
    from atom.config.recipes import format_recipe

    key, recipe = key_of(ingredients), recipe_of(config)
    about = {
        "name": config.model.name,
        "ingredients": ingredients,
        "recipe": recipe,
        "pieces": list(pieces),
        "marks": _marks(graph),
    }
    text = format_recipe(recipe, {"model": config.model.name, "artifact": key})
    cache.publish("artifacts", key, {"graph.py": show(graph).encode(), "recipe.yaml": text.encode()}, about)


def recipe_of(config: Config) -> list[str]:
    """The overrides that repeat this launch: those of the model, and final values; no API key, no port."""
    final = {
        "dtype": config.dtype,
        "device": config.device,
        "level": level_of(config),
        **({"batch_invariant": True} if config.batch_invariant else {}),
        **{f"parallel.{name}": size for name, size in asdict(mesh_of(config)).items() if size > 1},
        **({"parallel.dispatch": "dispatch"} if dispatches(config) else {}),
        "serve.kv_cache_dtype": config.serve.kv_cache_dtype,
        **({"serve.method": config.serve.method} if has_draft(config) else {}),
        **({"serve.pooler_config.pooling_type": config.serve.pooler_config.pooling_type} if pools(config) else {}),
        **({"serve.images": True} if config.reads_images else {}),
        **({"serve.draft_model": config.serve.draft_model} if config.draft else {}),
        **({"serve.cpu_offload_params": names} if (names := config.serve.cpu_offload_params) else {}),
        "serve.max_model_len": config.serve.max_model_len,
    }
    return [
        *(text for text in config.overrides if IN_RECIPE.match(text) and not text.startswith("model.name=")),
        *(override(name, value) for name, value in final.items()),
    ]


def explain_miss(config: Config, ingredients: dict[str, str], cache: Cache) -> str:
    """Why there is no artifact of these ingredients: it is not trusted, or how the nearest one differs."""
    key = key_of(ingredients)
    if cache.holds("artifacts", key):
        fault = cache.verify("artifacts", key)
        return f"the artifact is not used: {fault}" if fault else "another process has published it meanwhile"
    artifacts = cache.entries("artifacts")
    differing = [(entry, _differing(config, ingredients, entry)) for entry in artifacts if entry.fault is None]
    if not differing:
        is_empty = "there is no artifact in the cache yet"
        return f"no artifact in the cache can be used: {artifacts[0].fault}" if artifacts else is_empty
    nearest, named = min(differing, key=lambda each: len(each[1]))
    assert named, "an artifact of the same ingredients has the same key"
    differ = "differ" if len(named) > 1 or named[0].startswith("sources") else "differs"
    return f"{_listed(named)} {differ} from the nearest artifact, {nearest.key[:12]} ({nearest.about.get('name')})"


def _differing(config: Config, ingredients: dict[str, str], entry: Entry) -> list[str]:
    """The ingredients that differ from an entry's, without those that follow from another."""
    theirs = ingredients_of(entry)
    named = [name for name in {**ingredients, **theirs} if theirs.get(name) != ingredients.get(name)]
    if "dtype" in named and all(each.get("kv_cache_dtype") == each.get("dtype") for each in (ingredients, theirs)):
        named.remove("kv_cache_dtype")
    if "model" in named and {"dtype", "kv_cache_dtype", "quant", "draft", "pools", "images"} & set(named):
        try:
            quant = QuantConfig(**json.loads(str(theirs.get("quant"))))
            dtypes = [str(theirs.get(name)) for name in ("dtype", "kv_cache_dtype")]
            if set(dtypes) <= set(BITS):
                method = str(theirs.get("draft"))
                draft = config.draft if method == config.serve.method else None
                has_pool = theirs.get("pools") == "true"
                reads_images = "images" in theirs and config.model.vision is not None
                has: dict[str, Any] = {"pools": has_pool, "images": reads_images, "taps": layer_taps(config)}
                graph = build(config.model, dtypes[0], dtypes[1], quant, method=method, draft=draft, **has)
                if digest(show(graph)) == theirs["model"]:  # the text names its dtypes and formats
                    named.remove("model")
        except (ValueError, TypeError, ConfigError):  # theirs is of a model that takes other formats
            return named
    return named


def ingredients_of(entry: Entry) -> dict[str, Any]:
    """The ingredients that an entry states."""
    ingredients = entry.about.get("ingredients")
    return ingredients if isinstance(ingredients, dict) else {}


def differences_here(entries: Sequence[Entry]) -> list[str]:
    """The ingredients in which artifacts and pieces made elsewhere differ from those of this machine."""
    differences: dict[str, None] = {}
    for entry in entries:
        theirs = ingredients_of(entry)
        if entry.kind == BINARIES:
            continue  # its key can be made by its compiler only
        if entry.kind == "pieces":
            ours = identity(str(entry.about.get("text")), find_target(str(theirs.get("device", "cpu"))))
        else:
            ours = machine_ingredients(find_target(str(theirs.get("device"))))
        for name in ours:
            if theirs.get(name) != ours[name]:
                values = [str(theirs.get(name)), ours[name]]
                is_short = all(len(value) < 48 for value in values)
                differences[f"{name} ({values[0]}, here {values[1]})" if is_short else name] = None
    return list(differences)


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _marks(graph: Graph) -> dict[str, str]:
    """The first and last call of each piece, by program: `0-7 10-21`."""
    marks: dict[str, str] = {}
    for name, program in graph.programs.items():
        index_of = {node: index for index, node in enumerate(program.nodes)}
        runs = [(index_of[piece.calls[0]], index_of[piece.calls[-1]]) for piece in find_pieces(program)]
        marks[name] = " ".join(f"{first}-{last}" for first, last in runs)
    return marks
