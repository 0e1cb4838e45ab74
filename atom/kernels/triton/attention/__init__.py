"""Triton's attention kernels: decode, prefill, latent, and the rope before them."""
