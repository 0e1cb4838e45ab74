"""config.json and a model file -> the semantic graph.

graph = build(config.model, config.dtype, config.serve.kv_cache_dtype)
"""

from atom.frontend.decoder import build

__all__ = ["build"]
