"""Triton's matrix products of few rows, their tuning, and gates on Hopper."""
