"""Find tables: weights of which a token reads a row.

tables = find_tables(graph)                                  # none that anything else reads, as a tied head does
named = [each for each in tables if is_named(each, ["embed_tokens_per_layer"])]
"""

from __future__ import annotations

from collections.abc import Collection

from atom.graph import ops
from atom.graph.graph import Graph, node_leaves
from atom.graph.recipes import Recipe, State, leaves


def find_tables(graph: Graph) -> list[Recipe]:
    """The weights that only embeddings read, in order."""
    nodes = [node for program in graph.programs.values() for node in program.nodes]
    read = {
        leaf
        for node in nodes
        if node.target is not ops.embedding
        for recipe in node_leaves(node)
        if not isinstance(recipe, State)
        for leaf in leaves(recipe)
    }
    looked_up = dict.fromkeys(arg for node in graph.find(ops.embedding) for arg in node.args if isinstance(arg, Recipe))
    return [table for table in looked_up if read.isdisjoint(leaves(table))]


def is_named(recipe: Recipe, names: Collection[str]) -> bool:
    """Whether a stored tensor of a recipe has one of these runs of whole parts in its name, as `experts.w2_weight`."""
    return any(f".{name}." in f".{leaf.name}." for leaf in leaves(recipe) for name in names)
