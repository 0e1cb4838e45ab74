"""The KV cache: blocks, prefixes, host memory, files; no tensors but for copies."""
