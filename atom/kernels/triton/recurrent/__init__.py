"""Triton kernels of ops with recurrent state: convolution, delta rule, SSD."""
