"""Triton kernels of ops with recurrent state: they go through a sequence's tokens in order."""
