"""Keep tables of which a token reads a row in host memory.

    e = embedding(tokens, W("t", bf16[9, 4]))       ->      e = embedding(tokens, host(W("t", bf16[9, 4])))

Only those that `serve.cpu_offload_params` names. Declines if something else reads the table too, as a tied head does:
`compiler.check_offloaded` refuses that ahead of all passes, since a stage of a pipeline may not have a table at all. It
comes after `quantize`, which unpacks what no kernel looks up packed.
"""

from atom.errors import UnsupportedError
from atom.graph import Graph, Host, ops
from atom.graph.tables import find_tables, is_named
from atom.passes.context import PassContext


def offload_tables(graph: Graph, context: PassContext) -> Graph:
    if not context.cpu_offload_params:
        return graph
    tables = {table for table in find_tables(graph) if is_named(table, context.cpu_offload_params)}
    for node in graph.find(ops.embedding):
        tokens, table = node.args
        if table not in tables or isinstance(table, Host):
            continue
        if table.type.fmt is not None:
            raise UnsupportedError(f"serve.cpu_offload_params: {node.name} looks up {table.type}, which stays packed")
        node.args = (tokens, Host(table))
        graph.num_rewrites += 1
    return graph
