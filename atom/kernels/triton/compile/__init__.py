"""Compile Triton kernels: JIT, binaries in the cache folder, generated source."""
