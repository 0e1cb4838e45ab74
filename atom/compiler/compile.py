"""Compile a model: write the graph, lower it, compile its pieces.

graph = compile_graph(load(["checkpoint=/models/qwen3"]))                      # or a saved text is read
compiled = compile_model(load(["checkpoint=/models/qwen3", "level=2"]))        # graph and code, from the cache if there
compiled.report.hit, compiled.report.reason
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from atom.cache import Cache, key_of
from atom.checkpoint import SILENT, Progress
from atom.compiler.artifact import (
    dispatches,
    explain_miss,
    has_draft,
    has_pieces,
    launch_ingredients,
    level_of,
    max_loras_of,
    mesh_of,
    pools,
    publish_artifact,
    read_artifact,
    semantic_graph,
)
from atom.compiler.saved_graph import check_ranks, check_runnable, check_stages, check_tapped, read_saved
from atom.config import Config
from atom.errors import ArtifactError, ConfigError, PassError, UnsupportedError
from atom.graph import Graph
from atom.graph.recipes import leaves
from atom.graph.tables import find_tables, is_named
from atom.kernels import Target, building_kernels, find_kernel, find_piece_compiler, find_target, keep_binaries
from atom.measurement.phases import PhaseClock
from atom.passes import PassReport, lower
from atom.pieces import Piece, PieceCode, PieceError, compile_pieces, find_pieces, identity


def compile_graph(
    config: Config,
    watch: Callable[[PassReport], Any] = lambda _: None,
    target: Target | None = None,
    stage: int = 0,
    semantic: Graph | None = None,
    *,
    verifies_each: bool = True,
) -> Graph:
    """Compile the lowered graph. A saved text continues after its stage.

    target: by default this machine.
    stage: of the pipeline.
    watch: gets a report after each pass.
    semantic: the configuration's semantic graph, which is rewritten; None: it is written here.
    verifies_each: see `lower`.
    """
    level, target = level_of(config), target or find_target(config.device)
    lower_here = functools.partial(
        lower,
        level=level,
        target=target,
        watch=watch,
        keeps_act=config.quant.requires_act,
        mesh=mesh_of(config),
        stage=stage,
        max_loras=max_loras_of(config),
        max_lora_rank=config.serve.max_lora_rank,
        lora_experts=config.serve.lora_experts,
        dispatches=dispatches(config),
        cpu_offload_params=config.serve.cpu_offload_params,
        batch_invariant=config.batch_invariant,
        passes=config.passes,
        verifies_each=verifies_each,
    )
    if config.job.graph is None:
        graph = semantic_graph(config) if semantic is None else semantic
        check_offloaded(graph, config.serve.cpu_offload_params, target)
        graph = lower_here(graph)
        check_invariant(graph, config)
        return graph
    graph, first = read_saved(Path(config.job.graph))
    check_offloaded(graph, config.serve.cpu_offload_params, target)
    check_stages(graph, first, config.job.graph, mesh_of(config))
    graph = lower_here(graph, first=first)
    check_ranks(graph, config.job.graph, mesh_of(config))
    check_runnable(graph, config.job.graph, target, has_draft=has_draft(config), pools=pools(config))
    check_tapped(graph, config.job.graph, config.passes)
    check_invariant(graph, config)
    return graph


def check_offloaded(graph: Graph, names: Sequence[str], target: Target) -> None:
    """Check that what is to stay in host memory are tables of the model, and that the device reads them there.

    names: serve.cpu_offload_params
    """
    if names and "amd" in target.features:
        raise UnsupportedError("serve.cpu_offload_params is for NVIDIA's GPUs; leave it out")
    tables = find_tables(graph) if names else []
    listed = ", ".join(leaf.name for table in tables for leaf in leaves(table))
    there = f"of this model: {listed}" if tables else "this model has none"
    for name in names:
        found = {recipe for recipe in graph.recipes() if is_named(recipe, [name])}
        if not found or not found <= {*tables}:
            what = "is read by more than an embedding" if found else "names no tensor"
            instead = "only tables of which a token reads a row may stay in host memory"
            raise ConfigError(f"serve.cpu_offload_params: {name} {what}; {instead} ({there})")


def check_invariant(graph: Graph, config: Config) -> None:
    """Check that kernels that a saved text or a user's pass has named give the same bits in any batch, if asked to."""
    if not config.batch_invariant:
        return
    for node in (node for program in graph.programs.values() for node in program.nodes):
        kernel = find_kernel(node.target, node.meta.get("kernel", "reference"))
        if not kernel.batch_invariant:
            named = f"{kernel.backend}.{kernel.op.name}"
            raise UnsupportedError(
                f"batch_invariant=true: the bits of {named} depend on the batch; name another kernel"
            )


def whole_graph(graph: Graph, config: Config) -> Graph:
    """A graph with all weights and caches of the model, in place of this one, which may be of one stage's layers."""
    if mesh_of(config).pipeline == 1:
        return graph
    return semantic_graph(config) if config.job.graph is None else read_saved(Path(config.job.graph))[0]


WAITING = "another process is compiling these pieces"


class Report(NamedTuple):
    """How a model was compiled or found in the cache."""

    key: str  # of the artifact; "" for a saved text, which has none
    hit: bool  # no pass was run and nothing was compiled
    reason: str  # of a miss
    pieces: int
    distinct: int  # of them
    compiled: int  # of those
    seconds: dict[str, float]  # by stage


class Compiled(NamedTuple):
    graph: Graph
    code: dict[str, PieceCode]  # by the text of a piece
    report: Report
    level: int  # of the graph; it may be lower than the device's highest


def compile_model(
    config: Config,
    progress: Progress = SILENT,
    cache: Cache | None = None,
    check: Callable[[Graph], Any] = lambda _: None,
    stage: int = 0,
) -> Compiled:
    """Compile the graph and the code of its pieces, or find them in the cache; below level 2 there are no pieces.

    check: gets the graph before anything is compiled.
    stage: of the pipeline.

    `cache.warnings` says what was ignored in the folder, and which level is used instead of the highest.
    UnsupportedError if level=2 needs a compiler that is missing, PassError if a piece gives wrong results,
    ArtifactError if a compiler fails.
    """
    assert config.cache is not None, "config.load resolves it"
    cache = cache or Cache(Path(config.cache))
    with keep_binaries(config.device, cache):
        compiled = _compile_with_pieces(config, progress, cache, check, stage) if has_pieces(config) else None
        if compiled is None:
            config = replace(config, level=min(level_of(config), 1))
            graph = compile_graph(config, stage=stage)
            check(graph)
            report = Report("", False, "pieces begin at level 2", 0, 0, 0, {})
            compiled = Compiled(graph, {}, report, level_of(config))
            with building_kernels(graph):
                pass
        return compiled


def _compile_with_pieces(
    config: Config, progress: Progress, cache: Cache, check: Callable[[Graph], Any], stage: int
) -> Compiled | None:
    """Compile a model of level 2 or 3; None if a compiler is missing or a piece is wrong, and level 1 will do."""
    clock, target = PhaseClock(), find_target(config.device)
    key, ingredients, cached = "", {}, None
    if config.job.graph is None:
        ingredients = launch_ingredients(config, target, stage)
        key = key_of(ingredients)
        clock.stop("key")
        cached = read_artifact(cache, key)
    graph = cached or compile_graph(config, stage=stage)
    check(graph)
    clock.stop("graph")
    pieces = pieces_of(graph)
    keys = {piece.text: key_of(identity(piece.text, target)) for piece in pieces}
    code = _load(keys, target, cache)
    missing = {text: key for text, key in keys.items() if text not in code}
    if missing and (needed := find_piece_compiler(target.device).find_missing()):
        _do_without_compiler(config, len(missing), f"compiling pieces needs {needed}", cache)
        return None
    reason = "" if cached else explain_miss(config, ingredients, cache) if key else "a saved text has no artifact"
    is_damaged = any(cache.holds("pieces", each) for each in missing.values())
    try:
        with building_kernels(graph):
            made, num_compiled = _make(missing, target, cache, progress, is_retry=config.job.kind == "compile")
    except PieceError as error:
        _do_without_pieces(config, str(error), cache)
        return None
    code |= made
    code = {text: code[text] for text in keys}
    clock.stop("pieces")
    if key and not cached:
        publish_artifact(cache, config, ingredients, graph, [*keys.values()])
        clock.stop("publish")
    if num_compiled and not reason:
        where = "damaged or not to be trusted" if is_damaged else "not in the cache"
        reason = f"{num_compiled} of its pieces {'was' if num_compiled == 1 else 'were'} {where}"
    report = Report(key, not reason, reason, len(pieces), len(keys), num_compiled, clock.seconds)
    return Compiled(graph, code, report, level_of(config))


def _do_without_compiler(config: Config, num_missing: int, needed: str, cache: Cache) -> None:
    """Warn that this runs at level 1, if the level is left open; else raise UnsupportedError."""
    if config.job.kind == "compile":
        are = "is" if num_missing == 1 else "are"
        raise UnsupportedError(f"job=compile: {_count(num_missing, 'piece')} {are} not in the cache, and {needed}")
    if config.batch_invariant:
        raise UnsupportedError(f"batch_invariant=true: {needed}")
    if config.level is not None:
        raise UnsupportedError(f"level=2: {needed}, or take level=1")
    cache.warnings.append(f"{needed}; until then this runs at level 1, which is slower")


def _do_without_pieces(config: Config, reason: str, cache: Cache) -> None:
    """Warn that this runs at level 1, if the level is left open; else raise PassError."""
    if config.job.kind == "compile":
        raise PassError(f"job=compile: {reason}; level=1 runs without it")
    if config.batch_invariant:
        raise PassError(f"batch_invariant=true: {reason}; have job=compile try it again")
    if config.level is not None:
        raise PassError(f"level={config.level}: {reason}; take level=1, or have job=compile try it again")
    cache.warnings.append(f"{reason}: this runs at level 1, which is slower; job=compile tries it again")


def pieces_of(graph: Graph) -> list[Piece]:
    """The pieces of all programs, in order."""
    return [piece for program in graph.programs.values() for piece in find_pieces(program)]


@contextlib.contextmanager
def _locked(cache: Cache, keys: Sequence[str], progress: Progress) -> Iterator[None]:
    """Hold the locks of pieces, taken in one order, so that two processes never wait for each other."""
    with contextlib.ExitStack() as locks:
        with contextlib.ExitStack() as shown:
            show_once = functools.cache(lambda: shown.enter_context(progress.task(WAITING)))
            for key in sorted(keys):
                locks.enter_context(cache.lock("pieces", key, show_once))
        yield


def _load(keys: Mapping[str, str], target: Target, cache: Cache) -> dict[str, PieceCode]:
    """Load the pieces that are in the cache; keys by text. `cache.warnings` says which cannot be loaded."""
    code: dict[str, PieceCode] = {}
    for text, key in keys.items():
        if (folder := cache.find("pieces", key)) is None:
            continue
        try:
            code[text] = find_piece_compiler(target.device).load(folder)
        except ArtifactError as error:
            if (line := f"{error}, built anew") not in cache.warnings:
                cache.warnings.append(line)
    return code


def _make(
    keys: Mapping[str, str], target: Target, cache: Cache, progress: Progress, *, is_retry: bool
) -> tuple[dict[str, PieceCode], int]:
    """Make the code of missing pieces; the number of those compiled.

    keys: by text.

    PieceError if one is wrong, or was so before, unless failures are to be tried again.
    """
    with _locked(cache, [*keys.values()], progress):
        code = _load(keys, target, cache)  # another process may have been first
        missing = {text: key for text, key in keys.items() if text not in code}
        for text, key in missing.items():
            if not is_retry and (reason := find_failure(key, cache)):
                raise PieceError(text, reason)
        return code | _compile(missing, target, cache, progress), len(missing)


def find_failure(key: str, cache: Cache) -> str | None:
    """Why an earlier launch found that a piece must not be used; equal ingredients give equal code."""
    entry = cache.describe("failures", key)
    return None if entry is None else str(entry.about.get("reason"))


def _compile(keys: Mapping[str, str], target: Target, cache: Cache, progress: Progress) -> dict[str, PieceCode]:
    """Compile, publish and load pieces, whose locks are held; keys by text."""
    code: dict[str, PieceCode] = {}
    if not keys:
        return code
    with progress.task(f"compiling {_count(len(keys), 'piece')}", len(keys), in_bytes=False) as task:
        try:
            for text, files in compile_pieces(list(keys), target.device):
                _forget("failures", keys[text], cache)
                _forget("pieces", keys[text], cache)  # intact, but it cannot be loaded
                folder = cache.publish("pieces", keys[text], files, _about(text, target))
                code[text] = find_piece_compiler(target.device).load(folder)
                task.advance(1)
        except PieceError as error:
            name = f"{describe_piece(error.text)}: {error}"
            about = {**_about(error.text, target), "name": name, "reason": str(error)}
            cache.publish("failures", keys[error.text], {}, about)
            raise
    return code


def _about(text: str, target: Target) -> dict[str, Any]:
    return {"name": describe_piece(text), "text": text, "ingredients": identity(text, target)}


def _forget(kind: str, key: str, cache: Cache) -> None:
    """Remove an entry, if there is one and that is allowed."""
    if entry := cache.describe(kind, key):
        with contextlib.suppress(ArtifactError):
            cache.remove(entry)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_piece(text: str) -> str:
    """Describe a piece briefly, by its first and last calls."""
    names = [line.split(" = ")[1].partition("(")[0].partition(".")[2] for line in text.splitlines() if " = " in line]
    return f"{names[0]} … {names[-1]}, {len(names)} calls"
