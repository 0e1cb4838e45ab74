"""`job=explain`: show what each pass does, and the sizes of a model.

Reads no weights, compiles nothing.

atom-run job=explain                                  # each pass: changes, time, diff of the text; then sizes
atom-run job=explain job.stage=fuse_qkv > graph.py    # the whole text at that point, which job.graph=graph.py runs
atom-run job=explain job.gpu=h200                     # the sizes, and whether a GPU of conf/gpu fits
atom-run job=explain job.gpu=h200 device=cuda         # and a GPU's text; without a GPU here job.gpu is h200 by default
atom-run job=explain job.gpu=mi300x device=rocm       # of AMD's as well, by AITER
atom-run job=explain parallel=tp4                     # the text and the sizes of each of 4 ranks
atom-run job.save_tokenizer=FOLDER                    # only the tokenizer, for programs that read transformers' files
atom-run job=explain job.output=json
atom-run job=explain job.output=html > page.html      # a page: the model as a picture, passes, kernels, limits
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.fx import Node

from atom.assemble import digest_of, formats_made, left_plain, mtp_patterns, settle_formats, state_kinds
from atom.cache import Cache, key_of
from atom.checkpoint import RichProgress
from atom.compiler import compile_graph, describe_piece, find_failure, level_of, mesh_of, pieces_of
from atom.compiler.artifact import semantic_graph
from atom.compiler.saved_graph import WRITTEN, show_saved
from atom.config import Config, GPUConfig
from atom.config.checkpoint import open_for
from atom.config.load import gpu_of, load_gpu
from atom.config.parallel import find_mixture, sent_share
from atom.devices import find_device
from atom.errors import ConfigError
from atom.graph import DRAFT, DRAFT_HEAD, Graph, W, ops, show
from atom.graph.recipe_contents import device_bytes, held_by_format, held_bytes, host_bytes
from atom.graph.recipes import leaves
from atom.graph.shares import active_fractions
from atom.graph.types import BITS
from atom.jobs.explain.changes import Stage
from atom.jobs.explain.layouts import fit, kv_pool, layouts, prefill_limit, prompt_limit
from atom.jobs.explain.page import make_page
from atom.jobs.explain.text import describe, folded_diff
from atom.kernels import Target, find_kernel, find_target, tuned
from atom.passes import PassReport
from atom.pieces import identity
from atom.process.messages import say
from atom.weights.quantize import is_calibrated

OBJECTIVES = (  # choices of job.objective; those of a GPU are None without one
    *("decode_limit", "decode_limit_per_gpu", "prefill_limit", "prefill_limit_per_gpu", "fits", "kv_tokens"),
    *("kv_sequences", "weights_bytes", "active_weights_bytes"),
)


def run(config: Config, report: Callable[[Mapping[str, Any]], None] = lambda numbers: None) -> int:
    """Print the stages and the sizes, or one stage's whole text.

    report: is called with the numbers of OBJECTIVES
    """
    if config.job.stage is not None and config.job.output != "text":
        raise ConfigError(f"job.stage={config.job.stage} prints a text: leave out job.output={config.job.output}")
    if config.job.save_tokenizer is not None:
        save_tokenizer(config, Path(config.job.save_tokenizer))
        return 0
    config = settle_formats(config, RichProgress(), measures=False)
    name = gpu_of(config)
    if name != config.job.gpu:
        say(f"there is no GPU here, so this is about {name}; job.gpu=NAME takes another")
        config = replace(config, job=replace(config.job, gpu=name))
    gpu = None if name is None else load_gpu(name)
    has_texts = config.job.output != "json"
    stages = [Stage(WRITTEN, 0, 0.0, show(semantic_graph(config)) if has_texts else "")]

    def watch(report: PassReport) -> None:
        text = show(report.graph) if has_texts else ""
        stages.append(Stage(report.name, report.num_changes, report.seconds, text))

    target = None
    if gpu is not None and config.device == "cuda" and find_device() == "cpu":
        target = Target("cuda", frozenset(gpu.features))
    graph = compile_graph(config, watch, target, config.job.pipeline_rank)
    if config.job.stage is not None:
        sys.stdout.write(show_saved(config.job.stage, _find(stages, config.job.stage).text))
        return 0
    result = find_sizes(graph, gpu, target, config)
    report(numbers_of(result, mesh_of(config).num_ranks))
    match config.job.output:
        case "json":
            passes = [{"name": s.name, "changes": s.num_changes, "seconds": s.seconds} for s in stages[1:]]
            print(json.dumps({"passes": passes, **result}))
        case "html":
            print(make_page(graph, stages, result, list(describe(result, config)), config))
        case _:
            print_text(stages, result, config)
    return 0


def save_tokenizer(config: Config, folder: Path) -> None:
    """Write the checkpoint's tokenizer to a folder. ConfigError if that fails or an explanation is asked for too."""
    if config.job.stage is not None or config.job.output != "text":
        raise ConfigError("job.save_tokenizer explains nothing: leave out job.stage and job.output")
    checkpoint = open_for(config, RichProgress(), weights=False)
    try:
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
    finally:
        checkpoint.close()
    if tokenizer is None:
        raise ConfigError(f"job.save_tokenizer={folder}: the checkpoint has no tokenizer")
    try:
        tokenizer.save(folder)
    except OSError as error:
        raise ConfigError(f"job.save_tokenizer={folder}: {error.strerror}") from None
    say(f"{folder} has the tokenizer")


def numbers_of(result: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """The numbers of OBJECTIVES; those of a GPU are None without one. num_ranks: GPUs among which limits are shared"""
    numbers = dict.fromkeys(OBJECTIVES) | {name: result[name] for name in ("weights_bytes", "active_weights_bytes")}
    if gpu := result.get("gpu"):
        decode, prefill = gpu["decode"][0]["tokens_per_second"], gpu["prefill_tokens_per_second"]
        numbers |= {
            "decode_limit": decode,
            "decode_limit_per_gpu": decode / num_ranks,
            "prefill_limit": prefill,
            "prefill_limit_per_gpu": None if prefill is None else prefill / num_ranks,
            "fits": int(gpu["fits"]),
            "kv_tokens": max(gpu["kv_tokens"].values(), default=None),
            "kv_sequences": gpu["kv_sequences"],
        }
    return numbers


def find_sizes(graph: Graph, gpu: GPUConfig | None, target: Target | None, config: Config) -> dict[str, Any]:
    """The pieces, the sizes, and what a GPU would give. target: of a GPU that is not here, whose pieces have no keys"""
    result = pieces(graph, config) if target is None else {}
    lowered = replace(config, level=min(level_of(config), 1))
    graphs = [  # of all stages
        graph if stage == config.job.pipeline_rank else compile_graph(lowered, target=target, stage=stage)
        for stage in range(mesh_of(config).pipeline)
    ]
    result |= sizes(graph, config, graphs)
    if gpu is not None:
        result["gpu"] = limits(gpu, graphs, config)
        if mesh_of(config).num_ranks == 1 and config.job.graph is None:
            result["gpu"]["layouts"] = list(layouts(gpu, config, target))
    return result


def print_text(stages: Sequence[Stage], result: dict[str, Any], config: Config) -> None:
    """Print what each pass has changed and the sizes, which come first if a GPU is asked about."""
    lines = list(describe(result, config))
    width = max(len(label) for label, _ in lines)
    sizes = "\n".join(f"{label:<{width}}  {text}".rstrip() for label, text in lines)
    passes = []
    for before, after in pairwise(stages):
        diff = "".join(f"  {line}\n" for line in folded_diff(before.text, after.text))
        passes.append(f"{after.describe()}\n{diff}")
    for part in [sizes, "", *passes] if "gpu" in result else [*passes, sizes]:
        print(part)


def _find(stages: list[Stage], name: str) -> Stage:
    for stage in stages:
        if stage.name == name:
            return stage
    raise ConfigError(f"job.stage={name}: there is no such stage; stages: {', '.join(stage.name for stage in stages)}")


def sizes(graph: Graph, config: Config, graphs: Sequence[Graph] = ()) -> dict[str, Any]:
    """Parameters, bytes of weights, linears by their activations' format, KV bytes a token, and what the pool holds.

    graphs: of all stages of a pipeline
    """
    kinds, mesh = state_kinds(graph, config.serve.block_size), mesh_of(config)
    others = [state_kinds(each, config.serve.block_size) for each in graphs if each is not graph]
    nodes = [node for program in graph.programs.values() for node in program.nodes]
    return {
        **weight_sizes(graph),
        **({"calibration": config.quant.calibration} if _may_calibrate(graph, config) else {}),
        "activations": Counter(node.kwargs["act"] for node in nodes if "act" in node.kwargs),
        "batch_invariant": kernels_by_invariance(nodes),
        "left_plain": left_plain(graph, config),
        "left_out": mtp_patterns(config),
        **({"draft_bytes": draft_bytes(graph)} if DRAFT in graph.programs else {}),
        **({} if config.serve.method is None else {"draft_counts": draft_counts(config), **draft_times(graph, config)}),
        "kv_bytes_per_token": {kind.name: kind.bytes_per_token for kind in kinds if not kind.rule.in_slot},
        **({"state_bytes": size} if (size := sum(kind.bytes_per_slot(config.limits) for kind in kinds)) else {}),
        **kv_pool(kinds, config.serve, config.limits, mesh.num_ranks, others),
        **({"ranks": asdict(mesh), "collectives": collectives(graph)} if mesh.num_ranks > 1 else {}),
        **exchanges(graphs, config),
        **({"stages": [stage_sizes(each, config.serve.block_size) for each in graphs]} if len(graphs) > 1 else {}),
    }


def kernels_by_invariance(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """The kernels of these calls that give a token the same bits in any batch, and the others."""
    found: dict[str, set[str]] = {"kernels": set(), "others": set()}
    for node in nodes:
        kernel = find_kernel(node.target, node.meta.get("kernel", "reference"))
        found["kernels" if kernel.batch_invariant else "others"].add(f"{kernel.backend}.{kernel.op.name}")
    return {name: sorted(each) for name, each in found.items()}


def weight_sizes(graph: Graph) -> dict[str, Any]:
    """Parameters and bytes of weights, in all, of those that a token is multiplied with, and by format.

    Active parameters are those that one token is multiplied with: without the experts that it does not choose, and
    without the embedding, of which it takes one row, unless that is the head too. Most published figures count so, some
    with the embedding. A format's bytes are those in the checkpoint and those in memory, which differ if it is
    dequantized; a plain tensor counts in the dtype that it is computed in.
    """
    shares = active_fractions(graph.programs.values())
    share_of: dict[W, Fraction] = defaultdict(Fraction)
    for recipe, share in shares.items():
        for leaf in leaves(recipe):
            share_of[leaf] = max(share_of[leaf], share)
    stored, held = Counter[str](), Counter[str]()
    active: dict[str, Fraction] = defaultdict(Fraction)
    alike = Counter((leaf.type, share) for leaf, share in share_of.items())  # experts, of which there are many
    for (type, share), count in alike.items():
        stored[type.fmt or type.dtype] += type.num_bytes * count
        active[type.fmt or type.dtype] += type.num_elements * share * count
    for recipe in shares:
        held.update(held_by_format(recipe))
    return {
        "parameters": sum(type.num_elements * count for (type, _), count in alike.items()),
        "active_parameters": int(sum(active.values())),
        "weights_bytes": sum(map(device_bytes, shares)),
        **({"host_weights_bytes": on_host} if (on_host := sum(map(host_bytes, shares))) else {}),
        "active_weights_bytes": int(sum(held_bytes(recipe) * share for recipe, share in shares.items())),
        "formats": {
            fmt: {"stored_bytes": stored[fmt], "held_bytes": held[fmt], "active_parameters": int(active[fmt])}
            for fmt, _ in (stored | Counter({fmt: size for fmt, size in held.items() if fmt not in BITS})).most_common()
        },
    }


def stage_sizes(graph: Graph, block_size: int) -> dict[str, int]:
    """The layers of a stage, and what each of its ranks has of them."""
    return {
        "layers": len(graph.layers()),
        "weights_bytes": sum(map(device_bytes, graph.recipes())),
        "kv_bytes_per_token": sum(kind.bytes_per_token for kind in state_kinds(graph, block_size)),
    }


def draft_counts(config: Config) -> dict[int, int]:
    """Max drafts per sequence if no step was measured, by the max number of sequences that draft so many."""
    max_drafts, verified = config.serve.num_speculative_tokens or 0, config.limits.max_verified_tokens
    counts = {verified // (1 + count): count for count in range(1, max_drafts + 1) if verified > count}
    return dict(sorted(counts.items()))


def draft_times(graph: Graph, config: Config) -> dict[str, Any]:
    """Step times measured by tune=true, by GPU and sequences: microseconds with 0, 1, … drafts."""
    if config.cache is None or config.serve.max_verified_tokens is not None:
        return {}
    text, found = digest_of(graph)[:16], dict[str, dict[str, list[float]]]()
    for gpu, tables in tuned.read_all(Path(config.cache)).items():
        keys = [key.split() for key in tables.get(tuned.DRAFTS, {})]
        if times := {size: tables[tuned.DRAFTS][f"{size} {key}"] for size, key in keys if key == text}:
            found[gpu] = dict(sorted(times.items(), key=lambda each: int(each[0])))
    return {"draft_times": found} if found else {}


def draft_bytes(graph: Graph) -> int:
    """The bytes of weights that are read for a token that is drafted."""
    shares = active_fractions([graph.programs[name] for name in (DRAFT, DRAFT_HEAD)])
    return int(sum(held_bytes(recipe) * share for recipe, share in shares.items()))


def collectives(graph: Graph) -> dict[str, dict[str, int]]:
    """The collectives of a step by op: how many there are, and the bytes that a rank brings to all of them for a token,
    or gets of `receive`, or for a row that samples."""
    found: dict[str, dict[str, int]] = {}
    nodes = (node for program in graph.programs.values() for node in program.nodes if node.target.is_collective)
    for node in nodes:
        of = found.setdefault(node.target.name, {"times": 0, "bytes_per_token": 0})
        of["times"] += 1
        values = (node,) if node.target is ops.receive else node.all_input_nodes
        of["bytes_per_token"] += sum(value.meta["type"].bytes_per_token for value in values)
    return found


def exchanges(graphs: Sequence[Graph], config: Config) -> dict[str, Any]:
    """What a rank sends to other data groups per token of its own, by each `parallel.dispatch`.

    Assumes that tokens choose all experts equally often; seconds are at `job.network`.

    graphs: of all stages; the one that sends the most counts
    """
    parallel, mixture = config.parallel, find_mixture(config.model)
    if mixture is None or parallel.data == 1 or parallel.experts == 1:
        return {}
    share, others = sent_share(mixture, parallel.experts), parallel.data - 1
    largest = {"gather": 0, "dispatch": 0}
    for graph in graphs:
        nodes = [node for program in graph.programs.values() for node in program.nodes]
        calls = [node.args[:3] for node in nodes if node.target in (ops.gather_tokens, ops.dispatch)]
        sizes = [[value.meta["type"].bytes_per_token for value in values] for values in calls]
        rows, chosen = 2 * sum(row for row, *_ in sizes), sum(sum(rest) for _, *rest in sizes)  # there and back
        sent = {"gather": others * (rows + chosen), "dispatch": others * (int(rows * share) + chosen)}
        largest = {name: max(largest[name], sent[name]) for name in largest}
    each = {name: {"bytes_per_token": size, "seconds_per_token": size / config.job.network}
            for name, size in largest.items()}  # fmt: skip
    return {"exchanges": each}


def pieces(graph: Graph, config: Config) -> dict[str, Any]:
    """The number of pieces, and each distinct one: how often it runs, and whether the cache folder has it.

    `fault` is why a cached piece, or one that failed before, is not used. This does not count as a use for pruning.
    """
    assert config.cache is not None, "config.load resolves it"
    cache = Cache(Path(config.cache))
    counts, target = Counter(piece.text for piece in pieces_of(graph)), find_target(config.device)
    distinct = []
    for text, times in counts.items():
        key = key_of(identity(text, target))
        is_there = cache.holds("pieces", key)
        fault = cache.verify("pieces", key) if is_there else find_failure(key, cache)
        state = {"key": key, "cached": is_there and fault is None, "fault": fault}
        distinct.append({"name": describe_piece(text), "times": times, **state})
    return {"pieces": counts.total(), "distinct_pieces": distinct}


def limits(gpu: GPUConfig, graphs: Sequence[Graph], config: Config) -> dict[str, Any]:
    """A GPU's room and limits. graphs: of all stages"""
    return {
        "name": config.job.gpu,
        "memory_bytes": gpu.memory,
        "bandwidth": gpu.bandwidth,
        **fit(gpu, graphs, config),
        "prefill_tokens_per_second": prefill_limit(graphs, gpu, mesh_of(config)),
        "prompt": prompt_limit(graphs, gpu, mesh_of(config)),
    }


def _may_calibrate(graph: Graph, config: Config) -> bool:
    """Whether weights are calibrated, or would be without quant.calibration=none."""
    calibration = "auto" if config.quant.calibration == "none" else config.quant.calibration
    return any(is_calibrated(fmt, calibration) for fmt in formats_made(graph))
