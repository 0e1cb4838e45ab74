"""The graph and its text: ops, recipes, programs, parser, verifier, interpreter.

graph = parse(open("graph.py").read())
verify(graph, ops.SEMANTIC)
print(show(graph))
"""

from atom.graph import ops
from atom.graph.batch import Batch, PagedCache
from atom.graph.graph import BODY, DRAFT, DRAFT_HEAD, DRAFT_IN, HEAD, POOL, VISION, Graph, Program
from atom.graph.interpret import TORCH_DTYPES, interpret, interpret_ranks
from atom.graph.mesh import Mesh
from atom.graph.packed import LaidOut, PackedWeight
from atom.graph.recipes import (
    KV,
    Apply,
    Cat,
    Dequantize,
    Full,
    Host,
    LatestState,
    LearnedFreqs,
    Offset,
    Once,
    Quantize,
    Recipe,
    Regroup,
    Repack,
    Repeat,
    RopeFreqs,
    Share,
    Shift,
    Shuffle,
    Slice,
    Stack,
    State,
    Transpose,
    W,
)
from atom.graph.text import parse, show
from atom.graph.types import BATCH, Type
from atom.graph.verify import verify

__all__ = [
    "BATCH",
    "BODY",
    "DRAFT",
    "DRAFT_HEAD",
    "DRAFT_IN",
    "HEAD",
    "KV",
    "POOL",
    "TORCH_DTYPES",
    "VISION",
    "Apply",
    "Batch",
    "Cat",
    "Dequantize",
    "Full",
    "Graph",
    "Host",
    "LaidOut",
    "LatestState",
    "LearnedFreqs",
    "Mesh",
    "Offset",
    "Once",
    "PackedWeight",
    "PagedCache",
    "Program",
    "Quantize",
    "Recipe",
    "Regroup",
    "Repack",
    "Repeat",
    "RopeFreqs",
    "Share",
    "Shift",
    "Shuffle",
    "Slice",
    "Stack",
    "State",
    "Transpose",
    "Type",
    "W",
    "interpret",
    "interpret_ranks",
    "ops",
    "parse",
    "show",
    "verify",
]  # fmt: skip
