"""Write the semantic graph of a model from its configuration.

graph = build(config.model, config.dtype, config.serve.kv_cache_dtype)
"""

from atom.frontend.build import build

__all__ = ["build"]
