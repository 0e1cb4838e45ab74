"""Read a saved graph text (`job.stage=NAME > graph.py`) and continue from its stage.

It may have been edited, and runs in place of what the passes make.

text = show_saved("fuse_qkv", show(graph))               # its first line names the stage: # job.stage=fuse_qkv
graph, first = read_saved(Path("graph.py"))              # the pass after that stage
graph = lower(graph, level, target, watch, first=first)  # the remaining passes; none before it touches the text
check_runnable(graph, "graph.py", target)
"""

from __future__ import annotations

import re
from pathlib import Path

from torch.fx import Node

from atom.config import PassesConfig
from atom.errors import ConfigError, PassError
from atom.graph import BODY, DRAFT, DRAFT_HEAD, DRAFT_IN, HEAD, POOL, Graph, Mesh, Once, Shuffle, ops, parse, verify
from atom.graph.graph import ADAPTERS, NOISE, STEERING, type_of
from atom.graph.recipe_contents import ranked_parts
from atom.kernels import Target, find_kernel
from atom.passes.pipeline import PIPELINE
from atom.passes.split_stages import split_stages
from atom.runtime.types import INPUTS

PASSES = {rewrite.__name__: level for rewrite, _, level in PIPELINE}  # and the level of ops after each
WRITTEN = "semantic"  # the stage before the first
STAGE = re.compile(r"# job\.stage=(\S*)\s*")


def show_saved(stage: str, text: str) -> str:
    """The text of a graph after a pass, in the form that is saved."""
    return f"# job.stage={stage}\n{text}"


def read_saved(path: Path) -> tuple[Graph, str]:
    """Read a graph, and the name of the pass to continue with. ConfigError if the file is no such graph.

    If the text does not name its stage, it is inferred from the ops in it.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job.graph={path}: {getattr(error, 'strerror', error)}") from None
    graph, stage = parse(text, str(path)), _stage(text, str(path))
    stage = stage or _stage_of(graph)
    try:
        verify(graph, PASSES.get(stage, ops.SEMANTIC))
    except PassError as error:
        raise ConfigError(f"job.graph={path}: {error}") from None
    stages = [WRITTEN, *PASSES]
    return graph, stages[min(stages.index(stage) + 1, len(PASSES))]  # the last pass is repeated: its marks are comments


def _stage(text: str, path: str) -> str | None:
    """The stage in the first line, if it names one."""
    match = STAGE.fullmatch(text.partition("\n")[0])
    if match and match[1] not in (WRITTEN, *PASSES):
        stages = ", ".join([WRITTEN, *PASSES])
        raise ConfigError(f"job.graph={path}:1: there is no stage {match[1]!r}; stages: {stages}")
    return match[1] if match else None


def _stage_of(graph: Graph) -> str:
    """The last stage that a text has certainly passed, by the ops in it."""
    if any(node.target.level == ops.SEMANTIC for node in _nodes(graph)):
        return WRITTEN
    return "select_kernels" if any("kernel" in node.meta for node in _nodes(graph)) else "lower_attention"


def check_stages(graph: Graph, first: str, path: str, mesh: Mesh) -> None:
    """Raise ConfigError if a saved text is not of all pipeline stages.

    first: the pass that it continues with.
    """
    instead = f"save the text of all stages with job.stage={WRITTEN}, of which each stage takes its layers"
    if any(node.target in (ops.send, ops.receive) for node in _nodes(graph)):
        raise ConfigError(f"job.graph={path} is of one pipeline stage; {instead}")
    if mesh.pipeline > 1 and first != split_stages.__name__:
        raise ConfigError(f"job.graph={path} is of a model without stages; {instead}")


def check_ranks(graph: Graph, path: str, mesh: Mesh) -> None:
    """Raise ConfigError if a saved text that is divided among ranks is of another mesh."""
    found = [part for recipe in graph.recipes() for part in ranked_parts(recipe)]
    sizes = {(part.axis, part.ranks) for part in found if not isinstance(part, Once)}
    if wrong := sorted(f"{ranks} along {axis}" for axis, ranks in sizes if mesh.size(axis) != ranks):
        raise ConfigError(f"job.graph={path} is of other ranks, {', '.join(wrong)}: set parallel as it was saved with")
    if not found and (ranks := mesh.ranks_per_stage) > 1:
        raise ConfigError(f"job.graph={path} is of one rank, and parallel.tensor={ranks}: save it with that")


def check_runnable(graph: Graph, path: str, target: Target, *, has_draft: bool = False, pools: bool = False) -> None:
    """Raise ConfigError if a saved text has an input, a kernel or a layout that nothing provides, or not the
    programs of a draft or of embeddings if the run needs them."""
    _check_programs(graph, path, has_draft, pools)
    for node in _nodes(graph):
        backend = node.meta.get("kernel", "reference")
        kernel = find_kernel(node.target, backend)
        weights = (type_of(node.args[place]) for place in kernel.op.weights)
        wanted = kernel.layout_of(*weights) if kernel.has_layouts else None
        layout = next((arg.layout for arg in node.args if isinstance(arg, Shuffle)), None)
        if layout != wanted:
            rule = f'shuffle(…, "{wanted}")' if wanted else "its weight as it is, without shuffle"
            raise ConfigError(f"job.graph={path}: {node.name}: {backend}.{node.target.name} takes {rule}")
        if reason := kernel.accepts(target, *map(type_of, node.args), **node.kwargs):
            raise ConfigError(f"job.graph={path}: {node.name}: {backend}.{node.target.name}: {reason}")


def check_tapped(graph: Graph, path: str, passes: PassesConfig) -> None:
    """Raise ConfigError if a saved text taps or steers other layers than the configuration says."""
    body = graph.programs[BODY]
    num_read = sum(len(graph.programs[name].inputs) for name in (HEAD, DRAFT_IN) if name in graph.programs)
    num_taps = len(body.results) - num_read
    if (num_taps > 0 or passes.taps) and num_taps != len(passes.taps):
        what = f"its body returns what {max(num_taps, 0)} layers give, passes.taps names {len(passes.taps)}"
        raise ConfigError(f"job.graph={path}: {what}; save it with the same passes.taps")
    scales = [node.meta["type"].shape[-1] for node in body.inputs if node.name == STEERING]
    if sum(scales) != len(passes.steer or {}):
        what = f"its body takes {sum(scales)} scales, passes.steer names {len(passes.steer or {})} vectors"
        raise ConfigError(f"job.graph={path}: {what}; save it with the same passes.steer")


def _check_programs(graph: Graph, path: str, has_draft: bool, pools: bool) -> None:
    """Raise ConfigError if a program is missing, or has inputs that the others do not give it."""
    inputs, sources = {BODY: {*INPUTS, ADAPTERS, STEERING}}, {HEAD: BODY}
    if pools or POOL in graph.programs:
        sources[POOL] = BODY
    if has_draft or {DRAFT_IN, DRAFT_HEAD} & graph.programs.keys():
        inputs[DRAFT] = {*INPUTS}
        sources[DRAFT_HEAD] = DRAFT
    if graph.carries_hidden or DRAFT_IN in graph.programs:
        inputs[DRAFT] = {*INPUTS, "hidden"}
        sources[DRAFT_IN] = BODY
    if missing := {*inputs, *sources} - graph.programs.keys():
        raise ConfigError(f"job.graph={path}: it has no function {', '.join(sorted(missing))}")
    for name, known in inputs.items():
        for node in graph.programs[name].inputs:
            if node.name not in known:
                there = ", ".join(sorted(known))
                raise ConfigError(f"job.graph={path}: {name} has an input {node.name}, which is not one of: {there}")
    for name, source in sources.items():
        given = graph.programs[source].results
        nodes = [node for node in graph.programs[name].inputs if name != DRAFT_HEAD or node.name not in NOISE]
        given = given[-len(nodes) :] if name == DRAFT_IN else given[: len(nodes)]
        returned, taken = (", ".join(str(node.meta["type"].row) for node in each) for each in (given, nodes))
        if returned != taken:
            what = f"{name} takes rows of {taken} where {source} returns rows of {returned}"
            raise ConfigError(f"job.graph={path}: {what}")
    if graph.carries_hidden:
        (hidden,) = (node.meta["type"].row for node in graph.programs[DRAFT].inputs if node.name == "hidden")
        given = graph.programs[DRAFT_HEAD].results[1:] or graph.programs[DRAFT].results
        if [node.meta["type"].row for node in given] != [hidden]:
            what = f"{DRAFT_HEAD} returns no row of {hidden} after its tokens, with which a further draft begins"
            raise ConfigError(f"job.graph={path}: {what}")


def _nodes(graph: Graph) -> list[Node]:
    return [node for program in graph.programs.values() for node in program.nodes]
