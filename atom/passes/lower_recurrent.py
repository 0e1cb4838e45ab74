"""Lower ops with recurrent state to those of a batch.

    c = causal_conv(x, STATE("0", …), w)    ->    c = batched_causal_conv(x, STATE("0", …), batch, w)

The batch becomes an input of the program.
"""

from __future__ import annotations

from atom.graph import BATCH, Graph, State


def lower_recurrent(graph: Graph) -> None:
    for program in graph.programs.values():
        for node in [node for node in program.nodes if node.target.lowered is not None]:
            batch = program.input("batch", BATCH)
            place = next(at for at, arg in enumerate(node.args) if isinstance(arg, State)) + 1
            args = *node.args[:place], batch, *node.args[place:]
            graph.replace({node: graph.insert(node, node.target.lowered, *args, name=node.name, **node.kwargs)})
