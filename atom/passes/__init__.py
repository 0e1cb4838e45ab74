"""Passes: rewrites of the graph, in the order of PIPELINE.

graph = lower(graph, level=1, target=Target("cpu"))
"""

from atom.passes.pipeline import PIPELINE, PassReport, lower

__all__ = ["PIPELINE", "PassReport", "lower"]
