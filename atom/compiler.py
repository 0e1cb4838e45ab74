"""From a configuration to what runs: the frontend writes the graph, the passes lower it, its pieces are compiled.

graph = compile_graph(load(["checkpoint=/models/qwen3"]))                      # or a saved text is read
compiled = compile_model(load(["checkpoint=/models/qwen3", "level=2"]))        # graph and code, from the cache if there
compiled.report.hit, compiled.report.reason
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from atom.artifact import Cache, Entry
from atom.checkpoint import SILENT, Progress
from atom.config import Config
from atom.errors import ConfigError, PassError, UnsupportedError
from atom.frontend import build
from atom.graph import Graph, Shuffle, ops, parse, show, verify
from atom.kernels import Target, find_kernel, find_target
from atom.passes import PassReport, lower
from atom.pieces import (
    Piece,
    PieceCode,
    compile_pieces,
    digest,
    find_pieces,
    has_compiler,
    identity,
    instruction_set,
    key_of,
    load_piece,
    sources_of,
)
from atom.runtime.types import INPUTS, INPUTS_BY_KIND


def semantic_graph(config: Config) -> Graph:
    """What the frontend writes of the model."""
    return build(config.model, config.dtype, config.serve.kv_cache_dtype)


def compile_graph(
    config: Config, watch: Callable[[PassReport], Any] = lambda _: None, target: Target | None = None
) -> Graph:
    """The lowered graph; `watch` gets a report after each pass. A text saved before lowering is lowered too.

    The target is this machine, unless another is given.
    """
    level, target = level_of(config), target or find_target(config.device)
    if config.job.graph is None:
        return lower(semantic_graph(config), level, target, watch)
    graph = _saved_graph(Path(config.job.graph))
    is_semantic = _level(graph) == ops.SEMANTIC
    has_kernels = any("kernel" in node.meta for node in _nodes(graph))
    first = "fuse_qkv" if is_semantic else "split_pieces" if has_kernels else "select_kernels"
    graph = lower(graph, level, target, watch, first=first)
    _check_runnable(graph, config.job.graph)
    return graph


HIGHEST_LEVEL = 2


class Report(NamedTuple):
    """How a model was compiled, or found."""

    key: str  # of the artifact; "" for a saved text, which has none
    hit: bool  # nothing had to be compiled, and no pass to run
    reason: str  # of a miss
    pieces: int
    distinct: int  # of them
    compiled: int  # of those
    seconds: dict[str, float]  # by stage


class Compiled(NamedTuple):
    graph: Graph
    code: dict[str, PieceCode]  # by the text of a piece
    report: Report


def level_of(config: Config) -> int:
    """The level that a configuration asks for: the highest, where it leaves that open."""
    return HIGHEST_LEVEL if config.level is None else config.level


def compile_model(
    config: Config,
    progress: Progress = SILENT,
    cache: Cache | None = None,
    check: Callable[[Graph], Any] = lambda _: None,
) -> Compiled:
    """The graph and the code of its pieces, of the cache folder where they are there; below level 2 there are none.

    `check` sees the graph before anything is compiled.
    `cache.warnings` says what was ignored in the folder, and what a level left open has become. UnsupportedError where
    level=2 needs a compiler that is not there, ArtifactError where one fails.
    """
    assert config.cache is not None, "config.load resolves it"
    cache = cache or Cache(Path(config.cache))
    clock = _Clock()
    if level_of(config) < 2:
        graph = compile_graph(config)
        check(graph)
        return Compiled(graph, {}, Report("", False, "pieces begin at level 2", 0, 0, 0, clock.seconds))
    key, ingredients, found = "", {}, None
    if config.job.graph is None:
        ingredients = launch_ingredients(config, find_target(config.device))
        key = key_of(ingredients)
        clock.stop("key")
        found = _read_artifact(cache, key)
    graph = found or compile_graph(config)
    check(graph)
    clock.stop("graph")
    pieces = pieces_of(graph)
    keys = {piece.text: key_of(identity(piece.text)) for piece in pieces}
    folders = {text: cache.find("pieces", piece_key) for text, piece_key in keys.items()}
    missing = [text for text, folder in folders.items() if folder is None]
    if missing and not has_compiler():
        needed = "compiling pieces needs a C++ compiler: install g++"
        if config.level is not None:
            raise UnsupportedError(f"level=2: {needed}, or take level=1")
        cache.warnings.append(f"{needed}; until then this runs at level 1, which is slower")
        return compile_model(replace(config, level=1), progress, cache, check)
    reason = "" if found else _why(ingredients, cache.entries()) if key else "a saved text has no artifact"
    num_compiled = 0
    if missing:
        with _locked(cache, [keys[text] for text in missing]):
            # another process may have been first
            folders |= {text: cache.find("pieces", keys[text]) for text in missing}
            missing = [text for text in missing if folders[text] is None]
            folders |= _compile({text: keys[text] for text in missing}, cache, progress)
        num_compiled = len(missing)
    code = {text: load_piece(folder) for text, folder in folders.items() if folder is not None}
    clock.stop("pieces")
    if key and not found:
        about = {
            "name": config.model.name,
            "ingredients": ingredients,
            "pieces": [*keys.values()],
            "marks": _marks(graph),
        }
        cache.publish("artifacts", key, {"graph.py": show(graph).encode()}, about)
        clock.stop("publish")
    if num_compiled and not reason:
        reason = f"{num_compiled} of its pieces were not in the cache"
    report = Report(key, not reason, reason, len(pieces), len(keys), num_compiled, clock.seconds)
    return Compiled(graph, code, report)


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now


def launch_ingredients(config: Config, target: Target) -> dict[str, str]:
    """All that a lowered graph and its code depend on, in words; equal ones are one artifact."""
    return {
        "model": digest(show(semantic_graph(config))),
        "dtype": config.dtype,
        "kv_cache_dtype": config.serve.kv_cache_dtype,
        "level": str(level_of(config)),
        "device": target.device,
        "features": " ".join(sorted(target.features)),
        "instruction set": instruction_set(),
        "torch": torch.__version__,
        "sources of the graph": sources_of("graph"),
        "sources of the passes": sources_of("passes"),
        "sources of the kernels": sources_of("kernels"),
        "sources of the pieces": sources_of("pieces"),
        "sources of the compiler": sources_of("compiler.py"),
    }


def _why(ingredients: dict[str, str], entries: Iterable[Entry]) -> str:
    """Why there is no artifact of these ingredients: in what the nearest one differs."""
    differing = {
        (entry.key, str(entry.about.get("name"))): [
            name for name in ingredients if entry.about.get("ingredients", {}).get(name) != ingredients[name]
        ]
        for entry in entries
        if entry.kind == "artifacts" and entry.fault is None
    }
    if not differing:
        return "there is no artifact in the cache yet"
    (key, name), differences = min(differing.items(), key=lambda item: len(item[1]))
    named = [each for each in differences if each != "model"] or differences  # the text follows from the others
    differ = "differ" if len(named) > 1 else "differs"
    return f"{' and '.join(named)} {differ} from the nearest artifact, {key[:12]} ({name})"


def _read_artifact(cache: Cache, key: str) -> Graph | None:
    """The graph of a published artifact, its pieces marked."""
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


def _marks(graph: Graph) -> dict[str, str]:
    """By program, the places of each piece's first and last call: `0-7 10-21`."""
    marks: dict[str, str] = {}
    for name, program in graph.programs.items():
        places = {node: place for place, node in enumerate(program.nodes)}
        runs = [(places[piece.calls[0]], places[piece.calls[-1]]) for piece in find_pieces(program)]
        marks[name] = " ".join(f"{first}-{last}" for first, last in runs)
    return marks


def pieces_of(graph: Graph) -> list[Piece]:
    """The pieces of all programs, in order."""
    return [piece for program in graph.programs.values() for piece in find_pieces(program)]


@contextlib.contextmanager
def _locked(cache: Cache, keys: Iterable[str]) -> Iterator[None]:
    """Hold the locks of pieces, taken in one order, so that two processes never wait for each other."""
    with contextlib.ExitStack() as locks:
        for key in sorted(keys):
            locks.enter_context(cache.lock("pieces", key))
        yield


def _compile(keys: Mapping[str, str], cache: Cache, progress: Progress) -> dict[str, Path]:
    """Compile and publish pieces; keys by text. Their folders."""
    folders: dict[str, Path] = {}
    if not keys:
        return folders
    with progress.task(f"compiling {len(keys)} pieces", len(keys), in_bytes=False) as task:
        for text, files in compile_pieces(list(keys)):
            about = {"name": _describe(text), "text": text, "ingredients": identity(text)}
            folders[text] = cache.publish("pieces", keys[text], files, about)
            task.advance(1)
    return folders


def _describe(text: str) -> str:
    """A piece in a few words: its first and last calls."""
    names = [line.split(" = ")[1].partition("(")[0].partition(".")[2] for line in text.splitlines() if " = " in line]
    return f"{names[0]} … {names[-1]}, {len(names)} calls"


def _nodes(graph: Graph) -> list[Node]:
    return [node for program in graph.programs.values() for node in program.nodes]


def _level(graph: Graph) -> str:
    """semantic, where a call is that only such a graph may have."""
    is_lowered = all(ops.LOWERED in node.target.levels for node in _nodes(graph) if isinstance(node.target, ops.Op))
    return ops.LOWERED if is_lowered else ops.SEMANTIC


def _saved_graph(path: Path) -> Graph:
    try:
        graph = parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job.graph={path}: {getattr(error, 'strerror', error)}") from None
    try:
        verify(graph, _level(graph))
    except PassError as error:
        raise ConfigError(f"job.graph={path}: {error}") from None
    return graph


def _check_runnable(graph: Graph, path: str) -> None:
    """ConfigError where a saved text asks for an input, a kernel or a layout that nothing provides."""
    kinds = {cache.kind for cache in graph.caches()}
    provided = {"body": {*INPUTS, *(f"{name}{kind}" for name in INPUTS_BY_KIND for kind in kinds)}, "head": {"hidden"}}
    if missing := provided.keys() - graph.programs.keys():
        raise ConfigError(f"job.graph={path}: it has no function {', '.join(sorted(missing))}")
    for name, inputs in provided.items():
        for node in graph.programs[name].inputs:
            if node.name not in inputs:
                raise ConfigError(
                    f"job.graph={path}: {name} has an input {node.name}; there are: {', '.join(sorted(inputs))}"
                )
    for node in _nodes(graph):
        backend = node.meta.get("kernel", "reference")
        wanted = find_kernel(node.target, backend).layout
        given = next((arg.layout for arg in node.args if isinstance(arg, Shuffle)), None)
        if given != wanted:
            rule = f'shuffle(…, "{wanted}")' if wanted else "its weight as it is, without shuffle"
            raise ConfigError(f"job.graph={path}: {node.name}: {backend}.{node.target.name} takes {rule}")
