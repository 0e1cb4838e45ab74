"""Compile a configuration to a lowered graph and the code of its pieces.

graph = compile_graph(config)                # the text after all passes
compiled = compile_model(config)             # and its code, from the cache if it is there
"""

from atom.compiler.artifact import has_draft, level_of, mesh_of, semantic_graph
from atom.compiler.compile import (
    Compiled,
    Report,
    compile_graph,
    compile_model,
    describe_piece,
    find_failure,
    pieces_of,
    whole_graph,
)

__all__ = [
    "Compiled",
    "Report",
    "compile_graph",
    "compile_model",
    "describe_piece",
    "find_failure",
    "has_draft",
    "level_of",
    "mesh_of",
    "pieces_of",
    "semantic_graph",
    "whole_graph",
]
