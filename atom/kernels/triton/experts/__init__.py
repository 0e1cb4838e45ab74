"""Mixtures of experts in Triton: routers, grouping, grouped GEMMs."""
