"""Mark the runs of calls that are compiled as pieces.

    h, x = inductor.add_rms_norm(…)     ->      h, x = inductor.add_rms_norm(…)    # …; piece 1
    qkv = torch.linear(h, …)                    qkv = torch.linear(h, …)    # …; piece 1
    q = cpp.norm_rope_write(…)                  q = cpp.norm_rope_write(…)

The calls between two that cannot be compiled are one piece, unless there is nothing to compute in them.
"""

from torch.fx import Node

from atom.graph import Graph, Program, ops
from atom.kernels import PieceCompiler, find_backend, find_kernel
from atom.passes.context import PassContext


def split_pieces(graph: Graph, context: PassContext) -> Graph:
    number, compiler = 0, context.piece_compiler
    if compiler is None:
        return graph
    for program in graph.programs.values():
        for run in _runs(program, compiler):
            if not any(_is_compiled(node) for node in run):
                continue
            for node in run:
                node.meta["piece"] = number
            number += 1
    graph.num_rewrites += number
    return graph


def _is_compiled(node: Node) -> bool:
    """Whether the call computes something with a kernel that exists within pieces only."""
    backend = find_backend(node.meta.get("kernel", "reference"))
    return node.target not in ops.VIEWS and backend.piece_compiler is not None


def _runs(program: Program, compiler: PieceCompiler) -> list[list[Node]]:
    """The runs of consecutive calls that can be compiled."""
    runs: list[list[Node]] = [[]]
    for node in program.nodes:
        if compiler.takes(find_kernel(node.target, node.meta.get("kernel", "reference"))):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
