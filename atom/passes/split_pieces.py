"""
    h, x = inductor.add_rms_norm(…)     ->      h, x = inductor.add_rms_norm(…)    # …; piece 1
    qkv = torch.linear(h, …)                    qkv = torch.linear(h, …)    # …; piece 1
    q = torch.norm_rope_write(…)                q = torch.norm_rope_write(…)

The calls between two that cannot be compiled are one piece. A run in which there is nothing to compute is none.
"""

from torch.fx import Node

from atom.graph import Graph, Program, ops
from atom.kernels import find_kernel

COMPILERS = ("inductor", "generated")  # backends whose kernels only exist in pieces
VIEWS = (ops.split, ops.split_heads, ops.merge_heads)


def split_pieces(graph: Graph) -> Graph:
    number = 0
    for program in graph.programs.values():
        for run in _runs(program):
            if all(node.meta.get("kernel") not in COMPILERS or node.target in VIEWS for node in run):
                continue
            for node in run:
                node.meta["piece"] = number
            number += 1
    graph.num_rewrites += number
    return graph


def _runs(program: Program) -> list[list[Node]]:
    """The calls that can be compiled, those that follow each other together."""
    runs: list[list[Node]] = [[]]
    is_generated = any(node.meta.get("kernel") == "generated" for node in program.nodes)
    for node in program.nodes:
        backend = node.meta.get("kernel", "reference")
        if backend == "generated" if is_generated else find_kernel(node.target, backend).trace is not None:
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
